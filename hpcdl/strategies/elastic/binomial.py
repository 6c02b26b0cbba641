"""Binomial tree: a sum towards rank 0, and a broadcast from it, each in ceil(lg p) rounds of whole messages.

The plain form of SC17's Sync EASGD 1, lg p (alpha + n beta) each way; collectives/tree.py cuts its messages in slices
that follow each other, which is faster but is not what the paper has in its first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdl.core.protocols import Communicator

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


def reduce_to_root(communicator: Communicator, buffer: Array, landing: Array) -> int:
    """Sum `buffer` onto rank 0, by way of `landing` of the same length; returns the bytes sent by this rank."""
    rank = communicator.rank
    distance = 1
    while distance < communicator.size:
        if rank & distance:
            communicator.isend(buffer, rank - distance).wait()
            return buffer.nbytes
        if rank + distance < communicator.size:
            communicator.irecv(landing, rank + distance).wait()
            buffer += landing
        distance *= 2
    return 0


def broadcast_from_root(communicator: Communicator, buffer: Array) -> int:
    """Fill `buffer` with rank 0's; returns the bytes sent by this rank."""
    rank, sent = communicator.rank, 0
    distance = 1 << (communicator.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == distance:
            communicator.irecv(buffer, rank - distance).wait()
        elif rank % (2 * distance) == 0 and rank + distance < communicator.size:
            communicator.isend(buffer, rank + distance).wait()
            sent += buffer.nbytes
    return sent
