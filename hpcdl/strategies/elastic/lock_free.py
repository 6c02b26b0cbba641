"""A worker's link to a center that all workers change without locks (Hogwild): in shared or in remote memory."""

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
"""What the board has of each worker: steps and writes so far, and whether it has left. One row more: LEFT stops all."""


class LockFreeLink:
    """What the two kinds share: who counts what, and when the run is over. What is counted is never lost.

    `board` is what this worker has last seen of the others' counts.
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
        """The center is `weights`."""
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
        """No method has one here."""
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
        (self.group.survivors(lost) if lost else self.group).barrier()

    def finish(self, *, early: bool) -> None:
        """Nobody serves who would have to know; the memory goes back, unless a part of the group is lost."""
        if not self.num_lost:
            self._free()

    def details(self) -> dict[str, Any]:
        """How stale this worker's writes were."""
        return {"staleness_counts": self._staleness.as_json()}

    def _create(self, weights: Array) -> None:
        """Make center and board, the same for all; collective."""
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
        """What the board says now."""
        raise NotImplementedError

    def _free(self) -> None:
        """Give the memory back; collective."""

    def _others_are_lost(self) -> bool:
        """Whether everybody who has not left yet never will."""
        return set(numpy.flatnonzero(self._board[:-1, LEFT] == 0).tolist()) <= self.group.failed()

    def _look(self) -> None:
        self._board = self._read_board()
        self.count = self._first + int(self._board[:-1, STEPS].sum())
        self.stopped = bool(self._board[-1, LEFT]) or 0 < self._total <= self.count

    def _writes_of_others(self) -> int:
        return int(self._board[:-1, WRITES].sum() - self._board[self.group.rank, WRITES])


class SharedLink(LockFreeLink):
    """The center in memory that the workers of one node share and change without locks (Hogwild).

    Updates of two workers that meet in the same block may be lost in part: that is the method (Niu, Recht, Re and
    Wright 2011, arXiv 1106.5730). What is counted is not lost: each worker counts in a place of its own.
    """

    pause_s = 0.005

    def _create(self, weights: Array) -> None:
        self._center = self.group.shared_array([weights.size], numpy.float32)
        self._shared_board = self.group.shared_array(self._board.shape, numpy.int64)
        if self.group.rank == 0:
            self._center[:] = weights
        self.group.barrier()

    def _read(self, buffer: Array) -> None:
        buffer[:] = self._center

    def _change(self, sent: Array, reply: Array, rate: float) -> None:
        self._rule.serve(self._center, sent, reply, rate)

    def _note(self, row: int, steps: int, writes: int, left: int) -> None:
        self._shared_board[row] += (steps, writes, left)

    def _read_board(self) -> Array:
        return self._shared_board


class RemoteLink(LockFreeLink):
    """The center in the memory of workers on several nodes: an equal part in a window of each; the board is worker 0's.

    An exchange reads the center, applies the rule to what it has read, and adds the difference to the center element by
    element (MPI_Get, MPI_Accumulate): what two workers add at once both counts, only what they read may be old. It
    needs an MPI whose windows change while their owner computes (comm/mpi/calls.py).
    """

    pause_s = 0.05

    def _create(self, weights: Array) -> None:
        self._parts = server_spans(weights.size, self.group.size)
        own = self._parts[self.group.rank]
        self._center = self.group.remote_array(own.stop - own.start, numpy.float32)
        leads = self.group.rank == 0
        self._shared_board = self.group.remote_array(self._board.size if leads else 0, numpy.int64)
        self._seen = numpy.zeros_like(weights)
        self._center.add(self.group.rank, numpy.ascontiguousarray(weights[own]))
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
