"""Divides the time of each step on each rank into six parts, whose sum is the step.

The graph stamps the last local gradient and the end of the exchange. Ranks compare their stamps at intervals, corrected
by the offset of their clocks. The clocks are monotonic (core/processes/wall.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy

from hpcdl.comm.clocks import clock_identity
from hpcdl.comm.observed import Traffic, observe
from hpcdl.core.processes.wall import WALL
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import ALL_STEPS_UP_TO, PARTS, HistoryPoint
from hpcdl.core.statistics import Sample

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

PINGS = 8


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Unix times in seconds at the borders between one step's parts."""

    began: float
    got_batch: float
    had_gradients: float
    exchanged: float
    updated: float
    ended: float
    waited_s: float = 0.0
    """Seconds of the exchange spent waiting for others, for strategies whose ranks do not compare their stamps."""
    follows: bool = False
    """Whether the other workers took this step without a gradient of this rank."""

    @property
    def borders(self) -> tuple[float, ...]:
        """All six times in order."""
        return self.began, self.got_batch, self.had_gradients, self.exchanged, self.updated, self.ended


class StepClock:
    """Splits the times of steps into parts and sums them; `synchronous` strategies wait for the slowest rank.

    Its memory does not grow with the number of steps, beyond the first ones.
    """

    def __init__(self, communicator: Communicator, *, synchronous: bool, warmup_steps: int = 0) -> None:
        self._steps_together = synchronous
        self._seen = observe(communicator).monitor
        self.join(communicator)
        self._warmup_steps = warmup_steps
        self.num_steps = 0
        self.last_s = 0.0
        """Seconds of the last step."""
        self.first_steps = array("d")
        """Seconds of the first ALL_STEPS_UP_TO steps, in order."""
        self._cold, self._warm = Sample(ALL_STEPS_UP_TO), Sample(ALL_STEPS_UP_TO)
        self._num_split = 0
        self._cold_parts, self._warm_parts = numpy.zeros(len(PARTS)), numpy.zeros(len(PARTS))

    @property
    def steps(self) -> Sample:
        """Seconds of the steps after the warm-up; of all steps if there were no others."""
        return self._warm if self._warm.count else self._cold

    @property
    def is_warm(self) -> bool:
        """Whether there were steps after the warm-up."""
        return self._warm.count > 0

    def join(self, communicator: Communicator) -> None:
        """Compare stamps with the ranks of this group from here on; drop the parts of steps not compared yet."""
        self._communicator = communicator
        self._synchronous = self._steps_together and communicator.size > 1
        self._pending: list[StepTimes] = []

    def add(self, times: StepTimes) -> None:
        """Add one step."""
        self._seen.step_over(times.borders, times.waited_s, follows=times.follows)
        self._pending.append(times)
        self.last_s = seconds = times.ended - times.began
        if self.num_steps < ALL_STEPS_UP_TO:
            self.first_steps.append(seconds)
        (self._cold if self.num_steps < self._warmup_steps else self._warm).add(seconds)
        self.num_steps += 1

    def flush(self) -> None:
        """Split the steps since the last flush into parts; collective if the strategy is synchronous."""
        if not self._pending:
            return
        own_times = numpy.array([times.had_gradients for times in self._pending])
        slowest = self._slowest(own_times) if self._synchronous else own_times
        for times, slowest_gradients in zip(self._pending, slowest, strict=True):
            # The clocks' error could put the slowest rank's gradients after the exchange: no part may be negative.
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
            sums = self._cold_parts if self._num_split < self._warmup_steps else self._warm_parts
            sums += numpy.diff(borders)
            self._num_split += 1
        self._pending.clear()

    def mean_parts(self) -> dict[str, float]:
        """Return the mean seconds per step of each part, over the steps after the warm-up, else over all steps."""
        num_cold = min(self._num_split, self._warmup_steps)
        sums, count = (self._warm_parts, self._num_split - num_cold) if self._num_split > num_cold else (
            self._cold_parts, num_cold
        )  # fmt: skip
        return dict(zip(PARTS, (sums / count).tolist(), strict=True)) if count else {}

    def _slowest(self, seconds: Array) -> Array:
        offset_s = clock_offset_s(self._communicator)
        gathered = self._communicator.allgather_json((seconds - offset_s).tolist())
        # Back to this rank's own clock.
        slowest: Array = numpy.max(gathered, axis=0) + offset_s
        return slowest


def clock_offset_s(communicator: Communicator) -> float:
    """Return how far this rank's clock is ahead of rank 0's, from the fastest of several round trips; collective.

    Ranks that share rank 0's monotonic clock differ only in the time of day that each read at its start.
    """
    clocks: Sequence[tuple[str, float]] = communicator.allgather_json((clock_identity(), WALL.ahead_s))
    (identity, ahead_s), (own_identity, own_ahead_s) = clocks[0], clocks[communicator.rank]
    offset_s = own_ahead_s - ahead_s if own_identity == identity else 0.0
    # One rank after another: answers that queue on rank 0 would lengthen the round trips.
    for rank in range(1, communicator.size):
        if clocks[rank][0] == identity:
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
        stamp[0] = WALL.now_s()
        communicator.isend(stamp, rank).wait()


def _ping(communicator: Communicator) -> float:
    stamp = numpy.zeros(1)
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        sent = WALL.now_s()
        communicator.isend(stamp, 0).wait()
        communicator.irecv(stamp, 0).wait()
        received = WALL.now_s()
        # Cristian's algorithm: both ways are taken to last equally long, and the fastest trip errs least.
        best = min(best, (received - sent, (sent + received) / 2 - float(stamp[0])))
    return best[1]


@dataclass(kw_only=True)
class Outcome:
    """Times, history and warnings of one worker."""

    clock: StepClock
    steps_done: int = 0
    seconds: float = 0.0
    center_steps: int | None = None
    """Steps of a run whose workers do not step together: center updates divided by the number of workers."""
    seconds_to_target: float | None = None
    checkpoint_interval: Mapping[str, float] = field(default_factory=dict)
    background: Mapping[str, float] = field(default_factory=dict)
    bucket_bytes: int | None = None
    """The bucket size of a run that chose it by trial; `bucket_seconds` are the trial times."""
    bucket_seconds: Mapping[str, float] = field(default_factory=dict)
    history: list[HistoryPoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_lost: int = 0
    """Ranks that were lost during the run."""
    traffic: Traffic = field(default_factory=Traffic)
    """Traffic of the exchange, summed over the steps; that between steps (evaluation, checkpoints) is excluded."""
