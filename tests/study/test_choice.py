"""A study chooses the best setting for each point before measuring it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcdl.config.study import load_study, study_tables
from hpcdl.core.errors import ConfigError, HpcdlError
from hpcdl.core.records.run_record import HistoryPoint, RunRecord
from hpcdl.core.storage.files import write_toml
from hpcdl.study.choice import choose
from hpcdl.study.plan import StudyPoint, make_plan
from hpcdl.study.sweep import raise_for
from tests.conftest import ROOT, CommandLine
from tests.study.studies import behave, sweep, told

STUDY = """
repeats = 2
[matrix]
model = ["lenet"]
data = ["{data}"]
strategy = ["ring", "sync-easgd"]
workers = [2]
batch-size = [64]
[train]
steps = 20
[choose]
learning-rate = [0.0001, 0.05]
steps = 15
"""


def study_file(folder: Path, text: str, **values: str) -> Path:
    path = folder / "study.toml"
    path.write_text(text.format(data="synthetic:mnist") if not values else text.format(**values))
    return path


def record(accuracy: float | None, loss: float | None, training: float = 0.5) -> RunRecord:
    point = HistoryPoint(epoch=1, step=1, seconds=1, accuracy=training, val_accuracy=accuracy, val_loss=loss)
    counts = dict.fromkeys(("ranks", "workers", "batch_per_rank", "global_batch"), 1)
    return RunRecord(strategy="ring", model="lenet", data="x", history=[point], **counts)


def tried(rate: float) -> StudyPoint:
    facts: dict[str, Any] = dict.fromkeys(("number", "nodes", "ranks_per_node", "ranks", "workers", "servers"), 1)
    settings = (("learning-rate", rate),)
    return StudyPoint(**facts, model="lenet", data="x", strategy="ring", batch_size=8, settings=settings, tried_for=1)


def test_the_best_on_held_out_samples_is_chosen_and_all_are_listed(tmp_path: Path) -> None:
    choice = load_study(study_file(tmp_path, STUDY), {}).choice
    assert choice is not None and choice.train == {"steps": 15}
    rows = ((0.7, 1.0, 0.9, 0.1), (0.9, 0.5, 0.8, 0.2), (0.9, 0.4, 0.1, 0.3), (None, None, 1.0, 0.4))
    tries = [(record(accuracy, loss, training), tried(rate)) for accuracy, loss, training, rate in rows]
    found = choose(tries[:3], choice)
    assert found.values == {"learning-rate": 0.3} and found.samples == "held-out samples"
    assert "learning-rate 0.1: 0.7, learning-rate 0.2: 0.9, learning-rate 0.3: 0.9" in found.sentence
    diverged = choose(tries, choice)
    assert diverged.values == {"learning-rate": 0.3} and diverged.samples == "held-out samples"
    assert "learning-rate 0.4: none" in diverged.sentence, "the others are not judged by training for its sake"
    alone = choose(tries[3:], choice)
    assert alone.values == {"learning-rate": 0.4} and alone.samples == "training samples, there being no others"


def test_tries_come_first_and_are_of_no_repeat(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, STUDY), {})
    plan = make_plan(study)
    assert [point.tried_for for point in plan.points] == [1, 1, 2, 2, 0, 0] and len(plan.measured) == 2
    assert len({point.number for point in plan.points}) == 6
    assert [bool(run.point.tried_for) for run in plan.runs] == 4 * [True] + 4 * [False]
    assert {dict(run.point.settings)["steps"] for run in plan.runs if run.point.tried_for} == {15}
    write_toml(tmp_path / "again.toml", study_tables(study))
    assert make_plan(load_study(tmp_path / "again.toml", {})).points == plan.points


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("learning-rate = 0.1", "needs a list of values to try"),
        ("learning-rate = [0.1, -1]", "must be above 0"),
        ("lerning-rate = [0.1, 0.2]", "did you mean 'learning-rate'"),
        ('strategy = ["ring", "tree"]', "it is also in [matrix]; drop one"),
        ("ranks = [1, 2]", "list nodes or workers in [matrix]"),
    ],
)
def test_what_cannot_be_chosen_is_reported(tmp_path: Path, line: str, word: str) -> None:
    text = STUDY.split("[choose]")[0] + f"[choose]\n{line}\n"
    with pytest.raises(ConfigError) as caught:
        load_study(study_file(tmp_path, text), {})
    assert any(word in problem for problem in caught.value.problems), caught.value.problems


def test_the_gallery_s_methods_each_have_their_rate() -> None:
    for small, rates in ((False, 5), (True, 2)):
        plan = make_plan(load_study(ROOT / "share" / "hpcdl" / "studies" / "sc17-methods.toml", {}, small=small))
        assert len(plan.measured) == 9 and len(plan.points) == 9 + 9 * rates


def test_a_try_that_explodes_is_made_once_and_not_chosen(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, STUDY), {})
    plan = make_plan(study)
    bad = {run.name for run in plan.runs if dict(run.point.settings).get("learning-rate") == 0.0001}
    allocation = behave(tmp_path / "fake", **{f"run_{name}": ["diverge"] for name in bad})
    state = sweep(tmp_path / "out", allocation, study, plan)
    assert {run.name for run in state.runs if run.status == "failed"} == bad and len(bad) == 2
    assert len(told(tmp_path / "fake")) == len(plan.runs) == 8, "each of them once"
    chosen = json.loads((tmp_path / "out" / "chosen.json").read_text())
    assert [item["values"] for item in chosen.values()] == 2 * [{"learning-rate": "0.05"}]
    raise_for(state, tmp_path / "out")


def test_all_tries_of_a_point_may_explode(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, STUDY), {})
    plan = make_plan(study)
    bad = [run.name for run in plan.runs if run.point.tried_for == 1]
    allocation = behave(tmp_path / "fake", **{f"run_{name}": ["diverge"] for name in bad})
    state = sweep(tmp_path / "out", allocation, study, plan)
    assert (state.count("failed"), state.count("waiting"), state.count("finished")) == (2, 2, 4)
    with pytest.raises(HpcdlError, match=r"2 of 8 runs failed; .*a/kernel is not finite"):
        raise_for(state, tmp_path / "out")


@pytest.mark.mpi
def test_each_strategy_runs_with_the_rate_that_was_best_for_it(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Each strategy runs with its best rate (the other rate learns nothing); trials appear in no table."""
    once = STUDY.replace("repeats = 2", "repeats = 1")  # other tests plan the repeats
    path, out = study_file(tmp_path, once, data=str(shards)), tmp_path / "out"
    shown = session_hpcdl(["sweep", path, "--dry-run"])
    assert "after 4 tries to choose learning-rate = 6 runs" in shown.err + shown.out
    assert "of that time the tries take about" in shown.err + shown.out
    swept = session_hpcdl(["sweep", path, "--out", out], timeout_s=500)
    assert swept.code == 0, swept.err
    assert swept.err.count("runs with learning-rate 0.05, by the accuracy of its tries on held-out samples") == 2
    chosen = json.loads((out / "chosen.json").read_text())
    assert [item["values"] for item in chosen.values()] == 2 * [{"learning-rate": "0.05"}]
    records = [json.loads(file.read_text()) for file in (out / "runs").glob("*/record.json")]
    assert len(records) == 2 and {item["config"]["learning-rate"] for item in records} == {0.05}
    tries = [json.loads(file.read_text()) for file in (out / "tries").glob("*/record.json")]
    seeds = {item["config"]["seed"] for item in tries}
    assert len(tries) == 4 and not seeds & {item["config"]["seed"] for item in records}
    reported = session_hpcdl(["report", out, "--out", tmp_path / "report", "--json"])
    assert reported.code == 0, reported.err
    rows = reported.json()["scaling"]
    assert [row["n"] for row in rows] == [1, 1] and len(reported.json()["runs"]) == 2
