"""Whether the ranks of a `fit` were given the same samples, each in an order of its own.

Then no gradient and no batch is the same on two ranks, and nothing else would show it. Arrays are compared before the
first step. What generators and files give is noted as it arrives, and compared after the first epoch. In a custom loop
the inputs of the model are noted, and compared after 2, 4, 8, ... updates.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.scripts.fit.pipelines import arrays_in, check_pipelines, kind_of, stages_of, under_way
from hpcdl.scripts.fit.scaling import STANDARDISED, SampleMoments, scaling_alike, scaling_of
from hpcdl.scripts.process.session import DIFFERENT_SAMPLES, SAME_SAMPLES, warn_once
from hpcdl.strategies.base.graph import call_python

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

_LOOKED_AT_BYTES = 16 * 2**20
"""Bytes of a rank's samples to compare; of more, evenly spread bytes of each sample."""
_MOST_BYTES = 2**30
"""Larger arrays are not compared: reading them once would take too long."""
_LOOKED_AT_BYTES_OF_ROW = 1024
_CHUNK_BYTES = 2**20
_MOST_KEYS = 512
_MOST_REPEATS = 0.02
"""Share of a rank's samples that may be repeats of others. With more, samples of two ranks are the same by chance."""
_REPEATS_BY_CHANCE = 5
"""Samples of few different values repeat within a rank about as often as they are shared by chance."""
_MOST_BYTES_OF_BATCH = 2**20
"""Batches of larger samples are compared by their bytes alone: a step must not wait for it."""
_SCALED = "samples scaled by each rank"
"""Key of the warning of it."""
STEPS_OF_EPOCH = "steps of an epoch"
"""Key of the warning of too many."""
_LEAST_SHARED = 0.05
_LEAST_NUM_SHARED = 5
_AS_LONG = 0.15
"""Largest relative difference of an epoch's steps from those of one process."""
_MOST_UPDATES = 1024
"""Updates of a custom loop whose samples are compared."""
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
_KEEPS_ZIPPED = (*_KEEPS_SAMPLES, "Zip", "Options", "TensorSlice")
_KERAS_PICTURES = "keras.src.legacy.preprocessing.image"
_LEAST_TAKEN = 0.75
"""Share of what a data set holds that an epoch takes at least, if it takes all: it may leave out a remainder."""
_LEAST_WITH_NAMES = 2
"""Arrays in which names of files are those of samples."""


def warn_of_same_samples(
    group: ScriptGroup, model: Any, data: Any, *, counts_steps: bool = False
) -> SamplesOfEpoch | None:
    """Warn if ranks were given the same samples, or some of the same, in a fit of `model`. Collective.

    `data`: what this rank gave to `fit`; compared are arrays, and data sets of arrays that are not split anywhere, at
    the first fit that gets them. Return what notes the samples of the script's first epoch, if they come only then.
    `counts_steps`: whether the script says how many steps an epoch takes, so that only these samples can be compared.
    """
    whole = None if counts_steps else data
    compared = group.keep("data whose samples were compared", list[weakref.ref[Any]])
    first = group.keep("the first fit", lambda: [True])
    if not any(group.messages.allgather_json(_note_new(whole, compared) or first[0])):
        return None
    arrays = _arrays_of(whole)
    own_sketch = _sketch(arrays or _sources_of(whole))
    comes = data is not None and not arrays and (not is_split(data) or _is_generated(data))
    rows = group.messages.allgather_json([own_sketch, comes, scaling_of(arrays)])
    sketches, come, scaled = zip(*rows, strict=True)
    if all(sketch is not None for sketch in sketches):
        if text := verdict(sketches):
            warn_once(group, SAME_SAMPLES, text)
        elif text := scaling_alike(scaled):
            warn_once(group, _SCALED, text)
    begins, first[0] = first[0], False
    if not all(come) or not begins:
        return None
    notes = _notes[id(model)] = SamplesOfEpoch(whole, counts_steps=counts_steps)
    return notes


