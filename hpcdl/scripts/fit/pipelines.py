"""What the stages of ranks' tf.data pipelines tell: whether `shard` takes the parts of one whole, and who caches where.

Nothing else would show it: no two ranks have the same gradient if each has shuffled the samples in its own order.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.process.session import warn_once

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup

_EXTENTS = ("_num_shards", "_index", "_start", "_stop", "_count")
"""Attributes of tf.data's stages that say which elements they take."""
_ROWS = 256
"""Number of rows to compare of each source array, to check that all ranks have the same data."""


def check_pipelines(group: ScriptGroup, given: Sequence[Any]) -> None:
    """Check the data sets of tf.data among what this rank gave to a fit. Collective.

    Warn if `shard` takes the ranks' parts from different orders. Raise UsageError if ranks with different samples
    cache these in one file.
    """
    data = [one for one in given if isinstance(one, tf.data.Dataset)]
    stages = [stage for one in data for stage in stages_of(one)]
    shards = [_shard(one) for one in stages if kind_of(one) == "Shard"]
    rows = group.messages.allgather_json([shards, [_cache(one) for one in stages if _cache_name(one)]])
    parts_by_rank, caches_by_rank = zip(*rows, strict=True)
    if text := of_one_cache(caches_by_rank):
        raise UsageError(text)
    if any(_of_different_orders(parts) for parts in zip(*parts_by_rank, strict=False)):
        warn_once(
            group,
            "parts of different orders",
            "shard() takes each rank's part from another order of the samples: some are in no rank's part, others in "
            "several; give shuffle, list_files or image_dataset_from_directory one seed on all ranks, or shuffle "
            "after shard()",
        )


_iterated: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The data sets over which the script itself iterates, by their iterators."""
_LIBRARIES = {"hpcdl", "keras", "tensorflow"}


def note_iterated() -> None:
    """Patch data sets to keep those over which the script itself iterates, as a custom loop does."""
    plain = tf.data.Dataset.__iter__
    if hasattr(plain, "noted"):
        return

    @functools.wraps(plain)
    def iterate(data: Any) -> Any:
        iterator = plain(data)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            _iterated[iterator] = data
        return iterator

    vars(iterate).update(noted=True, autograph_info__={})  # the second is TensorFlow's mark: AutoGraph leaves it alone
    tf.data.Dataset.__iter__ = iterate


def under_way() -> list[Any]:
    """Return the data sets over which the script iterates at the moment."""
    return list(_iterated.values())


def stages_of(data: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline, the last one first."""
    yield data
    for source in data._inputs():
        yield from stages_of(source)


def kind_of(stage: Any) -> str:
    """Return the name of a stage's class without its ending."""
    return type(stage).__name__.strip("_").removesuffix("Dataset")


def arrays_in(whole: Any) -> list[Any]:
    """Return the source arrays of a data set, including its file names."""
    arrays = [one for stage in stages_of(whole) for one in getattr(stage, "_tensors", ())]
    return [one for one in arrays if one.dtype not in (tf.variant, tf.resource)]


def extents_in(whole: Any) -> list[str]:
    """Return which part of the data each stage takes, if it takes one, as `shard(2, 0)`."""
    return [
        f"{kind_of(stage).lower()}({', '.join(map(str, numbers))})"
        for stage in stages_of(whole)
        if (numbers := [int(vars(stage)[name]) for name in _EXTENTS if name in vars(stage)])
    ]


def looks_of(array: Any) -> list[Any]:
    """Return type, shape and a summary of some rows of an array: a digest of texts, or the means of numbers."""
    form = [array.dtype.name, array.shape.as_list()]
    whole = array if array.shape.rank else array[None]
    indices = numpy.linspace(0, max(len(whole) - 1, 0), min(len(whole), _ROWS)).astype(int)
    rows = tf.gather(whole, indices).numpy()
    if array.dtype == tf.string:
        texts = rows.reshape(-1).tolist()
        folder = len(os.path.commonprefix(texts))  # noqa: RUF071  a node names its own storage
        return [*form, hashlib.blake2b(b"\0".join(text[folder:] for text in texts)).hexdigest()]
    return [*form, [float(row.real.astype(numpy.float64).mean()) for row in rows] if rows.size else []]


