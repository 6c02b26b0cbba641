"""The parts of a report before anything is drawn: sections of text, tables and figures. They are values, not strings.

All renderers write the numbers in a table's cells in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdl.core.errors import printable
from hpcdl.core.statistics import estimate
from hpcdl.core.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value with the half width of its 95 % interval (None if it was measured once), from `n` runs.

    `seen`: the smallest and the largest value, if known. A table shows them instead of an interval that says nothing:
    for two runs, and for runs so far apart that the interval would reach below 0.
    """

    value: float
    half: float | None = None
    n: int | None = None
    seen: tuple[float, float] | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Interval | None:
        """Return mean and half width of the known, finite, non-negative values; None without any."""
        # Imported tables may hold negative times: the caveats name them, and no mean uses them.
        usable = [value for value in values if value is not None and math.isfinite(value) and value >= 0]
        if not usable:
            return None
        estimated = estimate(usable)
        return cls(value=estimated.mean, half=estimated.ci95, n=estimated.n, seen=(min(usable), max(usable)))

    @classmethod
    def of_ratio(cls, pairs: Iterable[tuple[float, float] | None]) -> Interval | None:
        """Return the ratio of two means, its half width by a ratio estimator (Cochran, Sampling Techniques, chapter 6).

        It is the ratio of the means themselves, unlike the mean of the pairs' ratios.
        """
        known_pairs = [pair for pair in pairs if pair is not None]
        total = sum(whole for _, whole in known_pairs)
        if total <= 0:
            return None
        ratio = sum(part for part, _ in known_pairs) / total
        # These residuals over the mean denominator have the standard error of the ratio (Cochran, section 6.3).
        estimated = estimate([(part - ratio * whole) * len(known_pairs) / total for part, whole in known_pairs])
        ratios = [part / whole for part, whole in known_pairs if whole > 0]
        return cls(value=ratio, half=estimated.ci95, n=estimated.n, seen=(min(ratios), max(ratios)))


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """A value with an interval that may be asymmetric, such as one of logarithms; None is an open end.

    `n` is the number of runs of a measurement.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int | None = None


Cell = str | int | float | Interval | Bounds | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table. `kind` says how to write its values: text, count, number, rate, percent, seconds, bytes."""

    name: str
    kind: str = "text"

    @classmethod
    def rate(cls, counted: str) -> Column:
        """Return a column for throughputs. `counted` is the unit that the report's runs count."""
        return cls(name=f"{counted}/s", kind="rate")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells. `note` is printed below them."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of a figure. `style`: measured (markers, line, error bars), dots (the same without the line), line, ideal
    (dashed), fit (dotted), published (stars), stack (stacked bars; x are their names).

    `low` and `high` are the ends of error bars, None if there is none.
    """

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    style: str = "measured"
    color: int = 0
    """For a curve: its index in the palette's CURVES. Series of one figure that belong together share it."""
    strategy: str = ""
    """The strategy of the curve, which has one color in all figures of a document."""
    part: str = ""
    """For a stack: its name in the palette's PARTS."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A plot: its data, a text that says what it shows (`alt`), and the same numbers as a table."""

    name: str
    title: str
    alt: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    table: Table
    x_log: bool = False
    y_log: bool = False
    y_percent: bool = False
    x_counts: bool = True
    """Whether ticks of a logarithmic x axis are at the points; else they are at powers of two."""
    square: bool = False
    """Whether both axes have the same scale, so that values proportional to x are on the diagonal."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Lines with fixed columns, a drawing in plain characters. `alt` says in words what they show."""

    title: str
    alt: str
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a report. It exists only if its data do. `in_files`: too long for a terminal, which only names it."""

    name: str
    title: str
    lines: Sequence[str] = ()
    items: Sequence[Table | Figure | Listing] = ()
    in_files: bool = False


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report. `data` is the content of report.json, `rows` that of scaling.csv."""

    title: str
    summary: Sequence[str]
    warnings: Sequence[str]
    sections: Sequence[Section]
    data: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def figures(self) -> list[Figure]:
        """Return every figure, in order."""
        return [item for section in self.sections for item in section.items if isinstance(item, Figure)]

    def tables(self) -> dict[str, Table]:
        """Return every table by a file name: that of its section, and its title in lower case with dashes."""
        tables: dict[str, Table] = {}
        for section in self.sections:
            for item in section.items:
                if isinstance(item, Table):
                    title_words = re.findall(r"[a-z0-9]+", item.title.lower())
                    # Titles may hold long names of networks and data, and file systems refuse names beyond 255 bytes.
                    name = "-".join([section.name, *title_words])[:80].rstrip("-")
                    # Each name is a file in tables/: two tables with one title must not overwrite each other.
                    again = sum(taken == name or taken.startswith(f"{name}--") for taken in tables)
                    tables[f"{name}--{again + 1}" if again else name] = item
        return tables


