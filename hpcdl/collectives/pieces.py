"""Pieces of unequal length from every rank to every other one: what all-gathers and all-to-alls are made of.

Each rank sends each other one its piece directly, p - 1 messages of just the bytes that are wanted there: the least
that can be sent, in one round, for groups of some hundred ranks at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Request


def swap_pieces(communicator: Communicator, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
    """Send `outgoing[rank]` to each rank, and fill `incoming[rank]` with what that one sends here.

    Buffers are C-contiguous, lengths agree on both sides; pieces without elements are not sent.
    """
    rank, size = communicator.rank, communicator.size
    incoming[rank][...] = outgoing[rank]
    requests: list[Request] = []
    for distance in range(1, size):
        source, destination = (rank - distance) % size, (rank + distance) % size
        if incoming[source].size:
            requests.append(communicator.irecv(incoming[source], source))
        if outgoing[destination].size:
            requests.append(communicator.isend(outgoing[destination], destination))
    for request in requests:
        request.wait()


def swap_numbers(communicator: Communicator, numbers: Array) -> Array:
    """Row r of `numbers` (ranks, n), int64, to each rank r; row r of the result comes from there."""
    theirs = numpy.empty_like(numbers)
    swap_pieces(communicator, list(numbers), list(theirs))
    return theirs


def gather_pieces(communicator: Communicator, mine: Sequence[Array]) -> list[list[Array]]:
    """Every rank's arrays, in rank order for each of `mine`; their first dimensions may differ over the ranks."""
    lengths = numpy.array([len(array) for array in mine], numpy.int64)
    everybody = swap_numbers(communicator, numpy.tile(lengths, (communicator.size, 1)))
    gathered = []
    for index, array in enumerate(mine):
        pieces = [numpy.empty((length, *array.shape[1:]), array.dtype) for length in everybody[:, index]]
        swap_pieces(communicator, [numpy.ascontiguousarray(array)] * communicator.size, pieces)
        gathered.append(pieces)
    return gathered
