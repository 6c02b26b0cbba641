"""Gaps: times in which a rank waits for others and its core has nothing to do, for work that has time.

A wait that lasts is a gap once it has lasted LEAST_S. While background work wants one (`wanted`), who waits for a
message looks for it and sleeps between looks, in place of MPI's own wait, which spins: else no core would be idle.
Whether other threads of the process compute (back-propagation goes on while buckets travel) the worker looks itself.
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
"""Shorter waits are no gaps: nothing is done in them, and nobody remembers them."""
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 200e-6
"""Who waits sleeps so long between looks, at first less: what a gap costs at most when its message comes."""
_REMEMBERED = 64
_ASK_S = 0.5
"""So often who waits for a gap is asked whether it still wants one."""
_LOOK_S = 1e-3
"""How long a worker looks on before it takes the core for idle."""


class IdleGaps:
    """The gaps of one rank: waiting threads open and close them, workers take them."""

    def __init__(self) -> None:
        self.wanted = 0
        """How many jobs would work in a gap; where it is 0, waiting costs nothing more."""
        self.changed = threading.Condition()
        self._waits: dict[int, float] = {}
        self._lengths: deque[float] = deque(maxlen=_REMEMBERED)
        self._typical_s = math.inf

    @property
    def open_since_s(self) -> float | None:
        """When the oldest wait that goes on began (`time.monotonic`); None where nobody waits."""
        waits = tuple(self._waits.values())
        return min(waits) if waits else None

    @property
    def typical_s(self) -> float:
        """The median of the last gaps; infinite before the first."""
        return self._typical_s

    def enter(self, began_s: float) -> None:
        """The calling thread waits since `began_s`; as often as it likes."""
        me = threading.get_ident()
        if me not in self._waits:
            with self.changed:
                self._waits[me] = began_s
                self.changed.notify_all()

    def leave(self) -> None:
        """It waits no more."""
        began_s = self._waits.pop(threading.get_ident(), None)
        if began_s is not None and (length_s := time.monotonic() - began_s) >= LEAST_S:
            self._lengths.append(length_s)
            self._typical_s = statistics.median(self._lengths)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Return when `done`, a look at a message, says so; who wants gaps has the core until then."""
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
        """Inside, the thread waits for what is not a message: a batch, say."""
        if not self.wanted:
            yield
            return
        self.enter(time.monotonic())
        try:
            yield
        finally:
            self.leave()

    def fits(self, slice_s: float) -> bool:
        """Whether a gap is open that, as gaps go, lasts `slice_s` more.

        The next update is due when a typical one ends. One that has lasted twice as long is another kind: nobody knows
        its end, and it is used again.
        """
        since_s = self.open_since_s
        if since_s is None:
            return False
        lasted_s = time.monotonic() - since_s
        return lasted_s + slice_s <= self._typical_s or lasted_s > 2 * self._typical_s

    def take(self, slice_s: float, core: IdleCore, until_s: float, wants: Callable[[], bool]) -> bool:
        """Return True when there is a gap for `slice_s` of work; False at `until_s`, or where `wants` says no.

        To be called again and again by a thread that works between the calls.
        """
        while wants() and (left_s := until_s - time.monotonic()) > 0:
            with self.changed:
                if self.open_since_s is None:
                    self.changed.wait(min(left_s, _ASK_S))
                    core.forget()
                    continue
            if self.fits(slice_s) and core.is_idle() and self.open_since_s is not None:
                return True
            time.sleep(_LOOK_S)
        return False


class IdleCore:
    """Whether the cores of this process have nothing to do but for the calling thread, always the same one.

    It goes by the processor time of the process since the last look, where that was not long ago.
    """

    def __init__(self) -> None:
        self._num_cores = len(os.sched_getaffinity(0))
        self._mark = (-math.inf, 0.0)

    def forget(self) -> None:
        """Time has passed in which other things happened."""
        self._mark = (-math.inf, 0.0)

    def is_idle(self) -> bool:
        """Whether half a core at least was free since the last look; looks on for a moment where that is long ago."""
        before = self._mark
        if time.monotonic() - before[0] > 10 * _LOOK_S:
            before = self._now()
            time.sleep(_LOOK_S)
        self._mark = now = self._now()
        return now[1] - before[1] < (self._num_cores - 0.5) * (now[0] - before[0])

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), time.process_time() - time.thread_time()