MISSING = "–"
_TWO = 2
plain = printable


def shortened(labels: Sequence[str], most: int) -> list[str]:
    """Return labels of at most about `most` characters that still differ, such as `1: async-easgd, batch…`."""
    plain_labels = [plain(label) for label in labels]
    if max(map(len, plain_labels), default=0) <= most:
        return plain_labels
    cut = [label if len(label) <= most else label[: most - 1] + "…" for label in plain_labels]
    # The cut may make two labels equal, and a legend must distinguish them.
    if len(set(cut)) == len(set(plain_labels)):
        return cut
    order = {label: position for position, label in enumerate(dict.fromkeys(plain_labels), start=1)}
    return [f"{order[label]}: {short}" for label, short in zip(plain_labels, cut, strict=True)]


def number(value: float) -> str:
    """Return three to four significant digits with thousands separators: `1,240`, `98.7`, `0.0123`."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return format_count(value)
    if abs(value) >= 1e-4:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


def percent(value: float) -> str:
    """Return a share as percent: `95.2 %`."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else MISSING


_WRITERS: Mapping[str, Callable[[float], str]] = {
    "count": format_count,
    "number": number,
    "rate": number,
    "percent": percent,
    "seconds": format_seconds,
    "bytes": format_bytes,
}


def cell_text(column: Column, cell: Cell) -> str:
    """Return the text of a cell."""
    if cell is None:
        return MISSING
    if isinstance(cell, str):
        return plain(cell)
    write = _WRITERS.get(column.kind, number)
    if isinstance(cell, Interval):
        return _interval(column.kind, write, cell)
    if isinstance(cell, Bounds):
        return _bounds(write, cell)
    return write(cell) if math.isfinite(cell) else MISSING


def is_numeric(column: Column) -> bool:
    """Return whether the column is aligned to the right."""
    return column.kind != "text"


def _bounds(write: Callable[[float], str], cell: Bounds) -> str:
    middle = MISSING if cell.value is None else write(cell.value)
    if cell.low is None and cell.high is None:
        return f"{middle} †" if cell.n == 1 else middle
    if cell.low == cell.high == cell.value:
        return middle  # a base, which is 1 by definition
    ends = [MISSING if end is None else write(end) for end in (cell.low, cell.high)]
    unit = " %" if all(end.endswith(" %") for end in ends) else ""
    return f"{middle} [{', '.join(end.removesuffix(unit) for end in ends)}{unit}]"


def _interval(kind: str, write: Callable[[float], str], cell: Interval) -> str:
    if cell.half is None:
        return f"{write(cell.value)} †" if cell.n == 1 else write(cell.value)
    # Student's t is 12.7 for two runs: their interval shows their number, not their scatter.
    if cell.seen is not None and cell.n == _TWO and cell.half > 0:
        return " and ".join(map(write, cell.seen))
    if cell.seen is not None and cell.half >= cell.value > 0:
        return f"{write(cell.value)}, of {' to '.join(map(write, cell.seen))}"
    if kind == "percent":
        return f"{100 * cell.value:.1f} ± {100 * cell.half:.1f} %"
    if kind in ("rate", "number"):
        return _same_digits(cell.value, cell.half)
    return f"{write(cell.value)} ± {write(cell.half)}"


def _same_digits(value: float, half: float) -> str:
    """Return value and half width with the digits that the half width justifies (two significant ones)."""
    if half <= 0:
        return f"{number(value)} ± 0"
    digits = max(0, 1 - math.floor(math.log10(half)))
    needed = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    # Of nearly equal repeats the half width alone would ask for a dozen digits.
    digits = min(digits, needed + 2)
    return f"{value:,.{digits}f} ± {half:,.{digits}f}"
