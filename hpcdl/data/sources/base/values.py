"""The values of a source's arrays: labels, one-hot rows, and what float32 rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hpcdl.data.sources.base.labels import MOST_CLASSES
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array

EXACT = 1 << 24
"""float32 represents every integer up to this one."""
LOOKED_AT = 64
"""Most pieces of an array that are searched for such numbers."""
READ, MOST_ROWS = 1 << 22, 1 << 14
"""Values and rows of a field that a check reads at most."""
FEWEST, RARE_FROM = 10, 100
"""Values below which a check says nothing, and the part (one in RARE_FROM) that is no stray."""
NUMBERS_SHOWN = 5
ABSENT = np.iinfo(np.int64).min
"""Marks a missing label."""
_NEARLY = 10
"""Rows are nearly one-hot if at most one in _NEARLY is not."""
_FEWEST_STEPS = 1000
"""float32 is too coarse for numbers if it changes them by more than their range divided by this."""


def values_in(arrays: Sequence[PlacedArray], *, finite: bool = False) -> Iterator[Array]:
    """Yield the values of arrays with one value per sample, in pieces; `finite` omits NaN and infinity."""
    for array in arrays:
        for chunk in array.chunks():
            flat = chunk.reshape(-1)
            yield flat[np.isfinite(flat)] if finite else flat


def labels_in(arrays: Sequence[PlacedArray]) -> Iterator[Array]:
    """Yield the labels of arrays with one value per sample, in pieces: integers as int64, text as strings.

    `ABSENT` replaces NaN and infinity.
    """
    for array in arrays:
        if array.text:
            yield from array.string_chunks()
            continue
        for values in values_in([array]):
            if values.dtype.kind == "f":
                finite = np.isfinite(values)
                # 0 in place of NaN, whose conversion to an integer is not defined.
                yield np.where(finite, np.where(finite, values, 0).astype(np.int64), ABSENT)
            else:
                yield values


def different(arrays: Sequence[PlacedArray]) -> tuple[Array, str]:
    """Return the different values, sorted, and "" or, if the search stopped at the limit on classes, "over "."""
    labels: Array = np.empty(0, object if arrays[0].text else np.int64)
    for chunk in labels_in(arrays):
        new = np.unique(chunk)
        if arrays[0].dtype.kind == "f":
            new = new[new != ABSENT]
        labels = np.union1d(labels, new) if len(labels) else new
        if len(labels) > MOST_CLASSES:
            return labels, "over "
    return labels, ""


def is_plain(array: PlacedArray) -> bool:
    """Return whether an array holds numbers in rows of one length, in a file."""
    return array.stored and not array.offsets and not array.text and bool(array.shape)


def are_whole(values: Array) -> bool:
    """Return whether all values are finite whole numbers that float64 represents."""
    return bool((np.isfinite(values) & (np.trunc(values) == values) & (np.abs(values) < 2**53)).all())


def is_one_hot(arrays: Sequence[PlacedArray]) -> bool:
    """Return whether each row of arrays (N, K) is one 1 among zeros, K at least 2."""
    if any(array.text or array.offsets or len(array.shape) != 2 or array.shape[1] < 2 for array in arrays):
        return False
    if not all(array.stored for array in arrays):
        return False
    chunks = (chunk for array in arrays for chunk in array.chunks())
    return all(bool((((chunk == 0) | (chunk == 1)).all(1) & (chunk.sum(1) == 1)).all()) for chunk in chunks)


def nearly_one_hot(name: str, arrays: Sequence[PlacedArray]) -> str:
    """Describe the rows of 0 and 1 that are not one-hot, if they are few among others that are; empty for others."""
    if any(array.text or array.offsets or len(array.shape) != 2 or array.shape[1] < 2 for array in arrays):
        return ""
    if not all(array.stored for array in arrays):
        return ""
    count, none, several, first = 0, 0, 0, -1
    for chunk in (chunk for array in arrays for chunk in array.chunks()):
        if not ((chunk == 0) | (chunk == 1)).all():
            return ""
        sums = chunk.sum(1)
        odd = np.flatnonzero(sums != 1)
        first = count + int(odd[0]) if first < 0 and len(odd) else first
        count, none, several = count + len(chunk), none + int((sums == 0).sum()), several + int((sums > 1).sum())
    if not 0 < _NEARLY * (none + several) <= count:
        return ""
    what = ", ".join([f"{none} without a 1"] * bool(none) + [f"{several} with several"] * bool(several))
    return (
        f"{name}: rows are one-hot but for {what}, the first is row {first}: samples of no class or of several, or "
        "mistakes?"
    )


def numbers_in(known: Array, values: Array, *, floats: bool) -> Array:
    """Return the index of each value in `known`, which is sorted; for labels that were floats `ABSENT` stays."""
    numbers = np.searchsorted(known, values).astype(np.int64)
    if floats:
        numbers[values == ABSENT] = ABSENT
    return numbers


def largest(values: Array) -> int:
    """Return the greatest absolute value of integers; 0 for other types."""
    if values.dtype.kind not in "iu":
        return 0
    return max(abs(int(values.max(initial=0))), abs(int(values.min(initial=0))))


def rounded_away(chunks: Iterable[Array]) -> str:
    """Describe values at one position of float64 samples for which float32 is too coarse; empty if there are none.

    These are numbers that rounding moves by more than a thousandth of their range, such as dates with hours
    (2459000.25).
    """
    low = high = error = np.empty(0)
    for chunk in chunks:
        values = chunk.reshape(len(chunk), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            moved = np.abs(values - values.astype(np.float32))
        chunk_bounds = np.fmin.reduce(values), np.fmax.reduce(values), np.fmax.reduce(moved)
        if not len(low):
            low, high, error = chunk_bounds
        low, high, error = (
            np.fmin(low, chunk_bounds[0]),
            np.fmax(high, chunk_bounds[1]),
            np.fmax(error, chunk_bounds[2]),
        )
    with np.errstate(over="ignore", invalid="ignore"):
        # An infinite error is a value beyond the range of float32.
        coarse = np.flatnonzero((error * _FEWEST_STEPS > high - low) & ((high > low) | np.isinf(error)))
    if not len(coarse):
        return ""
    at = int(coarse[0])
    return f"numbers from {low[at]:.12g} to {high[at]:.12g}, which float32 rounds by up to {error[at]:.3g}"
