"""Latency and bandwidth from times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.alpha_beta import AlphaBeta, alpha_beta

SIZES = [8, 4096, 65536, 1 << 20, 25 << 20]


@given(st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-7))
def test_exact_times_give_their_parameters(latency_s: float, per_byte: float) -> None:
    fit = alpha_beta(SIZES, [latency_s + per_byte * size for size in SIZES])
    assert fit is not None
    assert math.isclose(fit.latency_s, latency_s, rel_tol=1e-6)
    assert math.isclose(fit.seconds_per_byte, per_byte, rel_tol=1e-6)
    assert fit.seconds(1000) == pytest.approx(latency_s + 1000 * per_byte)


def test_nothing_is_negative() -> None:
    faster_when_longer = alpha_beta([1000, 2000], [2.0, 1.0])
    assert faster_when_longer is not None and faster_when_longer.seconds_per_byte == 0
    assert faster_when_longer.bytes_per_second is None
    through_zero = alpha_beta([1000, 2000], [1.0, 3.0])
    assert through_zero is not None and through_zero.latency_s == 0
    assert AlphaBeta(latency_s=0, seconds_per_byte=0.5).bytes_per_second == 2


def test_one_size_fits_no_line() -> None:
    assert alpha_beta([], []) is None
    assert alpha_beta([8, 8, 8], [1, 2, 3]) is None
