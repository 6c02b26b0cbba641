"""Figures drawn by matplotlib: SVG for pages, PNG and PDF for papers. No window system, no global state kept."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdl.core.pages.page import CURVES, GROUND, PARTS
from hpcdl.core.storage.disk import writing_output
from hpcdl.core.storage.files import write_output
from hpcdl.report.document import Figure, Series, number, percent, plain, shortened

_VARIABLES = {
    **{color.light: f"curve-{place}" for place, color in enumerate(CURVES)},
    **{color.light: name.replace("_", "-").replace(" ", "-") for name, color in PARTS.items()},
}
"""CSS variable of each color of a figure, which has another value on a dark page."""
_COLORED = re.compile("|".join(_VARIABLES))
_PLACE = re.compile(r"var\(--[\w-]+, (#\w+)\)")
_MARKERS = "osD^vPpX"
_STARS = "*h8d"
"""Markers of published points: the marker changes with every eighth source."""
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
"""Line styles of lines over time, whose markers are small."""
_LONGEST_NAME = 34
"""Maximum length of the names beside bars."""
_SHORT_LABEL = 32
"""Maximum length of two labels that are side by side in a legend."""
_LONGEST_LABEL = 60
_END_LABEL, _MOST_END_LABELS, _END_GAP = 18, 8, 0.065
"""Maximum length of names at the ends of curves, of the number of such curves, and their gap (share of the height)."""
_WIDTH, _NARROW = 5.8, 4.0
"""Inches of a PNG or PDF, and the width below which its letters are smaller."""
_SCREEN = 4.6
"""Inches of a figure on a page: its letters are readable on a phone and in one of three columns."""
_SVG_DPI = 72
_INK = "#123456"
"""Placeholder of the page's text color: in SVG it becomes currentColor, so that a dark page gets light axes."""
_PAPER = "#fedcba"
"""Placeholder of the page's background color, which the lines of a pattern have."""
_AXIS = "#888888"


