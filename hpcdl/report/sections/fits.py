"""Scaling laws fitted to the curves, and how far they are valid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcdl.core.units import listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.laws import SERIAL, CommunicationFit, Crossing, CurveFit, Parameter
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve
from hpcdl.report.document import Bounds, Cell, Column, Figure, Section, Series, Table, number

MOST_CURVES = 4
"""Maximum number of fitted curves in one figure."""
_REACH = 4.0
"""Factor by which a figure continues a law beyond the largest n."""
_ROUNDING = 1e-12
_SYMBOLS = {"serial_fraction": "serial fraction", "sigma": "σ (contention)", "kappa": "κ (coherency)"}


def build(analysis: Analysis) -> Section | None:
    """Parameters with intervals, and where efficiency falls below 80 %."""
    if not analysis.fits and not analysis.communication:
        return None
    names = dict(zip(map(id, analysis.curves), curve_names(analysis.curves), strict=True))
    table = _table(analysis.fits, names)
    tables = [table] if analysis.fits else []
    fitted = [item for item in analysis.communication if item.fit]
    if fitted:
        tables.append(_communication(fitted))
    drawn = [item for item in analysis.fits if item.fit.law.name == "usl"][:MOST_CURVES]
    figures = [_figure(drawn, names, table)] if drawn else []
    lines = [
        "Gustafson's law is fitted to weak scaling, Amdahl's to strong scaling and threads, the universal scalability"
        " law (USL) to all, by least squares on the logarithms of single runs. R² is that of throughput per worker."
    ]
    if any(item.fit.saturated for item in analysis.fits):
        lines.append("‡ marks fits with as many parameters as different n: these runs could not contradict the law.")
    if any(item.fit.parameters[name].value == 0 for item in analysis.fits for name in item.fit.law.own):
        lines.append(
            "A parameter of 0 is at its bound: the curve is flatter than the law, or rises. No law goes below 0."
        )
    if any(name == SERIAL and value.value > 1 for item in analysis.fits for name, value in item.fit.parameters.items()):
        lines.append(
            "A serial fraction above 1 is none: throughput falls as n grows, which these laws do not describe."
        )
    lines += [f"α and β of {item.strategy}: {item.left_out}." for item in analysis.communication if item.left_out]
    return Section(name="fits", title="Laws of scaling", lines=lines, items=(*figures, *tables))


def _table(fits: Sequence[CurveFit], names: dict[int, str]) -> Table:
    columns = (
        Column(name="curve"), Column(name="law"), Column(name="parameters"), Column(name="R²", kind="number"),
        Column(name="spread", kind="percent"), Column(name="runs", kind="count"),
        Column(name="below 80 % from n"), Column(name="in nodes"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for curve_fit in fits:
        law = f"{curve_fit.fit.law.name}{' ‡' if curve_fit.fit.saturated else ''}"
        parameters = "; ".join(_parameter_text(name, curve_fit.fit.parameters[name]) for name in curve_fit.fit.law.own)
        share = curve_fit.nodes_per_n
        rows.append(
            (
                f"{names[id(curve_fit.curve)]}, {curve_fit.curve.mode}", law, parameters, _r2(curve_fit.fit.r2),
                curve_fit.fit.spread, curve_fit.fit.num_runs, crossing_text(curve_fit.below),
                None if share is None else crossing_text(curve_fit.below, share),
            )
        )  # fmt: skip
    return Table(
        title="Fitted laws",
        columns=columns,
        rows=rows,
        note="[low, high] are 95 % intervals (Student's t); spread is the relative residual of single runs.",
    )


def _communication(fits: Sequence[CommunicationFit]) -> Table:
    columns = (
        Column(name="strategy"), Column(name="machine"), Column(name="α per round", kind="seconds"),
        Column(name="β: seconds per GB", kind="number"), Column(name="constant", kind="seconds"),
        Column(name="R²", kind="number"), Column(name="spread", kind="percent"), Column(name="runs", kind="count"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for strategy_fit in fits:
        assert strategy_fit.fit is not None
        alpha, beta, constant = (strategy_fit.parameters.get(name) for name in _COEFFICIENTS)
        rows.append(
            (
                strategy_fit.strategy, strategy_fit.machine, _bounds(alpha), _bounds(beta, 1e9), _bounds(constant),
                strategy_fit.fit.r2, strategy_fit.fit.spread, strategy_fit.fit.num_runs,
            )
        )  # fmt: skip
    note = (
        "Exposed communication = α x rounds + β x bytes + constant, as counted on the busiest rank, without hidden"
        " parts. None is below 0; the constant needs four different exchanges."
    )
    return Table(title="Alpha-beta of the exposed communication", columns=columns, rows=rows, note=note)


_COEFFICIENTS = ("alpha_seconds", "beta_seconds_per_byte", "constant_seconds")


def _bounds(parameter: Parameter | None, factor: float = 1.0) -> Bounds | None:
    if parameter is None:
        return None
    low, high = (None if end is None else end * factor for end in (parameter.low, parameter.high))
    return Bounds(value=parameter.value * factor, low=low, high=high)


def _parameter_text(name: str, parameter: Parameter) -> str:
    text = f"{_SYMBOLS.get(name, name)} {_rounded(parameter.value)}"
    if parameter.low is None or parameter.high is None:
        return text
    return f"{text} [{_rounded(parameter.low)}, {_rounded(parameter.high)}]"


def _r2(value: float | None) -> float | None:
    return 0.0 if value is not None and abs(value) < _ROUNDING else value


def _rounded(value: float) -> str:
    """Return a share of a step; what is left of 0 by rounding alone is 0."""
    return number(0.0 if abs(value) < _ROUNDING else value)


def crossing_text(below: Crossing, factor: float = 1.0) -> str:
    """Return the whole n from which efficiency is below the target: `12 [10, 15]`, `90 [60, ∞] extrapolated`."""
    if below.n is None:
        least = "" if below.low is None else f" (not before {_whole(below.low, factor)})"
        return f"not reached{least}, extrapolated"
    text = _whole(below.n, factor)
    if below.low is not None:
        text += f" [{_whole(below.low, factor)}, {_whole(below.high, factor)}]"
    return text + (" extrapolated" if below.extrapolated else "")


def _whole(n: float | None, factor: float) -> str:
    # A crossing is exact to 1e-6: one just above a whole number must not count as the next.
    return "∞" if n is None else f"{math.ceil(n * factor - 1e-6):,}"


def _figure(drawn: Sequence[CurveFit], names: dict[int, str], table: Table) -> Figure:
    series: list[Series] = []
    for color, curve_fit in enumerate(drawn):
        name = f"{names[id(curve_fit.curve)]}, {curve_fit.curve.mode}"
        series += [_measured(curve_fit.curve, name, color), _fitted(curve_fit, name, color)]
    ends = [point.n for curve_fit in drawn for point in curve_fit.curve.points]
    x = [float(min(ends)), max(ends) * _REACH]
    series.append(Series(label="80 %", x=x, y=[0.8, 0.8], style="ideal"))
    texts = [
        f"{names[id(curve_fit.curve)]}: below 80 % from n = {crossing_text(curve_fit.below)}" for curve_fit in drawn
    ]
    return Figure(
        name="fits",
        title="Efficiency and the USL's fit; beyond the largest measured n it is extrapolation",
        alt=f"Measured efficiency with fitted curves. {listed(texts, 4)}.",
        x_label=listed(sorted({curve_fit.curve.axis for curve_fit in drawn})),
        y_label="efficiency",
        series=series,
        table=table,
        x_log=True,
        y_percent=True,
    )


def _measured(curve: Curve, name: str, color: int) -> Series:
    """Return the points relative to the curve's own first point, like the law."""
    ratios = [point.efficiency.scaled(1 / curve.points[0].efficiency.value) for point in curve.points]
    return Series(
        label=name,
        x=[point.n for point in curve.points],
        y=[ratio.value for ratio in ratios],
        low=[None if ratio.is_wide else ratio.low for ratio in ratios],
        high=[None if ratio.is_wide else ratio.high for ratio in ratios],
        style="dots",
        color=color,
        strategy=curve.first.strategy,
    )


def _fitted(curve_fit: CurveFit, name: str, color: int) -> Series:
    first, last = curve_fit.curve.points[0].n, curve_fit.curve.points[-1].n * _REACH
    x = [first * (last / first) ** (step / 60) for step in range(61)]
    y = [curve_fit.fit.efficiency(n, first).value for n in x]
    largest = curve_fit.curve.points[-1].n
    # Beyond the runs a law that turns upwards has no meaning: it is not drawn there.
    end = next((i for i in range(1, len(x)) if x[i] > largest and y[i] > y[i - 1]), len(x))
    return Series(
        label=f"fit: {name}", x=x[:end], y=y[:end], style="fit", color=color, strategy=curve_fit.curve.first.strategy
    )
