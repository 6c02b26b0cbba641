"""The time of day as this rank's host has it: the one place where a run reads it, and `--inject skew` shifts it."""

from __future__ import annotations

import time


class WallClock:
    """A host's clock. A process has one, as its host has, so it is shared; only a skew on purpose ever moves it."""

    def __init__(self) -> None:
        self.shift_s = 0.0
        """How far it is ahead of the kernel's, in seconds."""

    def now_s(self) -> float:
        """Unix time in seconds."""
        return time.time() + self.shift_s


WALL = WallClock()
