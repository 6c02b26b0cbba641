"""Numbers that stand for missing values: marks far from all others, and the codes of surveys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcdl.core.units import counted
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.values import LOOKED_AT, MOST_ROWS, NUMBERS_SHOWN, RARE_FROM, READ, is_plain

NAN_SKIPPED = "write NaN in the source and give --nan skip"
"""What to do with samples whose values are missing."""
_MARKS = (-99, -999, -9999, -99999, -999999, 99, 999, 9999, 99999, 999999, 99.9, 999.9, 9999.9, -99.9, -999.9,
          -32768, -(2**31), 1e20, 1e30, 1e36, 9.969209968386869e36, -1e20, -1e30, -1e34,
          -3.4028234663852886e38, 3.4028234663852886e38, -1.7976931348623157e308)  # fmt: skip
"""Numbers that files have for missing ones: of netCDF, CMIP, GDAL, and tables."""
_LOW_MARKS, _LOW_GAP, _FEWEST_MARKED, _LEAST_DIFFERENT = (0, -1), 0.2, 2, 20
"""Numbers for missing ones among positive ones (no glucose of 0, no age of -1): the part of the others' range that they
are below it, how many there must be, and the different numbers that make the others a quantity."""
_LAST_CODES = frozenset({9, 88, 98, 99, 888, 998, 999, 9998, 9999})
_CODES = _LAST_CODES | {7, 8, 66, 77, 96, 97, 666, 777, 996, 997, 7777, 8888, 9996, 9997}
_CODES_BELOW = _CODES | set(range(1, 10))
"""Numbers of surveys for answers that are missing (refused, not known), those that are the last, and negative ones."""
_MOST_ANSWERS, _FEWEST_CODED = 30, 5


def marks_of_missing(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe a number that often stands for a missing one, far from all others at its place; empty if none does.

    Looks at the first GiB of each array. The pixels of a picture or a volume count as one place.
    """
    if field.kind != "numbers" or not all(array.stored for array in arrays):
        return ""

    def rows() -> Iterator[Array]:
        for chunk in (chunk for array in arrays for chunk in itertools.islice(array.chunks(), LOOKED_AT)):
            yield chunk.reshape(-1, 1) if len(field.shape) > 1 else chunk.reshape(len(chunk), -1)

    return mark_of_missing(field.name, np.dtype(field.dtype), rows, low=len(field.shape) < 2)


def mark_of_missing(name: str, dtype: np.dtype[Any], rows: Callable[[], Iterable[Array]], *, low: bool = False) -> str:
    """Describe such a number among `rows`, which returns pieces of shape (N, places) again at each call.

    With `low` also 0 or -1 below positive numbers; a picture's background is one.
    """
    # No value of a byte is odd among others.
    if dtype.kind not in "if" or dtype.itemsize < 2:
        return ""
    limits = np.iinfo(dtype) if dtype.kind == "i" else np.finfo(dtype)
    fitting = [mark for mark in _MARKS if float(limits.min) <= mark <= float(limits.max)]
    marks = np.array(fitting, np.float64).astype(dtype)
    # Two passes, because most fields have no such number at a bound, and are done after the first.
    bounds = [(np.fmin.reduce(values), np.fmax.reduce(values)) for values in rows() if len(values)]
    if not bounds:
        return ""
    least_seen, most_seen = (
        np.fmin.reduce([smallest for smallest, _ in bounds]),
        np.fmax.reduce([smallest for _, smallest in bounds]),
    )
    if least_seen.min() == most_seen.max() and sum(map(len, rows())) > 1:
        return f"{name}: all values seen are {least_seen[0]:g}: is there anything to learn from them?"
    is_low = np.isin(least_seen, _LOW_MARKS) & low & ~np.isin(most_seen, marks)
    mark = np.where(np.isin(least_seen, marks) | is_low, least_seen, most_seen)
    places = np.flatnonzero(np.isin(mark, marks) | is_low)
    if not len(places):
        return ""
    count, least, most = np.zeros(len(places), np.int64), np.full(len(places), np.inf), np.full(len(places), -np.inf)
    for values in (values[:, places].astype(np.float64) for values in rows() if len(values)):
        is_mark = values == mark[places]
        count += is_mark.sum(0)
        least = np.fmin(least, np.fmin.reduce(np.where(is_mark, np.inf, values)))
        most = np.fmax(most, np.fmax.reduce(np.where(is_mark, -np.inf, values)))
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.minimum(np.abs(mark[places] - least), np.abs(mark[places] - most))
        below = (least > 0) & (gap > _LOW_GAP * (most - least)) & (count >= _FEWEST_MARKED)
        odd = np.flatnonzero((least <= most) & np.where(is_low[places], below, gap > most - least))
    first = next(iter(rows()))[:MOST_ROWS]
    kept = [at for at in odd.tolist() if not is_low[places[at]] or
            len(np.unique(first[:, places[at]])) >= _LEAST_DIFFERENT]  # fmt: skip
    if not kept:
        return ""
    at, *others = kept
    where = f" at index {places[at]}" if len(least_seen) > 1 else ""
    also = ", ".join(f"{places[other]}" for other in others[:NUMBERS_SHOWN])
    more = f" (and such at index {also}{', ...' if len(others) > NUMBERS_SHOWN else ''})" if others else ""
    return (
        f"{name}: {counted(int(count[at]), 'value')} of {mark[places[at]]:g}{where}, all others {least[at]:g} to "
        f"{most[at]:g}{more}: a mark of missing values? It stays a number; if so, {NAN_SKIPPED}"
    )


