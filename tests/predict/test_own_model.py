"""A network of the user's own: its layers are what its record says, or unknown, told so, and the interval wide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcdl.predict.jobs import lengths_of
from tests.conftest import ROOT, CommandLine

MODEL = f"{ROOT / 'tests' / 'planted.py'}:build"


def test_a_record_knows_better_than_a_table_or_a_guess() -> None:
    recorded = (300, 20, 60, 3)
    assert lengths_of("own.py:build", 4 * sum(recorded), recorded) == recorded
    assert lengths_of("lenet", None, recorded) == recorded
    assert len(lengths_of("own.py:build", 4 * sum(recorded))) > len(recorded), "a guess of usual layers"


@pytest.mark.mpi
def test_predictions_take_the_layers_from_the_record(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = ["train", "--model", MODEL, "--data", "synthetic:mnist", "--strategy", "ring", "--ranks", "2"]
    line += ["--batch-size", "16", "--steps", "8", "--profile", "none", "--run-dir", str(run)]
    assert session_hpcdl(line, timeout_s=300).code == 0
    path = run / "record.json"
    record = json.loads(path.read_text())
    dense, last = [28 * 28 * 64, 64], [64 * 10, 10]
    assert record["gradient_elements"] == [1, *dense, 64, 64, *last]
    assert sum(record["gradient_elements"]) == record["parameters"] and record["evaluated_on"] == ""

    def predicted() -> tuple[str, float]:
        # On a slow network the exchange is most of a step; on a fast one the noise of eight steps hides the rest.
        told = session_hpcdl(["predict", run, "--nodes", "1,64", "--strategy", "ring", "--network", "1gbe", "--json"])
        assert told.code == 0, told.err
        far = told.json()["predictions"][-1]["step_seconds"]
        return told.out + told.err, far["high"] / far["low"]

    known, narrow = predicted()
    path.write_text(json.dumps({**record, "gradient_elements": []}))
    unknown, wide = predicted()
    assert "are not known, only their bytes" not in known and "are not known, only their bytes" in unknown
    assert wide > narrow
