"""A worker's link to a center that all workers change without locks (Hogwild): in shared or remote memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import waiting_for
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.elastic.server import Rule, Staleness, server_spans

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

STEPS, WRITES, LEFT, COLUMNS = 0, 1, 2, 3
"""Columns of the board, per worker: steps, writes, whether it has left. In one more row LEFT stops all workers."""


class LockFreeLink:
    """Common part of both kinds: the counts, and the end of the run. Counts are never lost.

    `board` holds the other workers' counts as this worker last read them.
    """

    pause_s: float

    def __init__(self, group: Communicator, rule: Rule) -> None:
        self.group = group
        self.count = 0
        self.stopped = False
        self.warnings: list[str] = []
        self.num_lost = 0
        self._rule = rule
        self._staleness = Staleness()
        self._first = self._total = self._read_version = 0
        self._board: Array = numpy.zeros((group.size + 1, COLUMNS), numpy.int64)

    def start(self, weights: Array, sizes: Sequence[int], *, count: int, total: int, velocity: Array | None) -> None:
        """Initialise the center with `weights`."""
        self._first, self._total = count, total
        self._rule.begin(weights.size)
        self._create(weights)
        self._look()

    def exchange(self, sent: Array, reply: Array, rate: float, steps: int) -> None:
        """Change the center in place, unless it takes no more changes."""
        self._look()
        if self.stopped:
            self._read(reply)
        else:
            self._staleness.add(max(self._writes_of_others() - self._read_version, 0))
            self._change(sent, reply, rate)
            self._note(self.group.rank, steps, 1, 0)
            self._look()
        self._read_version = self._writes_of_others()

    def fetch(self, buffer: Array) -> None:
        """Read the center."""
        self._look()
        self._read(buffer)

    def fetch_velocity(self, buffer: Array) -> None:
        """Fill `buffer` with zeros: no method has a velocity here."""
        buffer[:] = 0

    def leave(self, buffer: Array, *, stop: bool) -> None:
        """Sleep until every worker has left."""
        self._note(self.group.rank, 0, 0, 1)
        if stop:
            self._note(self.group.size, 0, 0, 1)
        with waiting_for(self.group, "leaving", numpy.flatnonzero(self._board[:-1, LEFT] == 0).tolist()):
            while not self._board[:-1, LEFT].all() and not self._others_are_lost():
                time.sleep(self.pause_s)
                self._look()
        self.fetch(buffer)
        lost = self.group.failed()
        self.num_lost = len(lost)
        (self.group.survivors(lost) if lost else self.group).barrier()  # no memory is freed before all have read it

    def finish(self, *, early: bool) -> None:
        """Free the memory, unless a part of the group is lost; there are no servers to inform."""
        # Windows are freed collectively: with a lost worker that would hang.
        if not self.num_lost:
            self._free()

    def details(self) -> dict[str, Any]:
        """Return the staleness of this worker's writes."""
        return {"staleness_counts": self._staleness.as_json()}

    def _create(self, weights: Array) -> None:
        """Create center and board, shared by all; collective."""
        raise NotImplementedError

    def _read(self, buffer: Array) -> None:
        """Fill `buffer` with the center."""
        raise NotImplementedError

    def _change(self, sent: Array, reply: Array, rate: float) -> None:
        """Apply the rule to the center, and fill `reply`."""
        raise NotImplementedError

    def _note(self, row: int, steps: int, writes: int, left: int) -> None:
        """Add to a row of the board."""
        raise NotImplementedError

    def _read_board(self) -> Array:
        """Return the current board."""
        raise NotImplementedError

    def _free(self) -> None:
        """Free the memory; collective."""

    def _others_are_lost(self) -> bool:
        """Whether all workers that have not left are lost."""
        return set(numpy.flatnonzero(self._board[:-1, LEFT] == 0).tolist()) <= self.group.failed()

    def _look(self) -> None:
        self._board = self._read_board()
        self.count = self._first + int(self._board[:-1, STEPS].sum())
        self.stopped = bool(self._board[-1, LEFT]) or 0 < self._total <= self.count

    def _writes_of_others(self) -> int:
        return int(self._board[:-1, WRITES].sum() - self._board[self.group.rank, WRITES])


class SharedLink(LockFreeLink):
    """The center in memory that the workers of one node share and change without locks (Hogwild).

    If two workers write to the same block at once, updates may be partly lost: that is the method (Niu, Recht, Re and
    Wright 2011, arXiv 1106.5730). Counts are not lost: each worker has its own counters.
    """

    pause_s = 0.005

    def _create(self, weights: Array) -> None:
        self._center = self.group.shared_array([weights.size], numpy.float32)
        self._shared_board = self.group.shared_array(self._board.shape, numpy.int64)
        if self.group.rank == 0:
            self._center[:] = weights
        self.group.barrier()  # nobody may read the center before it is set

    def _read(self, buffer: Array) -> None:
        buffer[:] = self._center

    def _change(self, sent: Array, reply: Array, rate: float) -> None:
        self._rule.serve(self._center, sent, reply, rate)

    def _note(self, row: int, steps: int, writes: int, left: int) -> None:
        # Without a lock: each worker has its row. In the last row a lost addition still leaves LEFT above zero.
        self._shared_board[row] += (steps, writes, left)

    def _read_board(self) -> Array:
        return self._shared_board


class RemoteLink(LockFreeLink):
    """The center in the memory of workers on several nodes: an equal part in a window of each; worker 0 has the board.

    An exchange reads the center, applies the rule to the copy, and adds the difference to the center element by element
    (MPI_Get, MPI_Accumulate). Concurrent additions all count; only the values read may be old. It needs an MPI whose
    windows change while their owner computes (comm/mpi/calls.py).
    """

    pause_s = 0.05

    def _create(self, weights: Array) -> None:
        self._parts = server_spans(weights.size, self.group.size)
        own_span = self._parts[self.group.rank]
        self._center = self.group.remote_array(own_span.stop - own_span.start, numpy.float32)
        leads = self.group.rank == 0
        self._shared_board = self.group.remote_array(self._board.size if leads else 0, numpy.int64)
        self._seen = numpy.zeros_like(weights)
        # A new window holds zeros, so an addition sets the value.
        self._center.add(self.group.rank, numpy.ascontiguousarray(weights[own_span]))
        self.group.barrier()

    def _read(self, buffer: Array) -> None:
        for owner, part in enumerate(self._parts):
            self._center.read(owner, buffer[part])

    def _change(self, sent: Array, reply: Array, rate: float) -> None:
        self._read(self._seen)
        difference = self._seen.copy()
        self._rule.serve(self._seen, sent, reply, rate)
        numpy.subtract(self._seen, difference, out=difference)
        for owner, part in enumerate(self._parts):
            # The difference, not the new value: other workers' additions in between must not be lost.
            self._center.add(owner, difference[part])

    def _note(self, row: int, steps: int, writes: int, left: int) -> None:
        added = numpy.array([steps, writes, left], numpy.int64)
        self._shared_board.add(0, added, row * COLUMNS)

    def _read_board(self) -> Array:
        board = numpy.empty_like(self._board)
        self._shared_board.read(0, board.reshape(-1))
        return board

    def _free(self) -> None:
        self._center.free()
        self._shared_board.free()
