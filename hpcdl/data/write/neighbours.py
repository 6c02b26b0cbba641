"""Samples that follow each other in a source and are alike, such as frames of a video, which --split divides."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.source import Array, FieldsReader, Index, Source, SourceFacts, UnreadableSample
from hpcdl.data.sources.layouts.images import decode

_DRAWN, _PAIRS, _LEAST_PAIRS = 4096, 16, 8
"""Rows whose classes are looked at, pairs of samples that are compared, and fewer that tell nothing."""
_MOST_BYTES = 1 << 27
"""Most bytes of samples that are read; of image files as they are stored."""
_GAP, _LEAST_NUMBERS, _ALIKE = 8, 8, 0.3
"""Rows that others are apart at least; numbers of a sample, because fewer are alike where a table is sorted; and the
part of the others' distance below which neighbours are alike."""
_READ = 1 << 22
"""Most numbers that are compared."""
_SIDE = 16
"""Image files are compared at this height and width."""


def remark_on_neighbours(
    source: Source, facts: SourceFacts, index: Index, count: int, shape: Sequence[int]
) -> list[str]:
    """Return a remark if neighbours in the source are far more alike than others of their class; `count` is of all."""
    sizes = [math.prod(item.shape) * np.dtype(item.dtype).itemsize for item in facts.fields if item.kind == "numbers"]
    of_files = index.rows(UNSPLIT, np.arange(min(count, _PAIRS)))["size"].mean()
    size = of_files if facts.samples_are == "files" else sum(sizes) or math.prod(shape) * np.dtype(facts.dtype).itemsize
    near, far = _pairs(index, count, min(_PAIRS, int(_MOST_BYTES // (4 * max(1, size)))))
    if min(len(near), len(far)) < _LEAST_PAIRS:
        return []
    read = [[_values(source, index, facts, shape, pair) for pair in pairs] for pairs in (near, far)]
    lengths = {len(own) for pairs in read for pair in pairs for own in pair}
    if len(lengths) != 1 or 0 in lengths:  # of any length, unreadable, or text alone
        return []
    samples: list[Array] = [np.array(pairs) for pairs in read]
    with np.errstate(over="ignore", invalid="ignore"):
        if facts.fields:  # columns have units of their own
            spread = np.concatenate(samples).reshape(-1, samples[0].shape[2]).std(0)
            samples = [pairs[..., spread > 0] / spread[spread > 0] for pairs in samples]
        if samples[0].shape[2] < _LEAST_NUMBERS:
            return []
        ours, theirs = (float(np.median(np.square(pairs[:, 0] - pairs[:, 1]).mean(1)) ** 0.5) for pairs in samples)
    if not 0 <= ours < _ALIKE * theirs:
        return []
    return [
        f"samples that follow each other in the source differ by {ours / theirs:.0%} of what others do: frames, or "
        "rows of a series? Results are too good if several splits have such neighbours, as --split makes them. Divide "
        "them in the source (a column split, folders or arrays called by splits)"
    ]


def _pairs(index: Index, count: int, most: int) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]:
    """Return the row numbers of neighbours of one class, and of two samples of one class that are no neighbours."""
    drawn = np.unique(np.linspace(0, count - 2, min(_DRAWN, count - 1)).astype(np.int64))
    labels = index.rows(UNSPLIT, drawn)["label"]
    alike = labels == index.rows(UNSPLIT, drawn + 1)["label"]
    near, far = [np.array([at, at + 1]) for at in drawn[alike].tolist()], []
    for label in np.unique(labels).tolist():
        own = drawn[labels == label]
        half = len(own) // 2
        far += [np.array(pair) for pair in zip(own[:half].tolist(), own[half:].tolist(), strict=False)]
    far = [pair for pair in far if pair[1] - pair[0] >= _GAP]
    return _spread(near, most), _spread(far, most)


def _spread(pairs: list[npt.NDArray[np.int64]], most: int) -> list[npt.NDArray[np.int64]]:
    return [pairs[at] for at in np.unique(np.linspace(0, len(pairs) - 1, most).astype(int))] if pairs else []


def _values(
    source: Source, index: Index, facts: SourceFacts, shape: Sequence[int], pair: npt.NDArray[np.int64]
) -> list[Array]:
    """Return the numbers of both samples' inputs; empty ones of samples that cannot be compared."""
    values = []
    for row in index.rows(UNSPLIT, pair):
        own: Array = np.zeros(0)
        with contextlib.suppress(UnreadableSample):  # the writing finds it again and follows --on-error
            if facts.fields:
                fields = zip(facts.fields, cast(FieldsReader, source).read_fields(row, facts), strict=True)
                parts = [part for item, part in fields if item.role == "input" and item.kind == "numbers"]
                own = np.concatenate([np.zeros(0), *(part.reshape(-1) for part in parts)])
            else:
                content = source.read(row, facts, index)
                if not isinstance(content, np.ndarray):
                    content = decode(content, size=(_SIDE, _SIDE), channels=shape[-1], dtype=facts.dtype)
                own = content.reshape(-1)
        values.append(own[:: max(1, math.ceil(len(own) * 4 * _PAIRS / _READ))].astype(np.float64))
    return values
