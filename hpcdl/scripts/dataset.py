"""`hpcdl.dataset`: each rank's part of a tf.data.Dataset, with as many batches on every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.process.session import session

_AHEAD = 2
"""Elements; a fixed number, so that the script decides whether tf.data tunes itself."""


def dataset(whole: Any, *, batch_size: int | None = None, steps: int | None = None) -> Any:
    """This rank's part of `whole`, which every rank makes alike: every size-th element, as many on each rank.

    Elements are what `whole` gives: samples, which `batch_size` (per rank) puts into batches, or batches. Where their
    number is unknown `steps` says how many this rank takes per epoch. What is left over is left out.
    """
    here = session()
    rank, size = here.communicator.rank, here.communicator.size
    if not isinstance(whole, tf.data.Dataset):
        raise UsageError(f"hpcdl.dataset takes a tf.data.Dataset, not {type(whole).__name__}; see from_tensor_slices")
    number = int(whole.cardinality())
    own = whole.shard(size, rank)
    if number == tf.data.INFINITE_CARDINALITY or number == tf.data.UNKNOWN_CARDINALITY:
        if steps is None:
            raise UsageError("hpcdl.dataset cannot tell how many elements there are; give steps= per rank and epoch")
    else:
        each = number // size
        own = own.take(each)
        most = each // batch_size if batch_size else each
        if not most:
            raise UsageError(f"{number} elements on {size} ranks leave none for a batch of each; use fewer ranks")
        steps = min(steps or most, most)
    if batch_size:
        own = own.batch(batch_size, drop_remainder=True)
    # Where the number was unknown, one that has fewer begins again: all ranks take as many.
    own = own.take(steps) if number >= 0 else own.repeat().take(steps)
    return own.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(_AHEAD)
