"""A worker's way to a center that lies in the memory of workers on several nodes: one-sided, without locks (Hogwild).

Every worker holds an equal part of the center in a window. An exchange reads the center, applies the rule to what it
has read, and adds the difference to the center element by element (MPI_Get, MPI_Accumulate): what two workers add at
once both counts, only what they read may be old. Nobody serves: it needs an MPI whose windows change while their owner
computes (comm/one_sided.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from hpcdl.strategies.elastic.center.message import server_spans
from hpcdl.strategies.elastic.links.lock_free import COLUMNS, LockFreeLink

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class RemoteLink(LockFreeLink):
    """The center in windows of all workers; the board, 24 bytes a worker, is worker 0's."""

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

    def _change(self, buffer: Array, rate: float) -> None:
        self._read(self._seen)
        difference = self._seen.copy()
        self._rule.serve(self._seen, buffer, rate)
        numpy.subtract(self._seen, difference, out=difference)
        for owner, part in enumerate(self._parts):
            self._center.add(owner, difference[part])
            self._count_bytes(owner, difference[part])

    def _note(self, row: int, steps: int, writes: int, left: int) -> None:
        added = numpy.array([steps, writes, left], numpy.int64)
        self._shared_board.add(0, added, row * COLUMNS)
        self._count_bytes(0, added)

    def _read_board(self) -> Array:
        board = numpy.empty_like(self._board)
        self._shared_board.read(0, board.reshape(-1))
        return board

    def _free(self) -> None:
        self._center.free()
        self._shared_board.free()

    def _count_bytes(self, owner: int, values: Array) -> None:
        if owner != self.group.rank:
            self.bytes_sent += values.nbytes
