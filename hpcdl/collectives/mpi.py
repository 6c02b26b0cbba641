"""The MPI library's own Allreduce, the best choice on networks it was tuned for.

Rounds and bytes depend on the library: `cost` is the lower bound of any all-reduce, lg p rounds and 2n(p-1)/p bytes.
Half precision is summed by an operation of hpcdl, because MPI has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdl.collectives.slices import Cost, Workspace, flattened, unseen

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished

SLICE_BYTES = 16 << 20
"""One call for a buffer far larger than the cache is slower than several that fit (benchmarks/allreduce_ring.py)."""


def allreduce(
    communicator: Communicator,
    buffer: Array,
    workspace: Workspace | None = None,
    add: Add | None = None,
    finished: Finished = unseen,
) -> None:
    """Sum `buffer` over the ranks in place."""
    flat = flattened(buffer)
    if communicator.size == 1 or buffer.size == 0:
        finished(flat)
        return
    length = max(1, SLICE_BYTES // flat.itemsize)
    for start in range(0, flat.size, length):
        part = flat[start : start + length]
        communicator.allreduce(part, add)
        finished(part)


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4) -> Cost:
    """Return the lower bound for any all-reduce; the library may need more."""
    if num_ranks == 1 or num_bytes == 0:
        return Cost(rounds=0, bytes=0)
    return Cost(rounds=(num_ranks - 1).bit_length(), bytes=2 * num_bytes * (num_ranks - 1) // num_ranks)
