"""Runs that several tests of training look at."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy

from hpcdl.cluster.status import read_statuses
from hpcdl.training.checkpoints import FOLDER, folder_of, list_checkpoints, read_arrays
from tests.conftest import CommandLine, Finished

SHORT = [
    "train", "--model", "lenet", "--strategy", "ring", "--ranks", "2", "--batch-size", "16", "--deterministic",
    "--optimizer", "momentum", "--learning-rate", "0.02", "--schedule", "cosine", "--profile", "none",
]  # fmt: skip


def record_of(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "record.json").read_text())
    return document


def start(hpcdl: CommandLine, arguments: list[Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hpcdl", *map(str, arguments)]
    return subprocess.Popen(
        command, env=hpcdl.environment, cwd=hpcdl.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> Finished:
    out, err = process.communicate(timeout=timeout_s)
    return Finished(process.returncode, out, err)


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def steps_done(run_dir: Path) -> int:
    """The newest step that the journal tells of."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def kill_rank(run_dir: Path, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a rank."""
    (pid,) = (status.pid for status in read_statuses(run_dir / "ranks") if status.rank == rank)
    os.kill(pid, number)


def final_weights(run_dir: Path) -> dict[str, numpy.ndarray]:
    """The weights and optimizer state of the newest checkpoint."""
    newest = list_checkpoints(run_dir / FOLDER)[0]
    return read_arrays(folder_of(run_dir / FOLDER, newest) / "shared.npz")


def model_weights(run_dir: Path) -> list[numpy.ndarray]:
    """The weights in a run's model.keras."""
    return weights_in(run_dir / "model.keras")


def weights_in(model: Path) -> list[numpy.ndarray]:
    """The weights in a .keras file, without the optimizer's and without starting TensorFlow."""
    with zipfile.ZipFile(model) as archive, archive.open("model.weights.h5") as file:
        found: list[tuple[str, numpy.ndarray]] = []
        with h5py.File(io.BytesIO(file.read())) as weights:
            weights.visititems(lambda name, item: found.append((name, item[()])) if hasattr(item, "shape") else None)
    return [value for name, value in sorted(found, key=lambda pair: pair[0]) if not name.startswith("optimizer")]
