"""How MPICH starts under Slurm, and ends under its own mpiexec.

Imports nothing of hpcdl: thousands of nodes load this with spread.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

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
