"""Fits recover alpha and beta from noisy exchanges, and their intervals cover them."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.report.analysis.laws import AlphaBeta, alpha_beta, fit_relative

ALPHA, BETA = 2e-5, 1 / 10e9


def ring(p: int, num_bytes: float) -> tuple[float, float]:
    return 2 * (p - 1), 2 * num_bytes * (p - 1) / p


DESIGN = [ring(p, size) for p in (2, 4, 8, 16) for size in (1e5, 1e7, 1e8) for _ in range(3)]


def test_exact_runs_are_recovered() -> None:
    fit = fit_relative(DESIGN, [ALPHA * rounds + BETA * size for rounds, size in DESIGN])
    assert fit is not None
    assert fit.coefficients[0].value == pytest.approx(ALPHA, rel=1e-9)
    assert fit.coefficients[1].value == pytest.approx(BETA, rel=1e-9)
    assert fit.r2 == pytest.approx(1.0)


def test_intervals_cover_alpha_and_beta() -> None:
    random_source = numpy.random.default_rng(5)
    exact = numpy.array([ALPHA * rounds + BETA * size for rounds, size in DESIGN])
    covered = [0, 0]
    for _ in range(1000):
        fit = fit_relative(DESIGN, list(exact * numpy.exp(random_source.normal(0, 0.05, len(exact)))))
        assert fit is not None
        for index, truth in enumerate((ALPHA, BETA)):
            parameter = fit.coefficients[index]
            covered[index] += (parameter.low or 0) <= truth <= (parameter.high or 0)
    assert all(900 <= count <= 990 for count in covered), covered


def test_runs_that_cannot_tell_them_apart_give_no_fit() -> None:
    assert fit_relative([ring(4, 1e6)] * 3, [1e-3, 1.1e-3, 0.9e-3]) is None


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
