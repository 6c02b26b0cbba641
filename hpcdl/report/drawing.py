"""How each style of series is drawn on matplotlib's axes."""

from __future__ import annotations

from typing import Any

from hpcdl.report.cells import percent, plain, shortened
from hpcdl.report.document import Figure, Series

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3f9fd8", "#8457aa", "#7a7a7a")
"""Okabe and Ito's palette, darkened or lightened where it would vanish on white or on black."""
_MARKERS = "osD^vP*X"
_LONGEST_NAME = 34
"""Characters of the names beside bars."""


def _draw_measured(axes: Any, series: Series) -> None:
    _draw_points(axes, series, linewidth=1.5)


def _draw_dots(axes: Any, series: Series) -> None:
    _draw_points(axes, series, linewidth=0)


def _draw_points(axes: Any, series: Series, linewidth: float) -> None:
    """Markers with error bars; a ring around points that were measured once."""
    color = COLORS[series.color % len(COLORS)]
    style = {"color": color, "marker": _MARKERS[series.color % len(_MARKERS)], "markersize": 6, "linewidth": linewidth}
    axes.plot(series.x, series.y, label=plain(series.label), **style)
    bars = [
        (x, y, low, high)
        for x, y, low, high in zip(series.x, series.y, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    if bars:
        x, y, low, high = zip(*bars, strict=True)
        reach = [
            [max(0.0, a - b) for a, b in zip(y, low, strict=True)],
            [max(0.0, b - a) for a, b in zip(y, high, strict=True)],
        ]
        axes.errorbar(x, y, yerr=reach, fmt="none", ecolor=color, elinewidth=1.2, capsize=3)
    once = [(x, y) for x, y, low in zip(series.x, series.y, series.low, strict=True) if low is None]
    if once:
        axes.plot(*zip(*once, strict=True), linestyle="none", marker="o", markersize=11, fillstyle="none", color=color)


def _draw_plain(axes: Any, series: Series) -> None:
    color = COLORS[series.color % len(COLORS)]
    marker = "." if len(series.x) <= 60 else ""
    axes.plot(series.x, series.y, label=plain(series.label), color=color, linewidth=1.5, marker=marker)


def _draw_ideal(axes: Any, series: Series) -> None:
    axes.plot(series.x, series.y, label=plain(series.label), color="#888888", linestyle="--", linewidth=1.2)


def _draw_fit(axes: Any, series: Series) -> None:
    color = COLORS[series.color % len(COLORS)]
    axes.plot(series.x, series.y, label=plain(series.label), color=color, linewidth=1.0, linestyle=":")


def _draw_published(axes: Any, series: Series) -> None:
    color = COLORS[series.color % len(COLORS)]
    axes.plot(
        series.x, series.y, label=plain(series.label), color=color, linestyle="none", marker="*", markersize=11,
        fillstyle="none",
    )  # fmt: skip


DRAWERS = {
    "measured": _draw_measured,
    "dots": _draw_dots,
    "line": _draw_plain,
    "ideal": _draw_ideal,
    "fit": _draw_fit,
    "published": _draw_published,
}


def draw_stack(axes: Any, figure: Figure) -> None:
    """Horizontal bars, one for each x of the series, piled up over the series."""
    from matplotlib.ticker import FuncFormatter

    labels = shortened([str(x) for x in figure.series[0].x], _LONGEST_NAME)
    left = [0.0] * len(labels)
    places = list(range(len(labels)))[::-1]
    for series in figure.series:
        color = COLORS[series.color % len(COLORS)]
        axes.barh(places, series.y, left=left, label=plain(series.label), color=color, height=0.65)
        left = [start + width for start, width in zip(left, series.y, strict=True)]
    axes.set_yticks(places, labels)
    axes.grid(visible=True, axis="x", alpha=0.25, color="#888888", linewidth=0.6)
    if figure.y_percent:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value).replace(".0 %", " %")))
    axes.axvline(0, color="#888888", linewidth=0.8)
