"""Which MPI library this Python loads, how it is loaded, started and ended; the only file that imports mpi4py.

Imports nothing of hpcdl: thousands of nodes load this with spread.py.

`python -m hpcdl.comm.mpi.library` prints it as JSON, without starting MPI: cluster/launchers/mpiexec.py asks it to find
the mpiexec that belongs to that library. Each start of several ranks waits for the answer, so no numpy here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hpcdl.core.errors import UsageError
from hpcdl.core.processes.lifeline import forget_names

LONGEST_VALUE = 800
ANSWER_S = 2.0
_PROXY = "hydra_pmi_proxy"
"""What MPICH's mpiexec starts ranks by; it has the 15 characters that the kernel keeps of a name."""
_ANNOUNCED = re.compile(rb"\bvallen_max=(\d+)")


@contextlib.contextmanager
def readable_lines() -> Iterator[None]:
    """MPI is to be started inside. Under `srun --mpi=pmi2` MPICH hears of shorter values than Slurm says it takes.

    Slurm allows values of 1,024 bytes and reads lines of 1,023, which have 60 bytes around the value. MPICH 5 puts the
    4 KB from its address on, which is shorter itself: what comes behind it on the heap decides whether lines are full,
    because zeros are sent shortened. A line that is cut ends the job, or has its ranks wait for ever. So a process that
    lives as long as this block stands between the two, and says LONGEST_VALUE.
    """
    if not ("PMI_FD" in os.environ and "SLURM_JOB_ID" in os.environ):
        yield
        return
    spoken = int(os.environ["PMI_FD"])
    slurm = os.dup(spoken)
    mine, other = socket.socketpair()
    with mine, other, warnings.catch_warnings():
        # From Python 3.12 on a warning tells of threads, which libraries keep waiting: the child runs none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        os.dup2(mine.fileno(), spoken)
        between = os.fork()
        if between == 0:
            mine.close()
            os.close(spoken)
            _stand_between(other.fileno(), slurm)
    try:
        yield
    finally:
        os.dup2(slurm, spoken)
        os.close(slurm)
        with contextlib.suppress(ProcessLookupError):
            os.kill(between, signal.SIGKILL)
        os.waitpid(between, 0)


def say_finalized() -> None:
    """Tell MPICH's own mpiexec that this rank is done: MPICH 5 does so in a handler of exit(), which ranks leave out.

    mpiexec takes a connection that ends without it for a failure, and kills what it has started in the rank's place:
    the process of a container, a shell. Libraries that have said so themselves have closed the connection. Where
    mpiexec has started the rank itself nothing is said: it kills what the rank has left behind, and would wait for
    the end of that otherwise.
    """
    spoken = os.environ.get("PMI_FD", "")
    if not spoken.isdigit() or "MPI_LOCALRANKID" not in os.environ:  # srun's PMI 2 has other lines
        return
    with contextlib.suppress(OSError):
        if Path(f"/proc/{os.getppid()}/comm").read_text(encoding="ascii", errors="replace").startswith(_PROXY):
            return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(spoken))) as mpiexec:
        if mpiexec.family == socket.AF_UNIX:
            mpiexec.settimeout(ANSWER_S)
            mpiexec.sendall(b"cmd=finalize\n")
            mpiexec.recv(1 << 10)


def _stand_between(rank: int, slurm: int) -> NoReturn:
    """Hand on what both say, until one of them is gone."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        to = {rank: slurm, slurm: rank}
        while True:
            for heard in select.select(list(to), [], [])[0]:
                message = os.read(heard, 1 << 16)
                if not message:
                    os._exit(0)
                while message := message[os.write(to[heard], _shorter(message)) :]:
                    pass
    finally:
        os._exit(1)


def _shorter(message: bytes) -> bytes:
    """What is said, with LONGEST_VALUE for a longest value above that; of as many bytes."""
    found = _ANNOUNCED.search(message)
    if found is None or int(found[1]) <= LONGEST_VALUE:
        return message
    return message[: found.start(1)] + str(LONGEST_VALUE).zfill(len(found[1])).encode() + message[found.end(1) :]


INFINIBAND = Path("/sys/class/infiniband")
_UCX_WITHOUT_HOOKS = ("UCX_MEM_EVENTS", "no")
"""UCX notes each piece of memory that the process gives back to the system, until it next registers memory with a
network adapter. Where there is none it never does, and keeps 148 bytes of each for ever: about 1 KB a training step,
because Python gives its stack back after each call from a thread of TensorFlow's."""


def library_version() -> str:
    """The full version text of the MPI library; does not start MPI."""
    return str(import_mpi(initialize=False).Get_library_version()).strip("\0\n ")


def library_path() -> str:
    """The file of the MPI library that this process loads; empty where the system cannot tell. Does not start MPI."""
    return _file_of(import_mpi(initialize=False).__file__, "MPI_Get_library_version")


def import_mpi(*, initialize: bool) -> Any:
    """mpi4py's MPI, which is started where `initialize` says so; UsageError where no library can be loaded."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        if not any(INFINIBAND.glob("*")):
            os.environ.setdefault(*_UCX_WITHOUT_HOOKS)
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        mpi4py.rc.thread_level = "multiple"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        raise UsageError(
            f"no MPI library can be loaded ({cause}); pip install 'hpcdl[mpich]' or load the site's MPI module"
        ) from error
    if initialize and not MPI.Is_initialized():
        with readable_lines():
            _start(MPI)
        MPI.COMM_WORLD.Barrier()
        forget_names()
    return MPI


def _start(mpi: Any) -> None:
    """MPI_Init_thread as mpi4py calls it, but without the interpreter's lock.

    It waits for all ranks, and the watch, which finds one that is stopped or gone, is a thread of Python's. Symbols of
    the whole process come first: a profiler may stand before MPI.
    """
    places = (ctypes.CDLL(None), ctypes.CDLL(mpi.__file__))
    init = next(place for place in places if hasattr(place, "MPI_Init_thread")).MPI_Init_thread
    init.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    if error := init(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())):
        raise mpi.Exception(error)
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)  # which mpi4py makes exceptions of


class _Where(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _file_of(extension: str, symbol: str) -> str:
    """The shared library that gives `extension`, a loaded one, the function `symbol`; empty where that is unknown."""
    function = getattr(ctypes.CDLL(extension), symbol)
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Where)]
    where = _Where()
    found = dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(where))
    return os.fsdecode(where.file_name) if found and where.file_name else ""


if __name__ == "__main__":
    try:
        print(json.dumps({"library": library_path(), "version": library_version()}))
    except UsageError as usage_error:
        print(json.dumps({"error": str(usage_error)}))
