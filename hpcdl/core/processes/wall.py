"""The clock of a run: the time of day when the process started, continued by the monotonic clock.

Setting the system clock during a run (NTP, an administrator, a paused virtual machine) therefore changes no time stamp
or duration of that run. The amount by which it was set is known and reported (`set_by_s`).
"""

from __future__ import annotations

import time

NOTICED_S = 0.5
"""A larger difference means that the system clock was set, and not only read late."""
_MOVED_S = 1e-3
"""Two readings of both clocks nearly always differ by less than this by chance."""


class WallClock:
    """The clock of one host, shared by everything in this process. Only an injected skew shifts it."""

    def __init__(self) -> None:
        self.shift_s = 0.0
        """Seconds by which it is ahead of the kernel's clock."""
        self._begin_s = time.time() - time.monotonic()
        self._set_by_s, self._set_by_before_s = 0.0, 0.0

    @property
    def ahead_s(self) -> float:
        """Seconds by which it is ahead of `time.monotonic`; constant for the life of the process."""
        return self._begin_s + self.shift_s

    def now_s(self) -> float:
        """Return Unix time in seconds; it never goes back or jumps."""
        return time.monotonic() + self.ahead_s

    def set_by_s(self) -> float:
        """Return the seconds by which the system clock was set ahead (back: negative) since this process began."""
        found_s = time.time() - time.monotonic() - self._begin_s
        if abs(found_s - self._set_by_s) > _MOVED_S:
            self._set_by_before_s, self._set_by_s = self._set_by_s, found_s
        return self._set_by_s

    def settled(self, stamp_s: float, since_s: float) -> float:
        """Return the time of this clock for a graph's `stamp_s` (strategies/base/graph.py), taken after `since_s`.

        A negative stamp is a time that TensorFlow read from the system clock, whatever that was set to by then.
        """
        if stamp_s >= 0:
            return stamp_s
        now_s = self.now_s()
        # Both amounts are tried: the clock may have been set after the stamp was taken.
        moments_s = [self.shift_s - stamp_s - set_by_s for set_by_s in (self.set_by_s(), self._set_by_before_s)]
        fits = (moment_s for moment_s in moments_s if since_s - _MOVED_S <= moment_s <= now_s + _MOVED_S)
        return min(max(next(fits, moments_s[0]), since_s), now_s)  # parts of a step are never negative


WALL = WallClock()
