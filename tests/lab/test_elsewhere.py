"""Runs started on a node without any of their ranks: signals that are sent there reach the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.conftest import Finished, command_line, family, finish, patience
from tests.lab.desk import Desk
from tests.lab.hosts import wait_until
from tests.lab.nodes import TCP, hostfile_environment
from tests.lab.slurm import SlurmLab
from tests.rank.survival import ranks_of

pytestmark = pytest.mark.lab
TRAIN = ("train", "--model", "lenet", "--data", "synthetic:cifar10", "--batch-size", "8", "--ranks", "2")


def started(lab: SlurmLab, by_ssh: bool, library: str, *more: str) -> tuple[Desk, subprocess.Popen[str]]:
    """Return a run of two ranks on `node1` and `node2`, started from `login`, that has made a step."""
    folder = lab.shared / "desk"
    folder.mkdir()
    desk = Desk(lab, folder, {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", **TCP})
    line, environment = desk.line(*TRAIN, "--steps", "100000", "--run-dir", folder / "run", *more), desk.environment
    if by_ssh:
        (folder / "hosts").write_text("node1\nnode2\n")
        environment |= hostfile_environment(folder / "hosts", library)
    else:
        line = ["salloc", "--quiet", "--nodes=2", "--exclusive", *line]
    command = lab.command(line, cwd=folder, env=environment)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **streams, text=True, env={"PATH": os.defpath})
    desk.wait_for_steps("run")
    return desk, process


@pytest.mark.parametrize(
    ("by_ssh", "library"),
    [
        (False, ""),
        pytest.param(True, "", marks=pytest.mark.soak),
        pytest.param(True, "libmpi.so.40", marks=pytest.mark.soak),
    ],
    ids=["srun", "mpich-ssh", "openmpi-ssh"],
)
def test_who_is_asked_to_stop_has_them_save(frail_lab: SlurmLab, by_ssh: bool, library: str) -> None:
    """SIGTERM to the process on the login node, where salloc leaves a user, makes the ranks save."""
    desk, process = started(frail_lab, by_ssh, library)
    os.kill(_hpcdl(process), signal.SIGTERM)
    finished: Finished = finish(process, 60)
    assert finished.code == 75 and "a checkpoint is saved: continue with --resume" in finished.err, finished
    assert desk.checkpoints("run")


def test_a_killed_rank_ends_the_others_at_once(frail_lab: SlurmLab) -> None:
    """A killed rank ends the others at once; srun would first wait for KillWait (5 s in the lab, 30 s by default)."""
    desk, process = started(frail_lab, False, "", "--elastic", "--checkpoint-every", "1s")
    began_s = time.time()
    os.kill(ranks_of(desk.folder / "run")[1], signal.SIGKILL)
    wait_until(
        lambda: any("new ranks continue" in event["text"] for event in desk.events("run", "message")),
        "new ranks continue",
    )
    (reported,) = (event for event in desk.events("run", "message") if "new ranks continue" in event["text"])
    assert "rank 1 on node2 ended without a word" in reported["text"]
    log = (desk.folder / "run" / "ranks" / "launcher.log").read_text()
    # MPICH 5.0.2 may crash rank 0 first: a send in MPI_Iallgather to the lost peer fails, and MPICH uses the request
    # that it then lacks (as in its pull request 6643 for receives). Then srun has no task left to end.
    assert "srun: forcing job termination" in log or "task 0: Segmentation fault" in log
    assert reported["at"] - began_s < patience(4)
    os.kill(_hpcdl(process), signal.SIGTERM)
    assert finish(process, 60).code == 75


def _hpcdl(process: subprocess.Popen[str]) -> int:
    """Return the process that has started the ranks: the first that runs Python itself.

    Until its exec each of its children has the same command line, and could get the signal instead.
    """
    lines = ((pid, command_line(pid)) for pid in family(process.pid))
    return next(pid for pid, line in lines if line and b"python" in line[0] and b"train" in line)
