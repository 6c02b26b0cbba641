"""A worker's way to a center in memory that the workers of one node share (Hogwild)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from hpcdl.strategies.elastic.links.lock_free import LockFreeLink

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


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

    def _change(self, buffer: Array, rate: float) -> None:
        self._rule.serve(self._center, buffer, rate)

    def _note(self, row: int, steps: int, writes: int, left: int) -> None:
        self._shared_board[row] += (steps, writes, left)

    def _read_board(self) -> Array:
        return self._shared_board
