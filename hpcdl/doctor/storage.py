"""File systems of the folder that runs are written to and of the data."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from hpcdl.core.units import format_bytes
from hpcdl.data.lustre import file_system_of, stripes_of
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "storage"
NEEDED_BYTES, COMFORTABLE_BYTES = 64 * 1024**2, 5 * 1024**3
_PROBE_BYTES = 1024**2


def check(subject: Subject) -> list[Finding]:
    """Kind, free space, and a megabyte really written (which also finds a used-up quota); stripes of data on Lustre."""
    found = [_place_to_write(subject.working)]
    if subject.data is not None:
        found.append(_data(subject.data))
    return found


def _place_to_write(folder: Path) -> Finding:
    system = file_system_of(folder)
    text = f"{folder} on {system.kind}, {format_bytes(system.free_bytes)} free"
    elsewhere = "work in another folder, or give --run-dir one"
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        why = "your quota is used up" if error.errno == errno.EDQUOT else (error.strerror or str(error))
        return failure(CHECK, f"{text}; writing fails: {why}", elsewhere)
    if system.free_bytes < NEEDED_BYTES:
        return failure(CHECK, f"{text}: no room for a checkpoint", elsewhere)
    if system.free_bytes < COMFORTABLE_BYTES:
        return warning(CHECK, f"{text}: checkpoints may not fit", elsewhere)
    return ok(CHECK, text)


def _data(folder: Path) -> Finding:
    if not folder.is_dir():
        return failure(CHECK, f"the data folder {folder} does not exist on this node", "check the path and the mounts")
    system = file_system_of(folder)
    text = f"data {folder} on {system.kind}"
    shard = next(folder.rglob("*.h5"), None)
    if not system.is_lustre or shard is None:
        return ok(CHECK, text)
    try:
        stripes = stripes_of(shard)
    except (HpcdlError, ValueError) as error:
        return warning(CHECK, f"{text}; its stripes cannot be read ({error})", "ask the site's staff for `lfs`")
    return ok(CHECK, f"{text}, {shard.name} over {stripes.count} OST(s), stripes of {format_bytes(stripes.size)}")
