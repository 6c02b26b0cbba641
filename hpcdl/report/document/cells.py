"""Cells of tables as text: one spelling of a number for all renderers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from hpcdl.core.errors import printable
from hpcdl.core.units import format_bytes, format_count, format_seconds
from hpcdl.report.document.document import Bounds, Cell, Column, Interval

MISSING = "–"
_TWO = 2
plain = printable


def shortened(labels: Sequence[str], most: int) -> list[str]:
    """Labels of at most about `most` characters that still differ: `1: async-easgd, batch…`."""
    whole = [plain(label) for label in labels]
    if max(map(len, whole), default=0) <= most:
        return whole
    cut = [label if len(label) <= most else label[: most - 1] + "…" for label in whole]
    if len(set(cut)) == len(set(whole)):
        return cut
    order = {label: place for place, label in enumerate(dict.fromkeys(whole), start=1)}
    return [f"{order[label]}: {short}" for label, short in zip(whole, cut, strict=True)]


def number(value: float) -> str:
    """Three to four significant digits with thousands separators: `1,240`, `98.7`, `0.0123`."""
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
    """A share as percent: `95.2 %`."""
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
    """What stands in the cell."""
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
    """Whether the column is aligned to the right."""
    return column.kind != "text"


def _bounds(write: Callable[[float], str], cell: Bounds) -> str:
    middle = MISSING if cell.value is None else write(cell.value)
    if cell.low is None and cell.high is None:
        return f"{middle} †" if cell.n == 1 else middle
    if cell.low == cell.high == cell.value:
        return middle  # a base: 1 by definition
    ends = [MISSING if end is None else write(end) for end in (cell.low, cell.high)]
    unit = " %" if all(end.endswith(" %") for end in ends) else ""
    return f"{middle} [{', '.join(end.removesuffix(unit) for end in ends)}{unit}]"


def _interval(kind: str, write: Callable[[float], str], cell: Interval) -> str:
    if cell.half is None:
        return f"{write(cell.value)} †" if cell.n == 1 else write(cell.value)
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
    """Value and half width to the digits that the half width justifies (two significant ones)."""
    if half <= 0:
        return f"{number(value)} ± 0"
    digits = max(0, 1 - math.floor(math.log10(half)))
    needed = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    digits = min(digits, needed + 2)
    return f"{value:,.{digits}f} ± {half:,.{digits}f}"
