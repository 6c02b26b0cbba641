from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcdl.core.storage.lock import writing
from hpcdl.node.accelerators import SeenByTensorflow
from hpcdl.tuning.space import Candidate
from hpcdl.tuning.trials import Measurer, TrialOutcome

Run = Callable[..., Any]


def slow_measure(_: Measurer, candidate: Candidate, time_limit_s: float, prefix: Sequence[str] = ()) -> TrialOutcome:
    """Play a trial that takes longer than its limit."""
    time.sleep(time_limit_s)
    return TrialOutcome(status="timeout", message="it took longer", seconds=time_limit_s)


def test_replay_prints_what_the_contract_says(ask_hpcdl: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranks_per_node", "intra_op_threads", "images_per_second"])
        writer.writerows([[1, threads, 100 - abs(threads - 8) + turn] for threads in range(1, 25) for turn in range(3)])
    done = ask_hpcdl(["tune-threads", "--replay", path, "--json"])
    assert done.code == 0, done.err
    document = done.json()
    assert set(document) == {"winner", "trials_used", "samples_used", "samples_exhaustive", "regret"}
    assert document["winner"] == {"ranks_per_node": "1", "intra_op_threads": "8"}
    assert document["samples_exhaustive"] == 72
    assert document["samples_used"] <= 36
    assert "regret" in ask_hpcdl(["tune-threads", "--replay", path]).out


def test_plan_for_a_knl_without_being_there(ask_hpcdl: Run) -> None:
    done = ask_hpcdl(["tune-threads", "--plan", "--machine", "stampede2-knl-quadrant-flat", "--json"])
    assert done.code == 0, done.err
    candidates = done.json()["candidates"]
    published = next(item for item in candidates if item["origin"] == "published for this machine")
    assert published["cpus_by_local_rank"] == [list(range(64))]
    assert published["memory_nodes_by_local_rank"] == [[1]]
    assert published["environment"]["HPCDL_INTRA_OP_THREADS"] == "64"
    rank = "numactl --physcpubind=0-63 --preferred=1 python -m hpcdl.bench.step FOLDER"
    assert published["commands"][0].endswith(rank)
    assert published["command"].startswith("hpcdl bench step --json --exchange-only --model MODEL --batch-size 32")


def test_plan_for_this_node_is_readable(ask_hpcdl: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("only = true\nintra_op_threads = [1]\nbinding = ['none']\n")
    done = ask_hpcdl(["tune-threads", "--plan", "--space", path, "--model", "lenet"])
    assert done.code == 0, done.err
    assert "1 candidates" in done.out
    assert "HPCDL_INTRA_OP_THREADS=1" in done.out
    assert "--model lenet" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lenet", "--budget", "0"], "--budget: 0"),
        ([], "--model is needed"),
        (["--model", "lenett"], "lenet"),
        (["--model", "lenet", "--data", "absent"], "no such data folder: absent"),
        (["--model", "lenet", "--machine", "theta-knl"], "add --plan"),
        (["--plan", "--machine", "theta"], "theta-knl"),
        (["--plan", "--batch-sizes", "32,x"], "--batch-sizes '32,x'"),
        (["--replay", "absent.csv"], "cannot read absent.csv"),
        (["--plan", "--space", "absent.toml"], "absent.toml"),
        (["--plan", "--machine", "generic", "--ranks-per-node", "9999"], "the space is empty"),
    ],
)
def test_unusable_input_is_one_line_and_exit_2(
    arguments: list[str], words: str, ask_hpcdl: Run, tmp_path: Path
) -> None:
    done = ask_hpcdl(["tune-threads", *arguments], cwd=tmp_path)
    assert done.code == 2, done.err
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.glob("*.toml")) == []


def test_two_searches_do_not_measure_into_one_log(ask_hpcdl: Run, tmp_path: Path) -> None:
    """The second would disturb the first's times, and their samples would be mixed."""
    with writing(tmp_path, name=".p.trials.jsonl.lock"):
        done = ask_hpcdl(["tune-threads", "--model", "lenet", "--out", "p.toml"], cwd=tmp_path)
    assert done.code == 2 and "another hpcdl writes to p.trials.jsonl (pid" in done.err
    assert not (tmp_path / "p.trials.jsonl").exists()


def test_a_search_that_measured_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch, ask_hpcdl: Run, tmp_path: Path
) -> None:
    monkeypatch.setattr("hpcdl.tuning.tune.Measurer.measure", slow_measure)
    done = ask_hpcdl(["tune-threads", "--model", "lenet", "--budget", "1s", "--out", "p.toml"], cwd=tmp_path)
    assert done.code == 1 and "no trial ended within the budget of 1 s: nothing was stored" in done.err
    assert done.out == "" and not (tmp_path / "p.toml").exists()


@pytest.mark.mpi
def test_a_search_for_gpus_whose_ranks_compute_on_processors_stores_nothing(
    monkeypatch: pytest.MonkeyPatch, ask_hpcdl: Run, tmp_path: Path
) -> None:
    """A GPU search whose ranks compute on CPUs stores nothing; only TensorFlow's answer is faked, the trial is real."""
    space, out = tmp_path / "s.toml", tmp_path / "p.toml"
    space.write_text("only = true\nintra_op_threads = [1]\nbinding = ['none']\n")
    answer = SeenByTensorflow(version="2.21.0", built_for="CUDA 12.5.1", seen=1)
    monkeypatch.setattr("hpcdl.tuning.tune.ask_tensorflow", lambda _: answer)
    words = ["tune-threads", "--model", "lenet", "--batch-size", "8", "--steps", "2", "--space", space, "--out", out]
    done = ask_hpcdl([*words, "--max-samples", "1"], env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert done.code != 0 and "2 x GPU: a rank for each" in done.err
    assert "2 of 2 ranks computed on CPUs, not on GPUs" in done.err and not out.exists()


@pytest.mark.mpi
def test_a_real_search_stores_a_profile_that_is_found_again(run_hpcdl: Run, tmp_path: Path) -> None:
    """On a node whose GPUs TensorFlow does not see, the search says so and tunes for the processors."""
    space = tmp_path / "s.toml"
    space.write_text("only = true\nranks_per_node = [1]\nintra_op_threads = [1]\nbinding = ['none']\n")
    words = ["tune-threads", "--model", "lenet", "--batch-size", "8", "--steps", "2", "--space", space]
    words += ["--budget", "4m", "--max-samples", "3", "--precision", "0.9", "--json"]
    done = run_hpcdl(words, env={"CUDA_VISIBLE_DEVICES": "0,1"}, timeout_s=280)
    assert done.code == 0, done.err
    assert "sees none of this node's GPUs (2 x GPU): the CPUs are tuned" in done.err
    document = done.json()
    assert document["schema"] == "hpcdl.profile/1"
    assert document["settings"]["intra_op_threads"] == 1 and "devices" not in document
    assert document["images_per_second"] > 0
    assert "not checked against" not in done.err
    assert "next: hpcdl train --model lenet --data synthetic:mnist --steps 20 --strategy ring --ranks 1" in done.err
    assert "precision" not in document["settings"]
    entries = [json.loads(line) for line in Path(document["log"]).read_text().splitlines()]
    assert len(entries) == 1 + document["num_samples"]
    found = run_hpcdl(["node", "env", "--model", "lenet"])
    assert f"HPCDL_INTRA_OP_THREADS={document['settings']['intra_op_threads']}" in found.out
    assert document["path"] in found.err
