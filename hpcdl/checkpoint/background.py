"""Background work: in the gaps of a step, in a thread beside it, or in the step (`--background gaps|thread|off`).

The work is cut into slices and calls its `Turn` before each. With gaps this call returns when the rank waits for others
and its core is idle, or when the job's patience is over; then the rest is done at once, as in a thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcdl.comm.gaps import IdleCore
from hpcdl.comm.observed import RankMonitor
from hpcdl.strategies.base.strategy import Features

GAPS, THREAD, OFF = "gaps", "thread", "off"
_FEW = 0.1
"""A job that did less than this fraction of its work in gaps shows that there are no gaps."""
_ENOUGH_S = 1.0
"""A job that may not wait longer than this shows nothing about gaps."""
_RETRY = 10
"""After a job without gaps, this number of jobs does not wait; then gaps are tried again."""
MOST_PATIENCE_S = 60.0
"""The longest patience, whatever the interval until the work is due."""
_FALLS_BACK = "--background gaps: {}; a thread does the background work"
_FIRST_SLICE_S = 1e-3
_SLICES = 8
"""The duration of a slice is averaged over about this number of slices."""


@dataclass(kw_only=True)
class Spent:
    """Seconds of processor time that background work took, in gaps and outside of them; per rank, for the record."""

    in_gaps_s: float = 0.0
    outside_s: float = 0.0


class AtOnce:
    """The turn of a caller that does the work at once."""

    def __call__(self) -> None:
        """Return at once."""

    def pause(self) -> None:
        """Do nothing: no time is counted."""


class Turn(AtOnce):
    """The turn of one job, called by its thread."""

    def __init__(self, work: BackgroundWork, patience_s: float) -> None:
        self._seen, self._gaps = work.seen, work.seen.gaps
        self._until_s = time.monotonic() + patience_s
        self._reports = patience_s >= _ENOUGH_S
        self._waits = patience_s > 0
        self._core = IdleCore()
        self._in_gap = False
        self._slice_s = _FIRST_SLICE_S
        self._began: tuple[float, float] | None = None
        self._piece: tuple[float, float, bool] | None = None
        self.spent = Spent()
        self.ran_out = False
        """Whether its patience was long enough to judge by, and ended before its work."""
        if self._waits:
            with self._gaps.changed:
                self._gaps.wanted += 1

    def __call__(self) -> None:
        """Return when the next slice may begin."""
        self.pause()
        if self._waits:
            self._in_gap = self._gaps.take(self._slice_s, self._core, self._until_s, self._wants)
            if not self._in_gap:
                self.ran_out = self._reports and self._wants()
                self.hurry()
        self._began = time.monotonic(), time.thread_time()

    def pause(self) -> None:
        """End the slice; what follows is not work but waiting, for a disk or for other ranks."""
        if self._began is None:
            return
        (began_s, began_processor_s), self._began = self._began, None
        # Processor time: wall time would include moments when a step had the core.
        now_s, took_s = time.monotonic(), time.thread_time() - began_processor_s
        fitted = self._in_gap and self._gaps.open_since_s is not None  # not if it outlasts its gap
        if fitted:
            self.spent.in_gaps_s += took_s
        else:
            self.spent.outside_s += took_s
        self._slice_s += (took_s - self._slice_s) / _SLICES
        self._in_gap = False
        self._keep(began_s, now_s, fitted)

    def hurry(self) -> None:
        """Do the rest at once: a caller waits for the job, or its patience is over."""
        with self._gaps.changed:
            if self._waits:
                self._waits = False
                self._gaps.wanted -= 1
                self._gaps.changed.notify_all()  # the job's thread may wait for a gap

    def end(self) -> None:
        """End the job."""
        self.pause()
        self.hurry()
        self._keep(math.inf, math.inf, False)

    def _wants(self) -> bool:
        return self._waits and threading.main_thread().is_alive()  # at exit Python joins this thread, and no gap comes

    def _keep(self, began_s: float, ended_s: float, fitted: bool) -> None:
        """Record a span; adjacent slices are merged into one."""
        before = self._piece
        if before is not None and before[2] == fitted and began_s - before[1] < _FIRST_SLICE_S:
            began_s = before[0]
        elif before is not None:
            self._seen.recorder.background(before[0], before[1], in_gap=before[2])
        self._piece = (began_s, ended_s, fitted)


class BackgroundJob:
    """One piece of background work in progress."""

    def __init__(self, name: str, turn: Turn, work: Callable[[Turn], None], over: Callable[[Turn], None]) -> None:
        self._turn, self._work, self._over = turn, work, over
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name=name)

    @property
    def continues(self) -> bool:
        """Whether its thread is running."""
        return self.thread.is_alive()

    def run(self) -> None:
        """Do the work; an error is kept for `wait`."""
        self._turn()
        try:
            self._work(self._turn)
        except BaseException as error:  # noqa: BLE001  raised again by `wait`
            self._failure = error
        finally:
            self._turn.end()
            self._over(self._turn)

    def wait(self) -> None:
        """Return when the work is done, without further waiting for gaps; raise its error if it failed."""
        self._turn.hurry()
        if self.thread.ident is not None:  # with `off` it never starts, and cannot be joined
            self.thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


class BackgroundWork:
    """The background work of one rank, in one of three ways. `log` gets one line, once, if the rank has no gaps."""

    def __init__(self, way: str, seen: RankMonitor, log: Callable[[str], None] = lambda text: None) -> None:
        self.way, self.seen, self._log = way, seen, log
        self.spent = Spent()
        self._lock = threading.Lock()
        self._impatient_jobs = 0
        self._logged = False

    def start(self, name: str, work: Callable[[Turn], None], patience_s: float = 0.0) -> BackgroundJob:
        """Start `work`, which calls its turn before each slice; with gaps it may wait up to `patience_s` for them."""
        with self._lock:
            waits = self.way == GAPS and not self._impatient_jobs
            self._impatient_jobs = max(0, self._impatient_jobs - 1)
        job = BackgroundJob(name, Turn(self, patience_s if waits else 0.0), work, self._note)
        if self.way == OFF:
            job.run()
        else:
            job.thread.start()
        return job

    def _note(self, turn: Turn) -> None:
        """Add up the time of a finished job, and note whether it found gaps."""
        spent = turn.spent
        with self._lock:
            self.spent.in_gaps_s += spent.in_gaps_s
            self.spent.outside_s += spent.outside_s
            if not turn.ran_out or spent.in_gaps_s >= _FEW * (spent.in_gaps_s + spent.outside_s):
                return
            self._impatient_jobs, logged, self._logged = _RETRY, self._logged, True
        if not logged:
            self._log("a step has no gaps that background work could use: it is done by a thread beside the steps")


def way_for(asked: str, features: Features, num_workers: int) -> tuple[str, str]:
    """Return how background work is done with a strategy, and a message about it, usually empty.

    A single rank never waits for others. If workers change one center without locks, or exchange inside TensorFlow's
    own engines, their waits are not visible.
    """
    if asked != GAPS or (num_workers > 1 and features.mpi and not features.lock_free):
        return asked, ""
    why = "one worker waits for nobody" if num_workers == 1 else "with this strategy nobody sees a worker wait"
    return THREAD, _FALLS_BACK.format(why)


def way_in_script(asked: str, num_ranks: int) -> tuple[str, list[str]]:
    """Return the same for a script, whose kind of exchange is not known in advance."""
    way, remark = way_for(asked, Features(), num_ranks)
    return way, [remark] if remark else []


def most_patience_s(way: str, stall_s: float) -> float:
    """Return how long a job may wait for gaps, so that ranks waiting for it are not taken as stalled (`stall_s`)."""
    return min(MOST_PATIENCE_S, stall_s / 4) if way == GAPS else 0.0
