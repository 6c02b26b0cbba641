"""What a check says, and what it looks at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OK, WARNING, FAILURE = "ok", "warning", "failure"
"""failure: a run here will fail; warning: it will be slow, or may fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence on one thing; `remedy` says what to type or whom to ask, where anything is wrong."""

    check: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is examined: an environment, the folders that a run would use, and the roots of the kernel's own files."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    data: Path | None = None
    working: Path = field(default_factory=Path.cwd)
    shared_memory: Path = Path("/dev/shm")
    control_groups: Path = Path("/sys/fs/cgroup")
    model: str = ""

    @property
    def scratch(self) -> Path:
        """Storage of the node's own."""
        return Path(self.environment.get("HPCDL_NODE_STORAGE") or self.environment.get("TMPDIR") or "/tmp")

    @property
    def ranks_here(self) -> int:
        """Ranks that the job puts on a node, 1 outside any job."""
        text = self.environment.get("SLURM_NTASKS_PER_NODE", "1").split("(")[0]
        return int(text) if text.isdigit() else 1


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check=check, level=OK, text=text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """It works, but."""
    return Finding(check=check, level=WARNING, text=text, remedy=remedy)


def failure(check: str, text: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(check=check, level=FAILURE, text=text, remedy=remedy)
