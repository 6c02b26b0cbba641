"""A share of this machine's processors for each host, so that hosts do not slow each other down."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Short, so that a host is slow rather than stopped for a while in each training step."""


def make_group(name: str, cores: float) -> Path:
    """Create a control group (of version 1 or 2) whose processes get `cores` processors in all."""
    quota = str(round(cores * PERIOD_US))
    weight = 1.25 ** -os.nice(0)  # a new group ignores the nice values of its processes
    if (ROOT / "cpu").is_dir():
        group = ROOT / "cpu" / name
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(quota)
        (group / "cpu.shares").write_text(str(round(1024 * weight)))
    else:
        group = ROOT / name
        group.mkdir()
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        (group / "cpu.weight").write_text(str(min(max(round(100 * weight), 1), 10_000)))
    return group


def entering(group: Path) -> list[str]:
    """Return the prefix of a command that puts it, and all processes that it starts, into `group`."""
    return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(group)]


def remove(group: Path) -> None:
    """Remove a group when its last process is gone."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
