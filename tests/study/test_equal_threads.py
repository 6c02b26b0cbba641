"""In weak scaling on one node, a rank has the same number of threads at every size."""

from __future__ import annotations

import dataclasses

import pytest

from hpcdl.config.study import load_study
from hpcdl.node.machines import read_topology
from hpcdl.study import points
from hpcdl.study.plan import StudyRuns, make_plan
from hpcdl.study.points import prepare_points
from hpcdl.study.state import digest_of

KEYS = {"model": "lenet", "data": "synthetic:mnist", "batch-size": 8}


def prepared(monkeypatch: pytest.MonkeyPatch, cores: int, **flags: object) -> StudyRuns:
    here = read_topology()
    made = tuple(dataclasses.replace(here.cores[0], index=number, cpus=(number,)) for number in range(cores))
    node = dataclasses.replace(here, cores=made, allowed_cpus=tuple(range(cores)))
    monkeypatch.setattr(points, "read_topology", lambda: node)
    study = load_study(None, {**KEYS, **{key.replace("_", "-"): value for key, value in flags.items()}})
    plan = make_plan(study)
    found, _ = prepare_points(study, plan)
    assert digest_of(study, found) == digest_of(study, plan), "a study continues where the node is another one"
    return found


def test_a_worker_alone_has_no_more_threads_than_one_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepared(monkeypatch, 8, workers="1,2,4")
    assert {point.shared_threads for point in found.points} == {2}
    assert {run.point.shared_threads for run in found.runs} == {2}
    (remark,) = found.remarks
    assert remark == "weak scaling on a node: each rank has 2 threads at every size, its share where 4 are on one"


def test_too_few_cores_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepared(monkeypatch, 2, workers="1,2,4")
    assert {point.shared_threads for point in found.points} == {1}
    assert "4 ranks on a node of 2 cores share them" in found.remarks[1]


@pytest.mark.parametrize(
    "flags",
    [
        {"workers": "2"},
        {"workers": "1,2", "ranks_per_node": "1"},
        {"workers": "1,2", "threads": "1"},
        {"workers": "1,2", "mode": "strong", "global_batch": "16", "batch_size": None},
    ],
)
def test_other_studies_keep_what_they_say(monkeypatch: pytest.MonkeyPatch, flags: dict[str, object]) -> None:
    found = prepared(monkeypatch, 8, **flags)
    assert {point.shared_threads for point in found.points} == {None} and not found.remarks
