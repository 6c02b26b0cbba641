"""TensorFlow's own engines through the command line: equal to `single`, protected, refused if the site forbids them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.cluster.status import read_statuses
from tests.conftest import CommandLine, listening, patience
from tests.training_runs import (
    finish,
    kill_rank,
    model_weights,
    record_of,
    start,
    steps_done,
    wait_for,
    written_by_ranks,
)

TRAIN = [
    "train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--optimizer", "momentum", "--steps", "20",
    "--schedule", "cosine", "--deterministic", "--profile", "none", "--allow-grpc",
]  # fmt: skip
SGD = [item if item != "momentum" else "sgd" for item in TRAIN]
"""Plain SGD for comparisons under a schedule: TensorFlow's momentum equals Keras's only at a constant rate."""
RUNS: dict[str, list[str]] = {
    "grpc-ring": ["--strategy", "grpc-ring", "--ranks", "2"],
    "nccl": ["--strategy", "nccl", "--ranks", "2"],
    "grpc-ps": ["--strategy", "grpc-ps", "--ranks", "4", "--servers", "2", "--placement", "greedy"],
}


@pytest.fixture(scope="module")
def single(session_hpcdl: CommandLine) -> Path:
    folder = session_hpcdl.home / "grpc-single"
    finished = session_hpcdl([*SGD, "--strategy", "single", "--batch-size", "16", "--run-dir", folder])
    assert finished.code == 0, finished.err
    return folder


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", sorted(RUNS))
def test_equals_single(session_hpcdl: CommandLine, single: Path, strategy: str) -> None:
    """Training equals `single`. In `make test-all` one strategy takes steps, in bench/test_step.py and below."""
    folder = session_hpcdl.home / strategy
    finished = session_hpcdl([*SGD, *RUNS[strategy], "--batch-size", "8", "--run-dir", folder], timeout_s=200)
    assert finished.code == 0, finished.err
    assert "authenticate nobody" in finished.err
    record = record_of(folder)
    assert record["workers"] == 2 and record["steps"] == 20 and record["status"] == "finished"
    assert any("authenticate nobody" in warning for warning in record["warnings"])
    assert record["software"]["mpi"] == "tcp"
    assert len(record["rank_records"]) == record["ranks"]
    assert written_by_ranks(folder) == {"all.json"}, "the job's secret must not outlive it"
    for own, other in zip(model_weights(folder), model_weights(single), strict=True):
        assert numpy.abs(own - other).max() <= 1e-5 * numpy.abs(other).max()


ADAPTED = """
import keras, numpy

def build(input_shape, num_classes):
    scaling = keras.layers.Normalization()
    scaling.adapt(numpy.random.default_rng(0).random((64, *input_shape), "float32"))
    nested = keras.Sequential([scaling, keras.layers.Flatten()])
    return keras.Sequential([keras.Input(input_shape), nested, keras.layers.Dense(num_classes)])
"""


@pytest.mark.mpi
def test_a_model_with_adapted_normalization_trains_as_on_one_process(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(ADAPTED)
    common = [
        "train", "--model", f"{tmp_path / 'net.py'}:build", "--data", "synthetic:6x6x1:3@64", "--steps", "4",
        "--batch-size", "8", "--deterministic", "--profile", "none", "--optimizer", "sgd",
    ]  # fmt: skip
    runs = {"one": ["--strategy", "single"], "ps": ["--strategy", "grpc-ps", "--ranks", "2", "--allow-grpc"]}
    for name, words in runs.items():
        finished = run_hpcdl([*common, *words, "--run-dir", tmp_path / name], timeout_s=200)
        assert finished.code == 0, finished.err
    for own, other in zip(*(model_weights(tmp_path / name) for name in runs), strict=True):
        assert numpy.abs(own - other).max() <= 1e-5 * numpy.abs(other).max() + 1e-7


@pytest.mark.mpi
@pytest.mark.soak
def test_ranks_that_slurm_started_meet_without_mpi(session_hpcdl: CommandLine, single: Path) -> None:
    """Two tasks as srun would start them on two nodes, here on one node with its own address for the loopback.

    Every `make test-all` shows the same for ranks that hpcdl starts, below.
    """
    folder = session_hpcdl.home / "grpc-srun"
    arguments = [*SGD, "--strategy", "grpc-ring", "--batch-size", "8", "--run-dir", str(folder)]
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "hpcdl", *arguments],
            env=session_hpcdl.environment | step | {"SLURM_PROCID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            cwd=session_hpcdl.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        finished = finish(process, timeout_s=300)
        assert finished.code == 0, finished.err
    for own, other in zip(model_weights(folder), model_weights(single), strict=True):
        assert numpy.abs(own - other).max() <= 1e-5 * numpy.abs(other).max()
    assert not list((session_hpcdl.home / "cache" / "hpcdl" / "steps").iterdir())


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses other than the loopback's."""
    answer = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    return [address for address in answer.stdout.split() if ":" not in address]


def answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0


