"""`hpcdl.dataset`: give each rank its part of a tf.data.Dataset, with the same number of batches on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.fit.pipelines import arrays_in, extents_in, kind_of, looks_of, same, seeds_of, shuffles_in
from hpcdl.scripts.process.session import session, warn_once

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup

_AHEAD = 2
"""Number of elements to prefetch. It is fixed, so that the script decides whether tf.data tunes itself."""

_TELL_FROM = 10
"""A tenth of the data that is left out is told."""
_RANK_OF_PICTURES = 2
_KEEPS_BATCHES = ("Map", "ParallelMap", "Prefetch", "Cache", "Options", "Shuffle")


def dataset(whole: Any, *, batch_size: int | None = None, steps: int | None = None) -> Any:
    """Return this rank's part of `whole`: every size-th element, the same number on each rank. Collective.

    All ranks must build the same `whole`. Its elements are batches, or samples if `batch_size` (per rank) is given.
    If their number is unknown, `steps` sets how many this rank takes per epoch. The remainder is dropped. Raises
    UsageError if ranks have different source arrays or file names, or the same ones in another order.
    """
    here = session()
    rank, size = here.communicator.rank, here.communicator.size
    if not isinstance(whole, tf.data.Dataset):
        raise UsageError(f"hpcdl.dataset takes a tf.data.Dataset, not {type(whole).__name__}; see from_tensor_slices")
    _check_alike(whole, here.group)
    whole = _shuffled_alike(whole, here.group)
    number = int(whole.cardinality())
    part = whole.shard(size, rank)
    if number == tf.data.INFINITE_CARDINALITY or number == tf.data.UNKNOWN_CARDINALITY:
        if steps is None:
            raise UsageError("hpcdl.dataset cannot tell how many elements there are; give steps= per rank and epoch")
    else:
        each = number // size
        # Without the remainder: ranks with one batch more would wait for the others.
        part = part.take(each)
        most = each // batch_size if batch_size else each
        if not most:
            smaller = "a smaller batch_size (none if the elements are batches), or " if batch_size else ""
            raise UsageError(
                f"hpcdl.dataset: {number} elements on {size} ranks leave no batch for each; use {smaller}fewer ranks"
            )
        if steps is None:
            _tell_left_out(whole, most * (batch_size or 1) * size, batched=not batch_size, group=here.group)
        steps = min(steps or most, most)
    if batch_size:
        _tell_batched_twice(whole, batch_size, here.group)
        part = part.batch(batch_size, drop_remainder=True)
    # If the number is unknown, a rank with fewer elements starts again, so that all ranks take the same number.
    part = part.take(steps) if number >= 0 else part.repeat().take(steps)
    return part.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(_AHEAD)


def _tell_batched_twice(whole: Any, batch_size: int, group: ScriptGroup) -> None:
    """Warn if the elements of `whole` are batches of samples already: of several arrays, or of pictures.

    A batch of numbers or rows may be a series, which is one sample.
    """
    stage = whole
    while kind_of(stage) in _KEEPS_BATCHES:
        (stage,) = stage._inputs()
    if kind_of(stage) not in ("Batch", "ParallelBatch"):
        return
    of = stage._inputs()[0].element_spec
    if isinstance(of, tuple | dict) or (of.shape.rank or 0) >= _RANK_OF_PICTURES:
        warn_once(
            group,
            "batches of batches",
            f"hpcdl.dataset(batch_size={batch_size}) makes batches of {batch_size} batches: its elements are batches "
            f"of {int(stage._batch_size)} samples already; leave batch_size= out, or .batch() before it",
        )


def _tell_left_out(whole: Any, num_taken: int, *, batched: bool, group: ScriptGroup) -> None:
    """Warn if all ranks together take `num_taken` elements of `whole`, and that leaves out a tenth of it or more."""
    number, what, stage = int(whole.cardinality()), "samples", whole
    if batched:
        what = "batches"
        while kind_of(stage) in _KEEPS_BATCHES:
            (stage,) = stage._inputs()
        if kind_of(stage) in ("Batch", "ParallelBatch"):  # the last one may be small
            each, (samples,) = int(stage._batch_size), stage._inputs()
            number, what, num_taken = int(samples.cardinality()), "samples", num_taken * each
    left = number - num_taken
    if left * _TELL_FROM < number:
        return
    remedy = "give it single samples and batch_size=, or smaller batches" if batched else "take a smaller batch_size"
    warn_once(
        group,
        f"left out {left} of {number}",
        f"hpcdl.dataset leaves out {left} of {number} {what} in each epoch, as all ranks take the same number of "
        f"batches; {remedy}",
    )


def _check_alike(whole: Any, group: ScriptGroup) -> None:
    """Raise UsageError if ranks have different data: their parts would then miss some samples and repeat others."""
    if group.size == 1 or not tf.executing_eagerly():
        return
    group.agree("hpcdl.dataset")
    rows = group.messages.allgather_json([[looks_of(array) for array in arrays_in(whole)], extents_in(whole)])
    by_rank, all_extents = zip(*rows, strict=True)
    for rank, others in enumerate(all_extents):
        own, other = (", ".join(one) or "all" for one in (all_extents[0], others))
        if own != other:
            raise UsageError(
                f"hpcdl.dataset: rank 0 takes {own} of its data set, rank {rank} {other}; it divides what all ranks "
                "have alike: leave shard, skip and take by rank out, or hpcdl.dataset"
            )
    if any(len(row) != len(by_rank[0]) for row in by_rank):
        return  # each rank made its data in a different way, so a comparison says nothing
    for rank, row in enumerate(by_rank[1:], 1):
        if not all(same(*pair) for pair in zip(by_rank[0], row, strict=True)):
            raise UsageError(
                f"hpcdl.dataset: rank {rank} has other data than rank 0, or the same in another order; it deals out "
                "what all ranks have alike: sort lists of files and seed what shuffles them, or leave hpcdl.dataset "
                "out where each rank has read its own part"
            )


def _shuffled_alike(whole: Any, group: ScriptGroup) -> Any:
    """Return `whole` with the same shuffle order on every rank. Raises UsageError if that is impossible.

    With a different order on each rank, the parts would miss some samples and repeat others.
    """
    shuffles = shuffles_in(whole)
    if not shuffles or group.size == 1:
        return whole
    seeds = seeds_of(whole)
    group.agree("hpcdl.dataset of a shuffled data set")
    by_rank = group.messages.allgather_json([seeds, int(numpy.random.SeedSequence().generate_state(1)[0])])
    if all(one != [0, 0] for one in seeds) and all(other == seeds for other, _ in by_rank):
        return whole
    if shuffles == [whole]:  # the shuffle is the last stage: repeat it with a seed that rank 0 has drawn
        return whole._input_dataset.shuffle(
            whole._buffer_size, seed=by_rank[0][1], reshuffle_each_iteration=whole._reshuffle_each_iteration
        )
    raise UsageError(
        "hpcdl.dataset: the ranks would shuffle in different orders, and some samples would be in no rank's part; give"
        " shuffle(..., seed=1) or list_files(..., seed=1) the same seed on all ranks, or shuffle its result"
    )
