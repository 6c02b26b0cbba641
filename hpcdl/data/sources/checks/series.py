"""Series and windows of them: overlapping windows, windows that splits share, and padding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hpcdl.data.format.manifest import Field, is_picture
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array, SourceFacts
from hpcdl.data.sources.base.values import READ, is_plain

_WINDOWS, _LEAST_OVERLAP, _LONGEST_WINDOW = 4, 3, 100_000
"""Samples compared to find overlapping windows, the values that they must share, and the longest that are compared."""
_COMPARED, _FEW = 32, 10
"""Windows of a split that are searched in train, and the part (one in _FEW) that a border in time may share."""
_PADDED, _SHORTEST_PADDED, _FEWEST_LENGTHS, _RARE = 64, 8, 4, 0.01
"""Series that are looked at for padding, the length from which on they are, the different lengths that they must have,
and the part of their own values that may be like the padding."""


def step_of_windows(facts: SourceFacts) -> int:
    """Return by how many values the first samples are each shifted against the one before; 0 unless they overlap."""
    if not facts.fields or not facts.arrays or facts.arrays[0].offsets or not facts.arrays[0].shape:
        return 0
    place = facts.arrays[0]
    length, width = place.shape[0], math.prod(place.shape[1:])
    if not _LEAST_OVERLAP < length <= _LONGEST_WINDOW or np.dtype(place.dtype).kind not in "fiu":
        return 0
    values = np.fromfile(place.file, place.dtype, _WINDOWS * length * width, offset=place.offset)
    rows = values[: len(values) // (length * width) * length * width].reshape(-1, length, width)
    # Of fewer samples, what was read is in part not theirs. Constant windows would fit at every step.
    if facts.num_samples < _WINDOWS or len(rows) < _WINDOWS or not (rows != rows[:, :1]).any((1, 2)).all():
        return 0
    steps = range(1, length - _LEAST_OVERLAP + 1)
    return next((step for step in steps if np.array_equal(rows[:-1, step:], rows[1:, : length - step])), 0)


def padding(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe the number that fills series of one length behind their own ends, or before; empty if none does.

    Within a series it is rare, and samples have different numbers of it.
    """
    length, width = field.shape[0] if field.shape else 0, math.prod(field.shape[1:])
    if field.kind != "numbers" or len(field.shape) > 2 or length < _SHORTEST_PADDED or not all(map(is_plain, arrays)):
        return ""
    if np.dtype(field.dtype).kind not in "fiu" or (len(field.shape) > 1 and field.dtype == "uint8"):
        return ""
    most = max(1, min(_PADDED, READ // (length * width)) // len(arrays))
    rows = np.concatenate([array.spread(most).reshape(-1, length, width) for array in arrays])
    for where, own in (("ends", rows[:, ::-1]), ("beginnings", rows)):
        values, counts = np.unique(own[(own[:, 0] == own[:, 0, :1]).all(1), 0, 0], return_counts=True)
        if not len(values):
            continue
        filler = values[counts.argmax()]
        fills = (own == filler).all(2)
        runs = np.where(fills.all(1), length, fills.argmin(1))
        within = (fills.sum() - runs.sum()) / max(1, fills.size - runs.sum())
        held = np.unique(length - runs[runs > 0])
        uneven = len(held) >= _FEWEST_LENGTHS and held[-1] - held[0] >= length / _FEW
        if uneven and 2 * (runs > 0).sum() >= len(rows) and within < _RARE and len(np.unique(rows[:_COMPARED])) > 2:
            masks = "a model can mask it (keras.layers.Masking, or Embedding with mask_zero)"
            meaning = f"training takes it for values; {masks}" if field.role == "input" else "the loss counts it, too"
            return (
                f"{field.name}: {filler:g} fills the {where} of {(runs > 0).sum()} of {len(rows)} samples looked at "
                f"({held[0]} to {held[-1]} of {length} are others): padding? If so, {meaning}"
            )
    return ""


def windows_shared(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe a split of windows of a series that mostly overlap with those of train; empty if there is none.

    A border that divides a series in time shares few windows, and is usual.
    """
    length, width = field.shape[0] if field.shape else 0, math.prod(field.shape[1:])
    plain = all(array.stored and not array.offsets for array in arrays) and field.kind == "numbers"
    if "train" not in splits or field.role != "input" or not plain or is_picture(field.shape) or width < 1:
        return ""
    if length < 2 * _LEAST_OVERLAP or length * length * width > READ or np.dtype(field.dtype).kind not in "fiu":
        return ""
    half = length // 2
    factors = np.random.default_rng(1).integers(1, 1 << 63, half * width, np.uint64)

    def keys(values: Array) -> Array:
        """Return a number for each row of `values`, computed from its bits."""
        bits = np.ascontiguousarray(values).view(f"u{values.itemsize}").reshape(len(values), -1)
        summed: Array = (bits * factors).sum(1, dtype=np.uint64)
        return summed

    def later(values: Array) -> Iterator[Array]:
        return (keys(values[:, at : at + half]) for at in range(1, length - half + 1))

    train = [array.values() for array, name in zip(arrays, splits, strict=True) if name == "train"]
    starts = np.concatenate([keys(values[: READ // (length * width), :half]) for values in train])
    tails = np.concatenate([own for values in train for own in later(values[-_COMPARED:])])
    for split in dict.fromkeys(splits):
        others = [array.values() for array, name in zip(arrays, splits, strict=True) if name == split != "train"]
        drawn = [row for values in others for row in values[:: len(values) // _COMPARED + 1]][:_COMPARED]
        drawn = [row for row in drawn if 2 * len(np.unique(row[:half], axis=0)) >= half]  # others are alike by chance
        if not drawn:
            continue
        rows = np.stack(drawn)
        shared = np.isin(keys(rows[:, :half]), tails) | np.isin(np.stack([*later(rows)]), starts).any(0)
        if _FEW * int(shared.sum()) > len(rows):
            return (
                f"{field.name}: {shared.sum()} of {len(rows)} samples of {split} looked at overlap with samples of "
                f"train, as windows of one series do: results on {split} are too good. Divide it, then cut windows"
            )
    return ""
