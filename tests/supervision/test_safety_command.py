"""Runs that go wrong end in bounded time, with the cause by name; real ranks, both MPIs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcdl.run import rundir
from hpcdl.run.plan import prepare
from tests.conftest import DIGITS, CommandLine, Mpi, patience
from tests.training_runs import PLANTED, SHORT, finish, kill_rank, record_of, start, steps_done, wait_for

pytestmark = pytest.mark.mpi
ENDLESS = [*SHORT, "--epochs", "500"]
BROKEN = [*SHORT, "--model", f"{PLANTED}:build", "--steps", "30"]


@pytest.mark.soak
def test_a_rank_asleep_is_named(mpi: Mpi, shards: Path, tmp_path: Path) -> None:
    """A stopped rank is named. `make test-all` has it with new ranks (test_inject.py), a server (test_faults.py)."""
    run_dir = tmp_path / "run"
    arguments = [*ENDLESS, "--data", shards, "--stall-timeout", "3s", "--run-dir", run_dir]
    process = start(mpi.hpcdl, arguments)
    wait_for(lambda: steps_done(run_dir) > 3 or process.poll() is not None)
    kill_rank(run_dir, 1, signal.SIGSTOP)
    began = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - began < patience(30)
    assert finished.code == 1, finished.err
    assert "rank 1 on" in finished.err
    assert "is not responding" in finished.err


def test_a_rank_killed_ends_the_run(mpi: Mpi, shards: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(mpi.hpcdl, [*ENDLESS, "--ranks", "3", "--data", shards, "--run-dir", run_dir])
    wait_for(lambda: steps_done(run_dir) > 3 or process.poll() is not None)
    kill_rank(run_dir, 2)
    began = time.monotonic()
    finished = finish(process)
    assert time.monotonic() - began < patience(20)
    assert finished.code == 1
    assert finished.err.splitlines()[-1].startswith("hpcdl: rank 2 on ")
    assert "Traceback" not in finished.err


@pytest.mark.long
@pytest.mark.parametrize("fault", ["nan", "bit", pytest.param("error", marks=pytest.mark.soak)])
def test_a_planted_fault_is_named(mpi: Mpi, shards: Path, tmp_path: Path, fault: str) -> None:
    """A fault on rank 1 at step 5 is named: images of NaN, one flipped bit of a weight, an exception.

    `make test-all` has exceptions in failing_steps, a batch in steps_per_call, a script in keras/test_run_command.
    """
    run_dir = tmp_path / "run"
    arguments = [*BROKEN, "--data", shards, "--divergence-check-steps", "10", "--run-dir", run_dir]
    finished = mpi.hpcdl(arguments, env={"FAULT": fault})
    assert finished.code == 1, finished.err
    line = finished.err.splitlines()[-1]
    if fault == "nan":
        ids = prepare(rundir.read(run_dir)[0]).sample_ids(5, 1)
        named = f"samples of the batch: {', '.join(map(str, ids))};"
        assert "the gradient of probe/scale" in line and f"is not finite at step 5 on rank 1; {named}" in line
    elif fault == "bit":
        assert "weights differ over the ranks after step 10: probe/scale on rank 1;" in line
    else:
        assert line.startswith("hpcdl: rank 1 on ")
        assert "ValueError: planted" in line
    assert "Traceback" not in finished.err
    assert not (run_dir / "model.keras").exists()
    assert record_of(run_dir)["failure"] == ("not-finite" if fault == "nan" else "")


def started_apart(mpi: Mpi, folder: Path, shards: Path, planted: str) -> list[str]:
    """Return the messages of two ranks, of which the second differs from the first in one thing."""
    command = [sys.executable, "-m", "hpcdl", *SHORT[:5], "--data", "data", "--steps", "2"]
    command += ["--run-dir", str(folder / "run")]
    folders = [folder / "first", folder / "second"]
    for own in folders:
        own.mkdir()
        (own / "data").symlink_to(shards)
    other, before = list(command), ["env"]
    if planted == "settings":
        other += ["--seed", "2"]
    elif planted == "data":
        (folders[1] / "data").unlink()
        flags = ["--image-size", "28", "--split", "train=0.7,val=0.3"]
        assert mpi.hpcdl(["shard", DIGITS, folders[1] / "data", *flags]).code == 0
    elif planted == "damage":
        (folders[1] / "data").unlink()
        manifest = next(shutil.copytree(shards, folders[1] / "data").rglob("manifest.json"))
        manifest.write_bytes(manifest.read_bytes()[:-100])
    else:
        package = folder / "planted" / "tensorflow-2.20.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.20.0\n")
        before += [f"PYTHONPATH={package.parent}"]
    first = ["-wdir", str(folders[0]), "env", *command]
    second = ["-wdir", str(folders[1]), *before, *other]
    finished = subprocess.run(
        [*mpi.launcher, "-n", "1", *first, ":", "-n", "1", *second],
        env=mpi.environment, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode != 0
    return [line for line in finished.stderr.splitlines() if line.startswith("hpcdl: ")]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ring", pytest.param("async-sgd", marks=pytest.mark.soak)])
def test_a_held_out_loss_that_is_not_finite_is_reported_and_no_number(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    """A held-out loss that is not finite causes a warning, and is null in record, journal and checkpoints, for JSON."""
    run_dir = tmp_path / "run"
    plain = [argument for argument in SHORT if argument != "--deterministic" or strategy == "ring"]
    arguments = [*plain, "--strategy", strategy, "--model", f"{PLANTED}:build_overflowing", "--data", shards]
    arguments += [*(["--optimizer", "sgd"] if strategy != "ring" else []), "--epochs", "2", "--run-dir", run_dir]
    finished = session_hpcdl([*arguments, "--checkpoint-every", "0.01s"])
    assert finished.code == 0, finished.err
    assert "the loss on held-out samples is nan" in finished.err
    assert {point["val_loss"] for point in record_of(run_dir)["history"]} == {None}
    assert "NaN" not in (run_dir / "metrics.jsonl").read_text()
    assert [*(run_dir / "checkpoints").iterdir()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ("settings", "ranks differ in --seed: rank 0 has 0, rank 1 has 2"),
        ("data", "ranks differ in data manifest: rank 0 has "),
        ("damage", "data/manifest.json is"),
        ("software", "ranks differ in version of tensorflow: rank 0 has 2.21.0, rank 1 has 2.20.0"),
    ],
)
def test_ranks_that_are_not_alike_are_refused(mpi: Mpi, shards: Path, tmp_path: Path, planted: str, words: str) -> None:
    complaints = started_apart(mpi, tmp_path, shards, planted)
    assert len(complaints) >= 1, complaints
    assert words in complaints[-1]
    assert planted != "damage" or complaints[-1].startswith("hpcdl: rank 1 on ")
    assert not (tmp_path / "run" / "record.json").exists()
