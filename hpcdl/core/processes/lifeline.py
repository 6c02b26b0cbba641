"""Nothing outlives its run: processes end with the process that started them, and names in /dev/shm are removed.

docs/decisions/0100 gives the reasons. The kernel's parent-death signal is the surest way: it reaches a process that is
stopped or deep in a library. But it comes when the *thread* that forked ends, and some starters fork from threads that
end early. A thread that waits for the starter's pidfd follows the process, whichever thread forked.
MPICH and its kin keep the file through which the ranks of a node meet until MPI_Finalize. Its name is useless once
all ranks have mapped it. Without the name the kernel frees the memory with the last rank, however that rank ends.
Open MPI removes its own files at MPI_Finalize and complains about missing names; its mpiexec removes those of ranks
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
"""Index of a process's start time in /proc/PID/stat, counted from behind its name."""
SHARED_MEMORY = Path("/dev/shm")
MPICH_NAMES = "mpich_shm_*"
SETTLED_S = 5.0
"""A rank that has made its file maps it much sooner than this."""


def ends_with_parent(number: int) -> Callable[[], None]:
    """Return a `preexec_fn` for Popen: the child gets this signal when the thread that started it ends.

    For programs of others, which cannot call `end_with_parent` themselves.
    """
    prctl = ctypes.CDLL(None).prctl  # load the library here: nothing may be loaded between fork and exec
    return lambda: prctl(_PR_SET_PDEATHSIG, int(number))


def end_with_parent(parent: int | None = None) -> None:
    """Kill this process when its parent ends, or at once if its parent is no longer `parent`.

    A caller that passes `parent` was started from the main thread of that process.
    """
    parent_pid = os.getppid()
    # The signal comes when the forking thread ends, which in a parent with one thread is the parent's end.
    if parent is not None or len(list(Path(f"/proc/{parent_pid}/task").glob("*"))) == 1:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != (parent_pid if parent is None else parent):  # it ended before prctl, and no signal will come
        end_in()
    after_end_of(identity(parent_pid), end_in)


def identity(pid: int) -> str:
    """Return node, namespace, number and start of a process: unique for all time; empty if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # Behind the last bracket: the program's name, in brackets, may hold blanks and brackets.
    return f"{_surroundings()} {pid} {text.rpartition(')')[2].split()[_START_TIME]}"


def after_end_of(known: str, action: Callable[[], None]) -> None:
    """Let a thread call `action` when the process of this identity has ended, or at once if it has.

    Does nothing if the process is on another node, or in a namespace that is not visible from here.
    """
    surroundings, _, pid = known.rpartition(" ")[0].rpartition(" ")
    if surroundings != _surroundings():
        return

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(int(pid))
            if identity(int(pid)) == known:  # checked after opening: the number may belong to a new process
                waiting = select.poll()  # select supports only the first 1024 descriptors
                waiting.register(descriptor, select.POLLIN)
                waiting.poll()
        action()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _surroundings() -> str:
    return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"


def end_in(seconds: float = 0.0) -> None:
    """Kill this process with SIGKILL after `seconds`; no other process waits for its output."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def forget_names() -> None:
    """Remove the names of this process's shared memory, after every rank of the node has returned from MPI_Init."""
    for path in _mapped(os.getpid()):
        remove_file(path)


def remove_abandoned() -> None:
    """Remove files that killed ranks of this user left in MPI_Init, if no process maps them any more."""
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
    """Yield the files of MPICH_NAMES that a process has mapped; none if its maps cannot be read."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            # Five fields come before the path, which may hold blanks.
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == SHARED_MEMORY and path.match(MPICH_NAMES):
                yield path
