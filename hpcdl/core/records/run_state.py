"""What has become of a run: the word of its record, held against whether anybody still writes its folder.

A record cannot say that its run was lost with all of its processes. The locks can: the process that started the run
holds one, rank 0 another, and the kernel releases them however a process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError
from hpcdl.core.processes.wall import WALL
from hpcdl.core.records.run_record import FILE_NAME, recorded_status
from hpcdl.core.storage.files import parse_json
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME

RANKS = "ranks"
"""The folder in a run directory that holds what its ranks say of themselves."""
STARTING, RUNNING, FINISHED, STOPPED, FAILED, LOST = "starting", "running", "finished", "stopped", "failed", "lost"
NOT_MEASURED = (STARTING, RUNNING, STOPPED, FAILED, LOST)
"""States of a run whose numbers are not a measurement."""
SILENT_S = 3600.0
"""A run on another host, whose locks nobody holds as far as can be seen from here, is lost when silent for so long."""
_SLACK_S = 2.0
_HELD, _FREE = "held", "free"
_JOURNAL = "metrics.jsonl"


def state_of(run_dir: Path, status: str | None = None) -> str:
    """The state of the run in `run_dir`, whose record says `status`; None reads the record. Writes nothing.

    The record's word, but `lost` for a run that is running and whose processes are gone, and `starting` for one that
    is being resumed, or has no record yet. Where nobody can know from here, `running (not verified: on HOST)`.
    """
    if status is None:
        status = _recorded(run_dir)
    if status not in NOT_MEASURED:
        return status
    found = [_look_at(run_dir / LOCK_NAME), _look_at(run_dir / RANKS / LOCK_NAME)]
    if _HELD in found:
        return RUNNING if status == RUNNING else STARTING
    if status not in (STARTING, RUNNING):
        return status
    unsure = next((word for word in found if word != _FREE), None)
    if unsure is None or _silent_s(run_dir) > SILENT_S:
        return LOST
    return f"{status} (not verified: {unsure})"


def is_measured(state: str) -> bool:
    """Whether numbers of a run in this state are a measurement."""
    return state.partition(" (")[0] not in NOT_MEASURED


def continues(state: str) -> bool:
    """Whether more is to come of a run in this state, as far as can be known."""
    return state.partition(" (")[0] in (STARTING, RUNNING)


def _recorded(run_dir: Path) -> str:
    with contextlib.suppress(CorruptError):
        return recorded_status(run_dir)
    return STARTING


def _look_at(path: Path) -> str:
    """Whether a process holds this lock: _HELD, _FREE, or why that cannot be known from here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:
        return f"{path} cannot be read"
    except OSError:  # absent, which is how a writer leaves; or nothing that hpcdl has made
        return _FREE
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return _FREE
        holder = _holder(descriptor)
        host = str(holder.get("host") or socket.gethostname())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return _HELD
            if host == socket.gethostname():  # a file system without flock
                return _HELD if _lives(holder.get("pid"), facts.st_mtime) else _FREE
        return _FREE if host == socket.gethostname() else f"on {host}"  # some file systems lock for each host alone
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        found = parse_json(os.pread(descriptor, 4096, 0))
        return found if isinstance(found, dict) else {}
    return {}


def _lives(pid: object, since: float) -> bool:
    """Whether this process of this host was there at the Unix time `since`: numbers are used again."""
    try:
        ticks = float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age_s = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return False
    return age_s + _SLACK_S >= WALL.now_s() - since


def _silent_s(run_dir: Path) -> float:
    """Seconds since the run has last written anything that shows that it goes on."""
    times = []
    for path in (run_dir / _JOURNAL, run_dir / FILE_NAME, run_dir / RANKS):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return WALL.now_s() - max(times, default=0.0)
