"""Scale-up, strong and weak scaling: throughput, speed-up and efficiency with intervals, base and ideal lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcdl.core.statistics import Ratio
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.document import Bounds, Cell, Column, Figure, Interval, Section, Series, Table

MOST_CURVES = 8
"""Maximum number of curves in one figure, so that they can be distinguished. Tables hold all."""
SEEN = "of two runs both values are shown; of runs too far apart for an interval the smallest and the largest"
"""A table's note about its intervals (document.py)."""
_TWO = 2
_TITLES = {"weak": "Weak scaling", "strong": "Strong scaling", "scale-up": "Scale-up by threads"}
_MEANING = {
    "weak": "The batch per worker is fixed, so the work grows with the workers; ideal efficiency is 100 %.",
    "strong": "The global batch is fixed, so the same work is shared by more workers; ideal speed-up is n / base.",
    "scale-up": "The same job with more threads per worker; ideal speed-up is threads / base.",
}


def build_weak(analysis: Analysis) -> Section | None:
    """Throughput and efficiency at fixed batch per worker."""
    return _build(analysis, "weak", (_throughput(analysis), _EFFICIENCY))


def build_strong(analysis: Analysis) -> Section | None:
    """Throughput, speed-up and efficiency at fixed global batch."""
    return _build(analysis, "strong", (_throughput(analysis), _SPEEDUP, _EFFICIENCY))


def build_scale_up(analysis: Analysis) -> Section | None:
    """Throughput, speed-up and efficiency against threads per worker."""
    return _build(analysis, "scale-up", (_throughput(analysis), _SPEEDUP, _EFFICIENCY))


@dataclass(frozen=True, kw_only=True)
class _Measure:
    """One quantity of a point, and how a figure and a table show it."""

    name: str
    label: str
    kind: str
    value: Callable[[Point], tuple[float, float | None, float | None]]
    ideal: Callable[[Curve, float], float]


def _throughput_of(point: Point) -> tuple[float, float | None, float | None]:
    value = point.throughput
    if value.ci95 is None or value.is_wide:
        return value.mean, None, None
    return value.mean, value.mean - value.ci95, value.mean + value.ci95


def _ratio_of(ratio: Ratio) -> tuple[float, float | None, float | None]:
    """Return a ratio for a figure. An interval that only shows that there were too few runs is omitted."""
    return (ratio.value, None, None) if ratio.is_wide else (ratio.value, ratio.low, ratio.high)


def _throughput(analysis: Analysis) -> _Measure:
    return _Measure(
        name="throughput",
        label=Column.rate(analysis.counted).name,
        kind="rate",
        value=_throughput_of,
        ideal=lambda curve, n: curve.base.throughput.mean * n / curve.base.n,
    )


_SPEEDUP = _Measure(
    name="speedup",
    label="speed-up over the base",
    kind="number",
    value=lambda point: _ratio_of(point.speedup),
    ideal=lambda curve, n: n / curve.base.n,
)
_EFFICIENCY = _Measure(
    name="efficiency",
    label="efficiency",
    kind="percent",
    value=lambda point: _ratio_of(point.efficiency),
    ideal=lambda curve, n: 1.0,
)


def _build(analysis: Analysis, mode: str, measures: Sequence[_Measure]) -> Section | None:
    curves = [curve for curve in analysis.curves if curve.mode == mode]
    if all(curve.alone for curve in curves):
        return None
    names = curve_names(curves)
    table = _table(mode, curves, names, Column.rate(analysis.counted))
    drawn = [(curve, name) for curve, name in zip(curves, names, strict=True) if not curve.alone]
    lines = [
        _MEANING[mode],
        f"Base: {_bases(curves, names)}. Intervals are 95 %: Student's t, ratios by Welch on logarithms.",
    ]
    if len(drawn) > MOST_CURVES:
        lines.append(f"The figures show the first {MOST_CURVES} of {len(drawn)} curves; the table holds all.")
    figures = [_figure(mode, measure, drawn[:MOST_CURVES], table) for measure in measures]
    return Section(name=mode, title=_TITLES[mode], lines=lines, items=(*figures, table))


def _bases(curves: Sequence[Curve], names: Sequence[str]) -> str:
    """Return the base of each curve: `1 worker (ps, ring), 2 workers (sync-easgd)`."""
    names_by_base: dict[str, list[str]] = {}
    for curve, name in zip(curves, names, strict=True):
        names_by_base.setdefault(base_words(curve), []).append(name)
    if len(names_by_base) == 1:
        return next(iter(names_by_base))
    return listed([f"{base} ({listed(names_by_base[base])})" for base in sorted(names_by_base)])


def base_words(curve: Curve) -> str:
    """Return the curve's base: `1 worker`, or `1 worker of single` if it belongs to another strategy."""
    smallest = counted(curve.base.n, curve.axis[:-1])
    return f"{smallest} of {curve.base.first.strategy}" if curve.borrowed else smallest


