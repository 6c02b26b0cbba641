"""Faults on every path: what happens to a run when a worker, rank 0, a server or the launcher is hit, by strategy.

A sample runs in `make test-all`, all of it three times with `make soak`. In the first try the run is also resumed, and
compared with an undisturbed run if its strategy promises the same numbers. With HPCDL_FAULT_TABLE=FILE each try appends
its result as a line of JSON; `python -m tests.faults.fault_table FILE` turns these lines into the table in
docs/safety.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from hpcdl.cluster.status import read_statuses
from hpcdl.strategies.base.strategy import Features
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine, Finished, patience
from tests.training_runs import (
    PLANTED,
    SHORT,
    events,
    finish,
    kill_rank,
    model_weights,
    record_of,
    same_run,
    start,
    steps_done,
    wait_for,
)

pytestmark = pytest.mark.mpi
RANKS = 3
STALL_S = 6
TRIES = 3
TABLE = os.environ.get("HPCDL_FAULT_TABLE")
"""Read once: tests run without the caller's HPCDL_* variables."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
PLANTS = {"exception": "error", "NaN": "nan", "exit(0)": "exit"}
"""Faults of the user's own code, with their names in tests/planted.py."""
IN_EVERY_TEST = {
    ("ps", "SIGSTOP", "server", 1),
    ("async-easgd", "SIGSTOP", "worker", 0),
    ("sync-easgd", "NaN", "worker", 1),
}
"""The rest of the table is in the long version; the first try of a case is also resumed and compared with a whole run.

`make test-all` does so for `ps` in strategies/test_ps.py and for `sync-easgd` in strategies/test_easgd_runs.py.
"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """How a run should end: its exit codes, and a text in its messages."""

    codes: tuple[int, ...]
    word: str = ""


def roles(fault: str, features: Features) -> list[str]:
    """Return the roles that a fault can hit."""
    if fault in PLANTS:
        return ["worker", "rank 0"]
    return [
        "worker",
        "rank 0",
        *(["server"] if features.servers else []),
        *(["launcher"] if fault != "SIGSTOP" else []),
    ]


def expected(fault: str, role: str, features: Features) -> Expected:
    """Return the promised end (docs/safety.md)."""
    continues = not features.synchronous and role in ("worker", "rank 0")
    if role == "launcher":
        return Expected(codes=(-signal.SIGKILL,) if fault == "SIGKILL" else (75,))
    if fault == "SIGTERM":
        # A server leaves the stop to the workers; an asynchronous worker leaves alone.
        return Expected(codes=(0,) if continues or role == "server" else (75,))
    if fault == "SIGSTOP" and continues and role == "worker":
        return Expected(codes=(0,), word="continues without rank 1")
    if fault in ("exception", "NaN") and continues:
        return Expected(codes=(0,))
    return Expected(codes=(1,), word=f"rank {number_of(role)}")


def number_of(role: str) -> int:
    """Return the rank that represents a role."""
    return {"rank 0": 0, "worker": 1, "server": RANKS - 1}[role]


CASES = [
    pytest.param(
        info.name, fault, role, attempt,
        marks=() if (info.name, fault, role, attempt) in IN_EVERY_TEST else pytest.mark.soak,
    )
    for attempt in range(TRIES)
    for info in STRATEGIES.values()
    if info.name != "single"
    for fault in (*SIGNALS, *PLANTS)
    for role in roles(fault, info.features)
]  # fmt: skip


def command(strategy: str, fault: str, run_dir: Path, shards: Path) -> list[str]:
    """Return the command of a run of the strategy: short if it is to continue to its end."""
    features = STRATEGIES[strategy].features
    line = [*SHORT, "--strategy", strategy, "--ranks", RANKS, "--data", shards, "--run-dir", run_dir]
    line += ["--stall-timeout", f"{STALL_S}s", "--epochs", "4"]
    if features.optimizers:
        line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"]
    if not features.mpi:
        line += ["--allow-grpc"]
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")
    if fault in PLANTS:
        line += ["--model", f"{PLANTED}:build"]
    return [str(argument) for argument in line]


def hit(fault: str, role: str, run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Send a signal to the process; faults in the user's code happen by themselves."""
    if fault not in SIGNALS:
        return
    wait_for(lambda: steps_done(run_dir) > 2 or process.poll() is not None)
    if role == "launcher":
        process.send_signal(SIGNALS[fault])
    else:
        kill_rank(run_dir, number_of(role), SIGNALS[fault])


Reference = Callable[[str, str], Path]
"""Returns the undisturbed run with the network and settings of a strategy's runs with a fault."""


@pytest.fixture(scope="module")
def reference(session_hpcdl: CommandLine, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Undisturbed runs, each created on its first use."""
    made: dict[tuple[str, bool], Path] = {}

    def run(strategy: str, fault: str) -> Path:
        key = (strategy, fault in PLANTS)
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            finished = session_hpcdl(command(strategy, fault, folder, shards))
            assert finished.code == 0, finished.err
            made[key] = folder
        return made[key]

    return run


@pytest.mark.long
@pytest.mark.parametrize("strategy, fault, role, attempt", CASES)
def test_a_fault(
    session_hpcdl: CommandLine,
    shards: Path,
    tmp_path: Path,
    reference: Reference,
    strategy: str,
    fault: str,
    role: str,
    attempt: int,
) -> None:
    run_dir = tmp_path / "run"
    features = STRATEGIES[strategy].features
    env = {"STEP_S": "0.02"}
    if fault in PLANTS:
        env |= {"FAULT": PLANTS[fault], "FAULT_RANK": str(number_of(role))}
    process = start(session_hpcdl, command(strategy, fault, run_dir, shards), env=env)
    hit(fault, role, run_dir, process)
    began = time.monotonic()
    finished = finish(process)
    took_s = time.monotonic() - began
    keep(strategy, fault, role, finished, took_s)  # kept in the table even if the assertions below fail
    promised = expected(fault, role, features)
    assert finished.code in promised.codes, finished.err
    reported = finished.err + "".join(event["text"] for event in events(run_dir, "message"))
    assert promised.word in reported
    assert "Traceback" not in finished.err
    nothing_is_left(run_dir)
    if finished.code == 0:
        assert all(numpy.isfinite(weights).all() for weights in model_weights(run_dir))
        assert record_of(run_dir)["history"][-1]["val_loss"] is not None
    if attempt == 0 and features.exact_resume:
        if finished.code != 0:
            resumed = session_hpcdl(["train", "--resume", "--run-dir", run_dir])
            assert resumed.code == 0, resumed.err
        same_run(run_dir, reference(strategy, fault))


def nothing_is_left(run_dir: Path) -> None:
    """Assert that no rank of the run is alive after the promised ten seconds."""
    pids = [status.pid for status in read_statuses(run_dir / "ranks")]
    deadline = time.monotonic() + patience(10)
    while any(is_rank(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank has outlived its launcher"
        time.sleep(0.1)


def is_rank(pid: int) -> bool:
    """Return whether `pid` is a living rank: it may have ended, be a zombie, or belong to another process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"hpcdl" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def keep(strategy: str, fault: str, role: str, finished: Finished, took_s: float) -> None:
    """Append the case to the table, if one is being written."""
    if TABLE:
        lines = finished.err.strip().splitlines() or [""]
        row = {"strategy": strategy, "fault": fault, "role": role, "code": finished.code, "seconds": round(took_s, 1)}
        with Path(TABLE).open("a") as file:
            file.write(json.dumps({**row, "said": lines[-1]}) + "\n")
