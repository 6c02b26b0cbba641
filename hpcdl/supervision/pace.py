"""Workers that are slower than the others for long: told of once, and with `--evict-slow` the run goes on without them.

Each worker writes down from time to time what it has spent in the parts of its steps that are its own work, which is
known of every strategy (comm/observed.py); worker 0 compares. The measure is the one by which trace/ finds stragglers:
what a worker's own work takes beyond the median of the others', against the spread of that. Slow is who is so in window
after window: a slow start, a slow step, a moment in which the node had other work fill none or one of them. Evaluations
and checkpoints lie between steps; steps beside which a checkpoint is written are left out (`RankMonitor.own_work`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.observed import PARTS, RankMonitor
from hpcdl.core.errors import CorruptError
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.disk import make_folder
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import format_seconds
from hpcdl.supervision.watchdog import write_note
from hpcdl.trace.counters import LEVELS, sample
from hpcdl.trace.stragglers import (
    BETWEEN,
    COLLECTOR_CAUSE,
    CONTENTION,
    INPUT_CAUSE,
    LEAST_SHARE,
    NUM_ERRORS,
    beyond_others,
    cause_of,
)

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

WINDOWS, WINDOWS_UNTIL_TOLD = 6, 3
"""Windows in a row in which a worker is slow before the run goes on without it, and before it is told of."""
LEAST_STEPS = 3
"""Of a worker in a window; before its first window, too."""
NOTICED = 1.5
"""Times as long as the others: who is not so much slower is not told of unasked; `hpcdl trace` says more."""
PACE = "pace-"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a worker has spent so far: steps and the seconds of each of PARTS in them, and its counters, at `at_s`.

    `at_s` is of its own clock.
    """

    rank: int
    host: str
    at_s: float
    spent: Sequence[float]
    counters: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step of one window in the mean: seconds of a worker's own work, of waiting for input in it, and of the step.

    Its own work is divided by the worker's share of the batch. `rates`: what its counters grow by in a second, or
    are.
    """

    own_s: float
    input_s: float
    step_s: float
    rates: Mapping[str, float]


def work_between(before: Pace, after: Pace, share: float) -> Work:
    """The mean of the steps from one pace to the next; a worker with twice the samples may take twice the time."""
    num_steps, *seconds = (b - a for a, b in zip(before.spent, after.spent, strict=True))
    parts = {name: total / num_steps for name, total in zip(PARTS, seconds, strict=True)}
    passed_s = max(after.at_s - before.at_s, 1e-9)
    step_s = sum(parts.values())
    grown = {name: count - before.counters[name] for name, count in after.counters.items() if name in before.counters}
    rates = {name: float(after.counters[name] if name in LEVELS else more / passed_s) for name, more in grown.items()}
    return Work(
        own_s=(step_s - parts["exchange"]) / share,
        input_s=parts["input"] / share,
        step_s=step_s,
        rates=rates,
    )


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A worker that takes `times` as long as the median of the others, likely for the reason that `why` begins with."""

    rank: int
    times: float
    why: str


