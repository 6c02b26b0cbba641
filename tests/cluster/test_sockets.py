"""Ranks on one node listen on the loopback or not at all, whatever the MPI's default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import EITHER, Mpi, command_line, end_family, family, listening
from tests.training_runs import SHORT, steps_done, wait_for

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.mpi
@EITHER
def test_ranks_on_one_node_listen_on_the_loopback_alone(mpi: Mpi, tmp_path: Path) -> None:
    """Only mpiexec's control port is elsewhere, which cannot be configured (docs/reference/site.md)."""
    run_dir = tmp_path / "run"
    data = ["--data", "synthetic:mnist@200", "--epochs", "500", "--run-dir", run_dir]
    process = mpi.hpcdl.start([*SHORT, *data])
    try:
        wait_for(lambda: steps_done(run_dir) > 3 or process.poll() is not None)
        sockets = {pid: {found[:2] for found in listening(pid)} for pid in family(process.pid)}
        programs = {pid: words for pid in sockets if (words := command_line(pid))}
    finally:
        end_family(process.pid)
        process.communicate()
    ranks = [pid for pid, program in programs.items() if b"hpcdl.rank.main" in program]
    launchers = [pid for pid, program in programs.items() if re.search(rb"mpiexec|orterun", program[0])]
    own = {pid: sockets[pid] - set.union(*(sockets[one] for one in launchers)) for pid in ranks}
    assert len(ranks) >= 2 and launchers
    assert all(address in LOOPBACK for found in own.values() for _, address in found), own
    wide = {address for pid in launchers for _, address in sockets[pid]} - LOOPBACK
    assert all(not int(address, 16) for address in wide) and len(wide) <= 2, wide
