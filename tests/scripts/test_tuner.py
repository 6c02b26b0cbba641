"""KerasTuner from start to end over two ranks: each trial on all ranks, the same results, files from rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, run_script, succeed

pytestmark = [pytest.mark.mpi, pytest.mark.soak]


def test_every_trial_is_one_of_all_ranks(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("keras_tuner", reason="keras-tuner is not installed")
    finished = succeed(run_script(session_hpcdl, HERE / "tuner_script.py", tmp_path, ranks=2, cwd=tmp_path))
    reported = [
        json.loads(line.removeprefix("found ")) for line in finished.out.splitlines() if line.startswith("found ")
    ]
    one, two = sorted(reported)
    assert one[1:] == two[1:]
    assert len(one[1]) == 3 and len({str(values) for _, values in one[1]}) == 3
    assert list((tmp_path / "all").rglob("trial.json")), "rank 0 keeps the results"
