"""Fits recover the parameters that generated the runs, and their intervals have the stated coverage."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.report.analysis.laws import LAWS, crossing, fit_curves, fit_scaling, misses
from hpcdl.report.analysis.scaling import build_curves
from tests.report.synthetic import make_run

NODES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
TRUTH = {"amdahl": (0.03,), "gustafson": (0.4,), "usl": (0.02, 0.0005)}
NOISE = 0.03


def throughput(name: str, own: tuple[float, ...], n: float) -> float:
    law = LAWS[name]
    return 100 * n * law.denominator(own, n) ** law.sign


@given(st.sampled_from(["amdahl", "gustafson"]), st.floats(min_value=0, max_value=0.9), st.floats(1e-2, 1e4))
def test_one_parameter_laws_are_recovered_exactly(name: str, serial: float, x1: float) -> None:
    fit = fit_scaling(LAWS[name], NODES, [x1 / 100 * throughput(name, (serial,), n) for n in NODES])
    assert fit is not None
    assert fit.parameters["serial_fraction"].value == pytest.approx(serial, abs=1e-7)
    assert fit.parameters["x1"].value == pytest.approx(x1, rel=1e-6)


@given(st.floats(min_value=0, max_value=0.3), st.floats(min_value=0, max_value=0.01))
def test_usl_is_recovered_exactly(sigma: float, kappa: float) -> None:
    fit = fit_scaling(LAWS["usl"], NODES, [throughput("usl", (sigma, kappa), n) for n in NODES])
    assert fit is not None
    assert fit.parameters["sigma"].value == pytest.approx(sigma, abs=1e-7)
    assert fit.parameters["kappa"].value == pytest.approx(kappa, abs=1e-8)
    assert fit.throughput(64) == pytest.approx(throughput("usl", (sigma, kappa), 64), rel=1e-5)


def test_usl_is_the_formula_of_the_textbook() -> None:
    assert throughput("usl", (0.1, 0.01), 4) == pytest.approx(100 * 4 / (1 + 0.1 * 3 + 0.01 * 4 * 3))
    assert throughput("amdahl", (0.1,), 4) == pytest.approx(100 / (0.1 + 0.9 / 4))
    assert throughput("gustafson", (0.1,), 4) == pytest.approx(100 * (4 - 0.1 * 3))


@pytest.mark.parametrize("name", list(LAWS))
def test_intervals_cover_the_truth(name: str) -> None:
    """Intervals cover each parameter and the n with 80 % efficiency: 1,000 draws, three runs per point, 3 % noise."""
    own = TRUTH[name]
    law = LAWS[name]
    n = numpy.repeat(NODES, 3)
    exact = numpy.array([throughput(name, own, item) for item in n])
    random_source = numpy.random.default_rng(11)
    truth = {"x1": 100.0, **dict(zip(law.own, own, strict=True))}
    covered = dict.fromkeys([*truth, "crossing"], 0)
    below = true_crossing(name, own)
    for _ in range(1000):
        fit = fit_scaling(law, list(n), list(exact * numpy.exp(random_source.normal(0, NOISE, len(n)))))
        assert fit is not None
        for key, value in truth.items():
            parameter = fit.parameters[key]
            covered[key] += (parameter.low or 0) <= value <= (parameter.high or 0)
        found = crossing(fit, 1.0)
        covered["crossing"] += (found.low or math.inf) <= below <= (found.high or math.inf)
    assert all(900 <= count <= 990 for count in covered.values()), covered


def true_crossing(name: str, own: tuple[float, ...]) -> float:
    low, high = 1.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if throughput(name, own, middle) / middle < 0.8 * throughput(name, own, 1):
            high = middle
        else:
            low = middle
    return high


def test_a_crossing_beyond_the_runs_is_marked() -> None:
    fit = fit_scaling(LAWS["amdahl"], [1, 2, 4] * 3, [throughput("amdahl", (0.01,), n) for n in [1, 2, 4] * 3])
    assert fit is not None
    found = crossing(fit, 1.0)
    assert found.n == pytest.approx(26.0, rel=1e-4)
    assert found.extrapolated


def test_perfect_scaling_never_crosses() -> None:
    fit = fit_scaling(LAWS["amdahl"], NODES, [100 * n for n in NODES])
    assert fit is not None
    assert crossing(fit, 1.0).n is None


def test_a_base_above_one_counts_from_there() -> None:
    fit = fit_scaling(LAWS["amdahl"], NODES[2:], [throughput("amdahl", (0.05,), n) for n in NODES[2:]])
    assert fit is not None
    assert fit.efficiency(4.0, 4.0).value == pytest.approx(1.0)
    assert fit.efficiency(8.0, 4.0).value == pytest.approx((1 + 0.05 * 3) / (1 + 0.05 * 7))


def test_too_few_sizes_give_no_fit() -> None:
    assert fit_scaling(LAWS["usl"], [1, 2, 1, 2], [100, 190, 101, 191]) is None
    assert fit_scaling(LAWS["amdahl"], [4, 4, 4], [1, 2, 3]) is None


def test_as_many_parameters_as_sizes_is_reported() -> None:
    fit = fit_scaling(LAWS["usl"], [1, 2, 4], [100, 190, 350])
    assert fit is not None
    assert fit.saturated
    assert fit.parameters["sigma"].low is None
    assert fit.spread is None


@pytest.mark.parametrize("values", [[100, 1e-3, 4e6, 1.0], [100, 190, 1e308, 300], [1e-308, 190, 350, 1e308]], ids=str)
@pytest.mark.filterwarnings("error")
def test_wild_runs_do_not_break_the_fit(values: list[float]) -> None:
    fit = fit_scaling(LAWS["usl"], [1, 2, 4, 8], values)
    assert fit is None or math.isfinite(fit.parameters["x1"].value)


def test_a_law_that_does_not_describe_the_runs_is_reported() -> None:
    """A law that does not fit (a knee beyond four workers) is reported; noise around the law itself is not."""
    random = numpy.random.default_rng(1)

    def told(truth: Callable[[int], float], repeats: int = 3) -> list[str]:
        runs = [
            make_run(n, truth(n) * math.exp(0.01 * random.standard_normal()), mode="weak")
            for n in (1, 2, 4, 8, 16)
            for _ in range(repeats)
        ]
        return misses(fit_curves(build_curves(runs)))

    (line,) = told(lambda n: 100 * n * (1 if n <= 4 else (4 / n) ** 0.7))
    assert line.startswith("2 fitted laws miss their runs' means by more than repeats scatter")
    assert "gustafson of weak ring lenet (2" in line and "usl of weak ring lenet (" in line
    assert not told(lambda n: throughput("gustafson", (0.1,), n))
    assert not told(lambda n: 100 * n * (1 if n <= 4 else (4 / n) ** 0.7), repeats=1), "nothing tells the noise"
