"""File systems: of the runs' folder, of the data, of the node itself, in memory; and their file locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from hpcdl.core.units import format_bytes
from hpcdl.data.write.lustre import file_system_of, stripes_of
from hpcdl.doctor.table import Finding, Subject, failure, ok, warning

NEEDED_BYTES, COMFORTABLE_BYTES = 64 * 1024**2, 5 * 1024**3
_PROBE_BYTES = 1024**2
SCRATCH_NEEDED_BYTES, SCRATCH_COMFORTABLE_BYTES = 32 * 1024**2, 4 * 1024**3
SHARED_MEMORY_NEEDED_BYTES, SHARED_MEMORY_COMFORTABLE_BYTES = 64 * 1024**2, 1024**3
LOCKING_VARIABLE = "HDF5_USE_FILE_LOCKING"


def check_storage(subject: Subject) -> list[Finding]:
    """Check kind, free space, and a write of 1 MB (to find an exhausted quota); report stripes of data on Lustre."""
    findings = [_place_to_write(subject.working)]
    if subject.data is not None:
        findings.append(_data(subject.data))
    return findings


def _place_to_write(folder: Path) -> Finding:
    system = file_system_of(folder)
    text = f"{folder} on {system.kind}, {format_bytes(system.free_bytes)} free"
    elsewhere = "work in another folder, or give --run-dir one"
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            # Network file systems may refuse data for a quota only when it is written back.
            os.fsync(probe.fileno())
    except OSError as error:
        why = "your quota is used up" if error.errno == errno.EDQUOT else (error.strerror or str(error))
        return failure(f"{text}; writing fails: {why}", elsewhere)
    if system.free_bytes < NEEDED_BYTES:
        return failure(f"{text}: no room for a checkpoint", elsewhere)
    if system.free_bytes < COMFORTABLE_BYTES:
        return warning(f"{text}: checkpoints may not fit", elsewhere)
    return ok(text)


def _data(folder: Path) -> Finding:
    if not folder.is_dir():
        return failure(f"the data folder {folder} does not exist on this node", "check the path and the mounts")
    system = file_system_of(folder)
    text = f"data {folder} on {system.kind}"
    # The first one only: listing all shards would burden the metadata server.
    shard = next(folder.rglob("*.h5"), None)
    if not system.is_lustre or shard is None:
        return ok(text)
    try:
        stripes = stripes_of(shard)
    except (HpcdlError, ValueError) as error:
        return warning(f"{text}; its stripes cannot be read ({error})", "ask the site's staff for `lfs`")
    return ok(f"{text}, {shard.name} over {stripes.count} OST(s), stripes of {format_bytes(stripes.size)}")


def check_scratch(subject: Subject) -> list[Finding]:
    """Check free space and write permission. MPI puts its sockets there at its start."""
    folder = subject.scratch
    remedy = "set TMPDIR to a folder of this node with space"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [failure(f"{folder} is not a folder that you may write to", remedy)]
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {format_bytes(free)} free"
    if free < SCRATCH_NEEDED_BYTES:
        return [failure(f"{text}: it is full", f"clear {folder}, or {remedy}")]
    if free < SCRATCH_COMFORTABLE_BYTES:
        return [warning(f"{text}: too little for --stage-env or staged shards", remedy)]
    return [ok(text)]


def check_shared_memory(subject: Subject) -> list[Finding]:
    """Check free space; below 64 MiB the MPI libraries fail to start several ranks on a node."""
    folder = subject.shared_memory
    if not folder.is_dir():
        return [failure(f"{folder} does not exist", "mount a tmpfs there (containers: --shm-size=2g)")]
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {format_bytes(free)} free"
    remedy = f"remove what dead jobs left in {folder} (`ls -l {folder}`); in a container use --shm-size=2g"
    if free < SHARED_MEMORY_NEEDED_BYTES:
        return [failure(text, remedy)]
    return [warning(text, remedy)] if free < SHARED_MEMORY_COMFORTABLE_BYTES else [ok(text)]


def check_locking(subject: Subject) -> list[Finding]:
    """Check flock, which HDF5 calls, on a new file in the current folder and on a shard of the data folder."""
    off = subject.environment.get(LOCKING_VARIABLE, "").upper() in ("FALSE", "0", "BEST_EFFORT")
    findings = [_new_file(subject.working, off)]
    shard = next(subject.data.rglob("*.h5"), None) if subject.data else None
    if shard is not None:
        findings.append(_existing(shard, off))
    return findings


def _new_file(folder: Path, off: bool) -> Finding:
    try:
        probe = tempfile.NamedTemporaryFile(dir=folder, suffix=".h5")  # noqa: SIM115  closed below
    except OSError as error:
        text = f"{folder}: locks were not tried, since no file can be made there ({error.strerror})"
        return warning(text, "work in another folder, or give --run-dir one")
    with probe:
        try:
            fcntl.flock(probe.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return _refused(str(folder), error, off)
    return ok(f"files in {folder} can be locked")


def _existing(shard: Path, off: bool) -> Finding:
    try:
        descriptor = os.open(shard, os.O_RDONLY)
    except OSError as error:
        return failure(f"{shard} cannot be read: {error.strerror}", f"chmod a+r {shard}, or ask its owner")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _refused(str(shard), error, off)
    finally:
        os.close(descriptor)
    return ok(f"{shard} can be locked for reading")


def _refused(what: str, error: OSError, off: bool) -> Finding:
    text = f"{what}: the file system refuses locks ({error.strerror})"
    if off:
        return ok(f"{text}, and {LOCKING_VARIABLE} says that HDF5 does without")
    return failure(text, f"export {LOCKING_VARIABLE}=FALSE, or mount Lustre with -o flock")
