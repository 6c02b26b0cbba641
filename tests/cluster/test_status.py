"""Why a launch ended: last messages of ranks against the launcher's output, including real launchers' noise."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cluster.launchers import load_launcher
from hpcdl.cluster.launchers.base import Casualty
from hpcdl.cluster.processes import end_marked
from hpcdl.cluster.status import RankStatus, raise_for
from hpcdl.core.errors import RankError, StoppedEarly
from tests.conftest import patience

LOG = Path("launcher.log")
HYDRA = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 128 RUNNING AT node2
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
"""
OPEN_MPI = """
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
mpiexec.openmpi noticed that process rank 1 with PID 130 on node node2 exited on signal 9 (Killed).
"""
SHUT_DOWN = "Connection to node2 closed by remote host.\nORTE was unable to reliably start one or more daemons.\n"
SRUN_NODE = """srun: error: Node failure on node2
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node1: task 0: Killed
"""


def status(rank: int, state: str = "running", message: str = "", at: float = 0.0, kind: str = "") -> RankStatus:
    return RankStatus(rank=rank, host=f"node{rank + 1}", pid=128, state=state, message=message, at=at, kind=kind)


@pytest.mark.parametrize(
    ("launcher", "log", "expected"),
    [
        ("hostfile", HYDRA, Casualty(pid=128, host="node2")),
        ("pbs", OPEN_MPI, Casualty(rank=1, host="node2")),
        ("hostfile", SHUT_DOWN, Casualty(lost_host="node2")),
        ("hostfile", "ssh: connect to host node2 port 22: No route to host\n", Casualty(lost_host="node2")),
        ("hostfile", "ssh: Could not resolve hostname node2: Name or service not known\n", Casualty(lost_host="node2")),
        ("ibrun", HYDRA, Casualty(pid=128, host="node2")),
        ("slurm", SRUN_NODE, Casualty(lost_host="node2")),
        ("ibrun", SRUN_NODE, Casualty(lost_host="node2")),
        ("hostfile", "all is well", None),
        ("local", HYDRA, None),
    ],
)
def test_launchers_tell_what_died_first(launcher: str, log: str, expected: Casualty | None) -> None:
    assert load_launcher(launcher).first_casualty(log) == expected


@pytest.mark.parametrize(
    "casualty", [Casualty(rank=1), Casualty(pid=128, host="node2.site.org"), Casualty(rank=1, host="node2")]
)
def test_the_rank_that_died_first_is_named(casualty: Casualty) -> None:
    with pytest.raises(RankError, match="rank 1 on node2 ended without a word") as caught:
        raise_for([status(0), status(1)], 2, casualty=casualty, log=LOG)
    assert (caught.value.rank, caught.value.host) == (1, "node2")


def test_a_lost_node_is_named_with_its_ranks() -> None:
    with pytest.raises(
        RankError, match=r"node node2 with rank 1 went down .* continue with --resume, without it"
    ) as caught:
        raise_for([status(0), status(1)], 2, casualty=Casualty(lost_host="node2"), log=LOG)
    assert caught.value.host == "node2"
    with pytest.raises(RankError, match="node node3 went down or cannot be reached"):
        raise_for([], 3, casualty=Casualty(lost_host="node3"), log=LOG)
    with pytest.raises(StoppedEarly, match=r"saved \(node node2 went down\)"):
        raise_for([status(0, "stopped", "saved"), status(1)], 2, casualty=Casualty(lost_host="node2"), log=LOG)


def test_a_node_that_may_not_see_the_run_directory_is_asked_about(tmp_path: Path) -> None:
    """The message asks whether the node sees the run directory: a rank without it cannot report its error."""
    log = tmp_path / "run" / "ranks" / "launcher.log"
    seen = re.escape(f"{tmp_path / 'run'} and {sys.prefix}")
    with pytest.raises(RankError, match=f"whether node1 sees {seen}"):
        raise_for([], 2, casualty=Casualty(rank=0, host="node1"), log=log)
    with pytest.raises(RankError, match=f"2 of 2 ranks never started.* whether node2 sees {seen}"):
        raise_for([], 2, casualty=None, log=log, hosts=[socket.gethostname(), "node2"])
    with pytest.raises(RankError, match=f"2 of 2 ranks never started.* whether all nodes see {seen}"):
        raise_for([], 2, casualty=None, log=log, hosts=["node1", "node2"])
    with pytest.raises(RankError, match=r"see \S+launcher\.log$"):
        raise_for([], 2, casualty=None, log=log)
    with pytest.raises(RankError, match=r"see \S+launcher\.log$"):
        raise_for([], 2, casualty=Casualty(rank=0, host=socket.gethostname()), log=log)


def test_an_own_failure_counts_before_all_else() -> None:
    with pytest.raises(RankError, match="rank 0 on node1: no luck"):
        raise_for([status(0, "failed", "no luck"), status(1)], 2, casualty=Casualty(lost_host="node2"), log=LOG)
    with pytest.raises(RankError, match="rank 1 on node2: first"):
        raise_for(
            [status(0, "failed", "second", at=2.0), status(1, "failed", "first", at=1.0)], 2, casualty=None, log=LOG
        )
    raise_for([status(0, "done"), status(1, "done")], 2, casualty=None, log=LOG)


@pytest.mark.parametrize("state", ["failed", "bereaved"])
def test_the_kind_of_a_failure_comes_with_it(state: str) -> None:
    reported = [
        status(0, state, "the gradient is not finite", kind="not-finite"),
        status(1, "bereaved", "rank 0 is gone"),
    ]
    with pytest.raises(RankError, match="not finite") as caught:
        raise_for(reported, 2, casualty=None, log=LOG)
    assert caught.value.kind == "not-finite"


def test_marked_processes_end_and_no_others() -> None:
    line = ["setsid", "sleep", "60"]
    marked = subprocess.Popen(line, env={**os.environ, "HPCDL_LAUNCH": "this"})
    other = subprocess.Popen(line, env={**os.environ, "HPCDL_LAUNCH": "this one"})
    try:
        end_marked("HPCDL_LAUNCH", "this")
        assert marked.wait(timeout=patience(10)) == -9 and other.poll() is None
    finally:
        other.kill()
        other.wait()
