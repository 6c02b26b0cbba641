"""A rank that is stopped (SIGSTOP): told within the time allowed whatever the strategy; asynchronous runs go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine
from tests.training.training_runs import SHORT, events, finish, kill_rank, record_of, start, steps_done, wait_for

pytestmark = pytest.mark.mpi
RANKS = 3
IN_EVERY_TEST = {("ps", "server"), ("async-easgd", "worker")}
"""The rest of the table is the long version's."""
FAMILIES = [info for info in STRATEGIES.values() if info.name != "single"]
CASES = [
    pytest.param(info.name, role, marks=() if (info.name, role) in IN_EVERY_TEST else pytest.mark.soak)
    for info in FAMILIES
    for role in ("worker 0", "worker", *(["server"] if info.features.servers else []))
]


@pytest.mark.parametrize("strategy, role", CASES)
def test_a_stopped_rank(session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str, role: str) -> None:
    features = STRATEGIES[strategy].features
    victim = {"worker 0": 0, "worker": 1, "server": RANKS - 1}[role]
    goes_on = not features.synchronous and role == "worker"
    run_dir = tmp_path / "run"
    own = [] if not features.optimizers else ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"]
    arguments = [
        *SHORT, "--strategy", strategy, "--ranks", RANKS, "--data", shards, "--run-dir", run_dir, "--stall-timeout",
        "6s", "--epochs", "3" if goes_on else "500", *own, *([] if features.mpi else ["--allow-grpc"]),
    ]  # fmt: skip
    if not features.keras_optimizer or not features.deterministic:
        arguments = [argument for argument in arguments if argument != "--deterministic"]
    process = start(session_hpcdl, [str(argument) for argument in arguments])
    wait_for(lambda: steps_done(run_dir) > 2 or process.poll() is not None)
    kill_rank(run_dir, victim, signal.SIGSTOP)
    finished = finish(process)
    if goes_on:
        assert finished.code == 0, finished.err
        assert any(f"goes on without rank {victim}" in event["text"] for event in events(run_dir, "message"))
        assert record_of(run_dir)["status"] == "finished"
        return
    assert finished.code == 1, finished.err
    last = finished.err.splitlines()[-1]
    assert last.startswith(f"hpcdl: rank {victim} on "), finished.err
    assert "gives no sign of life" in last
