"""A job loses a node: it ends in bounded time, names the node, and continues elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import patience
from tests.lab import ssh
from tests.lab.desk import Desk
from tests.lab.hosts import lab_folder, wait_until
from tests.lab.nodes import TCP, hostfile_environment
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
TRAIN = ("--model", "lenet", "--data", "synthetic:cifar10", "--batch-size", "8", "--checkpoint-every", "1s")
SLOW = ("--model", "emulated:lenet:0.2s", *TRAIN[2:])
"""Steps that leave time, and leave the cores to other processes."""
FOR_EVER = (*TRAIN, "--steps", "100000")
GONE = "hpcdl: node node2 with rank 1 went down or cannot be reached; continue with --resume"
BOUND_S = 90.0
"""Slurm's SlurmdTimeout is 10 s in the lab, and it checks each node three times; then it kills the job."""


def desk_of(lab: SlurmLab) -> Desk:
    folder = lab.shared / "desk"
    folder.mkdir()
    return Desk(lab, folder)


def at_work(desk: Desk, run: str) -> None:
    desk.wait_for_steps(run, patience(240))
    wait_until(lambda: bool(desk.checkpoints(run)), f"{run} saves", patience(60))


def lose(lab: SlurmLab, node: str, how: str) -> None:
    if how in ("power", "shutdown"):
        {"power": lab.lose_host, "shutdown": lab.stop_host}[how](node)
        return
    update = ["scontrol", "update", f"nodename={node}", "reason=a test"]
    lines = {
        "link": [["ip", "link", "set", "eth0", "down"]],
        "drained": [[*update, "state=drain"], [*update, "state=down"]],  # slurmd's next message ends down alone
    }[how]
    for line in lines:
        assert lab.run(line, host=node if how == "link" else "login").code == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("power", GONE),
        ("link", GONE),
        ("drained", "a checkpoint is saved: continue with --resume (node node2 went down)"),
    ],
    ids=["power", "link", "drained"],
)
def test_a_node_of_ranks_goes_down(frail_lab: SlurmLab, how: str, expected: str) -> None:
    desk = desk_of(frail_lab)
    number = desk.submit("--nodes", "2", "--time", "10m", "--", *FOR_EVER, run="lost")
    at_work(desk, "lost")
    assert desk.status("lost", 1).host == "node2"
    began = time.monotonic()
    lose(frail_lab, "node2", how)
    job = frail_lab.wait_for_job(number, timeout_s=BOUND_S)
    assert job["JobState"] == "NODE_FAIL" and time.monotonic() - began < patience(BOUND_S)
    wait_until(lambda: "hpcdl: " in desk.log(number), "hpcdl says why", 10)
    assert expected in desk.log(number), desk.log(number)
    assert desk.view(number)["state"] == "node_fail"
    last = int(desk.checkpoints("lost")[-1].partition("-")[2])
    again = desk.submit("--nodes", "2", "--time", "10m", "--", *TRAIN, "--steps", str(last + 2), "--resume", run="lost")
    job = frail_lab.wait_for_job(again, timeout_s=300)
    assert job["JobState"] == "COMPLETED", desk.log(again)
    assert f"resumed after step {last} of {last + 2}" in desk.log(again)
    hosts = desk.record("lost")["hosts"]
    assert len(hosts) == 2 and "node2" not in hosts


@pytest.mark.soak
@pytest.mark.parametrize("how", ["power", "link", "drained"])
def test_a_run_continues_on_the_nodes_that_are_left(frail_lab: SlurmLab, how: str) -> None:
    """A run continues on the remaining nodes; `make test-all` restores it from the memory of those nodes, below."""
    desk = desk_of(frail_lab)
    words = (*TRAIN, "--steps", "200", "--elastic", "--min-workers", "2", "--stall-timeout", "20s")
    number = desk.submit("--nodes", "4", "--time", "10m", "--", *words, run="lost")
    at_work(desk, "lost")
    lose(frail_lab, "node2", how)
    job = frail_lab.wait_for_job(number, timeout_s=500)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    assert "node2 is left out; 3 workers in place of 4, 32 samples a step as before" in desk.log(number)
    record = desk.record("lost")
    assert record["hosts"] == ["node1", "node3", "node4"]
    assert (record["status"], record["workers"], record["global_batch"], record["steps"]) == ("finished", 3, 32, 200)


@pytest.fixture
def patient_lab() -> Iterator[SlurmLab]:
    """A cluster that keeps a silent node in a job for two minutes."""
    with lab_folder() as folder:
        lab = SlurmLab(folder, num_nodes=4, node_timeout_s=120)
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


