"""The small version of every study of the gallery runs up to its report, in minutes on two cores."""

from __future__ import annotations

import pytest

from hpcdl.config.study import load_study
from hpcdl.study.plan import make_plan
from tests.conftest import DIGITS, ROOT, CommandLine

STUDIES = ROOT / "share" / "hpcdl" / "studies"
LONGEST_S = 1800.0


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.toml")))
def test_it_runs_small_to_its_report(run_hpcdl: CommandLine, name: str) -> None:
    folder = run_hpcdl.home
    file = STUDIES / f"{name}.toml"
    plan = make_plan(load_study(file, {}, small=True))
    if "digits-shards" in {point.data for point in plan.points}:
        made = run_hpcdl(
            ["shard", DIGITS, "digits-shards", "--image-size", "28", "--split", "train=0.8,val=0.2"], cwd=folder
        )
        assert made.code == 0, made.err
    swept = run_hpcdl(["sweep", file, "--small", "--out", "study"], cwd=folder, timeout_s=LONGEST_S)
    assert swept.code == 0, swept.err
    reported = run_hpcdl(["report", "study", "--out", "report", "--json"], cwd=folder)
    assert reported.code == 0, reported.err
    assert [run["status"] for run in reported.json()["runs"]] == ["finished"] * sum(
        not run.point.tried_for for run in plan.runs
    )
    assert len(reported.json()["scaling"]) == len(plan.measured)
