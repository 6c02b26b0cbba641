"""Every strategy trains a network with two inputs and a regression target, as it does one for image classification."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hpcdl.core.records.run_record import read_record
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine
from tests.data.sharding import make

pytestmark = pytest.mark.mpi
SAMPLE = ("ring",)
COUNT, STEPS = 192, 6
MODEL = """
import keras


def build(input_shape):
    series, settings = (keras.Input(input_shape[name], name=name) for name in ("series", "settings"))
    both = keras.layers.concatenate([keras.layers.Flatten()(series), settings])
    return keras.Model([series, settings], keras.layers.Dense(1, name="energy")(both))
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of two inputs and a quantity that follows from both, beside the network."""
    folder, random = tmp_path_factory.mktemp("events"), np.random.default_rng(0)
    series, settings = random.normal(size=(COUNT, 6, 2)), random.normal(size=(COUNT, 3))
    energy = (series.sum((1, 2)) + settings @ [1.0, -2.0, 0.5]).astype(np.float32)
    arrays = {"series": series.astype(np.float32), "settings": settings.astype(np.float32), "energy": energy}
    np.savez(folder / "a.npz", **arrays)
    options = {"input": "series=series,settings=settings", "target": "energy=energy", "split": "train=0.75,val=0.25"}
    make(folder / "a.npz", folder / "data", shards=2, **options)
    (folder / "network.py").write_text(MODEL)
    return folder


@pytest.mark.parametrize(
    "strategy", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.soak) for name in STRATEGIES]
)
def test_two_inputs_and_a_quantity(strategy: str, session_hpcdl: CommandLine, events: Path, tmp_path: Path) -> None:
    features = STRATEGIES[strategy].features
    ranks = 1 if strategy == "single" else 3 if features.servers else 2
    finished = session_hpcdl(
        [
            "train", "--model", f"{events / 'network.py'}:build", "--data", events / "data", "--strategy", strategy,
            "--ranks", str(ranks), "--batch-size", "8", "--steps", str(STEPS), "--loss", "mse", "--metrics", "mae",
            "--learning-rate", "0.01", "--profile", "none", "--run-dir", tmp_path / "run",
            *([] if features.mpi else ["--allow-grpc"]),
        ],
        timeout_s=200,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    record = read_record(tmp_path / "run")
    assert record.status == "finished" and (tmp_path / "run" / "model.keras").is_file()
    assert record.counted == "samples" and " samples/s, held-out loss " in finished.out, finished.out
    journal = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["counted"] for event in journal if event["kind"] == "start"] == ["samples"]
    last = journal[-1]
    assert math.isfinite(last["loss"]) and math.isfinite(last["val_metrics"]["mean_absolute_error"])
