"""The processors that a rank may use, read from folders like the kernel's control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcdl.trace import counters

GROUPS = {
    "version 2": {"cpu.max": "25000 100000"},
    "version 2 without a quota": {"cpu.max": "max 100000"},
    "version 1": {"cpu.cfs_quota_us": "2500", "cpu.cfs_period_us": "10000"},
    "version 1 without a quota": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
    "none": {},
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_quota_of_processors(kind: str, tmp_path: Path) -> None:
    for name, text in GROUPS[kind].items():
        (tmp_path / name).write_text(f"{text}\n")
    if kind == "none" or "without" in kind:
        with pytest.raises((OSError, ValueError)):
            counters._quota(tmp_path)
    else:
        assert counters._quota(tmp_path) == 0.25


def test_this_process_may_use_no_more_than_it_is_bound_to() -> None:
    found = counters.sample()
    assert 0 < found[counters.PROCESSORS] <= 1000 * len(os.sched_getaffinity(0))
    assert counters.LEVELS and {*counters.LEVELS} - {counters.CLOCK_KHZ} <= found.keys()
