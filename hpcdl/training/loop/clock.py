"""Where the time of a step goes: six parts per step and rank that add up to the step.

The graph stamps the last local gradient and the end of the exchange with the wall clock; ranks compare their stamps
now and then, after correcting for the offset of their clocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from hpcdl.core.protocols import Communicator
from hpcdl.core.records import PARTS

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

PINGS = 8


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Unix times in seconds at the borders of one step's parts."""

    began: float
    got_batch: float
    had_gradients: float
    exchanged: float
    updated: float
    ended: float
    waited_s: float = 0.0
    """What of the exchange was waiting for others, where the ranks do not compare their stamps."""


class StepClock:
    """Collects the times of steps and turns them into parts; `synchronous` strategies wait for the slowest rank."""

    def __init__(self, communicator: Communicator, *, synchronous: bool) -> None:
        self._communicator = communicator
        self._synchronous = synchronous and communicator.size > 1
        self._pending: list[StepTimes] = []
        self.step_seconds: list[float] = []
        self._parts: list[list[float]] = []

    def add(self, times: StepTimes) -> None:
        """Keep one step."""
        self._pending.append(times)
        self.step_seconds.append(times.ended - times.began)

    def flush(self) -> None:
        """Split the steps since the last flush into parts; collective where the strategy is synchronous."""
        if not self._pending:
            return
        own = numpy.array([times.had_gradients for times in self._pending])
        slowest = self._slowest(own) if self._synchronous else own
        for times, slowest_gradients in zip(self._pending, slowest, strict=True):
            everybody = min(max(slowest_gradients, times.had_gradients + times.waited_s), times.exchanged)
            borders = (
                times.began,
                times.got_batch,
                times.had_gradients,
                everybody,
                times.exchanged,
                times.updated,
                times.ended,
            )
            self._parts.append([after - before for before, after in itertools.pairwise(borders)])
        self._pending.clear()

    def mean_parts(self, skip: int) -> dict[str, float]:
        """Mean seconds per step in each part, without the first `skip` steps."""
        kept = self._parts[skip:] or self._parts
        if not kept:
            return {}
        return dict(zip(PARTS, numpy.mean(kept, axis=0).tolist(), strict=True))

    def _slowest(self, own: Array) -> Array:
        offset_s = clock_offset_s(self._communicator)
        gathered = self._communicator.allgather_json((own - offset_s).tolist())
        slowest: Array = numpy.max(gathered, axis=0) + offset_s
        return slowest


def clock_offset_s(communicator: Communicator) -> float:
    """How far this rank's wall clock is ahead of rank 0's, from the quickest of some round trips; collective.

    0 on rank 0 and on ranks that share its host (and so its clock).
    """
    hosts: Sequence[str] = communicator.allgather_json(communicator.host)
    offset_s = 0.0
    for rank in range(1, communicator.size):
        if hosts[rank] == hosts[0]:
            continue
        if communicator.rank == 0:
            _answer_pings(communicator, rank)
        elif communicator.rank == rank:
            offset_s = _ping(communicator)
    return offset_s


def _answer_pings(communicator: Communicator, rank: int) -> None:
    stamp = numpy.zeros(1)
    for _ in range(PINGS):
        communicator.irecv(stamp, rank).wait()
        stamp[0] = time.time()
        communicator.isend(stamp, rank).wait()


def _ping(communicator: Communicator) -> float:
    stamp = numpy.zeros(1)
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        sent = time.time()
        communicator.isend(stamp, 0).wait()
        communicator.irecv(stamp, 0).wait()
        received = time.time()
        best = min(best, (received - sent, (sent + received) / 2 - float(stamp[0])))
    return best[1]
