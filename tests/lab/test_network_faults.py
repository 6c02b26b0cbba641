"""Faults between real hosts: a node that is cut off, one with a slow link, one whose clock is ahead."""

from __future__ import annotations

import itertools

import pytest

from tests.lab.desk import Desk
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab
TRAIN = ("--model", "lenet", "--data", "synthetic:28x28x1:10", "--batch-size", "8", "--profile", "none")


def desk_of(lab: SlurmLab, name: str) -> Desk:
    folder = lab.shared / name
    folder.mkdir()
    return Desk(lab, folder)


def test_a_run_continues_when_a_node_is_cut_off_for_a_while(lab_slurm: SlurmLab) -> None:
    """A run continues after a partition, with a slow link and a clock ahead; root's tc setting is gone at the end."""
    desk = desk_of(lab_slurm, "impaired")
    faults = "skew:host=2:+5s,link:host=1:100mbit,partition:host=2@step=20+2s"
    # One step a call: the time of a call is divided among its steps, so that none of several would stand out.
    words = (*TRAIN, "--steps", "60", "--steps-per-call", "1", "--stall-timeout", "20s", "--inject", faults)
    number = desk.submit("--nodes", "3", "--time", "10m", "--", *words, run="impaired")
    job = lab_slurm.wait_for_job(number)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    events = desk.events("impaired", "message")
    texts = [event["text"] for event in events]
    for reported in ("skew:host=2:+5s", "link:host=1:100mbit (by tc on eth0)", "partition:host=2@step=20+2s"):
        assert f"injected: {reported}" in texts, texts
    assert "tbf" not in lab_slurm.run(["tc", "qdisc", "show", "dev", "eth0"], host="node2").out
    told_at = next(event["at"] for event in events if "partition" in event["text"] and "step" in event)
    steps = desk.events("impaired", "step")
    before_s = [event["at"] for event in steps if event["step"] <= 20]
    assert told_at - max(before_s) > 4, "told by rank 2, whose clock is ahead"
    record = desk.record("impaired")
    assert (record["status"], record["steps"]) == ("finished", 60)
    # Not by the longest step: a partition may begin between two steps, while the ranks agree whether to go on.
    gaps_s = [after["at"] - before["at"] for before, after in itertools.pairwise(steps)]
    assert max(gaps_s) > 1.9, "the run stood still"
    assert all(seconds >= 0 for seconds in record["parts"].values()), record["parts"]


@pytest.mark.soak
def test_a_node_that_stays_cut_off_is_named(lab_slurm: SlurmLab) -> None:
    """A node that stays cut off is named; `make test-all` has runs that continue without one, below."""
    desk = desk_of(lab_slurm, "parted")
    words = (*TRAIN, "--steps", "1000", "--stall-timeout", "8s", "--inject", "partition:host=1@step=20")
    number = desk.submit("--nodes", "3", "--time", "10m", "--", *words, run="parted")
    job = lab_slurm.wait_for_job(number)
    assert job["ExitCode"] == "1:0", desk.log(number)
    assert "hpcdl: rank 1 on node2 is not responding" in desk.log(number), desk.log(number)


def test_a_run_continues_without_a_node_that_stays_cut_off(lab_slurm: SlurmLab) -> None:
    """A run continues without a node that stays cut off, also for new ranks; Slurm's own network still works."""
    desk = desk_of(lab_slurm, "left-out")
    words = (*TRAIN, "--steps", "80", "--stall-timeout", "8s", "--checkpoint-every", "0.2s")
    words += ("--elastic", "--min-workers", "2", "--inject", "partition:host=1@step=50")
    number = desk.submit("--nodes", "3", "--time", "20m", "--", *words, run="left-out")
    job = lab_slurm.wait_for_job(number, timeout_s=900)
    log = desk.log(number)
    assert job["JobState"] == "COMPLETED", log
    assert "node2, on which ranks were lost twice, is left out; 2 workers in place of 3" in log, log
    record = desk.record("left-out")
    assert (record["status"], record["steps"], record["hosts"]) == ("finished", 80, ["node1", "node3"])
    reported = [event["text"] for event in desk.events("left-out", "message")]
    assert reported.count("injected: partition:host=1@step=50") == 1
    assert sum("rank 1 on node2 is not responding" in text for text in reported) == 2, reported


def test_hosts_that_the_job_has_not_got_are_refused(lab_slurm: SlurmLab) -> None:
    desk = desk_of(lab_slurm, "refused")
    number = desk.submit("--nodes", "2", "--time", "10m", "--", *TRAIN, "--inject", "skew:host=2:+2s", run="refused")
    job = lab_slurm.wait_for_job(number)
    assert job["ExitCode"] == "2:0", desk.log(number)
    assert "--inject skew:host=2:+2s: there are hosts 0 to 1" in desk.log(number), desk.log(number)
