"""Runs that go wrong are ended with the name of what went wrong, in bounded time; real ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdl.cluster.mpiexec import environment_for, find_mpiexec
from tests.conftest import CommandLine
from tests.training.training_runs import SHORT, finish, kill_rank, start, steps_done, wait_for

pytestmark = pytest.mark.mpi

DRIFTING = '''
import os
import keras
import tensorflow as tf


class Drift(keras.layers.Dense):
    """Damages one bit of its kernel on rank 1, as failing memory would."""

    def call(self, inputs, training=None):
        if training and os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            self._kernel.assign(self._kernel + 1e-7)
        return super().call(inputs)


def build(num_classes, input_shape):
    inputs = keras.Input(input_shape)
    flat = keras.layers.Flatten()(inputs)
    return keras.Model(inputs, Drift(num_classes, name="drift")(flat))
'''


def test_a_rank_asleep_is_named(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(
        session_hpcdl, [*SHORT, "--data", shards, "--epochs", "50", "--stall-timeout", "3s", "--run-dir", run_dir]
    )
    wait_for(lambda: steps_done(run_dir) > 3)
    kill_rank(run_dir, 1, signal.SIGSTOP)
    began = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - began < 30
    assert finished.code == 1, finished.err
    assert "rank 1 on" in finished.err
    assert "gives no sign of life" in finished.err


def test_a_rank_killed_ends_the_run(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(session_hpcdl, [*SHORT, "--data", shards, "--epochs", "50", "--run-dir", run_dir])
    wait_for(lambda: steps_done(run_dir) > 3)
    kill_rank(run_dir, 0)
    began = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - began < 10
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith("hpcdl: rank 0 on ")
    assert "Traceback" not in finished.err


def test_a_loss_that_is_nan_names_step_and_samples(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    arguments = [*SHORT, "--data", shards, "--steps", "50", "--learning-rate", "3e38", "--run-dir", tmp_path / "run"]
    finished = session_hpcdl(arguments)
    assert finished.code == 1, finished.err
    line = finished.err.splitlines()[-1]
    assert "loss is nan at step" in line or "loss is inf at step" in line
    assert "samples of the batch: " in line


def test_weights_that_drift_apart_are_found(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "drifting.py").write_text(DRIFTING)
    arguments = [*SHORT, "--model", f"{tmp_path}/drifting.py:build", "--data", shards, "--steps", "30"]
    finished = session_hpcdl([*arguments, "--divergence-check-steps", "10", "--run-dir", tmp_path / "run"])
    assert finished.code == 1, finished.err
    assert "weights differ over the ranks after step 10: drift/kernel on rank 1" in finished.err


def test_ranks_with_different_settings_are_refused(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    mpiexec = find_mpiexec()
    command = [sys.executable, "-m", "hpcdl", *SHORT[:5], "--data", str(shards), "--steps", "2"]
    finished = subprocess.run(
        [str(mpiexec.path), "-n", "1", *command, "--seed", "1", ":", "-n", "1", *command, "--seed", "2"],
        env={**session_hpcdl.environment, **environment_for(mpiexec.flavour)},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert finished.returncode != 0
    complaints = [line for line in finished.stderr.splitlines() if line.startswith("hpcdl: ")]
    assert len(complaints) == 1, finished.stderr
    assert "ranks differ in --seed: rank 0 has 1, rank 1 has 2" in complaints[0]
