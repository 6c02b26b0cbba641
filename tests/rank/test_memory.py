"""A rank's memory does not grow with its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine

EARLY, LATE = 2_000, 20_000
MODEL = Path(__file__).with_name("noting_memory.py")


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("strategy", ["ring", "easgd", "async-easgd"])
def test_memory_after_many_steps_is_that_after_some(run_hpcdl: CommandLine, tmp_path: Path, strategy: str) -> None:
    """Memory after many steps equals memory after some.

    Asynchronous workers take unequal numbers of steps: the late measurement is before the slower one's last step.
    """
    servers = int(STRATEGIES[strategy].features.servers)
    late = LATE if STRATEGIES[strategy].features.synchronous else LATE - 3_000
    finished = run_hpcdl(
        ["train", "--model", f"{MODEL}:build", "--data", "synthetic:8x8x1:10", "--strategy", strategy, "--ranks",
         str(2 + servers), "--batch-size", "2", "--learning-rate", "0.001", "--steps", str(LATE), "--profile", "none",
         "--run-dir", tmp_path / "run"],
        env={"NOTES": str(tmp_path), "NOTE_AT": f"{EARLY},{late}"},
        timeout_s=3600,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(notes) == 2
    for noted in notes:
        assert noted[str(late)] <= 1.01 * noted[str(EARLY)], noted
