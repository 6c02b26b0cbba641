"""Ranks on one node listen on the loopback or not at all, whatever the MPI's default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import EITHER, Mpi, end_family, family
from tests.training_runs import SHORT, steps_done, wait_for

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
_LISTENS = "0A"


def listening(pid: int) -> Iterator[tuple[str, str]]:
    """Yield inode and address, in hexadecimal digits, of every TCP socket on which a process listens."""
    found = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS:
                found[words[9]] = words[1].partition(":")[0]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except FileNotFoundError:
            continue
        if match and match[1] in found:
            yield match[1], found[match[1]]


@pytest.mark.mpi
@EITHER
def test_ranks_on_one_node_listen_on_the_loopback_alone(mpi: Mpi, tmp_path: Path) -> None:
    """Only mpiexec's control port is elsewhere, which cannot be configured (docs/reference/site.md)."""
    run_dir = tmp_path / "run"
    data = ["--data", "synthetic:mnist@200", "--epochs", "500", "--run-dir", run_dir]
    process = mpi.hpcdl.start([*SHORT, *data])
    try:
        wait_for(lambda: steps_done(run_dir) > 3 or process.poll() is not None)
        sockets = {pid: set(listening(pid)) for pid in family(process.pid)}
        programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in sockets}
    finally:
        end_family(process.pid)
        process.communicate()
    ranks = [pid for pid, program in programs.items() if b"hpcdl.rank.main" in program]
    launchers = [pid for pid, program in programs.items() if re.search(rb"mpiexec|orterun", program.split(b"\0")[0])]
    own = {pid: sockets[pid] - set.union(*(sockets[one] for one in launchers)) for pid in ranks}
    assert len(ranks) >= 2 and launchers
    assert all(address in LOOPBACK for found in own.values() for _, address in found), own
    wide = {address for pid in launchers for _, address in sockets[pid]} - LOOPBACK
    assert all(not int(address, 16) for address in wide) and len(wide) <= 2, wide
