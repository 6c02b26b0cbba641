"""Studies on a real Slurm: packed into one job of several nodes, and as one job for each number of nodes."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Finished
from tests.lab.hosts import LOGIN, wait_until
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab

# The rank of a run's second node is killed once, while it builds the network.
FLAKY = """
import os, pathlib, signal
import keras

def build(num_classes, input_shape):
    planted = pathlib.Path(__file__).with_name("planted")
    if os.environ.get("SLURM_NODEID") == "1" and not planted.exists():
        planted.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
"""
STUDY = """
repeats = {repeats}
run-timeout = "4m"
[matrix]
model = ["flaky.py:build"]
data = ["synthetic:mnist@500"]
strategy = ["ring"]
workers = [1, 2]
ranks-per-node = [1]
batch-size = [16]
[train]
steps = 6
profile = "none"
"""


class Desk:
    """A folder with a study in it, on the shared file system, and hpcdl as root on the login host."""

    def __init__(self, lab: SlurmLab, folder: Path, repeats: int) -> None:
        self.lab, self.folder = lab, folder
        folder.mkdir()
        (folder / "flaky.py").write_text(FLAKY)
        (folder / "study.toml").write_text(STUDY.format(repeats=repeats))

    def hpcdl(self, *words: str) -> Finished:
        environment = {"XDG_CACHE_HOME": str(self.folder / "cache"), "HPCDL_SITE_CONFIG": str(self.folder / "none")}
        line = [sys.executable, "-m", "hpcdl", *words]
        return self.lab.run(line, host=LOGIN, cwd=self.folder, env=environment, timeout_s=300)

    def submit(self, *words: str) -> dict[int, dict[str, Any]]:
        """Return what `hpcdl sweep --jobs` says of the parts, by their number of nodes."""
        finished = self.hpcdl("sweep", "study.toml", "--jobs", "--time", "10m", "--out", "out", "--json", *words)
        assert finished.code == 0, finished.err
        return {part["nodes"]: part for part in finished.json()["jobs"]}

    def records(self, place: str) -> dict[str, dict[str, Any]]:
        paths = sorted((self.folder / place).glob("runs/*/record.json"))
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    def states(self, place: str) -> list[str]:
        path = self.folder / place / "study.json"
        return sorted(run["status"] for run in json.loads(path.read_text())["runs"]) if path.exists() else []


@pytest.fixture
def queue(lab_slurm: SlurmLab) -> Iterator[SlurmLab]:
    yield lab_slurm
    lab_slurm.cancel_all()


def test_runs_go_side_by_side_in_one_job(queue: SlurmLab) -> None:
    desk = Desk(queue, queue.shared / "packed", repeats=1)
    (desk.folder / "planted").touch()
    sweep = shlex.join([sys.executable, "-m", "hpcdl", "sweep", "study.toml", "--out", "out"])
    (desk.folder / "job.sh").write_text(f"#!/bin/bash\n{sweep}\n")
    number = queue.submit(desk.folder / "job.sh", "-N3", "--output=job.log", user="root", cwd=desk.folder)
    job = queue.wait_for_job(number, timeout_s=500)
    assert job["JobState"] == "COMPLETED", (desk.folder / "job.log").read_text()
    one, two = desk.records("out").values()
    assert [(record["nodes"], record["ranks"]) for record in (one, two)] == [(1, 1), (2, 2)], "only the ranks needed"
    assert not set(one["hosts"]) & set(two["hosts"]), "both ran at once, on nodes of their own"


def test_no_run_is_begun_that_the_jobs_end_would_take_along(queue: SlurmLab) -> None:
    """In an allocation with one minute left, runs are not started to fail; they are left for --resume."""
    desk = Desk(queue, queue.shared / "late", repeats=1)
    line = ["salloc", "--quiet", "--nodes=2", "--time=1", sys.executable, "-m", "hpcdl", "sweep", "study.toml"]
    finished = queue.run([*line, "--out", "out"], host=LOGIN, cwd=desk.folder, timeout_s=100)
    assert finished.code == 75 and "stopped with 2 of 2 runs to go; continue with --resume" in finished.err
    assert "in another job: the time of this one is over" in finished.err
    assert desk.states("out") == ["waiting", "waiting"] and not desk.records("out")


def test_a_study_as_jobs_survives_a_dead_rank_and_a_killed_sweep(queue: SlurmLab) -> None:
    """A study has one job per number of nodes; runs that finished before a sweep was killed are kept byte for byte."""
    desk = Desk(queue, queue.shared / "jobs", repeats=2)
    first = desk.submit()
    assert sorted(first) == [1, 2] and all(part["submitted"] for part in first.values())
    jobs = {nodes: int(part["job"]) for nodes, part in first.items()}
    wait_until(lambda: desk.states("out/1-node") == ["finished", "running"], "one run of one node is done", 240)
    (done,) = (name for name, record in desk.records("out/1-node").items() if record["status"] == "finished")
    kept = (desk.folder / "out" / "1-node" / "runs" / done / "record.json").read_bytes()
    host = queue.job(jobs[1])["NodeList"]
    (pid,) = queue.run(["pgrep", "-o", "-f", "--", "--only-nodes 1 "], host=host).out.split()
    assert queue.run(["kill", "-9", pid], host=host).code == 0
    assert queue.wait_for_job(jobs[1])["JobState"] == "FAILED"

    again = desk.submit("--resume")
    assert again[1]["submitted"] and again[1]["finished"] == 1
    assert not again[2]["submitted"], "this part has a job"
    for number in (int(again[1]["job"]), jobs[2]):
        job = queue.wait_for_job(number, timeout_s=500)
        assert job["JobState"] == "COMPLETED", "\n".join(path.read_text() for path in desk.folder.rglob("log-*.txt"))
    assert (desk.folder / "out" / "1-node" / "runs" / done / "record.json").read_bytes() == kept, "not run again"
    assert [record["ranks"] for place in ("out/1-node", "out/2-nodes") for record in desk.records(place).values()] == [
        1, 1, 2, 2,
    ]  # fmt: skip
    (failed,) = (desk.folder / "out" / "2-nodes" / "failed").iterdir()
    assert "rank " in json.loads((failed / "record.json").read_text())["message"]
    assert {part["state"] for part in desk.submit("--resume").values()} == {"finished"}, "nothing is left to submit"

    reported = desk.hpcdl("report", "out", "--format", "json", "--out", "report")
    assert reported.code == 0, reported.err
    document = json.loads((desk.folder / "report" / "report.json").read_text())
    assert [(row["nodes"], row["n"]) for row in document["scaling"]] == [(1, 2), (2, 2)]
    assert any("1 run failed" in line for line in document["warnings"])


SEARCH = """
objective = ["loss"]
sampler = "random"
trials = 4
ranks = {ranks}
halving = false
[space]
learning-rate = {{low = 1e-3, high = 0.1, log = true}}
[train]
model = "flaky.py:build"
data = "synthetic:mnist@500"
strategy = "ring"
steps = 6
profile = "none"
"""


@pytest.mark.soak
def test_trials_of_a_search_go_side_by_side_on_nodes_of_their_own(queue: SlurmLab) -> None:
    """Trials of a search run side by side on nodes of their own: each takes two of the job's four, for lack of cores.

    `make test-all` has the runs of a study, above.
    """
    desk = Desk(queue, queue.shared / "search", repeats=1)
    (desk.folder / "planted").touch()
    ranks = len(os.sched_getaffinity(0)) + 1
    (desk.folder / "search.toml").write_text(SEARCH.format(ranks=ranks))
    search = shlex.join([sys.executable, "-m", "hpcdl", "search", "search.toml", "--out", "out"])
    (desk.folder / "job.sh").write_text(f"#!/bin/bash\n{search}\n")
    number = queue.submit(desk.folder / "job.sh", "-N4", "--output=job.log", user="root", cwd=desk.folder)
    job = queue.wait_for_job(number, timeout_s=500)
    log = (desk.folder / "job.log").read_text()
    assert job["JobState"] == "COMPLETED", log
    found = json.loads((desk.folder / "out" / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in found] == ["finished"] * 4, log
    paths = sorted((desk.folder / "out").glob("trials/*/record.json"))
    records = [json.loads(path.read_text()) for path in paths]
    assert [(record["nodes"], record["ranks"]) for record in records] == [(2, ranks)] * 4
    groups = [frozenset(record["hosts"]) for record in records]
    assert groups[0].isdisjoint(groups[1]) and set(groups) == {groups[0], groups[1]}