def svg(figure: Figure) -> str:
    """Return the figure as SVG text. Its ids contain the figure's name, so that several fit on one page."""
    with _style():
        text = _written(_draw(figure, _INK, _SCREEN))
    # An XML declaration cannot stand inside an HTML page.
    text = text[text.index("<svg") :]
    # A page holds several drawings, and matplotlib gives the same ids in each.
    text = re.sub(r'id="([^"]+)"', lambda match: f'id="{figure.name}-{match[1]}"', text)
    text = re.sub(r'(href="#|url\(#)', lambda match: f"{match[1]}{figure.name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'fill="(#\w{6})"', r'style="fill: \1"', text)  # only a style may use a page's variables
    text = _COLORED.sub(lambda match: f"var(--{_VARIABLES[match[0]]}, {match[0]})", text)
    return text.replace(_PAPER, "var(--paper, #ffffff)").replace(_INK, "currentColor")


def _written(canvas: Any) -> str:
    """Return `canvas` as SVG on a transparent background, laid out and drawn once; `savefig` would do both twice.

    The same renderer measures text for the layout and draws it, so that each text is measured once.
    """
    from matplotlib.backends import backend_svg

    backend: Any = backend_svg
    # As `savefig` does: matplotlib's SVG renderer has 72 units per inch.
    canvas.dpi = _SVG_DPI
    for patch in (canvas.patch, *(axes.patch for axes in canvas.axes)):
        patch.set_facecolor("none")
        patch.set_edgecolor("none")
    buffer, size = io.StringIO(), canvas.get_size_inches() * _SVG_DPI
    sheet = backend.RendererSVG(*size, buffer, image_dpi=_SVG_DPI, metadata={"Date": None, "Creator": None})
    holder = backend.FigureCanvasSVG(canvas)
    # The layout asks the canvas for a renderer to measure text with.
    holder.get_renderer = lambda: sheet
    canvas.get_layout_engine().execute(canvas)
    # `draw` would compute the layout a second time.
    canvas.set_layout_engine("none")
    canvas.draw(sheet)
    sheet.finalize()
    return buffer.getvalue()


def save(
    figure: Figure, drawing: str, folder: Path, formats: Sequence[str], width_inches: float = _WIDTH
) -> list[Path]:
    """Write the figure, whose SVG is `drawing`, as `folder/NAME.FORMAT` in each of `formats` (svg, png, pdf).

    PNG and PDF have the given width. Below 4 inches their letters are smaller, as a column of a paper needs them.
    """
    paths = []
    for form in formats:
        path = folder / f"{figure.name}.{form}"
        if form == "svg":
            # Outside a page there are no variables to take colors from.
            write_output(path, _PLACE.sub(r"\1", drawing.replace("currentColor", GROUND["ink"].light)))
        else:
            with _style(width_inches), writing_output(path) as temporary:
                # A date or version in a file would make equal reports differ.
                metadata = {"CreationDate": None} if form == "pdf" else {"Software": None}
                _draw(figure, GROUND["ink"].light, width_inches, paper=GROUND["paper"].light).savefig(
                    temporary, format=form, dpi=200, metadata=metadata
                )
        paths.append(path)
    return paths


@contextmanager
def _style(width_inches: float = _WIDTH) -> Iterator[None]:
    """Set matplotlib's settings for the drawing of figures, only inside this context."""
    import matplotlib

    settings: Any = {
        # Text stays text, which can be searched and read aloud, and takes fewer bytes than outlines.
        "svg.fonttype": "none",
        # Without a salt the ids are random, and the same report would have other bytes each time.
        "svg.hashsalt": "hpcdl",
        # TrueType: publishers refuse the Type 3 fonts that matplotlib embeds by default.
        "pdf.fonttype": 42,
        "font.family": "sans-serif",
        "font.size": 10 * _letters(width_inches),
        "axes.spines.top": False,
        "axes.spines.right": False,
        # A dollar sign in a file's or setting's name begins no formula.
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        yield


def _letters(width_inches: float) -> float:
    """Return the size of letters relative to those on a page on a screen."""
    return 0.75 if width_inches < _NARROW else 1.0


def _draw(figure: Figure, ink: str, width_inches: float = _WIDTH, paper: str = _PAPER) -> Any:
    from matplotlib.figure import Figure as Canvas

    figure = _with_short_labels(figure)
    stacked = any(series.style == "stack" for series in figure.series)
    coordinates = any(series.style == "coordinates" for series in figure.series)
    # A plot keeps its height for any number of legend lines; text stays readable on the width of a phone.
    columns = 2 if max(len(series.label) for series in figure.series) <= _SHORT_LABEL * width_inches / _WIDTH else 1
    legend_rows = 0 if coordinates else math.ceil(len(figure.series) / columns)
    letters = _letters(width_inches)
    height = (
        letters * (0.9 + 0.3 * len(figure.series[0].x)) if stacked else max(2.0, 3.0 * min(1.0, width_inches / _WIDTH))
    )
    canvas = Canvas(figsize=(width_inches, height + 0.22 * letters * legend_rows), layout="constrained")
    axes = canvas.add_subplot()
    if stacked:
        _draw_stack(axes, figure, paper)
    else:
        for series in figure.series:
            if series.style == "ideal":
                axes.plot(series.x, series.y, label=plain(series.label), color=ink, linestyle="--", linewidth=1.2)
            else:
                _DRAWERS[series.style](axes, series)
        if not coordinates:
            _scale_axes(axes, figure)
    axes.set_xlabel(plain(figure.x_label), color=ink)
    axes.set_ylabel(plain(figure.y_label), color=ink)
    axes.tick_params(colors=ink, which="both")
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.grid(visible=True, axis="y", alpha=0.25, color=_AXIS, linewidth=0.6)
    if figure.square:
        axes.set_box_aspect(1)
    handles, labels = axes.get_legend_handles_labels()
    if coordinates:
        return canvas
    canvas.legend(
        handles, labels, frameon=False, fontsize=9 * letters, labelcolor=ink, loc="outside lower center", ncols=columns
    )  # fmt: skip
    if not stacked:
        _label_ends(axes, figure, 8 * letters)
    return canvas


def _label_ends(axes: Any, figure: Figure, points: float) -> None:
    """Write the names of measured curves at their right ends, moved apart if they overlap. The legend has all."""
    curves = [series for series in figure.series if series.style in ("measured", "line") and series.x]
    if not 1 < len(curves) <= _MOST_END_LABELS:
        return
    axes.get_xlim(), axes.get_ylim()  # updates the limits of the axes
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted((float(to_axes.transform((item.x[-1], item.y[-1]))[1]), index) for index, item in enumerate(curves))
    heights: list[float] = []
    for height, _ in ends:
        heights.append(max(height, heights[-1] + _END_GAP) if heights else max(height, 0.0))
    # If the highest name is above the axes, all move down together and keep their gaps.
    drop = max(0.0, heights[-1] - 1.0)
    names = shortened([series.label for series in curves], _END_LABEL)
    for (_, index), height in zip(ends, heights, strict=True):
        axes.annotate(
            names[index], xy=(1.0, height - drop), xycoords="axes fraction", xytext=(4, 0),
            textcoords="offset points", color=_color(curves[index]), fontsize=points, va="center",
        )  # fmt: skip


def _with_short_labels(figure: Figure) -> Figure:
    """Return the figure with names that leave room for the plot. The table behind it has the full names."""
    labels = shortened([series.label for series in figure.series], _LONGEST_LABEL)
    return dataclasses.replace(
        figure,
        series=[dataclasses.replace(series, label=label) for series, label in zip(figure.series, labels, strict=True)],
    )


def _scale_axes(axes: Any, figure: Figure) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    # A fit is drawn at many x that are no sizes of runs.
    ticks = sorted({float(x) for series in figure.series if series.style != "fit" for x in series.x})
    if figure.x_log and ticks and ticks[0] > 0:
        axes.set_xscale("log", base=2)
        kept = _thinned(ticks) if figure.x_counts else _powers(ticks[0], ticks[-1])
        axes.xaxis.set_major_locator(FixedLocator(kept))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value) if value % 1 else f"{value:,.0f}"))
    if figure.square:
        axes.set_yscale("log", base=2)
        ends = [*axes.get_xlim(), *axes.get_ylim()]
        axes.set_xlim(min(ends), max(ends))
        axes.set_ylim(min(ends), max(ends))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    elif figure.y_log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        labelled = "123456789" if high / low < 4 else "1235"
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, labelled)))
        if high / low < 30:
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: _tick(value, labelled)))
        else:
            axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = axes.get_ylim()
        lines = all(series.style == "line" for series in figure.series)
        # Lines over time need no zero: their ends are of interest.
        below = any(value < 0 for series in figure.series for value in series.y if value is not None)
        bottom = low if below or (lines and low > high / 2) else 0.0
        axes.set_ylim(bottom, _percent_top(figure) if figure.y_percent and not lines else high)
    if figure.y_percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))


