"""The clock of a run: the time of day as this process found it, carried on by the monotonic clock.

Whoever sets the system's clock meanwhile (NTP, an administrator, a virtual machine that stood still) moves no time
stamp of a run against another, and so no duration; by how much it was set is known, and said (`set_by_s`).
"""

from __future__ import annotations

import time

NOTICED_S = 0.5
"""The system's clock has been set, and has not just been read late, where it is off by more than this."""
_MOVED_S = 1e-3
"""What lies between two readings of both clocks by chance is less, nearly always."""


class WallClock:
    """A host's clock. A process has one, as its host has, so it is shared; only a skew on purpose ever moves it."""

    def __init__(self) -> None:
        self.shift_s = 0.0
        """How far it is ahead of the kernel's, in seconds."""
        self._begin_s = time.time() - time.monotonic()
        self._set_by_s, self._set_by_before_s = 0.0, 0.0

    @property
    def ahead_s(self) -> float:
        """How far it is ahead of `time.monotonic`; the same as long as the process lives."""
        return self._begin_s + self.shift_s

    def now_s(self) -> float:
        """Unix time in seconds, which never goes back nor leaps."""
        return time.monotonic() + self.ahead_s

    def set_by_s(self) -> float:
        """How far the system's clock has been set ahead (back: negative) since this process began."""
        found_s = time.time() - time.monotonic() - self._begin_s
        if abs(found_s - self._set_by_s) > _MOVED_S:
            self._set_by_before_s, self._set_by_s = self._set_by_s, found_s
        return self._set_by_s

    def settled(self, stamp_s: float, since_s: float) -> float:
        """A time of this clock from a graph's `stamp_s` (strategies/base/graph.py), which was made after `since_s`.

        A negative one is of the system's clock, told by TensorFlow, whatever that was set to by then.
        """
        if stamp_s >= 0:
            return stamp_s
        now_s = self.now_s()
        moments_s = [self.shift_s - stamp_s - set_by_s for set_by_s in (self.set_by_s(), self._set_by_before_s)]
        fits = (one for one in moments_s if since_s - _MOVED_S <= one <= now_s + _MOVED_S)
        return min(max(next(fits, moments_s[0]), since_s), now_s)


WALL = WallClock()