@pytest.mark.mpi
def test_servers_are_closed_to_other_interfaces_and_a_death_names_the_rank(session_hpcdl: CommandLine) -> None:
    folder = session_hpcdl.home / "grpc-fenced"
    arguments: list[Any] = [*TRAIN, "--strategy", "grpc-ps", "--ranks", "3", "--batch-size", "8", "--run-dir", folder]
    arguments[arguments.index("--steps") + 1] = "1000000"
    process = start(session_hpcdl, arguments)
    wait_for(lambda: steps_done(folder) > 0)
    ports = [port for status in read_statuses(folder / "ranks") for _, _, port in listening(status.pid)]
    assert len(ports) >= 3
    for port in ports:
        assert answers("127.0.0.1", port)
        for address in own_addresses():
            assert not answers(address, port), f"port {port} answers at {address}, beyond the job's own address"
    kill_rank(folder, 1)
    killed_at = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - killed_at < patience(20)  # 2 s on an idle machine
    assert finished.code == 1
    assert "rank 1" in finished.err


@pytest.mark.parametrize("strategy", sorted(RUNS))
def test_the_site_may_forbid_it(ask_hpcdl: CommandLine, strategy: str) -> None:
    (ask_hpcdl.home / "site.toml").write_text('[site]\nforbid-strategies = ["grpc-ps", "grpc-ring"]\n')
    finished = ask_hpcdl([*TRAIN, *RUNS[strategy], "--run-dir", ask_hpcdl.home / "run"])
    assert finished.code == 2
    assert strategy in finished.err and "site.toml" in finished.err
    assert not (ask_hpcdl.home / "run").exists()


@pytest.mark.mpi
def test_nccl_on_cpus_is_tensorflows_ring_and_says_so(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    arguments = [*SGD, *RUNS["nccl"], "--batch-size", "8"]
    arguments[arguments.index("--steps") + 1] = "3"
    finished = session_hpcdl([*arguments, "--run-dir", tmp_path / "run"], timeout_s=200)
    assert finished.code == 0, finished.err
    record = record_of(tmp_path / "run")
    assert record["steps"] == 3 and record["strategy"] == "nccl"
    assert any("sees no GPU on any rank: its ring over gRPC takes NCCL's place" in line for line in record["warnings"])
    assert {rank["details"]["collective"] for rank in record["rank_records"]} == {"RING"}


def test_nccl_is_refused_where_some_ranks_have_no_gpu() -> None:
    """nccl is refused if some ranks have no GPU; TensorFlow sees none here, so the other answers are simulated."""
    from hpcdl.core.errors import UsageError
    from hpcdl.strategies.tensorflow_grpc.ring import Nccl

    class Ranks:
        def allgather_json(self, has_gpu: bool) -> list[bool]:
            return [True, has_gpu, True]

    context: Any = types.SimpleNamespace(communicator=Ranks())
    with pytest.raises(UsageError, match="TensorFlow sees no GPU on rank 1 of 3"):
        Nccl().worker(context)


SCONTROL = """#!/bin/sh
[ "$*" = "--oneliner show job 77" ] && echo "JobId=77 JobName=train UserId=ada(1000) OverSubscribe={word} Contiguous=0"
"""


@pytest.mark.parametrize(
    ("word", "strategy"), [("", "grpc-ring"), ("OK", "grpc-ps"), ("YES", "grpc-ring"), ("OK", "nccl")]
)
def test_nodes_that_others_share_are_refused(ask_hpcdl: CommandLine, strategy: str, word: str) -> None:
    """gRPC is refused outside of jobs, and in jobs on nodes that other users' jobs may share."""
    job = {"PATH": f"{ask_hpcdl.home}:{ask_hpcdl.environment['PATH']}", "SLURM_JOB_ID": "77"} if word else {}
    (ask_hpcdl.home / "scontrol").write_text(SCONTROL.format(word=word))
    (ask_hpcdl.home / "scontrol").chmod(0o700)
    arguments = [*(item for item in TRAIN if item != "--allow-grpc"), *RUNS[strategy]]
    finished = ask_hpcdl([*arguments, "--run-dir", ask_hpcdl.home / "run"], env=job)
    assert finished.code == 2
    assert "--allow-grpc" in finished.err and "--exclusive" in finished.err and strategy in finished.err
    assert len(finished.err.splitlines()) == 1
    assert not (ask_hpcdl.home / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--strategy", "grpc-ps", "--ranks", "3", "--placement", "split"],
        ["--strategy", "grpc-ps", "--ranks", "3", "--optimizer", "lars"],
        ["--strategy", "grpc-ps", "--ranks", "3", "--weight-decay", "0.1"],
        ["--strategy", "grpc-ps", "--ranks", "3", "--accumulate", "2"],
        ["--strategy", "grpc-ring", "--ranks", "2", "--compress", "bf16"],
    ],
)
def test_what_the_engines_do_not_have_is_refused(ask_hpcdl: CommandLine, tmp_path: Path, arguments: list[str]) -> None:
    finished = ask_hpcdl([*TRAIN, *arguments, "--run-dir", tmp_path / "run"])
    assert finished.code == 2
    assert arguments[-2] in finished.err
