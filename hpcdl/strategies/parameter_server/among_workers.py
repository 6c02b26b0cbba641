"""Parameter servers that also work: an all-reduce via the highest ranks, for scripts, in which all ranks train.

Every bucket is cut into equal parts, one for each server, as in the placement `split`. A server sums its part, its own
gradient first and then the others' in rank order, and sends the sum back to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdl.collectives.slices import Workspace, run_sliced, spans, unseen

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished


class ServersAmongWorkers:
    """Uses the `num_servers` highest ranks of a communicator as servers; called like all-reduces of collectives/."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers

    def allreduce(
        self,
        communicator: Communicator,
        buffer: Array,
        workspace: Workspace | None = None,
        add: Add | None = None,
        finished: Finished = unseen,
    ) -> None:
        """Sum `buffer` over the ranks in place."""
        run_sliced(self._exchange, communicator, buffer, workspace, add, finished, shares=self._num_servers)

    def _exchange(
        self, communicator: Communicator, part: Array, scratch: Array, add: Add, tag: int
    ) -> Iterator[None]:  # fmt: skip
        """Exchange one slice: send its piece to each server, and receive the sum from each."""
        rank, first = communicator.rank, communicator.size - self._num_servers
        pieces = {
            first + number: part[slice(*bounds)] for number, bounds in enumerate(spans(part.size, self._num_servers))
        }
        other_ranks = [other_rank for other_rank in range(communicator.size) if other_rank != rank]
        in_turn = sorted(pieces, key=lambda server: (server - first - rank) % self._num_servers)  # to spread the load
        leaving = [communicator.isend(pieces[server], server, tag) for server in in_turn if server != rank]
        own_piece = pieces.pop(rank, None)
        # Receives first: a long send ends only once it is received, and two servers would wait for each other.
        if own_piece is not None:
            landing = scratch[: own_piece.size]
            for worker in other_ranks:
                receive = communicator.irecv(landing, worker, tag)
                yield
                receive.wait()
                add(own_piece, landing)
        for send in leaving:
            yield
            send.wait()
        under_way = [communicator.irecv(piece, server, tag) for server, piece in pieces.items()]
        if own_piece is not None:
            under_way += [communicator.isend(own_piece, worker, tag) for worker in other_ranks]
        for request in under_way:
            yield
            request.wait()