def _table(mode: str, curves: Sequence[Curve], names: Sequence[str], rate: Column) -> Table:
    threads = mode == "scale-up"  # on one node, whatever the number of threads
    axis = "threads" if threads else "workers"
    columns = (
        Column(name="curve"), Column(name="batch"), Column(name=axis, kind="count"), Column(name="nodes", kind="count"),
        Column(name="servers", kind="count"), Column(name="runs", kind="count"), rate,
        Column(name="std", kind="rate"), Column(name="speed-up", kind="number"),
        Column(name="efficiency", kind="percent"), Column(name="per node", kind="percent"),
    )  # fmt: skip
    rows = [
        (
            name, curve.batch, point.n, point.first.nodes, point.first.servers, len(point.runs),
            _rate(point),
            point.throughput.std,
            *((None, None) if curve.alone else (_cell(point.speedup), _cell(point.efficiency))),
            None if threads or curve.alone else _cell(point.efficiency_per_node),
        )
        for curve, name in zip(curves, names, strict=True)
        for point in curve.points
    ]  # fmt: skip
    nodes = "" if threads else "; per node counts servers' nodes too"
    if any(point.efficiency_per_node.value > point.efficiency.value for curve in curves for point in curve.points):
        nodes += ", and exceeds the efficiency where a node has more workers than at the base"
    note = (
        "± is the half width of the 95 % interval, [low, high] its ends where it is one of logarithms; † measured once,"
        f" no interval; {SEEN}{nodes}."
    )
    return Table(title=f"{_TITLES[mode]}: all points", columns=columns, rows=rows, note=note)


def _rate(point: Point) -> Cell:
    """Return the mean with its interval, or with the values of the repeats if the interval says nothing."""
    return Interval.of([run.images_per_second for run in point.runs])


def _cell(ratio: Ratio) -> Bounds:
    if ratio.is_wide and min(ratio.n, ratio.n_base) == _TWO:
        return Bounds(value=ratio.value, low=None, high=None)
    return Bounds(value=ratio.value, low=ratio.low, high=ratio.high, n=min(ratio.n, ratio.n_base))


def _figure(mode: str, measure: _Measure, drawn: Sequence[tuple[Curve, str]], table: Table) -> Figure:
    series = [_series(measure, curve, name, color) for color, (curve, name) in enumerate(drawn)]
    axis = drawn[0][0].axis
    ideal = _ideal(measure, drawn)
    percent = measure.kind == "percent"
    ends = [
        f"{name} {measure.value(curve.points[-1])[0] * (100 if percent else 1):,.3g}{' %' if percent else ''}"
        f" at {curve.points[-1].n} {axis}"
        for curve, name in drawn
    ]
    return Figure(
        name=f"{mode}-{measure.name}",
        title=f"{_TITLES[mode]}: {measure.label}",
        alt=f"{measure.label} against {axis}: {listed(ends, 8)}. The numbers are in the table below.",
        x_label=axis,
        y_label=measure.label,
        series=(*series, *ideal),
        table=table,
        x_log=True,
        y_log=not percent,
        y_percent=percent,
        square=measure.name == "speedup",
    )


def _series(measure: _Measure, curve: Curve, name: str, color: int) -> Series:
    values = [measure.value(point) for point in curve.points]
    once = all(len(point.runs) == 1 for point in curve.points)
    return Series(
        label=f"{name} †" if once else name,
        x=[point.n for point in curve.points],
        y=[value for value, _, _ in values],
        low=[low for _, low, _ in values],
        high=[high for _, _, high in values],
        style="measured",
        color=color,
        strategy=curve.first.strategy,
    )


def _ideal(measure: _Measure, drawn: Sequence[tuple[Curve, str]]) -> list[Series]:
    """Return a dashed line of perfect scaling from the best base; from each size of a base, if that changes the line.

    One line for all would show curves with a larger base far below an ideal that is not theirs.
    """
    sizes = sorted({curve.base.n for curve, _ in drawn})
    if len(sizes) == 1 or measure.kind == "percent":
        return [_ideal_line(measure, drawn, _bases([curve for curve, _ in drawn], [name for _, name in drawn]))]
    by_size = [[(curve, name) for curve, name in drawn if curve.base.n == size] for size in sizes]
    return [_ideal_line(measure, group, base_words(group[0][0])) for group in by_size]


def _ideal_line(measure: _Measure, drawn: Sequence[tuple[Curve, str]], bases: str) -> Series:
    best = max((curve for curve, _ in drawn), key=lambda curve: curve.base.throughput.mean / curve.base.n)
    ends = [point.n for curve, _ in drawn for point in curve.points]
    # A borrowed base lies to the left of all points.
    x = sorted({min(*ends, best.base.n), max(ends)})
    return Series(label=f"ideal, from {bases}", x=x, y=[measure.ideal(best, n) for n in x], style="ideal")