def codes_of_missing(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe columns of few whole numbers with codes for answers that are missing; empty if there is none."""
    width = math.prod(field.shape)
    if (
        field.kind != "numbers"
        or field.role == "target"
        or len(field.shape) > 1
        or width > LOOKED_AT
        or np.dtype(field.dtype).kind not in "fi"
        or not all(map(is_plain, arrays))
    ):
        return ""
    most = max(1, min(MOST_ROWS, READ // width) // len(arrays))
    rows = np.concatenate([array.spread(most).reshape(-1, width) for array in arrays])
    found: dict[int, str] = {}
    for at, column in enumerate(rows.T):
        values, counts = _counts_of(column)
        if odd := missing_codes(values, counts):
            answers = [value for value in values if value not in odd]
            where = f" at index {at}" if width > 1 else ""
            found[at] = f"{', '.join(map(str, odd))}{where} beside {answers[0]} to {answers[-1]}"
    if not found:
        return ""
    also = ", ".join(map(str, [*found][1 : NUMBERS_SHOWN + 1])) + (", ..." if len(found) > NUMBERS_SHOWN + 1 else "")
    more = f" (and such at index {also})" if also else ""
    return (
        f"{field.name}: {next(iter(found.values()))}{more}: codes of a survey for missing answers? They stay numbers; "
        f"if so, {NAN_SKIPPED}"
    )


def _counts_of(column: Array) -> tuple[list[int], list[int]]:
    values, counts = np.unique(column[np.isfinite(column)], return_counts=True)
    if len(values) > _MOST_ANSWERS or (values % 1).any():
        return [], []
    return [int(value) for value in values], counts.tolist()


def missing_codes(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return those of a column's numbers (sorted) that surveys use for missing answers: 1, 2, 3, and then 7, 9.

    The others are 0, 1, 2, ... or 1, 2, ...; between these and the codes numbers are left out.
    """
    answers = [value for value in values if value >= 0]
    if len(answers) < 2 or answers[0] > 1:
        return []
    scale = next((at for at, value in enumerate(answers) if value != answers[0] + at), len(answers))
    low, high = [value for value in values if value < 0], answers[scale:]
    low = low if low and low[-1] < answers[0] - 1 and {-value for value in low} <= _CODES_BELOW else []
    high = high if high and high[-1] in _LAST_CODES and set(high) <= _CODES else []
    few = sum(count for value, count in zip(values, counts, strict=True) if value in (*low, *high))
    single = len(low) + len(high) == 1 and (*low, *high)[0] in _MARKS  # which is said as a mark far from others
    rare = few < max(_FEWEST_CODED, sum(counts) // RARE_FROM)
    return [] if scale < 2 or single or rare else [*low, *high]
