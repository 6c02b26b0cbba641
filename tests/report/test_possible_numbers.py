"""Fits that cannot be physical are no findings; values lie in their intervals; what is off is said."""

from __future__ import annotations

import math

import pytest

from hpcdl.core.statistics import outliers, welch_log_ratio
from hpcdl.report.analysis.analyse import Analysis, analyse
from hpcdl.report.analysis.laws import LAWS, fit_relative, fit_scaling
from hpcdl.report.compose.build import compose
from hpcdl.report.document.cells import cell_text
from hpcdl.report.document.document import Table
from hpcdl.report.runs.run import Run
from hpcdl.report.runs.sources import Gathered
from tests.report.synthetic import make_run


def analysis_of(runs: list[Run]) -> Analysis:
    return analyse(Gathered(runs=tuple(runs)))


def exchanging(workers: int, rounds: float, size: float, seconds: float) -> Run:
    return make_run(
        workers, workers * 64 / (2.0 + seconds), strategy="ps", servers=1, rounds_per_step=rounds,
        round_bytes_per_step=size, parts={"compute": 2.0, "exposed_communication": seconds},
    )  # fmt: skip


def test_rounds_and_bytes_that_rise_together_give_no_alpha_and_beta() -> None:
    """A constant in the exchange made beta negative: -1,000 seconds per GB."""
    runs = [
        exchanging(w, 0.2 + 3.2 * w, 1_829_223.0 * w, (0.3 + 0.735 * w) * noise)
        for w in (1, 2, 4)
        for noise in (0.99, 1.0, 1.01)
    ]
    found = analysis_of(runs)
    assert [item.fit for item in found.communication] == [None]
    section = next(item for item in compose(found).sections if item.name == "fits")
    assert any("cannot be told apart" in line for line in section.lines)
    assert not any(isinstance(item, Table) and "Alpha-beta" in item.title for item in section.items)


def test_no_coefficient_is_below_zero_or_outside_its_interval() -> None:
    design = [(rounds, size, 1.0) for rounds in (2.0, 6.0, 14.0) for size in (1e5, 1e7, 1e8) for _ in range(2)]
    seconds = [0.05 + 3e-4 * rounds * (1 + 0.02 * (number % 2)) for number, (rounds, _, _) in enumerate(design)]
    fit = fit_relative(design, seconds)
    assert fit is not None
    for parameter in fit.coefficients:
        assert parameter.low is not None and parameter.high is not None
        assert 0 <= parameter.low <= parameter.value <= parameter.high
    assert fit.coefficients[2].value == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))
def test_a_curve_that_rises_has_no_negative_contention(law: object) -> None:
    name = next(name for name, item in LAWS.items() if item is law)
    n = [float(k) for k in (1, 2, 4, 8) for _ in range(3)]
    rates = [k * (1 + 0.05 * math.log2(k)) * (1 + 0.01 * (place % 3)) for place, k in enumerate(n)]
    fit = fit_scaling(LAWS[name], n, rates)
    assert fit is not None
    for own in LAWS[name].own:
        parameter = fit.parameters[own]
        assert parameter.low is not None and parameter.high is not None
        assert 0 <= parameter.low <= parameter.value <= parameter.high


def test_a_ratio_lies_in_its_interval_with_a_run_far_off() -> None:
    base = [50.0 + 0.1 * (place % 5) for place in range(20)]
    values = [3000.0, *(100.0 + 0.2 * (place % 5) for place in range(19))]
    ratio = welch_log_ratio(values, base)
    assert ratio.low is not None and ratio.high is not None
    assert ratio.low <= ratio.value <= ratio.high
    assert outliers(values) == [0] and outliers(base) == []
    assert outliers([100.0, 101.0]) == [] and outliers([100.0, 101.0, 300.0]) == [2]


def test_a_run_far_off_and_an_efficiency_above_ideal_are_explained() -> None:
    runs = [make_run(1, 50.0 + 0.1 * k, name=f"one-{k}") for k in range(5)]
    runs += [make_run(2, 130.0 + 0.1 * k, name=f"two-{k}") for k in range(5)] + [make_run(2, 900.0, name="far")]
    warnings = analysis_of(runs).warnings
    assert any("far off the repeats" in line and "far 900" in line for line in warnings)
    assert any("above 100 %" in line for line in analysis_of(runs[:10]).warnings)


def test_two_repeats_are_printed_as_they_are() -> None:
    runs = [make_run(n, rate) for n in (1, 2) for rate in (100.0 * n, 2400.0 * n)]
    section = next(item for item in compose(analysis_of(runs)).sections if item.name == "weak")
    table = next(item for item in section.items if isinstance(item, Table))
    cells = [[cell_text(column, cell) for column, cell in zip(table.columns, row, strict=True)] for row in table.rows]
    assert cells[0][6] == "100 and 2,400" and "\N{PLUS-MINUS SIGN}" not in "".join(cells[0])
