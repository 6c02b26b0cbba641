"""MPICH's messages to Slurm at the start of MPI: all of them arrive, and the maximum length of a value is lowered."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdl.cluster.launchers.mpiexec import find_mpiexec, launch_flags
from hpcdl.comm.mpi.library import LONGEST_VALUE, readable_lines, refuse_finalized

ASKED, LONG = b"cmd=get_maxes\n", b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"
OWN_FILES = Path("/proc/self/fd")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of the connection: the rank's and Slurm's."""
    rank, slurm = socket.socketpair()
    monkeypatch.setenv("PMI_FD", str(rank.fileno()))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    for end in (rank, slurm):
        end.settimeout(20)
    with rank, slurm:
        yield rank, slurm


def test_the_longest_value_is_shorter_and_all_else_gets_through(slurm: tuple[socket.socket, socket.socket]) -> None:
    rank, scheduler = slurm
    with readable_lines():
        rank.sendall(ASKED)
        assert scheduler.recv(4096) == ASKED
        scheduler.sendall(LONG)
        heard = rank.recv(4096)
        assert heard == LONG.replace(b"1024", b"%04d" % LONGEST_VALUE)
        scheduler.sendall(b"cmd=maxes vallen_max=256\n")
        assert rank.recv(4096) == b"cmd=maxes vallen_max=256\n"
        rank.sendall(b"cmd=put value=" + bytes(range(256)) * 40)
        reported = b""
        while len(reported) < 14 + 40 * 256:
            reported += scheduler.recv(4096)
        assert reported.endswith(bytes(range(256)))
    scheduler.sendall(LONG)
    assert rank.recv(4096) == LONG, "once MPI has started they talk without anybody between"


def test_nobody_stays_between_them(slurm: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []
    fork = os.fork

    def noted() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", noted)
    files = set(OWN_FILES.iterdir())
    with pytest.raises(OSError, match="no MPI"), readable_lines():
        raise OSError("no MPI")
    assert set(OWN_FILES.iterdir()) == files
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)


def test_without_slurm_nobody_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_FD", "1000000")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    files = set(OWN_FILES.iterdir())
    with readable_lines():
        assert set(OWN_FILES.iterdir()) == files


LEAVES = """
from hpcdl.comm.mpi.communicator import world
from hpcdl.rank.start import leave
world(2).barrier()
leave(0)
"""
BETWEEN = """
import os, subprocess, sys, time
rank = subprocess.Popen(sys.argv[1:], close_fds=False)
os.close(int(os.environ.get("PMI_FD") or os.open("/dev/null", os.O_RDONLY)))
code = rank.wait()
time.sleep(0.5)
sys.exit(code)
"""


def test_a_rank_says_to_mpichs_own_mpiexec_that_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, proxy = socket.socketpair()
    heard: list[bytes] = []

    def answer() -> None:
        heard.append(proxy.recv(4096))
        proxy.sendall(b"cmd=finalize_ack\n")

    proxy.settimeout(20)
    with rank, proxy:
        monkeypatch.setenv("PMI_FD", str(rank.fileno()))
        refuse_finalized()  # srun sets no local rank number, and has other messages
        monkeypatch.setenv("MPI_LOCALRANKID", "0")
        mpiexec = threading.Thread(target=answer)
        mpiexec.start()
        refuse_finalized()
        mpiexec.join()
        assert heard == [b"cmd=finalize\n"]
    refuse_finalized()  # the library has closed it


@pytest.mark.mpi
def test_processes_between_mpiexec_and_a_rank_are_not_killed_at_the_end() -> None:
    """A process between mpiexec and a rank, as a container has one, is not killed: it may end after the rank."""
    mpiexec = find_mpiexec()
    between = [sys.executable, "-c", BETWEEN, sys.executable, "-c", LEAVES]
    line = [mpiexec.path, *launch_flags(mpiexec.flavour), "-n", "2", *between]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
