"""Flags of `hpcdl train` that change what a run is: each in a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest

from tests.conftest import DIGITS, CommandLine
from tests.training_runs import PLANTED, events, record_of, weights_in

pytestmark = pytest.mark.mpi
ALONE = ["train", "--strategy", "single", "--profile", "none", "--deterministic"]


def test_target_accuracy_then_fine_tuning_with_tensorboard(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    base = [*ALONE, "--model", "lenet", "--data", shards, "--optimizer", "momentum", "--learning-rate", "0.005"]
    finished = session_hpcdl([*base, "--epochs", "20", "--target-accuracy", "0.8", "--label-smoothing", "0.1",
                              "--warmup-epochs", "0.5", "--base-batch", "16", "--run-dir", first])  # fmt: skip
    assert finished.code == 0, finished.err
    assert "target accuracy 0.8 reached after" in finished.err
    reported = (
        "1 worker x batch 32 = 32 samples a step; momentum 0.9, learning rate 0.01 (= 0.005 scaled linearly from "
    )
    assert f"{reported}batch 16) after 22 warm-up steps" in finished.err
    record = record_of(first)
    *earlier, last = record["history"]
    assert last["epoch"] < 20
    assert all(point["val_accuracy"] < 0.8 for point in earlier) and last["val_accuracy"] >= 0.8
    assert record["seconds_to_target"] == last["seconds"] > 0
    smallest = ["--steps", "1", "--learning-rate", "1e-12", "--optimizer", "sgd"]
    smallest += ["--precision", "mixed_bfloat16", "--tensorboard", str(tmp_path / "board")]
    finished = session_hpcdl([*base, *smallest, "--init-weights", first / "model.keras", "--run-dir", second])
    assert finished.code == 0, finished.err
    assert f"weights of 4 layers from {first / 'model.keras'}" in finished.err
    for mine, theirs in zip(weights_in(second / "model.keras"), weights_in(first / "model.keras"), strict=True):
        numpy.testing.assert_allclose(mine, theirs, atol=1e-9)
    assert record_of(second)["accuracy"] == pytest.approx(record["accuracy"], abs=0.02)  # in bfloat16
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert "warning: --init-weights" not in finished.err
    for digit in range(1, 10):
        shutil.copytree(DIGITS / str(digit), tmp_path / "digits" / str(digit))
    made = session_hpcdl(["shard", tmp_path / "digits", tmp_path / "nine", "--image-size", "28"])
    assert made.code == 0, made.err
    other = [*ALONE, "--model", "lenet", "--data", tmp_path / "nine", "--classes", "10", "--scale", "none"]
    other += ["--steps", "1", "--learning-rate", "1e-12", "--run-dir", tmp_path / "other"]
    finished = session_hpcdl([*other, "--init-weights", first / "model.keras"])
    assert finished.code == 0, finished.err
    assert f"--init-weights: {first} numbers the class '1' 1, and digits 0: the last layer begins" in finished.err
    assert "was trained on inputs as float32 from 0 to 1, and this run reads them as float32 from 0 to 255" in (
        finished.err
    )


@pytest.mark.soak
def test_a_model_that_is_no_classifier(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    """A regression model trains on images; docs/test_data_tutorials trains one on series in `make test-all`."""
    run_dir = tmp_path / "run"
    arguments = [*ALONE, "--model", f"{PLANTED}:build_regression", "--data", shards, "--epochs", "3",
                 "--learning-rate", "0.002", "--loss", "mean_squared_error",
                 "--metrics", "mean_absolute_error", "--run-dir", run_dir]  # fmt: skip
    finished = session_hpcdl(arguments)
    assert finished.code == 0, finished.err
    assert "held-out loss" in finished.err
    record = record_of(run_dir)
    assert record["accuracy"] is None
    losses = [point["val_loss"] for point in record["history"]]
    assert losses[-1] < losses[0]
    assert 0 < record["history"][-1]["val_metrics"]["mean_absolute_error"] < 4.5
    evaluated = session_hpcdl(["evaluate", run_dir, "--data", shards, "--json"])
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json()["mean_absolute_error"] == record["history"][-1]["val_metrics"]["mean_absolute_error"]
    exported = session_hpcdl(["export", run_dir, "--to", "keras", tmp_path / "exported"])
    assert exported.code == 0, exported.err
    for mine, theirs in zip(
        weights_in(tmp_path / "exported" / "model.keras"), weights_in(run_dir / "model.keras"), strict=True
    ):
        numpy.testing.assert_array_equal(mine, theirs)


def test_half_precision_scales_the_loss_alike_on_all_ranks(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Half precision on CPUs: the loss falls, weights stay float32 and equal on all ranks, the scale is saved."""
    run_dir = tmp_path / "run"
    arguments = ["train", "--model", f"{PLANTED}:build", "--strategy", "ring", "--ranks", "2", "--data", shards,
                 "--precision", "mixed_float16", "--epochs", "2", "--learning-rate", "0.05", "--profile", "none",
                 "--divergence-check-steps", "10", "--checkpoint-every", "0.1s", "--run-dir", run_dir]  # fmt: skip
    finished = session_hpcdl(arguments)
    assert finished.code == 0, finished.err
    record = record_of(run_dir)
    first, second = (point["loss"] for point in record["history"])
    assert second < first
    assert any("mixed_float16 is for GPUs" in warning for warning in record["warnings"]), "slow without a word"
    assert {weight.dtype for weight in weights_in(run_dir / "model.keras")} == {numpy.dtype("float32")}
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    with numpy.load(newest / "shared.npz") as arrays:
        scalars = [
            float(arrays[name]) for name in arrays.files if name.startswith("optimizer") and not arrays[name].ndim
        ]
    assert 2.0**15 in scalars
    assert json.loads((newest / "checkpoint.json").read_text())["facts"]["ranks"] == 2
    assert not [event for event in events(run_dir, "message") if "differ" in event["text"]]
    inferred = session_hpcdl(["infer", run_dir, "--data", shards, "--out", tmp_path / "outputs"])
    assert inferred.code == 0, inferred.err
    assert "mixed_float16 is for GPUs" in inferred.err, "the outputs are as slow as the training"
