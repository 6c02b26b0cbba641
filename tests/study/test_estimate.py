from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpcdl.models.table import FLOP_PER_CORE_AND_SECOND, FLOP_PER_MAC
from hpcdl.study.cost import START_S, StudyEstimate, estimate_study
from hpcdl.study.points import prepare_points
from hpcdl.study.state import StudyState, new_state
from tests.study.studies import small_study


def estimated(cores: int = 4, nodes: int = 1, state: StudyState | None = None, **flags: Any) -> StudyEstimate:
    study, plan = small_study(repeats=1, **flags)
    study = dataclasses.replace(study, train={"steps": 10})
    checked, run_plan = prepare_points(study, plan)
    return estimate_study(study, checked, run_plan, cores, nodes, state)


def test_a_guess_counts_what_a_network_computes() -> None:
    found = estimated(workers="1", model="hepcnn", data="synthetic:hep", batch_size="8")
    flop = 10 * 8 * 2_630_025_472 * FLOP_PER_MAC
    assert found.seconds == pytest.approx(START_S + flop / (4 * FLOP_PER_CORE_AND_SECOND))
    assert found.node_hours == pytest.approx(found.seconds / 3600)
    halved = estimated(workers="1", model="hepcnn", data="synthetic:112x112x3:2", batch_size="8")
    assert halved.seconds - START_S == pytest.approx((found.seconds - START_S) / 4)
    shrunk = estimated(workers="1", model="hepcnn", data="synthetic:hep", batch_size="8", threads="1")
    assert shrunk.seconds - START_S == pytest.approx(4 * (found.seconds - START_S))


def test_emulated_computing_takes_what_it_says() -> None:
    found = estimated(workers="1", model="emulated:lenet:2s", batch_size="8")
    assert (found.seconds, found.unknown) == (START_S + 10 * 2.0, 0)


def test_runs_side_by_side_take_less_time_but_no_fewer_node_hours() -> None:
    apart = estimated(workers="1,2,3", ranks_per_node=1, run_estimate="1h")
    beside = estimated(workers="1,2,3", ranks_per_node=1, run_estimate="1h", nodes=3)
    assert (apart.seconds, apart.node_hours) == (3 * 3600, 6)
    assert (beside.seconds, beside.node_hours) == (2 * 3600, 6)


def test_what_was_measured_counts_and_what_is_finished_does_not() -> None:
    study, plan = small_study(repeats=3, workers="1")
    state = new_state(study, plan)
    for name, seconds in zip((run.name for run in plan.runs), (10.0, 30.0), strict=False):
        state = state.changed(name, status="finished", seconds=seconds)
    _, run_plan = prepare_points(study, plan)
    found = estimate_study(study, plan, run_plan, 4, 1, state)
    assert found.seconds == 20 and found.measured == 1 and len(found.seconds_by_run) == 1


def test_a_network_of_ones_own_is_in_no_estimate() -> None:
    found = estimated(workers="1", model="share/hpcdl/examples/my_model.py:build")
    assert (found.unknown, found.seconds) == (1, 0)
