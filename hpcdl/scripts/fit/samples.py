"""Whether the ranks of a `fit` were given the same samples, each in an order of its own.

Then no gradient and no batch is the same on two ranks, and nothing else would show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.scripts.process.session import SAME_SAMPLES, warn_once

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

_LOOKED_AT_BYTES = 16 * 2**20
"""Bytes of a rank's samples to compare; of more, evenly spread bytes of each sample."""
_MOST_BYTES = 2**30
"""Larger arrays are not compared: reading them once would take too long."""
_CHUNK_BYTES = 2**20
_MOST_KEYS = 512
_MOST_REPEATS = 0.02
"""Share of a rank's samples that may be repeats of others. With more, samples of two ranks are the same by chance."""
_LEAST_SHARED = 0.05
_LEAST_NUM_SHARED = 5
_KEEPS_SAMPLES = (
    "Shuffle",
    "Batch",
    "ParallelBatch",
    "Map",
    "ParallelMap",
    "Prefetch",
    "Repeat",
    "Cache",
)
"""Stages of tf.data after which every source row still comes once an epoch."""


def warn_of_same_samples(group: ScriptGroup, data: Any) -> None:
    """Warn if ranks were given the same samples, or some of the same. Collective.

    `data`: what this rank gave to `fit`; compared are arrays, and data sets of arrays that are not split anywhere.
    """
    by_rank = group.messages.allgather_json(_sketch(_arrays_of(data)))
    text = verdict(by_rank) if all(sketch is not None for sketch in by_rank) else ""
    if text:
        warn_once(group, SAME_SAMPLES, text)


def verdict(by_rank: Sequence[Sequence[Any]]) -> str:
    """Return the warning that the ranks' sketches deserve, or nothing.

    A sketch is the number of samples, the sum of their keys, the share of repeated samples, and the smallest keys.
    """
    number, total, *_ = by_rank[0]
    if all((other, other_total) == (number, total) for other, other_total, *_ in by_rank):
        return (
            f"every rank was given the same {number} samples, so an epoch takes each {len(by_rank)} times; give ranks "
            "different ones, with hpcdl.dataset or x[hpcdl.rank() :: hpcdl.size()]"
        )
    full = [keys[-1] for *_, keys in by_rank if len(keys) == _MOST_KEYS]
    bound = min(full, default=2**64)  # a full sketch says nothing about larger keys
    times = Counter(key for *_, keys in by_rank for key in keys if key <= bound)
    shared = sum(count > 1 for count in times.values())
    repeats = max(share for *_, share, _ in by_rank)
    if repeats > _MOST_REPEATS or shared < max(_LEAST_NUM_SHARED, _LEAST_SHARED * len(times)):
        return ""
    return (
        f"some samples were given to several ranks ({shared / len(times):.0%} of those compared), and others may be "
        "in no rank's part; shuffle with one seed on all ranks before each takes its part"
    )


def _arrays_of(data: Any) -> list[Array]:
    """Return the arrays of samples in what was given to `fit`; none if it cannot be looked at."""
    if isinstance(data, tf.data.Dataset):
        stage = data
        while stage._inputs():
            if _kind(stage) not in _KEEPS_SAMPLES:
                return []
            (stage,) = stage._inputs()
        data = list(stage._tensors) if _kind(stage) == "TensorSlice" else []
    arrays = tf.nest.flatten(data)
    if not all(isinstance(array, numpy.ndarray | tf.Tensor) and array.shape for array in arrays):
        return []
    plain = [numpy.asarray(array) for array in arrays]
    return plain if all(array.dtype.kind in "biufc" for array in plain) else []


def _kind(stage: Any) -> str:
    return type(stage).__name__.strip("_").removesuffix("Dataset")


def _sketch(arrays: Sequence[Array]) -> list[Any] | None:
    """Return the rank's samples as `verdict` takes them, or None without any, or if all are the same."""
    if not arrays or len({len(array) for array in arrays}) > 1 or not len(arrays[0]):
        return None
    if sum(array.nbytes for array in arrays) > _MOST_BYTES:
        return None
    keys: Array = numpy.stack([_keys(array, seed) for seed, array in enumerate(arrays)]).sum(0, dtype=numpy.uint64)
    # So far keys are linear in the values: their sum would be that of any samples with the same sums of columns.
    keys = (keys ^ (keys >> numpy.uint64(29))) * numpy.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> numpy.uint64(32)
    different = numpy.unique(keys)
    if len(different) == 1:
        return None
    repeats = 1 - len(different) / len(keys)
    return [len(keys), int(keys.sum(dtype=numpy.uint64)), repeats, different[:_MOST_KEYS].tolist()]


def _keys(array: Array, seed: int) -> Array:
    """Return a number for each row, the same on every rank that holds the row."""
    row_bytes = array.nbytes // len(array)
    # A power of two, so that parts of nearly the same size are compared by the same bytes.
    stride = 1 << (array.nbytes // _LOOKED_AT_BYTES).bit_length()
    bytes_taken = slice(stride // 2 % row_bytes if row_bytes else 0, None, stride)
    num_taken = len(range(row_bytes)[bytes_taken])
    factors = numpy.random.default_rng(seed).integers(1, 2**64 - 1, num_taken, numpy.uint64) | numpy.uint64(1)
    keys = numpy.empty(len(array), numpy.uint64)
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for at in range(0, len(array), step):
        rows = numpy.ascontiguousarray(array[at : at + step])
        rows = rows.reshape(len(rows), -1).view(numpy.uint8)[:, bytes_taken]
        keys[at : at + step] = rows.astype(numpy.uint64) @ factors
    return keys
