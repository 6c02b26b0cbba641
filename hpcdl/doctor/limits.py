"""Limits of the shell and of the job's control group."""

from __future__ import annotations

import resource
from pathlib import Path

from hpcdl.core.units import format_bytes
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "limits"
OPEN_FILES, PROCESSES = 1024, 512
NEEDED_BYTES, COMFORTABLE_BYTES = 1024**3, 4 * 1024**3
"""A process with TensorFlow holds 0.5 to 1 GB before it has a model."""


def check(subject: Subject) -> list[Finding]:
    """Open files, processes, address space, and the memory that the job may use."""
    found = []
    for what, number, needed, flag in (
        ("open files", resource.RLIMIT_NOFILE, OPEN_FILES, "n"),
        ("processes and threads", resource.RLIMIT_NPROC, PROCESSES, "u"),
    ):
        soft, _ = resource.getrlimit(number)
        if 0 <= soft < needed:
            found.append(warning(CHECK, f"{what}: {soft} allowed, {needed} wanted", f"ulimit -{flag} {needed}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= soft < COMFORTABLE_BYTES:
        text = f"address space is limited to {format_bytes(soft)}: TensorFlow maps more than that"
        found.append(failure(CHECK, text, "ulimit -v unlimited"))
    memory = allowed_memory(subject.control_groups)
    if memory is not None and memory < COMFORTABLE_BYTES:
        text = f"this job may use {format_bytes(memory)} of memory"
        level = failure if memory < NEEDED_BYTES else warning
        found.append(level(CHECK, text, "ask for more (sbatch --mem)"))
    return found or [ok(CHECK, f"files, processes and memory{'' if memory is None else f' ({format_bytes(memory)})'}")]


def allowed_memory(root: Path, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit of this process's control groups (version 2, or version 1's memory group), or None."""
    limits = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, kind, path = line.split(":", 2)
        base, name = (root, "memory.max") if not kind else (root / "memory", "memory.limit_in_bytes")
        if kind and "memory" not in kind.split(","):
            continue
        start = base / path.lstrip("/")
        for folder in (start, *start.parents):
            text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            limits += [int(text)] if text.isdigit() and int(text) < 2**62 else []
            if folder == base:
                break
    return min(limits, default=None)
