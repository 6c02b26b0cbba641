from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hpcdl.tuning.trials import node_of, shed, trial_prefixes

if TYPE_CHECKING:
    from tests.lab.slurm import SlurmLab


def test_outside_of_an_allocation_trials_run_here() -> None:
    assert trial_prefixes({}) == [[]]
    assert trial_prefixes({"SLURM_JOB_NODELIST": "c101"}) == [[]]


def test_every_node_of_an_allocation_runs_trials() -> None:
    prefixes = trial_prefixes({"SLURM_JOB_NODELIST": "c[101-103]"})
    assert [next(word for word in prefix if "nodelist" in word) for prefix in prefixes] == [
        f"--nodelist=c{number}" for number in (101, 102, 103)
    ]
    assert all(prefix[0] == "srun" for prefix in prefixes)
    assert [node_of(prefix) for prefix in prefixes] == ["c101", "c102", "c103"]
    assert node_of([]) == ""


def test_a_trial_does_not_take_itself_for_a_rank() -> None:
    assert shed({"SLURM_PROCID": "0", "PMI_RANK": "1", "PATH": "/bin"}) == {"PATH": "/bin"}
    code = "import os; print([name for name in os.environ if name.startswith('SLURM')])"
    command = [sys.executable, "-m", "hpcdl.tuning.trials", sys.executable, "-c", code]
    environment = os.environ | {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.lab
@pytest.mark.mpi
def test_trials_run_on_every_node_of_a_real_allocation(lab_slurm: SlurmLab) -> None:
    """Two nodes, two ranks a trial: srun takes the trial to its node, where it starts ranks of its own."""
    folder = lab_slurm.shared / "tuning"
    folder.mkdir(mode=0o777)
    (folder / "s.toml").write_text("only = true\nranks_per_node = [2]\nintra_op_threads = [1]\nbinding = ['none']\n")
    words = [sys.executable, "-m", "hpcdl", "tune-threads", "--model", "lenet", "--batch-size", "8", "--steps", "2"]
    words += ["--space", "s.toml", "--budget", "4m", "--precision", "0.9", "--out", "p.toml", "--log", "log.jsonl"]
    finished = lab_slurm.run(
        ["salloc", "--nodes=2", "--quiet", "--exclusive", *words], user="root", cwd=folder, timeout_s=400
    )
    assert finished.code == 0, finished.err
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
    assert {entry["status"] for entry in entries} == {"ok"}, entries
    assert len({entry["node"] for entry in entries}) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "p.toml", "s.toml"]
