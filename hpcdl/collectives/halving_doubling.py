"""Rabenseifner's all-reduce: recursive halving, then recursive doubling (Thakur, Rabenseifner and Gropp 2005).

Partners at distance p/2, p/4, ..., 1 swap halves of the part they still hold, and add: then every rank holds one
complete p-th. The same exchanges in reverse order, with growing pieces, give every rank the whole result.

Rounds 2 lg p. A rank sends 2n(p-1)/p bytes if p divides the number of elements. If p is no power of two: two more
rounds, and n more bytes for a rank that sends a result back (fold.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.fold import Fold, fold_for, fold_in, fold_out
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
    # With a power of two ranks a slice is two messages long: a rank first swaps half of it.
    shares = 1 if fold_for(communicator.size).num_folded else 2
    run_sliced(exchange, communicator, buffer, workspace, add, finished, shares=shares)


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4) -> Cost:
    """Return rounds, and bytes sent by the busiest rank, for a buffer of one slice."""
    if num_ranks == 1 or num_bytes == 0:
        return Cost(rounds=0, bytes=0)
    fold = fold_for(num_ranks)
    edges = numpy.array(_edges(num_bytes // item_bytes, fold.num_core))
    numbers = numpy.arange(fold.num_core)
    elements = numpy.where(numbers < fold.num_folded, num_bytes // item_bytes, 0)
    low, high = numpy.zeros_like(numbers), numpy.full_like(numbers, fold.num_core)
    distance = fold.num_core // 2
    while distance:
        # A rank sends in doubling what it keeps in halving: in total, what it held before.
        elements += edges[high] - edges[low]
        is_upper, middle = numbers & distance > 0, low + distance
        low, high = numpy.where(is_upper, middle, low), numpy.where(is_upper, high, middle)
        distance //= 2
    busiest = int(elements.max())
    rounds = 2 * (fold.num_core.bit_length() - 1) + 2 * (fold.num_folded > 0)
    chain_bytes = busiest * item_bytes + num_bytes * (fold.num_folded > 0)
    return Cost(rounds=rounds, bytes=busiest * item_bytes, chain_bytes=chain_bytes)


def exchange(communicator: Communicator, part: Array, scratch: Array, add: Add, tag: int) -> Iterator[None]:
    """Exchange one slice: fold in, halve, double, fold out."""
    fold = fold_for(communicator.size)
    yield from fold_in(communicator, fold, part, scratch, add, tag)
    number = fold.core_number(communicator.rank)
    if number is not None:
        yield from _core(communicator, fold, number, part, scratch, add, tag)
    yield from fold_out(communicator, fold, part, tag)


def _core(
    communicator: Communicator, fold: Fold, number: int, part: Array, scratch: Array, add: Add, tag: int
) -> Iterator[None]:
    edges = _edges(part.size, fold.num_core)
    halvings = _halvings(number, fold.num_core)
    for partner, own_range, sent_range in halvings:
        kept_part = part[edges[own_range[0]] : edges[own_range[1]]]
        landing = scratch[: kept_part.size]
        receive = communicator.irecv(landing, fold.rank_of(partner), tag)
        send = communicator.isend(part[edges[sent_range[0]] : edges[sent_range[1]]], fold.rank_of(partner), tag)
        yield
        receive.wait()
        add(kept_part, landing)  # before the send is complete: it reads the other half
        send.wait()
    for partner, own_range, sent_range in reversed(halvings):
        receive = communicator.irecv(part[edges[sent_range[0]] : edges[sent_range[1]]], fold.rank_of(partner), tag)
        send = communicator.isend(part[edges[own_range[0]] : edges[own_range[1]]], fold.rank_of(partner), tag)
        yield
        receive.wait()
        send.wait()


def _edges(length: int, num_parts: int) -> list[int]:
    """Return the bounds of the parts; halves of halves differ by at most one element, so half a buffer can receive."""
    return [part * length // num_parts for part in range(num_parts + 1)]


def _halvings(number: int, num_core: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return (partner, parts kept, parts sent) of each halving round, as ranges of part numbers."""
    rounds = []
    low, high = 0, num_core
    distance = num_core // 2
    while distance:
        middle = low + distance
        lower, upper = (low, middle), (middle, high)
        own_range, sent_range = (upper, lower) if number & distance else (lower, upper)
        rounds.append((number ^ distance, own_range, sent_range))
        low, high = own_range
        distance //= 2
    return rounds