@pytest.mark.soak
def test_a_run_grows_back_when_its_node_returns(patient_lab: SlurmLab) -> None:
    """A run grows again when its node returns, without a request."""
    desk = desk_of(patient_lab)
    words = (*SLOW, "--steps", "600", "--elastic", "--min-workers", "2", "--stall-timeout", "20s")
    number = desk.submit("--nodes", "4", "--time", "20m", "--", *words, run="lost")
    at_work(desk, "lost")
    lose(patient_lab, "node2", "shutdown")
    wait_until(lambda: "node2 is left out; 3 workers in place of 4" in desk.log(number), "it continues on three", 200)
    patient_lab.start_again("node2")
    job = patient_lab.wait_for_job(number, timeout_s=500)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    assert "node2 is back; 4 workers in place of 3, 32 samples a step as before" in desk.log(number)
    record = desk.record("lost")
    assert record["hosts"] == ["node1", "node2", "node3", "node4"]
    assert (record["status"], record["workers"], record["global_batch"], record["steps"]) == ("finished", 4, 32, 600)


@pytest.mark.soak
def test_a_node_that_slurm_has_taken_away_does_not_come_back(frail_lab: SlurmLab) -> None:
    """A node that Slurm removed from a job does not come back; the answer to a request for more workers says so."""
    desk = desk_of(frail_lab)
    words = (*SLOW, "--steps", "500", "--elastic", "--min-workers", "2", "--stall-timeout", "20s")
    number = desk.submit("--nodes", "4", "--time", "20m", "--", *words, run="lost")
    at_work(desk, "lost")
    lose(frail_lab, "node2", "power")
    wait_until(lambda: "node2 is left out; 3 workers in place of 4" in desk.log(number), "it continues on three", 200)
    frail_lab.start_again("node2")
    wait_until(lambda: frail_lab.states()["node2"] == "idle", "node2 is back", 60)
    asked = desk.hpcdl("jobs", "grow", str(number))
    assert asked.code == 0, asked.err
    why = "more workers were asked for, but node2 cannot be used (no answer, or no more in this job)"
    wait_until(lambda: why in desk.log(number), "it says why not", 60)
    assert frail_lab.wait_for_job(number, timeout_s=500)["JobState"] == "COMPLETED", desk.log(number)
    assert desk.record("lost")["workers"] == 3


@pytest.mark.soak
def test_a_run_over_the_hosts_of_a_file_grows_back(frail_lab: SlurmLab) -> None:
    """A run over the hosts of a file grows again: without a scheduler ssh checks the nodes, after a request at once."""
    desk = desk_of(frail_lab)
    (desk.folder / "hosts").write_text("node1\nnode2\nnode3\n")
    environment = hostfile_environment(desk.folder / "hosts", "")
    words = ("train", *SLOW, "--steps", "500", "--ranks", "3", "--run-dir", "lost", "--stall-timeout", "20s")
    words += ("--elastic", "--min-workers", "2")
    line = frail_lab.command(desk.line(*words), host="node1", cwd=desk.folder, env=desk.environment | environment)
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as run:
        at_work(desk, "lost")
        lose(frail_lab, "node2", "shutdown")
        wait_until(lambda: len(desk.record("lost")["hosts"]) == 2, "it continues on two", 200)
        frail_lab.boot_again("node2")
        ssh.start_on(frail_lab, "node2")
        desk.hpcdl("jobs", "grow", "lost")
        _, reported = run.communicate(timeout=500)
    assert run.returncode == 0, reported
    assert "node2 is back; 3 workers in place of 2" in reported, reported
    assert desk.record("lost")["hosts"] == ["node1", "node2", "node3"]


@pytest.mark.parametrize(
    ("redundancy", "way"), [("xor", "gaps"), pytest.param("partner", "thread", marks=pytest.mark.soak)]
)
def test_a_lost_nodes_state_comes_from_the_others_memory(frail_lab: SlurmLab, redundancy: str, way: str) -> None:
    """A lost node's state is restored from other nodes' memory, without any checkpoint on the file system."""
    desk = desk_of(frail_lab)
    saving = ("--checkpoint-every", "1h", "--local-checkpoint-every", "5", "--local-checkpoint-redundancy", redundancy)
    words = (*TRAIN, *saving, "--background", way, "--steps", "200", "--elastic", "--min-workers", "3")
    number = desk.submit("--nodes", "4", "--time", "10m", "--", *words, "--stall-timeout", "20s", run="lost")
    wait_until(lambda: any(event["step"] > 30 for event in desk.events("lost", "step")), "copies are made", 240)
    lose(frail_lab, "node3", "power")
    job = frail_lab.wait_for_job(number, timeout_s=500)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    left = "node1 and node2 and node4" if redundancy == "xor" else "node1"
    reported = [event["text"] for event in desk.events("lost", "message") if "is made again" in event["text"]]
    assert len(reported) == 1 and reported[0].startswith("warning: what node3 held of step "), desk.log(number)
    assert reported[0].endswith(f"is made again from the memory of {left}"), reported
    assert "node3 is left out; 3 workers in place of 4, 32 samples a step as before" in desk.log(number)
    record = desk.record("lost")
    assert record["hosts"] == ["node1", "node2", "node4"]
    assert (record["status"], record["workers"], record["global_batch"], record["steps"]) == ("finished", 3, 32, 200)
    (resumed,) = record["resumed_from_steps"]
    assert resumed > 0 and resumed % 5 == 0 and desk.checkpoints("lost") == [], "memory it was"


