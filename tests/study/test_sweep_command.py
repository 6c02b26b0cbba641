"""`hpcdl sweep` as users call it, with real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine

STUDY = """
mode = "scale-up"
repeats = 2
[matrix]
model = ["resnet50"]
data = ["synthetic:imagenet"]
nodes = [64]
strategy = ["single", "ring"]
threads = [1, 2]
[train]
steps = 6
[small]
repeats = 1
[small.matrix]
model = ["lenet"]
data = ["synthetic:mnist@500"]
strategy = ["ring"]
workers = [2]
threads = [1]
batch-size = [16]
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "pilot.toml"
    path.write_text(STUDY)
    return path


def test_a_dry_run_lists_and_writes_nothing(study: Path, ask_hpcdl: CommandLine) -> None:
    shown = ask_hpcdl(["sweep", study, "--dry-run"])
    assert shown.code == 0, shown.err
    assert "2 points x 2 repeats = 4 runs: about" in shown.out and "node-hours" in shown.out
    assert "left out 2 of the matrix" in shown.err and "'single' is one process" in shown.err
    document = ask_hpcdl(["sweep", study, "--dry-run", "--json", "--repeats", "1", "--threads", "4"]).json()
    assert [run["threads"] for run in document["runs"]] == [4]
    assert document["node_hours"] == pytest.approx(64 * document["seconds"] / 3600)
    assert not (ask_hpcdl.home / "studies").exists()


def test_what_cannot_run_here_is_reported_first(study: Path, ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(["sweep", study])
    assert refused.code == 2 and "inside an allocation" in refused.err and "--small" in refused.err
    wrong = ask_hpcdl(["sweep", study, "--small", "--repeats", "none", "--strategy", "rnig", "--retries", "-1"])
    assert wrong.code == 2
    assert {"repeats", "retries"} <= {word.strip(":") for word in wrong.err.replace("--", " ").split()}
    assert not (ask_hpcdl.home / "studies").exists()


@pytest.mark.long
def test_training_that_diverges_is_started_once(run_hpcdl: CommandLine) -> None:
    flags = ["--model", "lenet", "--data", "synthetic:mnist@64", "--workers", "1", "--strategy", "single"]
    flags += ["--batch-size", "16", "--repeats", "1", "--retries", "2", "--set", "learning-rate=1e30"]
    done = run_hpcdl(["sweep", *flags, "--set", "steps=4", "--out", "diverging"], timeout_s=300)
    assert done.code == 1 and "1 of 1 runs failed" in done.err, done.err
    assert "it is not started again, its seed and settings would be the same" in done.err
    folder = run_hpcdl.home / "diverging"
    assert not any((folder / "failed").iterdir())
    (state,) = json.loads((folder / "study.json").read_text())["runs"]
    record = json.loads((folder / "runs" / state["name"] / "record.json").read_text())
    assert (state["status"], state["attempts"], record["failure"]) == ("failed", 1, "not-finite")
    assert "not finite at step" in state["message"]


@pytest.mark.mpi
def test_a_small_study_trains_and_is_reported(study: Path, run_hpcdl: CommandLine) -> None:
    done = run_hpcdl(["sweep", study, "--small", "--json"], timeout_s=300)
    assert done.code == 0, done.err
    document = done.json()
    folder = run_hpcdl.home / document["folder"]
    (run,) = document["runs"]
    record = json.loads((folder / "runs" / run["name"] / "record.json").read_text())
    assert (run["status"], record["status"]) == ("finished", "finished")
    assert (record["study"], record["mode"], record["repeat"]) == ("pilot-small", "scale-up", 1)
    assert (record["workers"], record["steps"], record["intra_op_threads"]) == (2, 6, 1)
    assert not (folder / "runs" / run["name"] / "model.keras").exists()
    again = run_hpcdl(["sweep", study, "--small", "--resume"])
    assert again.code == 0 and "1 of 1 runs finished" in again.out
    reported = run_hpcdl(["report", folder, "--format", "json", "--out", folder / "report"])
    assert reported.code == 0, reported.err
    scaling = json.loads((folder / "report" / "report.json").read_text())["scaling"]
    assert [(row["mode"], row["threads"], row["workers"]) for row in scaling] == [("scale-up", 1, 2)]
