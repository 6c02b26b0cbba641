"""One place where a run reads the time of day."""

from __future__ import annotations

import re
from pathlib import Path

from hpcdl.core.wall import WallClock

ROOMS = ("comm", "collectives", "strategies", "trace", "training/loop", "training/keras", "training/session")
OUT_OF_A_RUN = {"live.py", "inject.py"}
"""Who looks on from outside; and moments of faults, which all ranks draw alike."""


def test_nothing_in_a_run_reads_the_time_of_day_elsewhere() -> None:
    """Else a clock that is ahead on purpose would be ahead in some stamps of a step and not in others."""
    package = Path(__file__).resolve().parents[2] / "hpcdl"
    paths = [path for room in ROOMS for path in (package / room).rglob("*.py") if path.name not in OUT_OF_A_RUN]
    assert len(paths) > 50
    found = [
        path.name
        for path in paths
        if re.search(r"\btime\.time\b|return tf\.timestamp\(\)$", path.read_text(), re.MULTILINE)
    ]
    assert found == []


def test_a_shifted_clock_is_ahead() -> None:
    clock = WallClock()
    before = clock.now_s()
    clock.shift_s = 5.0
    assert clock.now_s() >= before + 5