def same(first: list[Any], second: list[Any]) -> bool:
    """Return whether two summaries agree, up to the rounding differences of different processors."""
    *form, looks = first
    *other_form, other_looks = second
    if form != other_form or "float" not in form[0]:
        return bool(first == second)
    return bool(numpy.allclose(looks, other_looks, rtol=1e-5, atol=1e-7, equal_nan=True))


def shuffles_in(whole: Any) -> list[Any]:
    """Return all shuffles in a data set's pipeline, the last one first."""
    return [one for one in stages_of(whole) if hasattr(one, "_seed2") and hasattr(one, "_buffer_size")]


def seeds_of(whole: Any) -> list[list[int]]:
    """Return the two seeds of each shuffle in a data set's pipeline; both are 0 if each process draws its own order."""
    return [[int(one._seed), int(one._seed2)] for one in shuffles_in(whole)]


def _shard(stage: Any) -> list[Any]:
    """Return number and index of a shard, and what describes the whole that it is a part of."""
    return [int(stage._num_shards), int(stage._index), [looks_of(one) for one in arrays_in(stage)], seeds_of(stage)]


def _of_different_orders(parts: Sequence[Sequence[Any]]) -> bool:
    """Return whether one `shard`, on all ranks, gives them parts of different wholes."""
    numbers, indices, looks, seeds = zip(*parts, strict=True)
    # Ranks of a node may divide what their node alone holds; and all may take the same fold.
    if set(numbers) != {len(parts)} or len(set(indices)) < len(parts):
        return False
    if [0, 0] in seeds[0] or any(other != seeds[0] for other in seeds):
        return True
    return any(_differ(looks[0], other) for other in looks[1:])


def _differ(looks: Sequence[Any], other_looks: Sequence[Any]) -> bool:
    """Return whether source arrays differ. If each rank made its data in another way, a comparison says nothing."""
    alike = len(looks) == len(other_looks)
    return alike and not all(same(*pair) for pair in zip(looks, other_looks, strict=True))


def _cache_name(stage: Any) -> str:
    """Return the name of the file in which a stage caches, or nothing."""
    return os.fsdecode(stage._filename.numpy()) if kind_of(stage) == "Cache" else ""


def _cache(stage: Any) -> list[Any]:
    """Return what identifies the file of a cache, and what describes its samples."""
    path = Path(_cache_name(stage)).absolute()
    # With the folder's own numbers: nodes may have one of this name on storage of their own.
    numbers = [path.parent.stat().st_ino, os.statvfs(path.parent).f_fsid] if path.parent.is_dir() else []
    shards = [[int(one._num_shards), int(one._index)] for one in stages_of(stage) if kind_of(one) == "Shard"]
    return [[str(path), *numbers], shards, [looks_of(one) for one in arrays_in(stage)]]


def of_one_cache(by_rank: Sequence[Sequence[Any]]) -> str:
    """Return why a file in which several ranks cache their own samples is refused, or nothing."""
    first: dict[str, tuple[int, Sequence[Any]]] = {}
    for rank, row in enumerate(by_rank):
        for file, *samples in row:
            other, (shards, looks) = first.setdefault(str(file), (rank, samples))
            if other != rank and (samples[0] != shards or _differ(looks, samples[1])):
                name = os.path.relpath(file[0])
                return (
                    f"ranks {other} and {rank} cache different samples in one file, {name}: one would train on what "
                    f'the other has written; write cache(f"{name}-{{hpcdl.rank()}}-of-{{hpcdl.size()}}")'
                )
    return ""
