"""In real runs, a rank that sleeps in a layer and a rank that is stopped repeatedly get the right cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.trace.stragglers import CONTENTION, IDLE
from tests.conftest import ROOT, CommandLine

MODEL = f"{ROOT / 'tests' / 'planted.py'}:build_lenet"
TRAIN = (
    "train", "--model", MODEL, "--data", "synthetic:mnist", "--batch-size", "64", "--strategy", "ring", "--ranks", "2",
    "--profile", "none", "--warmup-steps", "4",
)  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["sleeps", pytest.param("stopped", marks=pytest.mark.soak)])
def test_a_rank_that_sleeps_in_a_layer_has_no_slow_clock(session_hpcdl: CommandLine, tmp_path: Path, how: str) -> None:
    (tmp_path / "slow").touch()
    faults = [] if how == "sleeps" else ["--inject", "slow:rank=1:x8"]
    # The sleep is long beside the waits for processors that other programs cause: else the cause would be unknown.
    environment = {"SLOW_WHILE": str(tmp_path / "slow"), "SLOW_S": "1.5"} if how == "sleeps" else {}
    steps = ["--steps", "12" if how == "sleeps" else "30", "--run-dir", tmp_path / "run"]
    finished = session_hpcdl([*TRAIN, *steps, *faults], env=environment, timeout_s=300)
    assert finished.code == 0, finished.err
    reported = session_hpcdl(["trace", tmp_path / "run"])
    first, *_ = json.loads(session_hpcdl(["trace", tmp_path / "run", "--json"]).out)["stragglers"]
    known = {"sleeps": [IDLE], "stopped": [IDLE, CONTENTION]}  # a continued process waits for a busy core
    assert first["rank"] == 1 and first["cause"] in known[how], reported.out
