"""Estimates agree with published values and scipy; simulation checks the coverage of intervals."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hpcdl.core.statistics import (
    Sample,
    estimate,
    estimate_of,
    holm,
    quantiles,
    t_quantile,
    tail,
    variance,
    welch_log_ratio,
    welch_of_estimates,
)

POSITIVE = st.floats(min_value=1e-3, max_value=1e6)
SAMPLE = st.lists(POSITIVE, min_size=2, max_size=12)


def test_estimate_is_student_t() -> None:
    found = estimate([98.0, 100.0, 102.0])
    assert found.mean == 100.0
    assert found.std == pytest.approx(2.0)
    assert found.ci95 == pytest.approx(4.302653 * 2 / math.sqrt(3), rel=1e-6)
    assert found.n == 3


def test_estimate_of_one_run_has_no_interval() -> None:
    found = estimate([5.0])
    assert (found.mean, found.std, found.ci95, found.n) == (5.0, None, None, 1)


def test_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate([])


@given(SAMPLE)
def test_variance_is_the_standard_library_s(values: list[float]) -> None:
    assert variance(values) == pytest.approx(statistics.variance(values), rel=1e-9, abs=1e-12)


@given(SAMPLE, SAMPLE)
def test_welch_is_scipy_s_on_logarithms(values: list[float], base: list[float]) -> None:
    found = welch_log_ratio(values, base)
    logs = [math.log(item) for item in values], [math.log(item) for item in base]
    if statistics.variance(logs[0]) < 1e-8 or statistics.variance(logs[1]) < 1e-8:
        return
    expected = stats.ttest_ind(*logs, equal_var=False)
    interval = expected.confidence_interval(0.95)
    ratio = statistics.fmean(values) / statistics.fmean(base)
    if interval.low < math.log(ratio) < interval.high:  # otherwise the interval is of the geometric means
        assert found.value == pytest.approx(ratio)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-300)
    assert math.log(found.low or 0) == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert math.log(found.high or 0) == pytest.approx(interval.high, rel=1e-6, abs=1e-9)


def test_welch_with_one_run_gives_a_ratio_without_interval() -> None:
    found = welch_log_ratio([2.0], [1.0, 1.0, 1.0])
    assert found.value == 2.0
    assert (found.low, found.high, found.p_value, found.std, found.ci95) == (None, None, None, None, None)


def test_welch_refuses_what_has_no_logarithm() -> None:
    with pytest.raises(ValueError, match="positive"):
        welch_log_ratio([1.0, 0.0], [1.0, 2.0])


def test_runs_without_noise_are_distinguished() -> None:
    same, other = welch_log_ratio([2.0, 2.0], [2.0, 2.0]), welch_log_ratio([2.0, 2.0], [1.0, 1.0])
    assert (same.p_value, same.low, same.high) == (1.0, 1.0, 1.0)
    assert other.p_value == 0.0


def test_scaling_a_ratio_scales_its_interval() -> None:
    found = welch_log_ratio([10, 11, 12], [5, 5.5, 6])
    half = found.scaled(0.5)
    assert half.value == pytest.approx(found.value / 2)
    assert half.high == pytest.approx((found.high or 0) / 2)
    assert half.p_value == found.p_value


def test_holm_gives_the_textbook_s_numbers() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=20))
def test_holm_keeps_the_order_and_never_helps(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    ranked = [q for _, q in sorted(zip(p_values, adjusted, strict=True))]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_three_runs_a_side_cover_the_ratio(noise: float) -> None:
    random_source = random.Random(7)
    covered = 0
    for _ in range(1000):
        values = [80 * math.exp(random_source.gauss(0, noise)) for _ in range(3)]
        base = [100 * math.exp(random_source.gauss(0, noise)) for _ in range(3)]
        found = welch_log_ratio(values, base)
        covered += (found.low or 1) <= 0.8 <= (found.high or 0)
    assert 900 <= covered <= 990


def test_quantiles_interpolate() -> None:
    assert quantiles([4.0, 1.0, 3.0, 2.0], [0.0, 0.5, 1.0]) == [1.0, 2.5, 4.0]
    with pytest.raises(ValueError, match="no values"):
        quantiles([], [0.5])


def test_student_s_t_has_its_closed_forms() -> None:
    """Student's t agrees with its closed forms: Cauchy for one degree of freedom, algebraic for two."""
    for value in (0.0, 1e-9, 0.1, 1.0, 1.96, 10.0, 1e4, 1e8):
        assert tail(value, 1) == pytest.approx(math.atan2(1, value) / math.pi, rel=1e-9)
        root = math.sqrt(2 + value * value)
        assert tail(value, 2) == pytest.approx(1 / (root * (root + value)), rel=1e-9)
    assert tail(math.inf, 3) == 0
    for probability in (0.025, 0.5, 0.9, 0.975, 0.9999):
        assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9, abs=1e-12)
        assert tail(abs(t_quantile(probability, 7.3)), 7.3) == pytest.approx(min(probability, 1 - probability))


def test_t_quantile_is_the_table_s() -> None:
    assert t_quantile(0.975, 2) == pytest.approx(4.302653, rel=1e-6)
    for probability, freedom in ((0.0, 3), (1.0, 3), (0.9, 0), (float("nan"), 3)):
        with pytest.raises(ValueError, match="no quantile"):
            t_quantile(probability, freedom)


def test_a_long_stream_keeps_its_quantiles_in_bounded_room() -> None:
    """A long stream keeps its quantiles in bounded memory, even if sorted: a window or every n-th value would fail."""
    samples = [Sample(2000), Sample(2000)]
    for sample in samples:
        for value in range(100_000):
            sample.add(value)
    chances = [0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0]
    found = samples[0].quantiles(chances)
    assert found == samples[1].quantiles(chances)
    assert len(samples[0]._kept) == 2000
    assert (found[0], found[-1], samples[0].mean) == (0, 99_999, 49_999.5)
    for chance, value in zip(chances, found, strict=True):
        error = math.sqrt(chance * (1 - chance) / 2000)
        assert abs(value / 100_000 - chance) <= 4 * error + 1e-4


def test_an_empty_stream_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no values"):
        _ = Sample(3).mean


def test_a_ratio_of_means_and_deviations_is_nearly_that_of_the_values() -> None:
    values, base = [101.0, 98.0, 103.0, 99.0], [81.0, 78.0, 80.0]
    exact = welch_log_ratio(values, base)
    known = [estimate_of(each.mean, each.ci95, each.n) for each in (estimate(values), estimate(base))]
    found = welch_of_estimates(*known)
    assert found.value == pytest.approx(exact.value) and (found.n, found.n_base) == (4, 3)
    assert found.low == pytest.approx(exact.low, rel=1e-3) and found.high == pytest.approx(exact.high, rel=1e-3)
    assert welch_of_estimates(known[0], estimate_of(80.0, None, 1)).low is None