def _percent_top(figure: Figure) -> float:
    """Return an upper limit for measurements with their intervals, and for 100 %. A fit may leave the figure."""
    drawn = [series for series in figure.series if series.style != "fit"]
    ends = [1.0, *(value for series in drawn for value in (*series.y, *series.high) if value is not None)]
    return 1.05 * max(ends)


def _thinned(ticks: Sequence[float]) -> list[float]:
    """Return at most a dozen ticks, none closer than a fifth of an octave to the previous one."""
    kept: list[float] = []
    room = max(1.15, (ticks[-1] / ticks[0]) ** (1 / 12))
    for tick in ticks:
        if not kept or tick / kept[-1] >= room:
            kept.append(tick)
    return kept


def _powers(low: float, high: float) -> list[float]:
    """Return at most nine powers of two from `low` to `high`, or both ends if there is none between them."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, -(-(last - first + 1) // 9))
    return [2.0**power for power in range(first, last + 1, step)] or [low, high]


def _tick(value: float, labelled: str) -> str:
    """Return the label of a logarithmic tick if its first digit is in `labelled`, else none: labels must not touch."""
    first = f"{value:e}"[0]
    return f"{value:,g}" if first in labelled else ""


def _draw_measured(axes: Any, series: Series) -> None:
    _draw_points(axes, series, linewidth=1.5)


def _draw_dots(axes: Any, series: Series) -> None:
    _draw_points(axes, series, linewidth=0)


def _draw_points(axes: Any, series: Series, linewidth: float) -> None:
    """Draw markers with error bars. Points without an interval (measured once, or too few times) get a ring."""
    color = _color(series)
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
    dashes = _DASHES[(series.color + series.color // len(CURVES)) % len(_DASHES)]
    axes.plot(
        series.x, series.y, label=plain(series.label), color=_color(series), linewidth=1.5, linestyle=dashes,
        marker=_MARKERS[series.color % len(_MARKERS)], markersize=4, markevery=max(1, len(series.x) // 12),
    )  # fmt: skip


def _draw_fit(axes: Any, series: Series) -> None:
    axes.plot(series.x, series.y, label=plain(series.label), color=_color(series), linewidth=1.0, linestyle=":")


def _draw_published(axes: Any, series: Series) -> None:
    star = _STARS[series.color // len(CURVES) % len(_STARS)]
    axes.plot(
        series.x, series.y, label=plain(series.label), color=_color(series), linestyle="none", marker=star,
        markersize=11, fillstyle="none",
    )  # fmt: skip


def _draw_coordinates(axes: Any, series: Series) -> None:
    """Draw a trial over all settings. The best, with `color` 0, is dark and in front."""
    strength = max(0.08, 0.9 * 0.93**series.color)
    axes.plot(
        range(len(series.x)), series.y, color=CURVES[0].light, alpha=strength, linewidth=1.4, zorder=100 - series.color
    )
    axes.set_xticks(range(len(series.x)), [plain(str(name).partition("\n")[0]) for name in series.x], rotation=20)


_DRAWERS = {
    "coordinates": _draw_coordinates,
    "measured": _draw_measured,
    "dots": _draw_dots,
    "line": _draw_plain,
    "fit": _draw_fit,
    "published": _draw_published,
}


def _color(series: Series) -> str:
    return CURVES[series.color % len(CURVES)].light


def _draw_stack(axes: Any, figure: Figure, paper: str) -> None:
    """Draw horizontal bars, one for each x of the series, stacked over the series."""
    from matplotlib.ticker import FuncFormatter

    labels = shortened([str(x) for x in figure.series[0].x], _LONGEST_NAME)
    starts = [0.0] * len(labels)
    rows = list(range(len(labels)))[::-1]
    for series in figure.series:
        part = PARTS[series.part]
        axes.barh(
            rows, series.y, left=starts, label=plain(series.label), color=part.light, height=0.65,
            hatch=part.hatch * 3, edgecolor=paper, linewidth=0,
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, series.y, strict=True)]
    axes.set_yticks(rows, labels)
    axes.grid(visible=True, axis="x", alpha=0.25, color=_AXIS, linewidth=0.6)
    if figure.y_percent:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value).replace(".0 %", " %")))
    axes.axvline(0, color=_AXIS, linewidth=0.8)
