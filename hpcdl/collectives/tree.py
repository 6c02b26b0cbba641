"""Binomial tree all-reduce: a sum towards rank 0, then a broadcast (the tree reduction of Sync EASGD, SC17).

A rank whose number ends in k zero bits sums the buffers of up to k children, nearest first. It sends the sum to its
parent, the rank without its lowest set bit. The result comes back the same way. Slices follow each other in a pipeline.

Rounds 2 ceil(lg p), each of n bytes. The root sends to its ceil(lg p) children, the maximum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdl.collectives.slices import Cost, Workspace, run_sliced, unseen

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
    run_sliced(exchange, communicator, buffer, workspace, add, finished)


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4) -> Cost:
    """Return rounds, and bytes sent by the busiest rank."""
    if num_ranks == 1 or num_bytes == 0:
        return Cost(rounds=0, bytes=0)
    depth = (num_ranks - 1).bit_length()
    return Cost(rounds=2 * depth, bytes=depth * num_bytes, chain_bytes=2 * depth * num_bytes)


def exchange(communicator: Communicator, part: Array, scratch: Array, add: Add, tag: int) -> Iterator[None]:
    """Send one slice up to rank 0 and back."""
    rank = communicator.rank
    children = _children(rank, communicator.size)
    landing = scratch[: part.size]
    for child in children:  # the nearest has the smallest subtree, so its sum is ready first
        receive = communicator.irecv(landing, child, tag)
        yield
        receive.wait()
        add(part, landing)
    if rank != 0:
        parent = rank & (rank - 1)
        send = communicator.isend(part, parent, tag)
        yield
        send.wait()
        receive = communicator.irecv(part, parent, tag)
        yield
        receive.wait()
    # The farthest child has the deepest subtree, so it comes first.
    sends = [communicator.isend(part, child, tag) for child in reversed(children)]
    for send in sends:
        yield
        send.wait()


def _children(rank: int, num_ranks: int) -> list[int]:
    """Return the children of `rank`, nearest first: `rank` plus each power of two below its lowest set bit."""
    children = []
    distance = 1
    while rank + distance < num_ranks and not rank & distance:
        children.append(rank + distance)
        distance *= 2
    return children
