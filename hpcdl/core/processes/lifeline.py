"""Nothing outlives its run: processes end with the one that started them, and names in /dev/shm are removed.

docs/decisions/0100 says why so. The kernel's parent-death signal is the surest: it reaches a process that is stopped or
deep in a library. But it comes when the *thread* ends that has forked, and some starters fork from threads that they
end later. A thread that waits for the starter's pidfd knows processes, whoever forked.

MPICH and its kin keep the file through which the ranks of a node meet until MPI_Finalize. Its name serves nobody once
all of them have it in their memory: without it the kernel gives the memory back with the last rank, however that ends.
Open MPI removes its own at MPI_Finalize and complains about names that are gone; its mpiexec removes those of ranks
that were killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcdl.core.storage.disk import remove_file

_PR_SET_PDEATHSIG = 1
_START_TIME = 19
"""Where /proc/PID/stat tells when a process began, counted behind its name."""
SHARED_MEMORY = Path("/dev/shm")
MPICH_NAMES = "mpich_shm_*"
SETTLED_S = 5.0
"""A rank that has made its file has it in its memory after far less."""


def told_to_end_with_parent(number: int) -> Callable[[], None]:
    """For `Popen(preexec_fn=...)`: what is started gets this signal when the thread that starts it ends.

    For programs of others, which cannot look after themselves.
    """
    prctl = ctypes.CDLL(None).prctl  # nothing may be loaded between fork and exec
    return lambda: prctl(_PR_SET_PDEATHSIG, int(number))


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process when its parent ends; at once where that is no longer `parent`.

    Whoever names its parent has been started from that one's main thread.
    """
    found = os.getppid()
    if parent is not None or len(list(Path(f"/proc/{found}/task").glob("*"))) == 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != (found if parent is None else parent):
        end_in()
    after_end_of(identity(found), end_in)


def identity(pid: int) -> str:
    """Node, namespace, number and start of a process, which no other one ever shares; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"{_surroundings()} {pid} {text.rpartition(')')[2].split()[_START_TIME]}"


def after_end_of(known: str, action: Callable[[], None]) -> None:
    """Have a thread call `action` when the process of this identity has ended, at once where it has.

    Nothing happens where it is on another node, or in a namespace of which nothing can be said from here.
    """
    surroundings, _, rest = known.rpartition(" ")[0].rpartition(" ")
    if surroundings != _surroundings():
        return

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(int(rest))
            if identity(int(rest)) == known:
                waiting = select.poll()  # select knows only the first 1024 descriptors
                waiting.register(descriptor, select.POLLIN)
                waiting.poll()
        action()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _surroundings() -> str:
    return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"


def end_in(seconds: float = 0.0) -> None:
    """SIGKILL, later: nobody is left to hear last words."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def forget_names() -> None:
    """Remove the names of what this process shares; every rank of the node must have come back from MPI_Init."""
    for path in _mapped(os.getpid()):
        remove_file(path)


def remove_abandoned() -> None:
    """Remove what ranks of this user have left that were killed in MPI_Init, where no process has it any more."""
    candidates = []
    for path in SHARED_MEMORY.glob(MPICH_NAMES):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime < time.time() - SETTLED_S:
                candidates.append(path)
    if candidates:
        used = {path for entry in Path("/proc").glob("[0-9]*") for path in _mapped(int(entry.name))}
        for path in set(candidates) - used:
            with contextlib.suppress(OSError):
                remove_file(path)


def _mapped(pid: int) -> Iterator[Path]:
    """The files of MPICH_NAMES in the memory of a process; none where it cannot be looked into."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == SHARED_MEMORY and path.match(MPICH_NAMES):
                yield path
