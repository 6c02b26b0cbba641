"""A worker's way to a center in memory that the workers of one node share (Hogwild)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import UsageError
from hpcdl.strategies.base import Context
from hpcdl.strategies.servers.center_rules import Rule
from hpcdl.strategies.servers.center_staleness import Staleness

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

SLEEP_S = 0.005


class SharedLink:
    """The center in memory that the workers of one node share and change without locks (Hogwild).

    Updates of two workers that meet in the same block may be lost in part: that is the method (Niu, Recht, Re and
    Wright 2011, arXiv 1106.5730). What is counted is not lost: each worker counts in a place of its own.
    """

    def __init__(self, context: Context, rule: Rule) -> None:
        self.group = context.communicator.duplicate()
        hosts = sorted(set(self.group.allgather_json(self.group.host)))
        if len(hosts) > 1:
            raise UsageError(
                f"strategy {context.info.name!r} shares memory, which needs all workers on one node, not on "
                f"{len(hosts)} ({', '.join(hosts[:4])}); use its async-* sibling"
            )
        self._rule = rule
        self._staleness = Staleness()
        self.bytes_sent = 0
        self.count = 0
        self.stopped = False
        self._first = self._total = self._read_version = 0

    def start(self, weights: Array, sizes: Sequence[int], *, count: int, total: int, velocity: Array | None) -> None:
        """Worker 0 writes the center."""
        self._center = self.group.shared_array([weights.size], numpy.float32)
        # Steps, writes, and whether it has left, for each worker; the last row: whether the run is stopped.
        self._board = self.group.shared_array([self.group.size + 1, 3], numpy.int64)
        self._own = self._board[self.group.rank]
        self._first, self._total = count, total
        self._rule.begin(weights.size)
        if self.group.rank == 0:
            self._center[:] = weights
        self.group.barrier()
        self._look()

    def exchange(self, buffer: Array, rate: float, steps: int) -> None:
        """Change the center in place."""
        if not self._look():
            self._staleness.add(max(self._writes_of_others() - self._read_version, 0))
            self._rule.serve(self._center, buffer, rate)
            self._own[:2] += (steps, 1)
            self._look()
        else:
            buffer[:] = self._center
        self._read_version = self._writes_of_others()

    def fetch(self, buffer: Array) -> None:
        """Read the center."""
        self._look()
        buffer[:] = self._center

    def fetch_velocity(self, buffer: Array) -> None:
        """No method has one here."""
        buffer[:] = 0

    def leave(self, buffer: Array, *, stop: bool) -> None:
        """Sleep until every worker has left."""
        self._own[2] = 1
        if stop:
            self._board[-1, 2] = 1
        while not self._board[:-1, 2].all():
            time.sleep(SLEEP_S)
        self.fetch(buffer)
        self.group.barrier()

    def finish(self, *, early: bool) -> None:
        """Nobody serves who would have to know. The last reader has left: give the memory back."""

    def details(self) -> dict[str, Any]:
        """How stale this worker's writes were."""
        return {"staleness_counts": self._staleness.as_json()}

    def _writes_of_others(self) -> int:
        return int(self._board[:-1, 1].sum() - self._own[1])

    def _look(self) -> bool:
        self.count = self._first + int(self._board[:-1, 0].sum())
        self.stopped = bool(self._board[-1, 2]) or 0 < self._total <= self.count
        return self.stopped
