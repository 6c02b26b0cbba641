"""A study inside a Slurm job of several nodes: srun starts the ranks, runs go side by side on nodes of their own."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lab.slurm import SlurmLab

STUDY = """
name = "nodes"
repeats = 1
run-timeout = "4m"
[matrix]
model = ["lenet"]
data = ["synthetic:mnist@500"]
strategy = ["ring"]
workers = [1, 2]
ranks-per-node = [1]
batch-size = [16]
[train]
steps = 6
profile = "none"
"""


@pytest.mark.lab
def test_a_study_runs_on_the_nodes_of_its_job(lab_slurm: SlurmLab) -> None:
    folder = lab_slurm.shared / "sweep"
    folder.mkdir()
    (folder / "nodes.toml").write_text(STUDY)
    sweep = shlex.join([sys.executable, "-m", "hpcdl", "sweep", "nodes.toml", "--out", "study", "--json"])
    (folder / "job.sh").write_text(f"#!/bin/bash\n{sweep} >out 2>err\n")
    number = lab_slurm.submit(folder / "job.sh", "-N3", "--output=job.log", user="root", cwd=folder)
    job = lab_slurm.wait_for_job(number, timeout_s=500)
    assert job["JobState"] == "COMPLETED", (folder / "err").read_text() + (folder / "job.log").read_text()
    document = json.loads((folder / "out").read_text())
    assert [run["status"] for run in document["runs"]] == ["finished", "finished"]
    records = [json.loads(path.read_text()) for path in sorted((folder / "study" / "runs").glob("*/record.json"))]
    assert [(record["nodes"], record["ranks"]) for record in records] == [(1, 1), (2, 2)]
    hosts = [set(record["hosts"]) for record in records]
    assert not hosts[0] & hosts[1], "both ran at once, on nodes of their own"
