"""Training runs that several tests inspect."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy

from hpcdl.cluster.status import read_statuses
from tests.conftest import CommandLine, patience
from tests.conftest import finish as finish

SHORT = [
    "train", "--model", "lenet", "--strategy", "ring", "--ranks", "2", "--batch-size", "16", "--deterministic",
    "--optimizer", "momentum", "--learning-rate", "0.02", "--schedule", "cosine", "--profile", "none",
]  # fmt: skip


PLANTED = Path(__file__).with_name("planted.py")
"""A file with a network that records and fails on purpose, for --model."""


EPOCHS = 6
NOTED = [*SHORT, "--model", f"{PLANTED}:build", "--epochs", str(EPOCHS)]
"""A short run that records its samples in RECORD_DIR."""


def record_of(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "record.json").read_text())
    return document


def start(hpcdl: CommandLine, arguments: list[Any], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return hpcdl.start(arguments, env=env)


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + patience(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in the journal."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


def steps_done(run_dir: Path) -> int:
    """Return the newest step in the journal."""
    return max((event["step"] for kind in ("step", "epoch") for event in events(run_dir, kind)), default=0)


def same_run(found: Path, expected: Path) -> None:
    """Assert that two runs have the same losses and weights, bit for bit."""
    keys = ("epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy")
    ours, theirs = record_of(found), record_of(expected)
    assert [[point[key] for key in keys] for point in ours["history"]] == [
        [point[key] for key in keys] for point in theirs["history"]
    ]
    for mine, other in zip(model_weights(found), model_weights(expected), strict=True):
        numpy.testing.assert_array_equal(mine, other)


def written_by_ranks(run_dir: Path) -> set[str]:
    """Return the names of what a launch has left beside its log: only the table of all ranks, if every rank ended well.

    Notes of the stall watch do not count: on a busy machine a rank may wait long enough to write one.
    """
    return {path.name for path in (run_dir / "ranks").iterdir()} - {"launcher.log", "watch"}


def kill_rank(run_dir: Path, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a rank."""
    (pid,) = (status.pid for status in read_statuses(run_dir / "ranks") if status.rank == rank)
    os.kill(pid, number)


def model_weights(run_dir: Path) -> list[numpy.ndarray]:
    """Return the weights in a run's model.keras."""
    return weights_in(run_dir / "model.keras")


def weights_in(model: Path) -> list[numpy.ndarray]:
    """Return the weights in a .keras file, without the optimizer's and without starting TensorFlow."""
    return [value for _, value in sorted(named_weights_in(model).items())]


def named_weights_in(model: Path) -> dict[str, numpy.ndarray]:
    """Return the weights in a .keras file by their path in the file, without the optimizer's."""
    with zipfile.ZipFile(model) as archive, archive.open("model.weights.h5") as file:
        found: dict[str, numpy.ndarray] = {}
        with h5py.File(io.BytesIO(file.read())) as weights:
            weights.visititems(lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None)
    return {name: value for name, value in found.items() if not name.startswith("optimizer")}


def images_of(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return the checksums of the images by (rank, step); of a repeated step those of the last time, which the weights
    saw.

    Only steps after the last checkpoint are repeated.
    """
    found = {}
    for rank in range(2):
        for text in (folder / f"rank-{rank}.jsonl").read_text().split("\n"):
            if text.endswith("}"):  # otherwise a rank was killed in the middle of its line
                line = json.loads(text)
                found[rank, line["step"]] = line["images"]
    return found
