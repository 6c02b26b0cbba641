"""`ps` on real MPI ranks: regular and irregular ends, backup workers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.cluster.status import read_statuses
from tests.conftest import CommandLine, patience
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

pytestmark = pytest.mark.mpi

TRAIN = [
    "train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--strategy", "ps", "--batch-size", "8",
    "--deterministic", "--profile", "none",
]  # fmt: skip


def test_servers_do_without_tensorflow() -> None:
    statement = (
        "import sys, hpcdl.strategies.parameter_server.strategy, hpcdl.strategies.parameter_server.server; "
        "import hpcdl.rank.job; "
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", statement], timeout=300, check=False).returncode == 0


@pytest.fixture(scope="module")
def whole_run(session_hpcdl: CommandLine) -> Path:
    folder = session_hpcdl.home / "ps-whole"
    finished = session_hpcdl([*TRAIN, "--ranks", "4", "--servers", "2", "--steps", "40", "--run-dir", folder])
    assert finished.code == 0, finished.err
    return folder


def test_the_record_states_about_servers(whole_run: Path) -> None:
    record = record_of(whole_run)
    assert (record["ranks"], record["workers"], record["servers"]) == (4, 2, 2)
    assert written_by_ranks(whole_run) == {"all.json"}
    assert [status.state for status in read_statuses(whole_run / "ranks")] == ["done"] * 4
    workers = [rank for rank in record["rank_records"] if rank["role"] == "worker"]
    servers = [rank for rank in record["rank_records"] if rank["role"] == "server"]
    assert [rank["rank"] for rank in servers] == [2, 3]
    gradient_bytes = record["gradient_bytes"]
    for rank in workers:  # beside the gradients a header of 40 bytes for each server, and their layout, once
        assert gradient_bytes <= rank["bytes_sent_per_step"] < 1.001 * gradient_bytes
    assert sum(rank["details"]["held_bytes"] for rank in servers) == gradient_bytes
    for rank in servers:
        held = rank["details"]["held_bytes"]
        assert held == pytest.approx(gradient_bytes / 2, rel=0.01)
        for kind in ("bytes_sent_per_step", "bytes_received_per_step"):
            assert rank[kind] == pytest.approx(2 * held, rel=0.001)
        assert rank["busy_seconds_per_step"] > 0
        assert rank["peak_memory_bytes"] < 0.5 * workers[0]["peak_memory_bytes"]


def test_stopped_and_resumed_is_the_same_to_the_bit(session_hpcdl: CommandLine, whole_run: Path) -> None:
    folder = session_hpcdl.home / "ps-stopped"
    command: list[Any] = [*TRAIN, "--ranks", "4", "--servers", "2", "--steps", "40", "--run-dir", folder]
    stopped = session_hpcdl([*command, "--time-limit", "1ms"])
    assert stopped.code == 75, stopped.err
    assert steps_done(folder) < 40
    resumed = session_hpcdl([*command, "--resume", "--time-limit", "1h"])
    assert resumed.code == 0, resumed.err
    assert record_of(folder)["resumed_from_steps"]
    for own, other in zip(model_weights(folder), model_weights(whole_run), strict=True):
        assert numpy.array_equal(own, other)


def test_a_killed_server_ends_the_job(session_hpcdl: CommandLine) -> None:
    folder = session_hpcdl.home / "ps-killed"
    process = start(session_hpcdl, [*TRAIN, "--ranks", "2", "--steps", "1000000", "--run-dir", folder])
    wait_for(lambda: steps_done(folder) > 0)
    kill_rank(folder, 1)
    killed_at = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - killed_at < patience(20)  # 3 s on an idle machine
    assert finished.code == 1
    assert "rank 1" in finished.err


def test_a_worker_that_stops_is_left_behind_and_catches_up(session_hpcdl: CommandLine) -> None:
    folder = session_hpcdl.home / "ps-backup"
    arguments = ["--ranks", "3", "--backup-workers", "1", "--steps", "300", "--divergence-check-steps", "150"]
    process = start(session_hpcdl, [*TRAIN, *arguments, "--run-dir", folder])
    wait_for(lambda: steps_done(folder) > 0)
    kill_rank(folder, 1, signal.SIGSTOP)
    time.sleep(1)
    kill_rank(folder, 1, signal.SIGCONT)
    finished = finish(process)
    assert finished.code == 0, finished.err
    workers = record_of(folder)["rank_records"][:2]
    assert workers[1]["details"]["followed_steps"] > 0
    assert sum(rank["details"]["followed_steps"] for rank in workers) < 600


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "2", "--servers", "2"], "at least one worker"),
        (["--ranks", "3", "--backup-workers", "2"], "at most 1"),
        (["--ranks", "3", "--compress", "fp16"], "--compress fp16"),
        (["--ranks", "3", "--placement", "even"], "round-robin, greedy, split"),
    ],
)
def test_what_cannot_be_is_refused(ask_hpcdl: CommandLine, tmp_path: Path, arguments: list[str], says: str) -> None:
    finished = ask_hpcdl([*TRAIN, *arguments, "--run-dir", tmp_path / "run"])
    assert finished.code == 2
    assert says in finished.err
    assert not (tmp_path / "run").exists()
