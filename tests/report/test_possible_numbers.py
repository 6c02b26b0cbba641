"""The report shows no physically impossible fit, keeps values inside their intervals, and flags odd values."""

from __future__ import annotations

import math

import pytest

from hpcdl.core.statistics import outliers, welch_log_ratio
from hpcdl.report.analysis.analyse import Analysis, analyse
from hpcdl.report.analysis.laws import LAWS, fit_relative, fit_scaling
from hpcdl.report.analysis.scaling import mean_parts
from hpcdl.report.compose.build import compose
from hpcdl.report.document import Table, cell_text
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
    """No alpha and beta are fitted if the constant makes beta negative (-1,000 seconds per GB)."""
    runs = [
        exchanging(w, 0.2 + 3.2 * w, 1_829_223.0 * w, (0.3 + 0.735 * w) * noise)
        for w in (1, 2, 4)
        for noise in (0.99, 1.0, 1.01)
    ]
    found = analysis_of(runs)
    assert [item.fit for item in found.communication] == [None]
    section = next(item for item in compose(found).sections if item.name == "fits")
    assert any("cannot be separated" in line for line in section.lines)
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


def test_a_ratio_is_in_its_interval_with_a_run_far_off() -> None:
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


@pytest.mark.parametrize(("nodes", "explained"), [((1, 1), True), ((1, 2), False)])
def test_throughput_per_node_above_the_efficiency_is_explained(nodes: tuple[int, int], explained: bool) -> None:
    """Two workers on one node printed 131 % per node beside an efficiency of 66 %, without a word."""
    runs = [
        make_run(n, 100.0 * n**0.4, nodes=num, ranks_per_node=n // num) for n, num in zip((1, 2), nodes, strict=True)
    ]
    section = next(item for item in compose(analysis_of(runs)).sections if item.name == "weak")
    table = next(item for item in section.items if isinstance(item, Table))
    assert ("where a node has more workers than at the base" in table.note) == explained


def texts(analysis: Analysis, name: str, title: str) -> list[list[str]]:
    sections = [section for section in compose(analysis).sections if section.name == name]
    table = next(item for one in sections for item in one.items if isinstance(item, Table) and item.title == title)
    return [[cell_text(column, cell) for column, cell in zip(table.columns, row, strict=True)] for row in table.rows]


def test_two_repeats_are_printed_as_they_are_in_every_table() -> None:
    runs = [make_run(n, n * rate, step_seconds=32 / rate) for n in (1, 2) for rate in (100.0, 160.0)]
    for row in texts(analysis_of(runs), "learning", "Three measures of each setting"):
        assert row[6:7] == ["200 ms and 320 ms"] and " and " in row[5], row


def test_repeats_too_far_apart_show_their_ends_and_why() -> None:
    """Widely spread repeats show their range and the reason, as Student's interval would reach below zero."""
    runs = [make_run(1, 50.0 + 0.1 * k, name=f"one-{k}") for k in range(20)]
    runs += [make_run(2, 100.0, name=f"two-{k}") for k in range(19)] + [make_run(2, 3000.0, name="far")]
    found = analysis_of(runs)
    assert texts(found, "weak", "Weak scaling: all points")[1][6] == "245, of 100 to 3,000"
    lines = " ".join(compose(found).summary)
    assert lines.count("its runs are too far apart for an interval") == 2 and "too few" not in lines
    assert any("may be chance, since its interval holds 100 % too" in line for line in found.warnings)


def test_threads_of_one_node_have_no_efficiency_per_node() -> None:
    runs = [
        make_run(1, rate, threads=threads, mode="scale-up", strategy="single")
        for threads, rate in ((1, 40.0), (16, 480.0))
    ]
    assert [row[-1] for row in texts(analysis_of(runs), "scale-up", "Scale-up by threads: all points")] == ["–", "–"]


def test_one_size_alone_has_no_speed_up_and_no_efficiency_in_the_table() -> None:
    runs = [make_run(n, 100.0 * n, strategy="ring") for n in (1, 2)] + [make_run(2, 150.0, strategy="tree")]
    found = analysis_of(runs)
    rows = {(row[0], row[2]): row[8:11] for row in texts(found, "weak", "Weak scaling: all points")}
    assert rows["tree", "2"] == ["–", "–", "–"] and rows["ring", "1"] == ["1.00", "100.0 %", "100.0 %"]
    assert [line for line in found.warnings if "one size alone" in line and "tree" in line]


def test_a_rounding_error_is_no_part_of_a_step() -> None:
    parts = {"compute": 2.0, "exposed_communication": 3.2, "other": 3e-16}
    runs = [make_run(n, 12.0 * n, parts=parts) for n in (1, 2)]
    assert mean_parts(runs) == {"compute": 2.0, "exposed_communication": 3.2, "other": 0.0}


def test_a_parameter_at_its_bound_is_not_certain() -> None:
    """A fit that would give a negative kappa reports 0, but not as certain."""
    n = [float(k) for k in (2, 4, 8, 16, 32, 64) for _ in range(3)]
    efficiencies = {2: 1.0, 4: 0.98, 8: 0.97, 16: 0.96, 32: 0.94, 64: 0.92}
    rates = [k * efficiencies[int(k)] * (1 + 0.003 * (place % 3)) for place, k in enumerate(n)]
    fit = fit_scaling(LAWS["usl"], n, rates)
    assert fit is not None and fit.parameters["kappa"].value == 0
    assert fit.parameters["kappa"].high is not None and fit.parameters["kappa"].high > 0
    falling = fit_scaling(LAWS["amdahl"], [1.0, 1.0, 2.0, 2.0], [64.0, 70.0, 45.0, 58.0])
    assert falling is not None
    serial = falling.parameters["serial_fraction"]
    assert serial.low is not None and serial.high is not None and 1 < serial.value < serial.high
    assert serial.high - serial.value == pytest.approx(serial.value - serial.low), "not cut off at the value itself"
    few = fit_scaling(LAWS["gustafson"], [1.0, 1.0, 2.0, 2.0], [50.0, 51.0, 90.0, 120.0])
    assert few is not None and few.parameters["serial_fraction"].high == 1
