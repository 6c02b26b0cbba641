"""Names that MPI libraries leave in /dev/shm when their ranks are killed.

MPICH and its kin keep the file through which the ranks of a node meet until MPI_Finalize. Its name serves nobody once
all of them have it in their memory: without it the kernel gives the memory back with the last rank, however that ends.
Open MPI removes its own at MPI_Finalize and complains about names that are gone; its mpiexec removes those of ranks
that were killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
PATTERN = "mpich_shm_*"
SETTLED_S = 5.0
"""A rank that has made its file has it in its memory after far less."""


def forget_names() -> None:
    """Remove the names of what this process shares; every rank of the node must have come back from MPI_Init."""
    for path in _mapped(os.getpid()):
        path.unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Remove what ranks of this user have left that were killed in MPI_Init, where no process has it any more."""
    candidates = []
    for path in FOLDER.glob(PATTERN):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime < time.time() - SETTLED_S:
                candidates.append(path)
    if candidates:
        used = {path for entry in Path("/proc").glob("[0-9]*") for path in _mapped(int(entry.name))}
        for path in set(candidates) - used:
            with contextlib.suppress(OSError):
                path.unlink()


def _mapped(pid: int) -> Iterator[Path]:
    """The files of PATTERN in the memory of a process; none where it cannot be looked into."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == FOLDER and path.match(PATTERN):
                yield path
