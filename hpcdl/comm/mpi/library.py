"""Which MPI library this Python loads, and how it is loaded and started; the only file that imports mpi4py.

`python -m hpcdl.comm.mpi.library` prints it as JSON, without starting MPI: cluster/launchers/mpiexec.py asks it to find
the mpiexec that belongs to that library. Each start of several ranks waits for the answer, so no numpy here.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from hpcdl.comm.mpi.start import readable_lines
from hpcdl.core.errors import UsageError
from hpcdl.core.processes.lifeline import forget_names

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
