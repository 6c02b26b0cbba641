"""Whether each rank has scaled its own part of the samples: by a mean and a deviation, or a range, of its own.

One model then gets numbers of different meaning. Of samples that were scaled before they were divided no part has
exactly the mean 0 and the deviation 1, and one part alone has a column's smallest or largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

_LEAST_ROWS, _LEAST_ROWS_OF_RANGE = 8, 16
_MOST_COLUMNS = 64
"""Columns of a table to look at."""
_MOST_BYTES = 2**27
"""Larger arrays are not looked at: it would take too long."""
_CHUNK_ROWS = 1 << 16
_ROUNDING, _OF_ROW = 2e-5, 1e-3
"""Largest means and differences of variances that count as 0: of many values, and of the few of a sample."""

_OF_GAP = 0.05
"""Largest distance of an end from 0 or 1, in gaps to the next number: many random numbers come as near by chance."""
_LEAST_DIFFERENT = 0.9
"""Share of a column's numbers that differ if they are measured, and no classes or counts."""
_FEW = 4
"""Numbers of fewer different values are classes."""
STANDARDISED = (
    "each rank's samples have exactly the mean 0 and the standard deviation 1, so each rank standardised its own part; "
    "use the mean and deviation of all samples on every rank"
)
_RANGED = (
    "each rank's samples have a column whose smallest number is exactly {}, and whose largest is 1: each rank scaled "
    "its own part; use the minimum and maximum of all samples on every rank"
)


def scaling_of(arrays: Sequence[Array]) -> list[list[Any]]:
    """Return how these arrays may have been scaled by their own numbers, as `scaling_alike` takes it."""
    found: list[list[Any]] = [[STANDARDISED]] if any(_is_standardised(array) for array in arrays) else []
    return found + [
        [_RANGED.format(low), index, *which] for index, one in enumerate(arrays) for low, *which in _ranged(one)
    ]


def scaling_alike(by_rank: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Return the warning if the arrays of every rank were scaled by their own numbers, or nothing."""
    common = [one for one in by_rank[0] if all(one in found for found in by_rank)]
    return str(common[0][0]) if common else ""


def _ranged(array: Array) -> list[tuple[int, int]]:
    """Return the columns or channels of measured numbers that one number 0 or -1, and one number 1, are the ends of.

    If all ranks have scaled alike, one rank alone has such an end of a column. The first item is the 0 or -1.
    """
    if array.dtype.kind != "f" or len(array) < _LEAST_ROWS_OF_RANGE or not 0 < array.nbytes <= _MOST_BYTES:
        return []
    columns = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)[:, :_MOST_COLUMNS]
    lows, highs = columns.min(0), columns.max(0)
    found = []
    for index, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        if abs(high - 1) > _ROUNDING or min(abs(low), abs(low + 1)) > _ROUNDING:
            continue
        column = columns[:, index]
        ends = ((low, round(low), column), (-high, -1, -column))
        exact = all(_OF_GAP * (numpy.partition(of, 1)[1] - end) > abs(end - bound) for end, bound, of in ends)
        some = column[:_CHUNK_ROWS]
        if exact and len(numpy.unique(some)) >= _LEAST_DIFFERENT * len(some):
            found.append((round(low), index))
    return found


def _is_standardised(array: Array) -> bool:
    moments = SampleMoments()
    size = array[:, :_MOST_COLUMNS].nbytes if array.ndim == 2 else array.nbytes
    if array.dtype.kind != "f" or not 0 < size <= _MOST_BYTES:
        return False
    for start in range(0, len(array), step := max(1, _CHUNK_ROWS * len(array) // array.size)):
        moments.add(array[start : start + step])
    return moments.are_standard()


class SampleMoments:
    """Mean and variance of the columns or channels of samples that come in batches."""

    def __init__(self) -> None:
        self._sums = self._squares = numpy.zeros(0)
        self._num_samples = self._number = 0
        self._some: set[float] = set()
        self._apart = False
        """Whether they are standardised one by one, or have no common columns: then nothing is added."""

    def add(self, batch: Array) -> None:
        """Add samples."""
        if batch.dtype.kind != "f" or self._apart or not len(batch):
            return
        columns = batch.reshape(-1, batch.shape[-1] if batch.ndim > 1 else 1)
        if batch.ndim == 2:
            columns = columns[:, :_MOST_COLUMNS]
        if not self._num_samples:
            self._apart = batch.ndim > 1 and all(abs(row.mean()) < _OF_ROW for row in batch[:3])  # spectra
            self._sums = self._squares = numpy.zeros(columns.shape[1])
        if self._apart or columns.shape[1] != len(self._sums):
            self._apart = True
            return
        if len(self._some) < _FEW:
            self._some.update(columns[:: max(1, len(columns) // _MOST_COLUMNS)].ravel().tolist())
        self._num_samples, self._number = self._num_samples + len(batch), self._number + len(columns)
        chunk = columns.astype(numpy.float64)
        self._sums, self._squares = self._sums + chunk.sum(0), self._squares + (chunk**2).sum(0)

    def are_standard(self) -> bool:
        """Return whether the samples so far have exactly the mean 0 and the deviation 1."""
        if self._apart or self._num_samples < _LEAST_ROWS or len(self._some) < _FEW:  # few: -1 and 1, as many of each
            return False
        by_column = _fits(self._sums, self._squares, self._number)
        constant = numpy.isclose(self._squares, 0.0)  # a scaler leaves those at 0
        total, squares = self._sums.sum(keepdims=True), self._squares.sum(keepdims=True)
        as_a_whole = _fits(total, squares, self._number * len(self._sums))
        return bool(as_a_whole.all() or ((by_column | constant).all() and by_column.any()))


def _fits(sums: Array, squares: Array, number: int) -> Array:
    """Return where `number` values have the mean 0, and the variance 1 by that number or by one less."""
    mean, square = sums / number, squares / number
    one = [numpy.abs(square * factor - 1) < _ROUNDING for factor in (1, number / max(number - 1, 1))]
    fits: Array = (numpy.abs(mean) < _ROUNDING) & (one[0] | one[1])
    return fits
