"""Recursive doubling all-reduce (Thakur, Rabenseifner and Gropp 2005): the fewest rounds, for short messages.

In round k each rank swaps its whole buffer with the rank whose number differs in bit k, and both add what they
received. Addition of two numbers is commutative, so after every round the partners hold the same bits, and finally all
ranks do.

Rounds lg p, each of n bytes: a rank sends n lg p. If p is no power of two: two more rounds, and n more bytes (fold.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdl.collectives.fold import fold_for, fold_in, fold_out
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
    """Return rounds, and bytes sent by the busiest rank: one of the core that sends a result back."""
    if num_ranks == 1 or num_bytes == 0:
        return Cost(rounds=0, bytes=0)
    fold = fold_for(num_ranks)
    rounds = fold.num_core.bit_length() - 1
    folded = fold.num_folded > 0
    all_rounds = rounds + 2 * folded
    return Cost(rounds=all_rounds, bytes=num_bytes * (rounds + folded), chain_bytes=num_bytes * all_rounds)


def exchange(communicator: Communicator, part: Array, scratch: Array, add: Add, tag: int) -> Iterator[None]:
    """Exchange one slice: fold in, double, fold out."""
    fold = fold_for(communicator.size)
    yield from fold_in(communicator, fold, part, scratch, add, tag)
    number = fold.core_number(communicator.rank)
    if number is not None:
        landing = scratch[: part.size]
        distance = 1
        while distance < fold.num_core:
            partner = fold.rank_of(number ^ distance)
            receive = communicator.irecv(landing, partner, tag)
            send = communicator.isend(part, partner, tag)
            yield
            receive.wait()
            send.wait()  # the sum must not change a message that is still being sent
            add(part, landing)
            distance *= 2
    yield from fold_out(communicator, fold, part, tag)