def _note_new(data: Any, compared: list[weakref.ref[Any]]) -> bool:
    """Return whether `data` have an array or data set that is not in `compared`, and add these."""
    parts = [data] if isinstance(data, tf.data.Dataset) else tf.nest.flatten(data)
    parts = [part for part in parts if isinstance(part, tf.data.Dataset | tf.Tensor | numpy.ndarray)]
    # Weak references: a script's data must not stay in memory because they were compared.
    compared[:] = [entry for entry in compared if entry() is not None]
    new = [part for part in parts if not any(entry() is part for entry in compared)]
    compared += map(weakref.ref, new)
    return bool(new)


def note_samples(model: Any, batch: Callable[[], Sequence[Any]]) -> None:
    """Add to a training step of `model` what notes the rows of its batch, if the samples of its fit are compared."""
    if (notes := _notes.get(id(model))) is not None:
        notes.trace(batch())


def stop_noting(model: Any) -> None:
    """Note no further samples of `model`, such as those of a fit that an error ended."""
    if (notes := _notes.pop(id(model), None)) is not None:
        notes.stop()


_notes: dict[int, SamplesOfEpoch] = {}
"""What notes the samples of each model whose fit is in its first epoch, by `id`: a script's class may have no hash."""


class SamplesOfEpoch:
    """Notes the samples that this rank's steps take, until `stop`. `data`: what gives them.

    `counts_steps`: whether the script says how many steps an epoch takes: the ranks may draw from one whole, but if all
    take the same samples, or each sample as often as there are ranks, their steps are those of one process.
    """

    def __init__(self, data: Any = None, *, counts_steps: bool = False) -> None:
        self._data, self._counts_steps = data, counts_steps
        self._on = tf.Variable(True, trainable=False, name="notes_samples")
        self._number = self._total = self._num_last = 0
        self._smallest: Array = numpy.empty(0, numpy.uint64)
        self._counts: Array = numpy.empty(0, numpy.int64)
        self._even = True
        """Whether all tensors of a batch had as many rows: ragged and sparse ones do not."""
        self._moments: list[SampleMoments] = []

    def trace(self, rows: Sequence[Any]) -> None:
        """Add what notes a batch to the training step; it does nothing in later epochs."""
        tf.cond(self._on, lambda: call_python(self.note, rows, tf.bool), lambda: tf.constant(True))

    def note(self, *rows: Array) -> bool:
        """Note the samples of one batch."""
        self._even &= len({len(array) for array in rows}) == 1
        if self._even and len(rows[0]):
            strides = [1 << (array[:1].nbytes // _LOOKED_AT_BYTES_OF_ROW).bit_length() for array in rows]
            keys = _mixed([_keys(*one, seed) for seed, one in enumerate(zip(rows, strides, strict=True))])
            self._num_last = len(keys)
            self._number += len(keys)
            self._moments += [SampleMoments() for _ in rows[len(self._moments) :]]
            for moments, array in zip(self._moments, rows, strict=False):
                if array.nbytes <= _MOST_BYTES_OF_BATCH:
                    moments.add(array)
            # A sum is the same in any order, in which the ranks differ.
            self._total = (self._total + int(keys.sum(dtype=numpy.uint64))) % 2**64
            smallest = numpy.concatenate([self._smallest, keys])
            self._smallest, inverse = numpy.unique(smallest, return_inverse=True)
            counts = numpy.concatenate([self._counts, numpy.ones(len(keys), numpy.int64)])
            self._counts = numpy.bincount(inverse, counts).astype(numpy.int64)[:_MOST_KEYS]
            self._smallest = self._smallest[:_MOST_KEYS]
        return True

    def stop(self) -> None:
        """Note no further batches: steps that are traced skip it."""
        self._on.assign(False)

    def compare(self, group: ScriptGroup) -> None:
        """Warn if the ranks took the same samples. Collective."""
        own_scale = not self._counts_steps and any(moments.are_standard() for moments in self._moments)
        # Samples that are changed at random are no longer the same.
        held = _sketch(_held_by(self._data, self._number)) if self._even else None
        counts_steps = self._counts_steps, self._counts_steps and self._comes_times(group.size)
        rows = group.messages.allgather_json([self.sketch(), held, own_scale, *counts_steps])
        by_rank, held_by_rank, scaled, counted, too_often = zip(*rows, strict=True)
        for sketches in (by_rank, held_by_rank):
            if all(sketch is not None for sketch in sketches) and (text := verdict(sketches, all_only=any(counted))):
                warn_once(group, SAME_SAMPLES, text)
                return
        if all(scaled):
            warn_once(group, _SCALED, STANDARDISED)
        if all(too_often):
            warn_once(
                group,
                STEPS_OF_EPOCH,
                f"steps_per_epoch takes each sample of a rank's part {group.size} times, as if it were the whole; "
                "divide the steps of one process by hpcdl.size()",
            )

    def _comes_times(self, number: int) -> bool:
        """Return whether each sample has come `number` times, but for the remainder of a batch."""
        return (
            len(self._counts) > 1
            and int(self._counts.max()) == number
            and float(self._counts.mean()) > (1 - _AS_LONG) * number
        )

    def sketch(self) -> list[Any] | None:
        """Return the noted samples as `verdict` takes them, or None without any, or if all are the same."""
        if not self._even or len(self._counts) < 2:
            return None
        repeats = 1 - len(self._counts) / int(self._counts.sum())
        return [self._number, self._total, repeats, self._smallest.tolist()]


class SamplesOfLoop(SamplesOfEpoch):
    """Notes the samples of a custom loop, which has no epochs: the inputs of its model, from update to update."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = True

    def trace_new(self, rows: Callable[[], Sequence[Any]]) -> None:
        """Add what notes `rows`, those of one step, if samples are still compared."""
        if self._looks and (found := rows()):
            self.trace(found)

    def compare_after(self, num_updates: int, group: ScriptGroup) -> None:
        """Warn if the ranks took the same samples so far. Collective.

        A rank that has samples twice is in its second epoch, or is given inputs that are no samples.
        """
        if num_updates == 1:
            group.keep("data sets under way", lambda: self._compare_data(group))
        if not self._looks or num_updates < 2:
            return
        by_rank = group.messages.allgather_json(self.sketch())
        new = all(sketch is not None and sketch[2] <= _MOST_REPEATS for sketch in by_rank)
        if text := verdict(by_rank) if new else "":
            warn_once(group, SAME_SAMPLES, text)
        self._looks = new and not text and num_updates < _MOST_UPDATES
        if not self._looks:
            self.stop()

    def _compare_data(self, group: ScriptGroup) -> None:
        """Warn if the loop of each rank takes a whole data set, whose samples it may change at random. Collective."""
        data = under_way()[-1:]
        check_pipelines(group, data)
        (size,) = [_batch_size(one) for one in data] or [0]
        # A rank may take its part of each batch, or as many steps of a repeated data set as it likes.
        takes_all = size and self._num_last and not self._num_last % size
        sketches = group.messages.allgather_json(_sketch(_sources_of(data[0])) if takes_all else None)
        if all(sketch is not None for sketch in sketches) and (text := verdict(sketches)):
            warn_once(group, SAME_SAMPLES, text)


def _batch_size(data: Any) -> int:
    """Return how many samples a batch of a data set has; 0 if it has no end or no batches."""
    stages = list(stages_of(data))
    sizes = [int(one._batch_size) for one in stages if kind_of(one) in ("Batch", "ParallelBatch")]
    return 0 if len(sizes) != 1 or any(kind_of(one) == "Repeat" for one in stages) else sizes[0]


def verdict(by_rank: Sequence[Sequence[Any]], *, all_only: bool = False) -> str:
    """Return the warning that the ranks' sketches deserve, or nothing. `all_only`: some shared samples are none.

    A sketch is the number of samples, the sum of their keys, the share of repeated samples, and the smallest keys.
    """
    number, total, *_ = by_rank[0]
    if all((other, other_total) == (number, total) for other, other_total, *_ in by_rank):
        return (
            f"every rank was given the same {number} samples, so an epoch takes each {len(by_rank)} times; give ranks "
            f"different ones, with {DIFFERENT_SAMPLES}"
        )
    if all_only:
        return ""
    full = [keys[-1] for *_, keys in by_rank if len(keys) == _MOST_KEYS]
    bound = min(full, default=2**64)  # a full sketch says nothing about larger keys
    times = Counter(key for *_, keys in by_rank for key in keys if key <= bound)
    number_shared = sum(count > 1 for count in times.values())
    shared = number_shared / max(len(times), 1)
    repeats = max(share for *_, share, _ in by_rank)
    if repeats > min(_MOST_REPEATS, shared / _REPEATS_BY_CHANCE):
        return ""
    if number_shared < _LEAST_NUM_SHARED or shared < _LEAST_SHARED:
        return ""
    return (
        f"some samples were given to several ranks ({shared:.0%} of those compared), and others may be "
        "in no rank's part; shuffle with one seed on all ranks before each takes its part"
    )


def _arrays_of(data: Any) -> list[Array]:
    """Return the arrays of samples in what was given to `fit`; none if it cannot be looked at."""
    if isinstance(data, tf.data.Dataset):
        stage = data
        while stage._inputs():
            if kind_of(stage) not in _KEEPS_SAMPLES:
                return []
            (stage,) = stage._inputs()
        data = list(stage._tensors) if kind_of(stage) == "TensorSlice" else []
    arrays = tf.nest.flatten(data)
    if not all(isinstance(array, numpy.ndarray | tf.Tensor) and array.shape for array in arrays):
        return []
    plain = [numpy.asarray(array) for array in arrays]
    return plain if all(array.dtype.kind in "biufc" for array in plain) else []


def _sources_of(data: Any) -> list[Array]:
    """Return what stands for the samples of files and of pictures that are changed at random; [] if it is not known.

    Those of two ranks never look the same, but they have the same names, or were the same before.
    """
    if type(data).__module__ == _KERAS_PICTURES:  # ImageDataGenerator
        named = hasattr(data, "filenames")
        given = [data.filenames, getattr(data, "labels", None)] if named else [data.x, data.y]
    elif isinstance(data, tf.data.Dataset) and all(kind_of(one) in _KEEPS_ZIPPED for one in stages_of(data)):
        given = arrays_in(data)
    else:
        return []
    plain = numpy.ndarray | tf.Tensor  # labels of several classes each may be lists of lists
    arrays = [numpy.asarray(one) for one in given if isinstance(one, plain) or _is_plain_list(one)]
    texts = [array.dtype.kind in "OSU" for array in arrays]
    # One name alone may be that of a file with many samples, of which each rank takes its own.
    if (any(texts) and len(arrays) < _LEAST_WITH_NAMES) or len({array.shape[:1] for array in arrays}) != 1:
        return []
    return _without_texts(arrays)


def _held_by(data: Any, num_taken: int) -> list[Array]:
    """Return the arrays and lists that a `PyDataset` of the script holds, if an epoch takes all of their rows.

    If it holds the whole of which it takes a rank's part, it has many more rows than the `num_taken` samples.
    """
    if not isinstance(data, keras.utils.PyDataset):
        return []
    held = [numpy.asarray(one) for one in vars(data).values() if isinstance(one, numpy.ndarray) or _is_plain_list(one)]
    held = [one for one in held if one.ndim and num_taken <= len(one) < num_taken / _LEAST_TAKEN and not _is_order(one)]
    return _without_texts(held) if len({len(one) for one in held}) == 1 else []


def _is_plain_list(thing: Any) -> bool:
    """Return whether it is a list of texts or of numbers."""
    return isinstance(thing, list | tuple) and len({type(one) for one in thing} & {str, int, float}) == 1


def _is_order(array: Array) -> bool:
    """Return whether an array has the numbers of samples, which a script shuffles."""
    return array.ndim == 1 and array.dtype.kind in "iu" and bool((numpy.sort(array) == numpy.arange(len(array))).all())


def _without_texts(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays with texts as hashes, which are compared as all other values are; [] if there are other objects."""
    if any(array.dtype.kind == "O" and not isinstance(array.flat[0], str | bytes) for array in arrays if array.size):
        return []
    texts = [array.dtype.kind in "OSU" for array in arrays]
    return [
        tf.strings.to_hash_bucket_fast(array, 1 << 62).numpy() if is_text else array
        for array, is_text in zip(arrays, texts, strict=True)
    ]


def is_split(data: Any) -> bool:
    """Return whether a data set is split among ranks somewhere, as hpcdl.dataset does."""
    if not isinstance(data, tf.data.Dataset):
        return False
    return any(kind_of(stage) == "Shard" for stage in stages_of(data))


def _is_generated(data: Any) -> bool:
    """Return whether a function gives the samples of a data set, such as a generator with an order of its own."""
    return any(kind_of(stage) == "FlatMap" for stage in stages_of(data))


def long_epochs(data: Any, steps: int | None, num_ranks: int) -> str:
    """Return the warning if `steps_per_epoch` of a repeated data set is that of one process, or nothing."""
    if steps is None or num_ranks == 1 or not isinstance(data, tf.data.Dataset):
        return ""
    own = _steps_of_a_pass(data)
    # Rounded numbers of batches differ by the last one.
    if not own or not math.isclose(steps, own * num_ranks, rel_tol=_AS_LONG):
        return ""
    return (
        f"steps_per_epoch={steps} takes each rank's part of the data {num_ranks} times, as if it were the whole; "
        "divide the steps of one process by hpcdl.size()"
    )


def _steps_of_a_pass(stage: Any) -> float:
    """Return how many elements a repeated data set has before it begins again; 0 if that is not known."""
    kind, inputs = kind_of(stage), stage._inputs()
    if kind == "Repeat":
        return float(max(int(inputs[0].cardinality()), 0))  # unknown numbers are negative
    if len(inputs) != 1 or kind not in (*_KEEPS_SAMPLES, "Options"):
        return 0.0
    own = _steps_of_a_pass(inputs[0])
    return own / int(stage._batch_size) if kind in ("Batch", "ParallelBatch") else own


def _sketch(arrays: Sequence[Array]) -> list[Any] | None:
    """Return the rank's samples as `verdict` takes them, or None without any, or if all are the same."""
    if not arrays or len({len(array) for array in arrays}) > 1 or not len(arrays[0]):
        return None
    if sum(array.nbytes for array in arrays) > _MOST_BYTES:
        return None
    # A power of two, so that parts of nearly the same size are compared by the same bytes.
    strides = [1 << (array.nbytes // _LOOKED_AT_BYTES).bit_length() for array in arrays]
    keys = _mixed([_keys(*one, seed) for seed, one in enumerate(zip(arrays, strides, strict=True))])
    different = numpy.unique(keys)
    if len(different) == 1:
        return None
    repeats = 1 - len(different) / len(keys)
    return [len(keys), int(keys.sum(dtype=numpy.uint64)), repeats, different[:_MOST_KEYS].tolist()]


def _mixed(keys_by_array: Sequence[Array]) -> Array:
    """Return one key for each sample from those of its arrays."""
    keys: Array = numpy.stack(keys_by_array).sum(0, dtype=numpy.uint64)
    # So far keys are linear in the values: their sum would be that of any samples with the same sums of columns.
    keys = (keys ^ (keys >> numpy.uint64(29))) * numpy.uint64(0xBF58476D1CE4E5B9)  # a constant of splitmix64
    keys ^= keys >> numpy.uint64(32)
    return keys


def _keys(array: Array, stride: int, seed: int) -> Array:
    """Return a number for each row from every `stride`-th byte, the same on every rank that holds the row."""
    row_bytes = array.nbytes // len(array)
    bytes_taken = slice(stride // 2 % row_bytes if row_bytes else 0, None, stride)
    num_taken = len(range(row_bytes)[bytes_taken])
    # Odd factors have inverses modulo 2^64: two different bytes never give the same product.
    factors = numpy.random.default_rng(seed).integers(1, 2**64 - 1, num_taken, numpy.uint64) | numpy.uint64(1)
    keys = numpy.empty(len(array), numpy.uint64)
    step = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for at in range(0, len(array), step):
        # Bytes of a row can be taken only where they are in one piece.
        rows = numpy.ascontiguousarray(array[at : at + step])
        rows = rows.reshape(len(rows), -1).view(numpy.uint8)[:, bytes_taken]
        keys[at : at + step] = rows.astype(numpy.uint64) @ factors
    return keys
