"""`python -m benchmarks.step_profile` summarises a profile correctly; test_benchmarks.py runs it."""

from __future__ import annotations

from types import SimpleNamespace as Some

import pytest

from benchmarks import step_profile


def test_an_operation_has_the_time_in_which_nothing_runs_inside_it() -> None:
    events = [(12, 15, "Mul"), (0, 10, "Call"), (2, 8, "MatMul"), (3, 5, "Mul"), (8, 9, "Mul"), (10, 12, "Relu")]
    assert step_profile.own_times(events) == {"Call": 3, "MatMul": 4, "Mul": 6, "Relu": 2}


def test_operations_are_found_by_the_executors_names() -> None:
    names = {1: "model/conv1/Conv2D:Conv2D", 2: "ThreadpoolListener::Record", 3: "EagerExecute: step", 4: "a/b:AddN"}
    plane = Some(
        event_metadata={number: Some(name=name) for number, name in names.items()},
        lines=[
            Some(events=[Some(metadata_id=number, offset_ps=10 * number, duration_ps=number) for number in names]),
            Some(events=[]),
        ],
    )
    assert list(step_profile.operations_of(Some(planes=[plane]))) == [[(10, 11, "Conv2D"), (40, 44, "AddN")], []]


@pytest.mark.parametrize(
    "operation, kind",
    [
        ("Conv2DBackpropFilter", "convolution, product"),
        ("_MklNativeFusedConv2D", "convolution, product"),
        ("BatchMatMulV2", "convolution, product"),
        ("FusedBatchNormGradV3", "normalization"),
        ("_MklMaxPoolGrad", "pooling"),
        ("AddN", "AddN"),
        ("AddV2", step_profile.ELSE),
        ("ReluGrad", step_profile.ELSE),
        ("BiasAddGrad", "sums"),
        ("ConcatV2", "moving, casts"),
        ("ResourceApplyKerasMomentum", "update"),
    ],
)
def test_each_operation_is_of_one_kind(operation: str, kind: str) -> None:
    assert step_profile.kind_of(operation) == kind


def test_shares_are_of_the_step_and_the_rest_is_between() -> None:
    times = step_profile.Counter({"Conv2D": 0.5, "MatMul": 0.1, "Mul": 0.2})
    shares = step_profile.shares_of(times, 1.0)
    assert shares["convolution, product"] == pytest.approx(0.6) and shares[step_profile.ELSE] == pytest.approx(0.2)
    assert shares[step_profile.BETWEEN] == pytest.approx(0.2) and sum(shares.values()) == pytest.approx(1)
