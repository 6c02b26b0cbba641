"""Storage of the node's own: staging of data and environment, and temporary files of MPI."""

from __future__ import annotations

import os
import shutil

from hpcdl.core.units import format_bytes
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "scratch"
NEEDED_BYTES, COMFORTABLE_BYTES = 32 * 1024**2, 4 * 1024**3


def check(subject: Subject) -> list[Finding]:
    """Free space and the right to write. MPI's start-up puts its sockets there."""
    folder = subject.scratch
    other = "set TMPDIR to a folder of this node with space"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [failure(CHECK, f"{folder} is no folder that you may write to", other)]
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {format_bytes(free)} free"
    if free < NEEDED_BYTES:
        return [failure(CHECK, f"{text}: it is full", f"clear {folder}, or {other}")]
    if free < COMFORTABLE_BYTES:
        return [warning(CHECK, f"{text}: too little for --stage-env or staged shards", other)]
    return [ok(CHECK, text)]
