"""Any number of ranks for algorithms that require a power of two.

Of p = 2^k + r ranks the first 2r form pairs (Thakur, Rabenseifner and Gropp 2005). The even rank sends its buffer to
the odd one, sits out, and gets the result back. The 2^k others have core numbers 0 to 2^k - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The participants: `num_core` ranks, after `num_folded` others have sent them their buffers."""

    num_core: int
    num_folded: int

    def core_number(self, rank: int) -> int | None:
        """Return the number of `rank` in the core; None if it sits out."""
        if rank >= 2 * self.num_folded:
            return rank - self.num_folded
        return rank // 2 if rank % 2 else None

    def rank_of(self, core_number: int) -> int:
        """Return the rank with this number in the core."""
        return 2 * core_number + 1 if core_number < self.num_folded else core_number + self.num_folded


def fold_for(num_ranks: int) -> Fold:
    """Return the largest power of two in `num_ranks`, and how many ranks exceed it."""
    num_core = 1 << (num_ranks.bit_length() - 1)
    return Fold(num_core=num_core, num_folded=num_ranks - num_core)


def fold_in(communicator: Communicator, fold: Fold, part: Array, scratch: Array, add: Add, tag: int) -> Iterator[None]:
    """Send the buffer, or receive and add one, before the core's exchange."""
    rank = communicator.rank
    if rank >= 2 * fold.num_folded:
        return
    if rank % 2 == 0:
        send = communicator.isend(part, rank + 1, tag)
        yield
        send.wait()
        return
    receive = communicator.irecv(scratch[: part.size], rank - 1, tag)
    yield
    receive.wait()
    add(part, scratch[: part.size])


def fold_out(communicator: Communicator, fold: Fold, part: Array, tag: int) -> Iterator[None]:
    """Send the result back, or receive it, after the core's exchange."""
    rank = communicator.rank
    if rank >= 2 * fold.num_folded:
        return
    request = communicator.isend(part, rank - 1, tag) if rank % 2 else communicator.irecv(part, rank + 1, tag)
    yield
    request.wait()