class Paces:
    """The work of all workers, window by window; `shares` of the batch by worker, 1 in the mean."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._begun: dict[int, Pace] = {}
        self._latest: dict[int, Work] = {}
        self._times: dict[int, deque[float]] = {}

    def take(self, paces: Mapping[int, Pace]) -> None:
        """The paces of all workers that are still there; those with too few new steps go on with their window."""
        self._latest = {rank: work for rank, work in self._latest.items() if rank in paces}
        fresh = []
        for rank, pace in paces.items():
            before = self._begun.get(rank)
            if pace.spent[0] - (before.spent[0] if before else 0) < LEAST_STEPS:
                continue
            self._begun[rank] = pace
            if before is not None:
                self._latest[rank] = work_between(before, pace, self._shares[rank])
                fresh.append(rank)
        for rank in fresh:
            others = [work.own_s for other, work in self._latest.items() if other != rank]
            if others:
                times = self._latest[rank].own_s / max(statistics.median(others), 1e-9)
                self._times.setdefault(rank, deque(maxlen=WINDOWS)).append(times)

    def slow(self, factor: float, num_windows: int) -> list[Slow]:
        """Who has taken more than `factor` times as long as the others in the last `num_windows`, the slowest first."""
        found = []
        for rank, work in self._latest.items() if len(self._latest) > 1 else ():
            last = [*self._times.get(rank, ())][-num_windows:]
            if len(last) < num_windows or min(last) <= factor:
                continue
            times = statistics.fmean(last)
            late_s = work.own_s * self._shares[rank] * (1 - 1 / times)
            error = statistics.stdev(last) / math.sqrt(num_windows) if num_windows > 1 else 0.0
            if times - 1 > NUM_ERRORS * error and late_s > LEAST_SHARE * work.step_s:
                found.append(Slow(rank=rank, times=times, why=self._why(rank, late_s)))
        return sorted(found, key=lambda one: -one.times)

    def _why(self, rank: int, late_s: float) -> str:
        ranks = sorted(self._latest)
        row, works = ranks.index(rank), [self._latest[other] for other in ranks]
        input_s = numpy.array([work.input_s for work in works])
        own_s = numpy.array([work.own_s for work in works])
        excess = {
            INPUT_CAUSE: float(beyond_others(input_s)[row]),
            CONTENTION: float(beyond_others(own_s - input_s)[row]),
            BETWEEN: -math.inf,  # what lies between steps is not part of them
            COLLECTOR_CAUSE: 0.0,
        }
        names = set.intersection(*(set(work.rates) for work in works))
        rates = {name: numpy.array([work.rates[name] for work in works]) for name in names}
        cause, evidence = cause_of(row, excess, rates, late_s, works[row].step_s)
        return f"{cause}: {evidence}"


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Who is done without: workers more than `factor` times slower.

    `enough` says of one whether the run could go on with the others, who are given too. `leave` is told of the one that
    it is to go on without, and why.
    """

    factor: float
    enough: Callable[[int, Sequence[int]], bool]
    leave: Callable[[int, str], None]


@dataclass(kw_only=True)
class PaceKeeper:
    """One rank's part in it: call `look` every now and then; the first compares, and logs what it finds.

    `folder` is one that all ranks of the run see; a window takes `window_s`.
    """

    monitor: RankMonitor
    folder: Path
    window_s: float
    shares: Sequence[float]
    log: Callable[[str], None] = lambda text: None
    eviction: Eviction | None = None
    _logged: set[tuple[str, int]] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._compared = Paces(self.shares)
        self._looked_s = time.monotonic()
        self._written = 0.0

    def look(self) -> None:
        """Write this worker's pace once in a window, where it has moved; worker 0 compares."""
        now_s = time.monotonic()
        if len(self.shares) < 2 or now_s - self._looked_s < self.window_s:
            return
        self._looked_s = now_s
        seen = self.monitor
        if seen.own_work[0] > self._written:
            self._written = seen.own_work[0]
            self._write(Pace(rank=seen.rank, host=seen.host, at_s=now_s, spent=seen.own_work, counters=sample()))
        if seen.leads:
            self._compare()

    def _compare(self) -> None:
        paces = self._paces()
        self._compared.take(paces)
        for slow in self._compared.slow(NOTICED, WINDOWS_UNTIL_TOLD):
            self._log_once("slow", slow.rank, self._words(slow, paces[slow.rank].host))
        if self.eviction is None:
            return
        for slow in self._compared.slow(self.eviction.factor, WINDOWS)[:1]:
            words = f"{self._words(slow, paces[slow.rank].host)}; --evict-slow {self.eviction.factor:g}"
            left = [rank for rank in paces if rank != slow.rank]
            if not self.eviction.enough(slow.rank, left):
                self._log_once("kept", slow.rank, f"{words} keeps it, for the others would be too few")
                continue
            self._gone.add(slow.rank)
            self.eviction.leave(slow.rank, f"{words} leaves it out")

    def _words(self, slow: Slow, host: str) -> str:
        least_s = self.window_s * WINDOWS_UNTIL_TOLD
        return (
            f"rank {slow.rank} (worker) on {host} takes {slow.times:.1f} times as long as the others for its part of a "
            f"step, for {format_seconds(least_s)} and more; likely {slow.why}"
        )

    def _log_once(self, what: str, rank: int, text: str) -> None:
        if (what, rank) not in self._logged:
            self._logged.add((what, rank))
            self.log(text)

    def _paces(self) -> dict[int, Pace]:
        """Of the workers that the run still goes on with."""
        found = {}
        for rank in range(len(self.shares)):
            if rank in self._gone or rank in self.monitor.lost:
                continue
            with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
                found[rank] = from_json(Pace, read_json(self.folder / f"{PACE}{rank}"))
        return found

    def _write(self, pace: Pace) -> None:
        make_folder(self.folder)
        write_note(self.folder / f"{PACE}{pace.rank}", dataclasses.asdict(pace))
