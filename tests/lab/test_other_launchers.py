"""Launchers other than srun with real ranks on several hosts: mpiexec over ssh, and substitutes for ibrun and PBS.

No ibrun or PBS is available here: tests/lab/doubles.py describes the substitutes. The ranks, the MPIs, ssh and, for
ibrun, Slurm are real.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import patience
from tests.lab import doubles
from tests.lab.desk import Desk
from tests.lab.hosts import wait_until
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
TRAIN = ("--model", "lenet", "--data", "synthetic:cifar10", "--batch-size", "8")
OPEN_MPI = {"MPI4PY_LIBMPI": "libmpi.so.40", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
"""Debian's Open MPI; the lab's hosts share a kernel, and UCX must not use its shared memory."""
PBS_JOB = ("--nodes", "2", "--ranks-per-node", "1", "--time", "4m")
BOTH = pytest.mark.parametrize(
    "variables", [{}, pytest.param(OPEN_MPI, marks=pytest.mark.soak)], ids=["mpich", "openmpi"]
)


@pytest.fixture
def folder(lab_ssh: SlurmLab, request: pytest.FixtureRequest) -> Iterator[Path]:
    place = lab_ssh.shared / request.node.name.translate({ord("["): "-", ord("]"): None})
    place.mkdir()
    yield place
    lab_ssh.cancel_all()


def pbs_desk(lab: SlurmLab, folder: Path, variables: dict[str, str]) -> Desk:
    programs = doubles.write_pbs(folder / "server", lab.nodes)
    return Desk(lab, folder, {"HPCDL_LAUNCHER": "pbs", "PATH": f"{programs}:/usr/bin:/bin", **variables})


@BOTH
def test_mpiexec_over_the_hosts_of_a_file(lab_ssh: SlurmLab, folder: Path, variables: dict[str, str]) -> None:
    """mpiexec runs over the hosts of a file; a rank that is killed on the second host is named."""
    (folder / "hosts").write_text("# two of the lab's\nnode1 slots=1\nnode[2]:1\n")
    desk = Desk(lab_ssh, folder, {"HPCDL_HOSTFILE": str(folder / "hosts"), **variables})
    words = ("train", *TRAIN, "--ranks", "2", "--run-dir", "two", "--steps", "100000")
    line = lab_ssh.command(desk.line(*words), host="node1", cwd=folder, env=desk.environment)
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as run:
        desk.wait_for_steps("two")
        record = desk.record("two")
        assert (record["ranks"], record["hosts"]) == (2, ["node1", "node2"])
        assert [desk.status("two", rank).host for rank in range(2)] == ["node1", "node2"]
        assert lab_ssh.run(["kill", "-9", str(desk.status("two", 1).pid)], host="node2").code == 0
        _, reported = run.communicate(timeout=300)
    assert run.returncode == 1 and "hpcdl: rank 1 on node2 ended without a word" in reported, reported


def test_a_host_that_is_not_there(lab_ssh: SlurmLab, folder: Path) -> None:
    (folder / "hosts").write_text("node1\nnode9\n")
    desk = Desk(lab_ssh, folder, {"HPCDL_HOSTFILE": str(folder / "hosts")})
    began = time.monotonic()
    finished = desk.hpcdl("train", *TRAIN, "--steps", "2", "--ranks", "2", "--run-dir", "none", host="node1")
    assert finished.code == 1 and time.monotonic() - began < patience(90)
    assert "hpcdl: node node9 went down or cannot be reached" in finished.err, finished.err


@pytest.mark.soak
def test_ibrun(lab_ssh: SlurmLab, folder: Path) -> None:
    """`submit` uses ibrun if $TACC_SYSTEM is set, and its job starts ranks on two nodes by the substitute.

    `make test-all` has srun, PBS and mpiexec over ssh; ibrun's command line is in cluster/test_launchers.py.
    """
    programs = doubles.write_ibrun(folder / "tacc", Path(sys.executable).with_name("mpiexec.hydra"))
    desk = Desk(lab_ssh, folder, {"TACC_SYSTEM": "lab", "PATH": f"{programs}:/usr/bin:/bin"})
    words = ("--nodes", "2", "--ranks-per-node", "1", "--time", "10m", "--", *TRAIN, "--steps", "2")
    number = desk.submit(*words, run="two")
    assert "export HPCDL_LAUNCHER=ibrun" in (folder / "two.job" / "job.sh").read_text()
    job = lab_ssh.wait_for_job(number, timeout_s=300)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    assert desk.record("two")["hosts"] == ["node1", "node2"] and desk.record("two")["ranks"] == 2
    assert (folder / "tacc" / f"slots.{number}").read_text().split() == ["node1", "node2"]
    assert "TACC:  Starting up job" in (folder / "two" / "ranks" / "launcher.log").read_text()


@BOTH
def test_pbs(lab_ssh: SlurmLab, folder: Path, variables: dict[str, str]) -> None:
    """A job of two nodes shows its progress; cancelled, it saves and leaves nothing running."""
    desk = pbs_desk(lab_ssh, folder, variables)
    number = desk.submit(*PBS_JOB, "--", *TRAIN, "--steps", "100000", run="two")
    desk.wait_for_steps("two")
    view = desk.view(number)
    assert (view["state"], view["steps"]) == ("running", 100000) and view["step"] > 0 and view["loss"] > 0
    assert desk.record("two")["hosts"] == ["node1", "node2"]
    finished = desk.hpcdl("cancel", f"{number}.pbs")
    assert finished.code == 0, finished.err
    wait_until(lambda: desk.view(number)["state"] == "completed", "the cancelled job ends", 120)
    assert desk.checkpoints("two") and "a checkpoint is saved" in desk.log(number), desk.log(number)
    assert (folder / "server" / "pbs" / "1" / "exit_status").read_text() == "75\n"
    left = [lab_ssh.run(["ps", "-e", "-o", "args="], host=node).out for node in ("node1", "node2")]
    assert "hpcdl.rank.main" not in "".join(left)


@pytest.mark.soak
def test_pbs_at_its_time_limit(lab_ssh: SlurmLab, folder: Path) -> None:
    """PBS sends no warning: the script sets the run's time limit, and the next job continues."""
    desk = pbs_desk(lab_ssh, folder, {})
    number = desk.submit(*PBS_JOB, "--warning", "210s", "--", *TRAIN, "--steps", "100000", run="two")
    wait_until(lambda: desk.view(number)["state"] == "completed", "the job leaves before its limit", 200)
    assert "stopped by the time limit" in desk.log(number), desk.log(number)
    assert (folder / "server" / "pbs" / "1" / "exit_status").read_text() == "75\n"
    done = int(desk.checkpoints("two")[-1].partition("-")[2])
    number = desk.submit(*PBS_JOB, "--", *TRAIN, "--steps", str(done + 2), "--resume", run="two")
    wait_until(lambda: desk.view(number)["state"] == "completed", "the second job ends", 200)
    assert f"resumed after step {done}" in desk.log(number)
    assert (desk.record("two")["status"], desk.view(number)["step"]) == ("finished", done + 2)


def test_more_nodes_than_pbs_has(lab_ssh: SlurmLab, folder: Path) -> None:
    desk = pbs_desk(lab_ssh, folder, {})
    finished = desk.hpcdl("submit", "--nodes", "9", "--", "train", *TRAIN, "--steps", "2")
    assert finished.code == 1 and "Job exceeds queue resource limits" in finished.err
