"""Ring all-reduce (Patarasuk and Yuan 2009): bandwidth-optimal for any number of ranks.

The buffer is cut into p parts. In p - 1 rounds each rank passes a part to its right neighbour, which adds its own: then
every rank holds one complete part. In p - 1 more rounds the complete parts go around.

Rounds 2(p-1). Each rank sends exactly 2n(p-1)/p bytes if p divides the number of elements. Otherwise parts differ by
one element, and a rank sends 2n less the two parts that it never sends (one in each half).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdl.collectives.slices import Cost, Workspace, run_sliced, spans, unseen

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished


def allreduce(
    communicator: Communicator,
    buffer: Array,
    workspace: Workspace | None = None,
    add: Add | None = None,
    finished: Finished = unseen,
) -> None:
    """Sum `buffer` over the ranks in place."""
    run_sliced(exchange, communicator, buffer, workspace, add, finished, shares=communicator.size)


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4) -> Cost:
    """Return rounds, and bytes sent by the busiest rank."""
    if num_ranks == 1 or num_bytes == 0:
        return Cost(rounds=0, bytes=0)
    # Slices are multiples of p elements, so parts differ only by the remainder of the whole buffer.
    sizes = [end - start for start, end in spans(num_bytes // item_bytes, num_ranks)]
    unsent = min(sizes[rank - 1] + sizes[rank] for rank in range(num_ranks))
    return Cost(rounds=2 * (num_ranks - 1), bytes=2 * num_bytes - unsent * item_bytes)


def exchange(communicator: Communicator, part: Array, scratch: Array, add: Add, tag: int) -> Iterator[None]:
    """Pass one slice around the ring."""
    rank, size = communicator.rank, communicator.size
    right, left = (rank + 1) % size, (rank - 1) % size
    pieces = [part[start:end] for start, end in spans(part.size, size)]
    sends = []
    for step in range(size - 1):
        outgoing, incoming = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        landing = scratch[: incoming.size]
        receive = communicator.irecv(landing, left, tag)
        sends.append(communicator.isend(outgoing, right, tag))
        yield
        receive.wait()
        add(incoming, landing)
    for send in sends:  # the next half overwrites the memory these read
        send.wait()
    sends.clear()
    for step in range(size - 1):
        outgoing, incoming = pieces[(rank + 1 - step) % size], pieces[(rank - step) % size]
        receive = communicator.irecv(incoming, left, tag)
        sends.append(communicator.isend(outgoing, right, tag))
        yield
        receive.wait()
    for send in sends:
        send.wait()