@pytest.mark.soak
def test_below_the_least_number_of_workers_a_job_ends_with_what_is_saved(frail_lab: SlurmLab) -> None:
    desk = desk_of(frail_lab)
    words = (*FOR_EVER, "--elastic", "--min-workers", "3", "--stall-timeout", "20s")
    number = desk.submit("--nodes", "3", "--time", "10m", "--", *words, run="lost")
    at_work(desk, "lost")
    lose(frail_lab, "node3", "power")
    job = frail_lab.wait_for_job(number, timeout_s=500)
    assert job["ExitCode"] == "75:0", desk.log(number)
    assert "2 workers are left, --min-workers is 3; what is saved, up to step" in desk.log(number)


@pytest.mark.soak
def test_the_node_of_the_batch_script_goes_down(frail_lab: SlurmLab) -> None:
    """The node of the batch script goes down: Slurm itself requeues the job, which was submitted with --until-done."""
    desk = desk_of(frail_lab)
    number = desk.submit("--nodes", "2", "--time", "10m", "--until-done", "--", *TRAIN, "--steps", "400", run="lost")
    at_work(desk, "lost")
    lose(frail_lab, "node1", "power")
    wait_until(lambda: frail_lab.job(number)["Restarts"] == "1", "the job is requeued", BOUND_S)
    job = frail_lab.wait_for_job(number, timeout_s=300)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    assert "resumed after step" in desk.log(number)
    record = desk.record("lost")
    assert len(record["hosts"]) == 2 and "node1" not in record["hosts"] and record["steps"] == 400


@pytest.mark.soak
@pytest.mark.parametrize("library", ["", "libmpi.so.40"], ids=["mpich", "openmpi"])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("power", "hpcdl: rank 1 on node2 is not responding"),
        ("shutdown", GONE),
    ],
    ids=["power", "shutdown"],
)
def test_a_node_goes_down_where_no_scheduler_sees_it(
    frail_lab: SlurmLab, library: str, how: str, expected: str
) -> None:
    """A node goes down without a scheduler: mpiexec over ssh may wait for minutes, and --stall-timeout ends the run."""
    desk = desk_of(frail_lab)
    (desk.folder / "hosts").write_text("node1\nnode2\n")
    environment = hostfile_environment(desk.folder / "hosts", library)
    words = ("train", *FOR_EVER, "--ranks", "2", "--run-dir", "lost", "--stall-timeout", "6s")
    line = frail_lab.command(desk.line(*words), host="node1", cwd=desk.folder, env=desk.environment | environment)
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as run:
        at_work(desk, "lost")
        began = time.monotonic()
        lose(frail_lab, "node2", how)
        _, reported = run.communicate(timeout=BOUND_S)
    assert run.returncode == 1 and time.monotonic() - began < patience(60), reported
    assert expected in reported, reported
    left = frail_lab.run(["ps", "-e", "-o", "args="], host="node1").out
    assert "hpcdl" not in left.replace(str(frail_lab.folder), "") and "ssh -x" not in left, left


@pytest.mark.soak
@pytest.mark.parametrize("victim", [1, 0])
def test_ranks_on_other_nodes_continue_in_place(frail_lab: SlurmLab, open_mpi_5: Path, victim: int) -> None:
    """A run continues in place after a rank is killed on another node, or beside the process that started all.

    `make test-all` has it on one node (training/test_in_place.py).
    """
    desk = desk_of(frail_lab)
    shutil.copytree(open_mpi_5, frail_lab.shared / "openmpi", symlinks=True)
    (desk.folder / "hosts").write_text("node1\nnode2\nnode3\n")
    library = str(frail_lab.shared / "openmpi" / "lib" / "libmpi.so.40")
    environment = hostfile_environment(desk.folder / "hosts", library) | TCP
    words = ("train", *SLOW, "--steps", "60", "--ranks", "3", "--run-dir", "lost", "--strategy", "ring", "--elastic")
    words += ("--min-workers", "2", "--inject", f"kill:rank={victim}@step=20")
    line = desk.line(*words)
    env = desk.environment | environment
    finished = frail_lab.run(line, host="node1", cwd=desk.folder, env=env, timeout_s=patience(200))
    assert finished.code == 0, finished.err
    assert "where a rank is lost, the others continue in place (ULFM)" in finished.err
    (recovery,) = [event["recovery"] for event in desk.events("lost", "message") if "recovery" in event]
    assert recovery["lost"] == [victim]
    record = desk.record("lost")
    assert (record["status"], record["workers"], record["steps"]) == ("finished", 2, 60)
    assert record["hosts"] == [node for rank, node in enumerate(["node1", "node2", "node3"]) if rank != victim]
