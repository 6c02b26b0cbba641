"""The parts of lost efficiency add up exactly, and the imbalance of servers is busiest over mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.records.run_record import PARTS
from hpcdl.report.analysis.scaling import breakdowns, build_curves, lost_efficiency
from hpcdl.report.sections.network import imbalance
from tests.report.synthetic import make_run

SECONDS = st.fixed_dictionaries({name: st.floats(1e-6, 10) for name in PARTS})


@given(SECONDS, SECONDS, st.floats(0.01, 1))
def test_lost_parts_sum_to_one_minus_efficiency(parts: dict[str, float], base: dict[str, float], factor: float) -> None:
    efficiency = factor * sum(base.values()) / sum(parts.values())
    assert sum(lost_efficiency(parts, base, factor).values()) == pytest.approx(1 - efficiency, abs=1e-9)


def test_weak_loss_is_what_was_added() -> None:
    runs = [
        make_run(1, 100.0, parts={"compute": 0.8, "exposed_communication": 0.0}),
        make_run(4, 320.0, parts={"compute": 0.8, "exposed_communication": 0.2}),
    ]
    (curve,) = build_curves(runs)
    base, last = breakdowns(curve)
    assert not base.lost
    assert last.lost["exposed_communication"] == pytest.approx(0.2)
    assert last.lost["compute"] == pytest.approx(0.0)


def test_strong_loss_counts_compute_that_did_not_shrink() -> None:
    runs = [
        make_run(n, rate, mode="strong", batch_per_rank=64 // n, parts={"compute": seconds})
        for n, rate, seconds in ((1, 64.0, 1.0), (4, 128.0, 0.5))
    ]
    (curve,) = build_curves(runs)
    assert breakdowns(curve)[1].lost["compute"] == pytest.approx((0.5 - 0.25) / 0.5)


def test_negative_parts_are_left_out() -> None:
    runs = [make_run(1, 100.0, parts={"compute": 1.0}), make_run(1, 101.0, parts={"compute": -1.0})]
    (curve,) = build_curves(runs)
    (found,) = breakdowns(curve)
    assert (found.num_runs, found.parts["compute"]) == (1, 1.0)


def test_imbalance_is_busiest_over_mean() -> None:
    assert imbalance([1.0, 1.0, 4.0]) == pytest.approx(2.0)
    assert imbalance([0.0, 0.0]) is None
