"""Gaps: times in which a rank waits for others and its core is idle, to be used for work that is not urgent.

A wait becomes a gap after LEAST_S. While background work needs gaps (`wanted`), a rank that waits for a message polls
and sleeps between polls, instead of MPI's own wait, which spins and would leave no core idle. Whether other threads of
the process compute (back-propagation continues while buckets travel) the background worker checks itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

LEAST_S = 1e-3
"""Shorter waits are no gaps: they are neither used nor recorded."""
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 200e-6
"""The growing sleep between polls: the maximum is the most that a gap can delay the message."""
_REMEMBERED = 64
_ASK_S = 0.5
"""Interval at which a thread that waits for a gap is asked whether it still wants one."""
_LOOK_S = 1e-3
"""How long a worker observes a core before it counts as idle."""


class IdleGaps:
    """The gaps of one rank: waiting threads open and close them, background workers use them."""

    def __init__(self) -> None:
        self.wanted = 0
        """How many jobs would work in a gap; at 0 waiting has no extra cost."""
        self.changed = threading.Condition()
        self._waits: dict[int, float] = {}
        self._lengths: deque[float] = deque(maxlen=_REMEMBERED)
        self._typical_s = math.inf

    @property
    def open_since_s(self) -> float | None:
        """Start of the oldest wait in progress (`time.monotonic`); None if no thread waits."""
        # A copy: other threads enter and leave meanwhile.
        waits = tuple(self._waits.values())
        return min(waits) if waits else None

    def enter(self, began_s: float) -> None:
        """Note that the calling thread waits since `began_s`; may be called repeatedly."""
        me = threading.get_ident()
        if me not in self._waits:
            with self.changed:
                self._waits[me] = began_s
                self.changed.notify_all()

    def leave(self) -> None:
        """Note that the calling thread no longer waits."""
        began_s = self._waits.pop(threading.get_ident(), None)
        if began_s is not None and (length_s := time.monotonic() - began_s) >= LEAST_S:
            self._lengths.append(length_s)
            self._typical_s = statistics.median(self._lengths)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Return when `done`, a poll of a message, returns True; until then background work may use the core."""
        began_s, pause_s = time.monotonic(), 0.0
        try:
            while not done():
                pause_s = min(pause_s + _PAUSE_STEP_S, _LONGEST_PAUSE_S)
                time.sleep(pause_s)
                if time.monotonic() - began_s >= LEAST_S:
                    self.enter(began_s)
        finally:
            self.leave()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the thread waits for something other than a message, such as a batch."""
        if not self.wanted:
            yield
            return
        self.enter(time.monotonic())
        try:
            yield
        finally:
            self.leave()

    def fits(self, slice_s: float) -> bool:
        """Whether a gap is open that is likely to last `slice_s` more.

        The rank needs its core again when a typical gap ends. A gap that has lasted twice as long is of another kind
        with an unknown end, so it is used again.
        """
        since_s = self.open_since_s
        if since_s is None:
            return False
        lasted_s = time.monotonic() - since_s
        return lasted_s + slice_s <= self._typical_s or lasted_s > 2 * self._typical_s

    def take(self, slice_s: float, core: IdleCore, until_s: float, wants: Callable[[], bool]) -> bool:
        """Return True when there is a gap for `slice_s` of work; False at `until_s`, or when `wants` returns False.

        A thread that works between the calls calls this repeatedly.
        """
        while wants() and (left_s := until_s - time.monotonic()) > 0:
            with self.changed:
                if self.open_since_s is None:
                    self.changed.wait(min(left_s, _ASK_S))
                    core.forget()
                    continue
            # Looking for an idle core may take a millisecond, in which the message may have arrived.
            if self.fits(slice_s) and core.is_idle() and self.open_since_s is not None:
                return True
            time.sleep(_LOOK_S)
        return False


class IdleCore:
    """Detects whether this process's cores are idle except for the calling thread, which must always be the same.

    It uses the CPU time of the process since the last check, if that was recent.
    """

    def __init__(self) -> None:
        self._num_cores = len(os.sched_getaffinity(0))
        self._mark = (-math.inf, 0.0)

    def forget(self) -> None:
        """Discard the last check, because other things happened since."""
        self._mark = (-math.inf, 0.0)

    def is_idle(self) -> bool:
        """Whether at least half a core was free since the last check; measures for a moment if that was long ago."""
        before = self._mark
        if time.monotonic() - before[0] > 10 * _LOOK_S:
            before = self._now()
            time.sleep(_LOOK_S)
        self._mark = after = self._now()
        return after[1] - before[1] < (self._num_cores - 0.5) * (after[0] - before[0])

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), time.process_time() - time.thread_time()
