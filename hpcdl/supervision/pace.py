"""Detects workers that stay slower than the others: reports them once; `--evict-slow` continues without them.

At intervals each worker writes the time of its own work in its steps, which every strategy reports (comm/observed.py).
Worker 0 compares. As in trace/, the measure of a straggler is its own work beyond the median of the others, relative to
the spread. A worker counts as slow if it is slow in several consecutive windows. A slow start, a slow step, or a moment
of other load on the node affects at most one window. Evaluations and checkpoints are between steps; steps during the
writing of a checkpoint are excluded (`RankMonitor.own_work`).
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

WINDOWS, WINDOWS_UNTIL_REPORTED = 6, 3
"""Consecutive slow windows before the run continues without a worker, and before the worker is reported."""
LEAST_STEPS = 3
"""Minimum steps of a worker in a window, and before its first window."""
NOTICED = 1.5
"""Workers slow by less than this factor are not reported by default; `hpcdl trace` shows more."""
PACE = "pace-"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a worker has spent so far: steps and the seconds of each of PARTS in them, and its counters, at `at_s`.

    `at_s` is a time of its own clock.
    """

    rank: int
    host: str
    at_s: float
    spent: Sequence[float]
    counters: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The mean step of one window: seconds of a worker's own work, of waiting for input in it, and of the step.

    Its own work is divided by the worker's share of the batch. `rates`: its counters' growth per second, or their
    level.
    """

    own_s: float
    input_s: float
    step_s: float
    rates: Mapping[str, float]


def work_between(before: Pace, after: Pace, share: float) -> Work:
    """Return the mean of the steps between two paces; a worker with twice the samples may take twice the time."""
    num_steps, *seconds = (b - a for a, b in zip(before.spent, after.spent, strict=True))
    parts = {name: total / num_steps for name, total in zip(PARTS, seconds, strict=True)}
    passed_s = max(after.at_s - before.at_s, 1e-9)
    step_s = sum(parts.values())
    grown = {name: count - before.counters[name] for name, count in after.counters.items() if name in before.counters}
    rates = {name: float(after.counters[name] if name in LEVELS else grew / passed_s) for name, grew in grown.items()}
    return Work(
        own_s=(step_s - parts["exchange"]) / share,
        input_s=parts["input"] / share,
        step_s=step_s,
        rates=rates,
    )


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A worker that takes `times` as long as the median of the others; `why` begins with the likely reason."""

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
        """Take the paces of all remaining workers; a worker with too few new steps continues its window."""
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
            other_times = [work.own_s for other_rank, work in self._latest.items() if other_rank != rank]
            if other_times:
                times = self._latest[rank].own_s / max(statistics.median(other_times), 1e-9)
                self._times.setdefault(rank, deque(maxlen=WINDOWS)).append(times)

    def slow(self, factor: float, num_windows: int) -> list[Slow]:
        """Return the workers slower than the others by more than `factor` in the last `num_windows`, slowest first."""
        slow_workers = []
        for rank, work in self._latest.items() if len(self._latest) > 1 else ():
            last = [*self._times.get(rank, ())][-num_windows:]
            if len(last) < num_windows or min(last) <= factor:
                continue
            times = statistics.fmean(last)
            # The part of its own work that it would save at the others' pace.
            late_s = work.own_s * self._shares[rank] * (1 - 1 / times)
            error = statistics.stdev(last) / math.sqrt(num_windows) if num_windows > 1 else 0.0
            if times - 1 > NUM_ERRORS * error and late_s > LEAST_SHARE * work.step_s:
                slow_workers.append(Slow(rank=rank, times=times, why=self._why(rank, late_s)))
        return sorted(slow_workers, key=lambda worker: -worker.times)

    def _why(self, rank: int, late_s: float) -> str:
        ranks = sorted(self._latest)
        row, works = ranks.index(rank), [self._latest[worker_rank] for worker_rank in ranks]
        input_s = numpy.array([work.input_s for work in works])
        own_s = numpy.array([work.own_s for work in works])
        excess = {
            INPUT_CAUSE: float(beyond_others(input_s)[row]),
            CONTENTION: float(beyond_others(own_s - input_s)[row]),
            BETWEEN: -math.inf,  # time between steps is not part of them
            COLLECTOR_CAUSE: 0.0,
        }
        names = set.intersection(*(set(work.rates) for work in works))
        rates = {name: numpy.array([work.rates[name] for work in works]) for name in names}
        cause, evidence = cause_of(row, excess, rates, late_s, works[row].step_s)
        return f"{cause}: {evidence}"


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """The rule of eviction: workers more than `factor` times slower than the others.

    `enough` takes a worker and the others, and returns whether the run could continue with the others. `leave` takes
    the evicted worker and the reason.
    """

    factor: float
    enough: Callable[[int, Sequence[int]], bool]
    leave: Callable[[int, str], None]


@dataclass(kw_only=True)
class PaceKeeper:
    """One rank's part in the comparison: call `look` at intervals; the first rank compares, and logs what it finds.

    `folder` must be visible to all ranks of the run; a window takes `window_s`.
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
        """Write this worker's pace once per window if it has advanced; worker 0 compares."""
        now_s = time.monotonic()
        if len(self.shares) < 2 or now_s - self._looked_s < self.window_s:
            return
        self._looked_s = now_s
        monitor = self.monitor
        if monitor.own_work[0] > self._written:
            self._written = monitor.own_work[0]
            self._write(
                Pace(rank=monitor.rank, host=monitor.host, at_s=now_s, spent=monitor.own_work, counters=sample())
            )
        if monitor.leads:
            self._compare()

    def _compare(self) -> None:
        paces = self._paces()
        self._compared.take(paces)
        for slow in self._compared.slow(NOTICED, WINDOWS_UNTIL_REPORTED):
            self._log_once("slow", slow.rank, self._words(slow, paces[slow.rank].host))
        if self.eviction is None:
            return
        # One at a time: without this worker the median changes, and others may no longer count as slow.
        for slow in self._compared.slow(self.eviction.factor, WINDOWS)[:1]:
            text = f"{self._words(slow, paces[slow.rank].host)}; --evict-slow {self.eviction.factor:g}"
            remaining = [rank for rank in paces if rank != slow.rank]
            if not self.eviction.enough(slow.rank, remaining):
                self._log_once("kept", slow.rank, f"{text} keeps it, for the others would be too few")
                continue
            self._gone.add(slow.rank)
            self.eviction.leave(slow.rank, f"{text} leaves it out")

    def _words(self, slow: Slow, host: str) -> str:
        least_s = self.window_s * WINDOWS_UNTIL_REPORTED
        return (
            f"rank {slow.rank} (worker) on {host} takes {slow.times:.1f} times as long as the others for its part of a "
            f"step, for {format_seconds(least_s)} and more; likely {slow.why}"
        )

    def _log_once(self, what: str, rank: int, text: str) -> None:
        if (what, rank) not in self._logged:
            self._logged.add((what, rank))
            self.log(text)

    def _paces(self) -> dict[int, Pace]:
        """Return the paces of the workers with which the run continues."""
        paces = {}
        for rank in range(len(self.shares)):
            if rank in self._gone or rank in self.monitor.lost:
                continue
            with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
                paces[rank] = from_json(Pace, read_json(self.folder / f"{PACE}{rank}"))
        return paces

    def _write(self, pace: Pace) -> None:
        make_folder(self.folder)
        write_note(self.folder / f"{PACE}{pace.rank}", dataclasses.asdict(pace))
