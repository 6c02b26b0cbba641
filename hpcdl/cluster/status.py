"""What ranks tell the process that started them: one small JSON file each.

Exit codes of mpiexec mean different things under different MPIs; these files mean one thing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpcdl.core.errors import CorruptError
from hpcdl.core.files import read_json, write_json
from hpcdl.core.records import from_json

FOLDER = "ranks"
"""Folder inside a run directory that holds the status files and the launcher's log."""


STATES = ("running", "done", "stopped", "failed", "bereaved", "left behind")
"""stopped: left early with something to resume; bereaved: failed because another rank did; left behind: gave no sign of
life, and the others went on without it."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank's last word: `state` is one of STATES; `at` is Unix time in seconds."""

    rank: int
    host: str
    pid: int
    state: str
    exit_code: int = 0
    message: str = ""
    at: float = 0.0


def report_status(folder: Path, rank: int, state: str, *, exit_code: int = 0, message: str = "") -> None:
    """Write this process's status; a disk that is full must not hide the error that is being reported."""
    status = RankStatus(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        state=state,
        exit_code=exit_code,
        message=message,
        at=time.time(),
    )
    path = folder / f"{rank}.json"
    try:
        write_json(path, asdict(status))
    except OSError:
        with contextlib.suppress(OSError), path.open("r+b") as file:  # the room that this file has is there already
            file.truncate(file.write(json.dumps(asdict(status)).encode()))


def report_left(folder: Path, rank: int, message: str) -> None:
    """Write the status of another rank, one that the run goes on without."""
    for status in read_statuses(folder):
        if status.rank == rank:
            left = replace(status, state="left behind", message=message, at=time.time())
            write_json(folder / f"{rank}.json", asdict(left))


def read_statuses(folder: Path) -> list[RankStatus]:
    """The statuses written so far, by rank; files that are damaged are left out."""
    found = []
    for path in folder.glob("[0-9]*.json"):
        with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
            found.append(from_json(RankStatus, read_json(path)))
    return sorted(found, key=lambda status: status.rank)
