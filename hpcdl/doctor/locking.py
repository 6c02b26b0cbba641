"""File locking where HDF5 files are read and written: HDF5 locks each file that it opens."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from hpcdl.doctor.finding import Finding, Subject, failure, ok

CHECK = "locking"
VARIABLE = "HDF5_USE_FILE_LOCKING"


def check(subject: Subject) -> list[Finding]:
    """flock, the call that HDF5 makes, on a new file in the current folder and on a shard of the data folder."""
    off = subject.environment.get(VARIABLE, "").upper() in ("FALSE", "0", "BEST_EFFORT")
    found = [_new_file(subject.working, off)]
    shard = next(subject.data.rglob("*.h5"), None) if subject.data else None
    if shard is not None:
        found.append(_existing(shard, off))
    return found


def _new_file(folder: Path, off: bool) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".h5") as probe:
            fcntl.flock(probe.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return _refused(str(folder), error, off)
    return ok(CHECK, f"files in {folder} can be locked")


def _existing(shard: Path, off: bool) -> Finding:
    try:
        descriptor = os.open(shard, os.O_RDONLY)
    except OSError as error:
        return failure(CHECK, f"{shard} cannot be read: {error.strerror}", f"chmod a+r {shard}, or ask its owner")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _refused(str(shard), error, off)
    finally:
        os.close(descriptor)
    return ok(CHECK, f"{shard} can be locked for reading")


def _refused(what: str, error: OSError, off: bool) -> Finding:
    text = f"{what}: the file system refuses locks ({error.strerror})"
    if off:
        return ok(CHECK, f"{text}, and {VARIABLE} says that HDF5 does without")
    return failure(CHECK, text, f"export {VARIABLE}=FALSE, or mount Lustre with -o flock")
