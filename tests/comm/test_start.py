"""MPICH's talk with Slurm while MPI starts: all of it gets through, and a longest value that is too long does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdl.comm.mpi.start import LONGEST_VALUE, readable_lines

ASKED, LONG = b"cmd=get_maxes\n", b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n"
OWN_FILES = Path("/proc/self/fd")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A rank's end and Slurm's."""
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
        said = b""
        while len(said) < 14 + 40 * 256:
            said += scheduler.recv(4096)
        assert said.endswith(bytes(range(256)))
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
