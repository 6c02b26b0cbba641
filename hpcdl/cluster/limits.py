"""Resources of a node that ranks need and that a user, a container or an administrator may have limited.

Libraries that reach such a limit end a rank without a message (a bus error, an abort), so the limits are checked first.
The process that starts the ranks checks its own node, and each rank checks its node.
"""

from __future__ import annotations

import os
import resource
import tempfile

from hpcdl.cluster.launchers.mpiexec import mpi_flavour
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.processes.lifeline import SHARED_MEMORY
from hpcdl.core.units import format_bytes

OPEN_FILES = 256
"""Files that a rank opens with TensorFlow and MPI, including its line (cluster/deaths.py) above MPI's own."""
OPEN_FILES_A_RANK = 16
"""Files that an mpiexec opens for each rank that it starts on its node."""
_COMFORTABLE_FILES = 4096
_MPICH_BYTES, _MPICH_BYTES_A_RANK = 8 << 20, 6 << 20
"""Space that MPICH 5.0 needs in /dev/shm: with less it ends by signal 7 or 11 (measured with 2, 4 and 8 ranks).
Open MPI 4 and 5 work without it: messages within the node then use the network."""
_TEMPORARY_BYTES = 64 << 10
_CONTAINER = "in a container use --shm-size=1g"


def check_node(num_ranks: int, *, mpi: bool = True) -> None:
    """Raise UsageError with the limit if `num_ranks` ranks cannot start on this node.

    Also raises the soft limit of open files for this process and its children.
    """
    allow_open_files(max(OPEN_FILES, OPEN_FILES_A_RANK * num_ranks))
    if not mpi or num_ranks < 2:
        return
    needed = _MPICH_BYTES + num_ranks * _MPICH_BYTES_A_RANK
    # Asking for the flavour starts a process, so it is done only where there is a problem.
    for flavour, problem in (("mpich", _shared_memory_problem(needed)), ("openmpi", _temporary_problem())):
        if problem and mpi_flavour() == flavour:
            raise UsageError(problem)


def check_own_node(*, mpi: bool) -> None:
    """Raise HpcdlError if this rank cannot continue on its node; other ranks may have used /dev/shm already."""
    try:
        allow_open_files(OPEN_FILES)
        problem = _shared_memory_problem(_MPICH_BYTES_A_RANK) if mpi else ""
        if problem and mpi_flavour() == "mpich":
            raise UsageError(problem)
    except UsageError as error:  # about this node, not all ranks alike
        raise HpcdlError(str(error)) from error


def allow_open_files(needed: int) -> None:
    """Raise the soft limit if it is below what hpcdl prefers. Raises UsageError if `needed` is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(needed, _COMFORTABLE_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed < needed:
        raise UsageError(
            f"only {allowed} files may be open at once on {os.uname().nodename}, ranks need {needed}: raise the hard "
            f"limit (`ulimit -n {_COMFORTABLE_FILES}`, or `nofile` in /etc/security/limits.conf)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _temporary_problem() -> str:
    """Return why Open MPI cannot write its sockets and files; empty if it can."""
    host, folder = os.uname().nodename, os.environ.get("TMPDIR") or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(_TEMPORARY_BYTES))
    except OSError as error:
        return (
            f"the temporary folder {folder} on {host} cannot be written: {error.strerror}; clear it, or set TMPDIR to "
            "another one"
        )
    return ""


def _shared_memory_problem(needed: int) -> str:
    """Return why MPICH cannot get `needed` bytes of shared memory; empty if it can."""
    where = f"{SHARED_MEMORY} on {os.uname().nodename}"
    purpose = "MPICH exchanges messages between the ranks of a node through it"
    try:
        volume = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"{where} cannot be used: {error.strerror}; {purpose}: mount a tmpfs there"
    if volume.f_flag & os.ST_RDONLY or not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return f"{where} is read-only; {purpose}: mount it writable, or load Open MPI, which does without"
    free = volume.f_bavail * volume.f_frsize
    # A tmpfs without a limit reports no blocks.
    if volume.f_blocks and free < needed:
        return (
            f"{where} has {format_bytes(free)} free, MPICH needs {format_bytes(needed)} for its ranks: remove what "
            f"dead jobs left there (`ls -l {SHARED_MEMORY}`), {_CONTAINER}, or load Open MPI, which does without"
        )
    return ""
