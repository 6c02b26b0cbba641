"""Space in /dev/shm, which MPI and shared windows of several ranks on a node live in."""

from __future__ import annotations

import shutil

from hpcdl.core.units import format_bytes
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "shared-memory"
NEEDED_BYTES, COMFORTABLE_BYTES = 64 * 1024**2, 1024**3


def check(subject: Subject) -> list[Finding]:
    """Free space; below 64 MiB the MPI libraries fail to start several ranks on a node."""
    folder = subject.shared_memory
    if not folder.is_dir():
        return [failure(CHECK, f"{folder} does not exist", "mount a tmpfs there (containers: --shm-size=2g)")]
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {format_bytes(free)} free"
    remedy = f"remove what dead jobs left in {folder} (`ls -l {folder}`); in a container use --shm-size=2g"
    if free < NEEDED_BYTES:
        return [failure(CHECK, text, remedy)]
    return [warning(CHECK, text, remedy)] if free < COMFORTABLE_BYTES else [ok(CHECK, text)]
