"""A baseline is compared at equal settings only; the report says what it could not compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hpcdl.report.analysis.comparisons import compare_with, corrected, regressions
from hpcdl.report.runs.run import Run
from tests.conftest import CommandLine
from tests.report.synthetic import NOISE, make_record, make_run, write_run


def study(rate: float, sizes: tuple[int, ...] = (1, 2), **changes: Any) -> list[Run]:
    return [make_run(n, rate * n * noise, **changes) for n in sizes for noise in NOISE]


def test_slower_beyond_noise_is_a_regression_only_beyond_the_percentage() -> None:
    found, warnings = compare_with(study(90), study(100))
    judged = corrected(found)
    assert [round(item.ratio.value, 3) for item in judged] == [0.9, 0.9]
    assert len(regressions(judged, 5)) == 2
    assert regressions(judged, 15) == []
    assert warnings == []


def test_noise_and_gains_are_no_regression() -> None:
    assert regressions(corrected(compare_with(study(99.9), study(100))[0]), 0) == []
    assert regressions(corrected(compare_with(study(150), study(100))[0]), 0) == []


def test_single_runs_cannot_fail_and_are_reported() -> None:
    found, warnings = compare_with([make_run(1, 1.0)], study(100, sizes=(1,)))
    assert regressions(corrected(found), 0) == []
    assert any("cannot be judged" in line for line in warnings)


def test_settings_of_one_side_are_reported() -> None:
    _, warnings = compare_with(study(100, sizes=(1, 4)), study(100, sizes=(1, 2, 8)))
    assert any(line.startswith("2 settings of the baseline") for line in warnings)
    assert any(line.startswith("1 setting of this study") for line in warnings)


def test_a_baseline_over_another_mpi_is_reported() -> None:
    over = {name: study(100, software={"mpi": name}) for name in ("MPICH 5.0.2", "Open MPI 4.1.4")}
    one, other = over.values()
    assert any("the baseline ran over Open MPI 4.1.4, not MPICH" in line for line in compare_with(one, other)[1])
    assert not compare_with(one, one)[1] and not compare_with(one, study(100))[1]


def test_the_same_machine_is_preferred_and_another_is_reported() -> None:
    both = study(100, machine="a") + study(50, machine="b")
    assert {round(item.ratio.value, 2) for item in compare_with(study(100, machine="a"), both)[0]} == {1.0}
    _, warnings = compare_with(study(100, machine="c"), both)
    assert any("another machine" in line for line in warnings)


def test_a_copy_of_the_study_is_no_baseline(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A study does not regress against itself: such a check passes whatever happened, so it is refused."""
    for repeat in range(4):
        record = make_record(1, 100.0 + repeat, started_at=f"2026-01-0{1 + repeat}T00:00:00")
        write_run(tmp_path / "now" / f"r{repeat}", record)
    shutil.copytree(tmp_path / "now", tmp_path / "copy")
    line = ["report", tmp_path / "now", "--baseline", tmp_path / "copy", "--fail-on-regression", "5", "--out"]
    refused = ask_hpcdl([*line, tmp_path / "out"])
    assert refused.code == 2 and "its runs are copies of those to compare" in refused.err
    shutil.rmtree(tmp_path / "now" / "r0")
    shutil.rmtree(tmp_path / "now" / "r1")
    reported = ask_hpcdl([*line, tmp_path / "out", "--format", "terminal"])
    assert reported.code == 0 and "baseline: 2 runs left out as a copy of another" in reported.out, (
        reported.out + reported.err
    )
