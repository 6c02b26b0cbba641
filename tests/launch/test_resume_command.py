"""Stopped at random moments and resumed, a run gives the same numbers, and takes each sample once per epoch."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import numpy
import pytest

from tests.conftest import EITHER, CommandLine, Mpi, Undisturbed
from tests.training_runs import (
    EPOCHS,
    NOTED,
    PLANTED,
    events,
    finish,
    images_of,
    kill_rank,
    record_of,
    same_run,
    start,
    steps_done,
    wait_for,
)

pytestmark = pytest.mark.mpi
STEPS_PER_EPOCH, GLOBAL_BATCH = 44, 32


def test_an_epoch_takes_each_sample_once(undisturbed: Undisturbed) -> None:
    """An epoch takes each sample once over both ranks; 1437 samples give 44 whole global batches."""
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        taken = [image for step in steps for rank in range(2) for image in undisturbed.images[rank, step]]
        assert len(taken) == len(set(taken)) == STEPS_PER_EPOCH * GLOBAL_BATCH


def interrupt(hpcdl: CommandLine, shards: Path, folder: Path, moments: int, seed: int) -> list[int]:
    """Stop a run at random moments, in turn by SIGTERM, by --time-limit and by SIGKILL of a rank; let it finish.

    Returns the steps at which it was resumed. Every fourth SIGTERM comes while the ranks start up.
    """
    generator = random.Random(seed)
    run_dir = folder / "run"
    arguments = [*NOTED, "--data", shards, "--run-dir", run_dir, "--resume", "--checkpoint-every", "0.1s"]
    arguments += ["--background", ("gaps", "thread", "off")[seed % 3]]
    longest_s = 0.6 / moments  # in units of the minimum time of all steps
    all_steps_s = 0.03 * EPOCHS * STEPS_PER_EPOCH
    slowly = {"RECORD_DIR": str(folder), "STEP_S": "0.03"}
    for moment in range(moments):
        kind = ("SIGTERM", "time", "SIGKILL")[moment % 3]
        after_s = all_steps_s * generator.uniform(0, longest_s)
        limit = f"{max(after_s, 0.001):.3f}s" if kind == "time" else "1h"
        begun = len(events(run_dir, "start"))
        process = start(hpcdl, [*arguments, "--time-limit", limit], slowly)
        if kind == "SIGTERM" and moment % 4 == 0:
            wait_for(lambda: (run_dir / "ranks" / "all.json").exists() or process.poll() is not None)  # noqa: B023
        else:
            wait_for(lambda: len(events(run_dir, "start")) > begun or process.poll() is not None)  # noqa: B023
            time.sleep(after_s)
        if kind == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        elif kind == "SIGKILL":
            kill_rank(run_dir, generator.randrange(2))
        finished = finish(process)
        assert finished.code == (1 if kind == "SIGKILL" else 75), finished.err
        if kind == "time":
            assert "stopped by the time limit after step" in finished.err
            assert "continue with --resume" in finished.err
    to_the_end = ["train", "--resume", "--run-dir", run_dir, "--time-limit", "1h"]
    finished = finish(start(hpcdl, to_the_end, {"RECORD_DIR": str(folder)}))
    assert finished.code == 0, finished.err
    resumed: list[int] = record_of(run_dir)["resumed_from_steps"]
    return resumed


def nothing_repeated_or_lost(folder: Path, undisturbed: Undisturbed) -> None:
    """Assert that the weights saw, step by step, the samples of the undisturbed run, and ended equal."""
    same_run(folder / "run", undisturbed.run_dir)
    assert images_of(folder) == undisturbed.images


def test_stopped_at_three_random_moments(
    undisturbed: Undisturbed, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    resumed = interrupt(session_hpcdl, shards, tmp_path, moments=3, seed=3)
    nothing_repeated_or_lost(tmp_path, undisturbed)
    assert len(resumed) >= 2  # a stop leaves a checkpoint, a kill before the first checkpoint leaves none
    assert resumed == sorted(resumed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_stopped_at_a_hundred_random_moments(
    undisturbed: Undisturbed, session_hpcdl: CommandLine, shards: Path, tmp_path: Path, seed: int
) -> None:
    interrupt(session_hpcdl, shards, tmp_path, moments=10, seed=100 + seed)
    nothing_repeated_or_lost(tmp_path, undisturbed)


@pytest.mark.soak
@EITHER
def test_a_warning_stops_and_the_run_continues_under_either_mpi(
    mpi: Mpi, undisturbed: Undisturbed, shards: Path, tmp_path: Path
) -> None:
    """SIGUSR1 to the process that the user started stops a run, which can then be resumed; an early signal works too.

    `make test-all` has Slurm's warning (lab/test_slurm_jobs.py), and SIGTERM (above).
    """
    run_dir = tmp_path / "run"
    process = start(mpi.hpcdl, [*NOTED, "--data", shards, "--run-dir", run_dir], {"STEP_S": "0.02"})
    wait_for(lambda: steps_done(run_dir) > 50 or process.poll() is not None)
    process.send_signal(signal.SIGUSR1)
    finished = finish(process)
    assert finished.code == 75, finished.err
    assert f"of {EPOCHS * STEPS_PER_EPOCH}; a checkpoint is saved: continue with --resume" in finished.err
    finished = mpi.hpcdl(["train", "--resume", "--run-dir", run_dir], timeout_s=200)
    assert finished.code == 0, finished.err
    assert record_of(run_dir)["software"]["mpi"].startswith(
        {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi.mpiexec.flavour]
    )
    same_run(run_dir, undisturbed.run_dir)


@pytest.mark.long
def test_on_another_rank_count_and_997_held_out_samples(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """Started on two ranks, finished on four: every step is taken, and evaluation counts each sample once."""
    from hpcdl.data.format.dataset import open_dataset
    from tests.conftest import DIGITS

    data, run_dir = tmp_path / "data", tmp_path / "run"
    split = f"train={800 / 1797:.6f},val={997 / 1797:.6f}"
    assert session_hpcdl(["shard", DIGITS, data, "--image-size", "28", "--split", split]).code == 0
    assert open_dataset(str(data)).splits["val"].num_samples == 997
    base = ["train", "--model", f"{PLANTED}:build", "--strategy", "ring", "--data", data, "--deterministic",
            "--profile", "none", "--batch-size", "16", "--learning-rate", "0.05", "--run-dir", run_dir]  # fmt: skip
    finished = session_hpcdl([*base, "--ranks", "2", "--epochs", "3", "--time-limit", "1ms"])
    assert finished.code == 75, finished.err
    (stopped,) = {int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir()}
    finished = session_hpcdl(
        ["train", "--resume", "--run-dir", run_dir, "--ranks", "4", "--time-limit", "1h"], timeout_s=200
    )
    assert finished.code == 0, finished.err
    record = record_of(run_dir)
    assert any("resumed on 4 workers what 2 began" in warning for warning in record["warnings"])
    assert record["resumed_from_steps"] == [stopped]
    again = next(line for line in finished.err.splitlines() if line.startswith("resumed after step"))
    assert 0 < int(again.split()[3]) < stopped or stopped == 1, "the new position, in steps of 64 samples"
    numbered = f"a step has 64 samples, not 32; steps before it were numbered to {stopped}, so compare epochs"
    assert any(numbered in warning for warning in record["warnings"])
    assert [(point["epoch"], point["step"]) for point in record["history"]] == [(1, 12), (2, 24), (3, 36)]
    assert record["accuracy"] > 0.6
    same_as_counted_by_numpy(run_dir, data, record["history"][-1])


def same_as_counted_by_numpy(run_dir: Path, data: Path, point: dict[str, object]) -> None:
    """Assert that numpy counts the same top-1 and top-5, with the moving statistics that the four ranks agreed on."""
    import h5py

    from tests.training_runs import named_weights_in

    weights = named_weights_in(run_dir / "model.keras")
    files = [h5py.File(path) for path in sorted((data / "val").glob("*.h5"))]
    images = numpy.concatenate([file["images"][:] for file in files]).astype(numpy.float64) / 255
    labels = numpy.concatenate([file["labels"][:] for file in files])
    logits = predicted(weights, images.reshape(len(images), -1))
    order = numpy.argsort(-logits, axis=1)
    assert len(labels) == 997
    assert point["val_metrics"] == {
        "accuracy": numpy.sum(order[:, 0] == labels) / 997,
        "top5_accuracy": numpy.sum(order[:, :5] == labels[:, None]) / 997,
    }


def predicted(weights: dict[str, numpy.ndarray], flat: numpy.ndarray) -> numpy.ndarray:
    """Compute the network of tests/planted.py in numpy."""

    def values(layer: str) -> list[numpy.ndarray]:
        found = {name: value for name, value in weights.items() if f"/{layer}/" in f"/{name}"}
        return [value for _, value in sorted(found.items())]

    scale = values("probe")[0]
    kernel, bias = values("dense")
    hidden = numpy.tanh(flat * float(scale.squeeze()) @ kernel + bias)
    gamma, beta, mean, variance = values("batch_normalization")
    hidden = (hidden - mean) / numpy.sqrt(variance + 1e-3) * gamma + beta
    kernel, bias = values("dense_1")
    logits: numpy.ndarray = hidden @ kernel + bias
    return logits
