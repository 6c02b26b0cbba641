"""Which MPI library this Python loads, how it is loaded, started and ended; the only file that imports mpi4py.

Imports nothing of hpcdl: thousands of nodes load this with spread.py.

`python -m hpcdl.comm.mpi.library` prints it as JSON, without starting MPI: cluster/launchers/mpiexec.py runs it to find
the mpiexec that belongs to that library. Each start of several ranks waits for the answer, so numpy is not imported.
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
"""The program by which MPICH's mpiexec starts ranks; it has the 15 characters that the kernel keeps of a name."""
_ANNOUNCED = re.compile(rb"\bvallen_max=(\d+)")


@contextlib.contextmanager
def readable_lines() -> Iterator[None]:
    """Start MPI inside this block. Under `srun --mpi=pmi2` MPICH is told a lower limit for values than Slurm announces.

    Slurm announces values of 1,024 bytes but reads lines of 1,023, with 60 bytes around the value. MPICH 5 publishes
    the 4 KB from its address on, although the address is shorter. Whether a line is full depends on the heap behind it,
    because zeros are sent shortened. A truncated line ends the job, or makes its ranks wait forever. So a process that
    lives as long as this block relays the messages, and announces LONGEST_VALUE.
    """
    if not ("PMI_FD" in os.environ and "SLURM_JOB_ID" in os.environ):
        yield
        return
    spoken = int(os.environ["PMI_FD"])
    slurm = os.dup(spoken)
    own_end, other_end = socket.socketpair()
    with own_end, other_end, warnings.catch_warnings():
        # From Python 3.12 on fork warns of threads, such as waiting threads of libraries: the child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        os.dup2(own_end.fileno(), spoken)  # the rank's MPI takes this number from PMI_FD
        between = os.fork()
        if between == 0:
            # Both ends must close with the rank, or this process would never read an end of file.
            own_end.close()
            os.close(spoken)
            _stand_between(other_end.fileno(), slurm)
    try:
        yield
    finally:
        os.dup2(slurm, spoken)
        os.close(slurm)
        with contextlib.suppress(ProcessLookupError):
            os.kill(between, signal.SIGKILL)  # it ignores the signals by which launchers end a job
        os.waitpid(between, 0)


def refuse_finalized() -> None:
    """Tell MPICH's own mpiexec that this rank is done: MPICH 5 does so in an exit() handler, which ranks skip.

    mpiexec treats a connection that ends without it as a failure, and kills the process it started in the rank's place:
    a container's process or a shell. Libraries that have already reported have closed the connection. If mpiexec
    started the rank directly, nothing is sent: it kills what the rank has left behind, for which it would otherwise
    wait.
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
    """Relay the messages of both sides until one of them is gone."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        to = {rank: slurm, slurm: rank}
        while True:
            for heard in select.select(list(to), [], [])[0]:
                message = os.read(heard, 1 << 16)
                if not message:
                    os._exit(0)
                # A write may take a part of a message.
                while message := message[os.write(to[heard], _shorter(message)) :]:
                    pass
    finally:
        os._exit(1)  # a forked copy: it must never go on with the program of the rank


def _shorter(message: bytes) -> bytes:
    """Return the message with an announced limit above LONGEST_VALUE replaced by it; the length stays the same."""
    match = _ANNOUNCED.search(message)
    if match is None or int(match[1]) <= LONGEST_VALUE:
        return message
    # PMI-2 puts the length in front of each message, so the digits are padded.
    return message[: match.start(1)] + str(LONGEST_VALUE).zfill(len(match[1])).encode() + message[match.end(1) :]


INFINIBAND = Path("/sys/class/infiniband")
_UCX_WITHOUT_HOOKS = ("UCX_MEM_EVENTS", "no")
"""Stops UCX from recording memory that the process returns to the system.

UCX keeps each record until it next registers memory with a network adapter. Without an adapter it never does, and keeps
148 bytes each: about 1 KB a training step, because Python frees its stack after each call from a TensorFlow thread.
"""


def library_version() -> str:
    """Return the full version text of the MPI library; does not start MPI."""
    return str(import_mpi(initialize=False).Get_library_version()).strip("\0\n ")


def library_path() -> str:
    """Return the file of the MPI library that this process loads; empty if unknown. Does not start MPI."""
    return _file_of(import_mpi(initialize=False).__file__, "MPI_Get_library_version")


def import_mpi(*, initialize: bool) -> Any:
    """Return mpi4py's MPI, started if `initialize` is set. Raises UsageError if no library can be loaded."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        if not any(INFINIBAND.glob("*")):
            os.environ.setdefault(*_UCX_WITHOUT_HOOKS)
        # Not on import: `_start` does it without the interpreter's lock.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True  # by default mpi4py finalizes only an MPI that it has initialized itself
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
        MPI.COMM_WORLD.Barrier()  # a name must stay until the last rank of the node has opened it
        forget_names()
    return MPI


def _start(mpi: Any) -> None:
    """Call MPI_Init_thread like mpi4py, but without holding the interpreter's lock.

    It waits for all ranks, while the watchdog, a Python thread, must detect ranks that are stopped or gone. Symbols of
    the whole process are searched first: a profiler may intercept MPI.
    """
    libraries = (ctypes.CDLL(None), ctypes.CDLL(mpi.__file__))
    init = next(library for library in libraries if hasattr(library, "MPI_Init_thread")).MPI_Init_thread
    init.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    if error := init(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())):
        raise mpi.Exception(error)
    # Errors without a communicator go to COMM_SELF since MPI 4, and to COMM_WORLD before.
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py turns these into exceptions


class _Where(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _file_of(extension: str, symbol: str) -> str:
    """Return the shared library that provides `symbol` to the loaded `extension`; empty if unknown."""
    function = getattr(ctypes.CDLL(extension), symbol)
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Where)]
    info = _Where()
    succeeded = dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file_name) if succeeded and info.file_name else ""


if __name__ == "__main__":
    try:
        print(json.dumps({"library": library_path(), "version": library_version()}))
    except UsageError as usage_error:
        print(json.dumps({"error": str(usage_error)}))
