"""`hpcdl infer` with real ranks: what it writes, what it resumes, what it refuses."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcdl.core.records.run_record import read_record, state_of
from tests.conftest import DIGITS, ROOT, CommandLine, Mpi
from tests.training_runs import SHORT, finish, start, wait_for

pytestmark = pytest.mark.mpi
NUM_VAL = 359
MODELS = """
import sys, keras
keras.utils.set_random_seed(1)
folder = sys.argv[1]
image = keras.Input((28, 28, 1))
layer = image
for _ in range(3):  # slow enough to be killed in the middle
    layer = keras.layers.Conv2D(48, 5, padding="same", activation="relu")(layer)
keras.Model(image, keras.layers.Dense(10)(keras.layers.Flatten()(layer))).save(f"{folder}/slow.keras")
flat = keras.layers.Flatten()(image)
other = keras.layers.Dense(10)(flat)
keras.Model(image, other).save(f"{folder}/other.keras")
two = {"near": keras.layers.Dense(3)(flat), "map": keras.layers.Conv2D(2, 3, dtype="bfloat16")(image)}
keras.Model(image, two).save(f"{folder}/two.keras")
keras.Model(image, keras.layers.Lambda(lambda x: x)(image)).save(f"{folder}/code.keras")
keras.Model(image, keras.ops.log(flat - 0.5)).save(f"{folder}/nan.keras")
keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]).save(f"{folder}/flat.keras")
keras.Model(image, keras.ops.sum(flat, axis=0)).save(f"{folder}/mixed.keras")
"""


@pytest.fixture(scope="module")
def trained(session_hpcdl: CommandLine, shards: Path) -> Path:
    run_dir = session_hpcdl.home / "inferred-run"
    finished = session_hpcdl([*SHORT, "--data", shards, "--epochs", "2", "--run-dir", run_dir])
    assert finished.code == 0, finished.err
    return run_dir


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain Keras models, created by Keras alone."""
    folder = tmp_path_factory.mktemp("models")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    subprocess.run([sys.executable, "-c", MODELS, str(folder)], check=True, capture_output=True, env=environment)
    return folder


@pytest.fixture(scope="module")
def alone(session_hpcdl: CommandLine, shards: Path, trained: Path) -> Path:
    """The outputs of one rank without a launcher."""
    out = session_hpcdl.home / "alone"
    finished = session_hpcdl(["infer", trained, "--data", shards, "--out", out, "--deterministic"])
    assert finished.code == 0, finished.err
    assert "outputs of val (359 samples) of digits" in finished.err
    return out


def files_of(out: Path) -> dict[str, bytes]:
    """Return the shards and the manifest, by name."""
    return {str(path.relative_to(out)): path.read_bytes() for path in [*out.rglob("*.h5"), out / "manifest.json"]}


def read(out: Path, split: str = "val") -> dict[str, np.ndarray]:
    """Return all outputs of a split, and the samples' numbers, in the order of the shards."""
    found: dict[str, list[np.ndarray]] = {}
    for entry in json.loads((out / "manifest.json").read_text())["splits"][split]["shards"]:
        with h5py.File(out / entry["file"]) as file:
            for name in ("sample", *file["block_checksums"]):
                found.setdefault(name, []).append(file[name][:])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def labels_of(shards: Path, split: str = "val") -> np.ndarray:
    entries = json.loads((shards / "manifest.json").read_text())["splits"][split]["shards"]
    parts = []
    for entry in entries:
        with h5py.File(shards / entry["file"]) as file:
            parts.append(file["labels"][:])
    return np.concatenate(parts)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_any_number_of_ranks_writes_the_same_bytes(
    session_hpcdl: CommandLine, shards: Path, trained: Path, alone: Path, tmp_path: Path, ranks: int
) -> None:
    line = ["infer", trained, "--data", shards, "--out", tmp_path / "out", "--deterministic", "--ranks", ranks]
    finished = session_hpcdl([str(word) for word in line])
    assert finished.code == 0, finished.err
    assert files_of(tmp_path / "out") == files_of(alone)
    record = read_record(tmp_path / "out")
    assert (record.status, record.ranks, record.strategy) == ("finished", ranks, "infer")
    shares = [rank.details["num_samples"] for rank in record.rank_records]
    assert sum(shares) == NUM_VAL and min(shares) > 0


@pytest.mark.long
def test_outputs_are_those_of_the_trained_model(
    session_hpcdl: CommandLine, shards: Path, trained: Path, alone: Path
) -> None:
    found = read(alone)
    assert found["sample"].tolist() == list(range(NUM_VAL)), "every sample once, in order, and no padding"
    assert found["output"].shape == (NUM_VAL, 10) and found["output"].dtype == np.float32
    evaluated = session_hpcdl(["evaluate", trained, "--data", shards, "--split", "val", "--json"]).json()
    right = (found["output"].argmax(axis=1) == labels_of(shards)).mean()
    assert right == pytest.approx(evaluated["accuracy"], abs=1e-6) and right > 0.7
    assert session_hpcdl(["inspect", alone, "--verify"]).code == 0


@pytest.mark.long
def test_images_without_labels_are_one_class_that_the_model_need_not_know(
    session_hpcdl: CommandLine, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(DIGITS / "3", tmp_path / "new" / "unlabelled")
    made = session_hpcdl(["shard", tmp_path / "new", tmp_path / "shards", "--image-size", "28"])
    assert made.code == 0, made.err
    finished = session_hpcdl(["infer", trained, "--data", tmp_path / "shards", "--out", tmp_path / "out"])
    assert finished.code == 0, finished.err
    with h5py.File(tmp_path / "out/shard-00000.h5") as shard:
        assert (shard["output"][:].argmax(axis=1) == 3).mean() > 0.7


@pytest.mark.long
def test_images_of_another_range_are_warned_of(session_hpcdl: CommandLine, trained: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.full((8, 28, 28, 1), 200.0, np.float32), labels=np.arange(8) % 2)
    assert session_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "data"]).code == 0
    done = session_hpcdl(["infer", trained, "--data", tmp_path / "data", "--out", tmp_path / "out"])
    assert done.code == 0 and "'images' of a.npz goes from 200 to 200, and from 0 to 1 in the data" in done.err, (
        done.err
    )
    assert "are both scaled alike?" in read_record(tmp_path / "out").warnings[0]
    evaluated = session_hpcdl(["evaluate", trained, "--data", tmp_path / "data"])
    assert "'images' of a.npz goes from 200 to 200" in evaluated.err, evaluated.err


def test_the_record_says_how_fast(session_hpcdl: CommandLine, alone: Path) -> None:
    found = read_record(alone).inference
    assert found is not None
    assert (found.num_computed, found.num_kept, found.num_shards, found.num_not_finite) == (NUM_VAL, 0, 23, 0)
    assert found.batch_seconds_median is not None and found.batch_seconds_p99 is not None
    assert 0 < found.batch_seconds_median <= found.batch_seconds_p99
    assert found.first_batch_seconds is not None and found.first_batch_seconds > found.batch_seconds_median
    assert found.identity["the data"] == read_record(alone).data_checksum
    (row,) = session_hpcdl(["runs", alone, "--json"]).json()["runs"]
    assert (row["strategy"], row["status"], row["model"]) == ("infer", "finished", "lenet")


@pytest.mark.long
def test_nothing_of_it_is_taken_for_training(
    session_hpcdl: CommandLine, trained: Path, alone: Path, tmp_path: Path
) -> None:
    for path in (trained, alone):
        shutil.copytree(path, tmp_path / "both" / path.name)
    report = session_hpcdl(["report", tmp_path / "both", "--out", tmp_path / "report", "--json"]).json()
    assert [row["strategy"] for row in report["scaling"]] == ["ring"]
    assert [(item["ranks"], item["usable"]) for item in report["inference"]] == [(1, True)]
    refused = session_hpcdl(["evaluate", alone, "--data", "synthetic:mnist"])
    assert refused.code == 3 and "hpcdl train" in refused.err


@pytest.mark.long
def test_a_checkpoint_of_any_strategy_serves(session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    easgd = [
        "--strategy",
        "async-easgd",
        "--optimizer",
        "sgd",
        "--ranks",
        "3",
        "--steps",
        "40",
        "--checkpoint-every",
        "1ms",
    ]
    assert session_hpcdl([*SHORT, *easgd, "--data", shards, "--run-dir", run]).code == 0
    (run / "model.keras").unlink()
    finished = session_hpcdl(["infer", run, "--data", shards, "--out", out, "--ranks", "2"])
    assert finished.code == 0, finished.err
    assert "this is its checkpoint after step" in finished.err
    evaluated = session_hpcdl(["evaluate", run, "--data", shards, "--split", "val", "--json"]).json()
    right = (read(out)["output"].argmax(axis=1) == labels_of(shards)).mean()
    assert right == pytest.approx(evaluated["accuracy"], abs=1e-6)
    shutil.rmtree(run / "checkpoints")
    refused = session_hpcdl(["infer", run, "--data", shards, "--out", tmp_path / "new"])
    assert refused.code == 3 and "neither model.keras nor a checkpoint" in refused.err
    assert not (tmp_path / "new").exists()


def slow(models: Path, shards: Path, out: Path, ranks: int) -> list[Any]:
    flags = ["--deterministic", "--batch-size", "8", "--scale", "0..1", "--ranks", str(ranks)]
    return ["infer", models / "slow.keras", "--data", shards, "--out", out, *flags]


def num_shards(out: Path) -> int:
    return len([*out.glob("val/shard-*.h5")])


def entered(out: Path) -> dict[str, int]:
    """Return the inodes of the shards that the ranks have recorded as complete, by name."""
    lines = [line for path in out.glob("manifest.partial.*") for line in path.read_text().splitlines()[1:]]
    files = [json.loads(line)["entry"]["file"] for line in lines if line.endswith("}")]
    return {Path(file).name: (out / file).stat().st_ino for file in files}


@pytest.mark.long
def test_killed_ranks_and_launchers_leave_nothing_twice_or_missing(
    session_hpcdl: CommandLine, shards: Path, models: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert session_hpcdl(slow(models, shards, whole, 1)).code == 0
    ended = session_hpcdl([*slow(models, shards, out, 2), "--inject", "kill:rank=1@step=5", "--trace"])
    assert ended.code == 1 and "injected: kill:rank=1@step=5" in ended.err and "rank 1" in ended.err, ended.err
    kept = entered(out)
    # Each rank may have been killed between a shard's rename and the line that records it.
    assert 1 <= num_shards(out) - 2 <= len(kept) <= num_shards(out) < num_shards(whole)
    assert not (out / "manifest.json").exists()
    failed = read_record(out)
    assert failed.status == "failed" and "a fault was injected: kill of rank 1 at step 5" in failed.warnings
    assert session_hpcdl(["trace", out, "--json"]).json()["steps"] >= 1, "what both ranks did before"

    command = start(session_hpcdl, [*slow(models, shards, out, 4), "--resume"])
    there = num_shards(out)
    wait_for(lambda: num_shards(out) > there + 3)
    command.kill()  # the ranks get no message and notice it themselves
    command.communicate()
    wait_for(lambda: state_of(out) == "lost")
    between = num_shards(out)
    assert between < num_shards(whole)

    finished = session_hpcdl([*slow(models, shards, out, 1), "--resume"])
    assert finished.code == 0, finished.err
    assert files_of(out) == files_of(whole)
    now = {path.name: path.stat().st_ino for path in out.glob("val/shard-*.h5")}
    assert kept.items() <= now.items(), "what was whole is not computed again"
    found = read_record(out).inference
    assert found is not None and found.num_computed + found.num_kept == NUM_VAL and found.num_kept >= 8 * len(kept) - 7
    assert not [*out.rglob("*.tmp")] and not [*out.glob("manifest.partial*")]


NOTES_ITS_PLACE = """
import os, sys
if "hpcdl.rank.infer" in sys.orig_argv:
    open(f"{os.environ['WHERE_DIR']}/{os.getpid()}", "w").write(sys.prefix)
"""


@pytest.mark.long
def test_ranks_start_from_a_staged_copy_and_their_batches_are_steps_of_a_trace(
    session_hpcdl: CommandLine, shards: Path, trained: Path, alone: Path, tmp_path: Path, mpi: Mpi
) -> None:
    """Ranks start from a staged copy, and their batches are steps of a trace.

    The environment borrows TensorFlow from the tests' own: packing that takes minutes.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (packages / "sitecustomize.py").write_text(NOTES_ITS_PLACE)
    for folder in ("node", "where"):
        (tmp_path / folder).mkdir()
    library = os.environ.get("MPI4PY_LIBMPI", f"{sysconfig.get_path('data')}/lib/libmpi.so.12")
    places = {"HPCDL_NODE_STORAGE": str(tmp_path / "node"), "WHERE_DIR": str(tmp_path / "where")}
    line = ["infer", trained, "--data", shards, "--out", tmp_path / "out", "--deterministic", "--ranks", "2"]
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-m", "hpcdl", *map(str, line), "--stage-env", "--trace", "full"],
        env={**mpi.environment, **places, "MPI4PY_LIBMPI": library}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "out") == files_of(alone)
    began = [path.read_text() for path in (tmp_path / "where").iterdir()]
    assert len(began) == 2 and all(place.startswith(f"{tmp_path}/node/hpcdl-env-") for place in began), began
    assert not [*(tmp_path / "node").iterdir()]

    shown = session_hpcdl(["trace", tmp_path / "out", "--to", "chrome", tmp_path / "trace.json.gz", "--json"])
    assert shown.code == 0, shown.err
    found = shown.json()
    path = {part["part"]: part["seconds_per_step"] for part in found["critical_path"]}
    assert (found["ranks"], found["steps"]) == (2, 11)
    assert b"writing a shard" in gzip.decompress((tmp_path / "trace.json.gz").read_bytes())
    assert path["compute"] > 0 and path["input"] > 0 and path["other"] > 0, path
    assert path["update"] == path["wait"] == path["exposed_communication"] == 0, path
    assert found["gaps"]["count_per_step"] == 0 and not found["waits"]


@pytest.mark.long
def test_a_signal_stops_it_and_resume_continues(
    session_hpcdl: CommandLine, shards: Path, models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = start(session_hpcdl, slow(models, shards, out, 2))
    wait_for(lambda: num_shards(out) >= 2)
    command.send_signal(signal.SIGTERM)
    stopped = finish(command)
    assert stopped.code == 75 and "--resume" in stopped.err, stopped.err
    assert read_record(out).status == "stopped"
    assert session_hpcdl([*slow(models, shards, out, 2), "--resume"]).code == 0
    assert read(out)["sample"].tolist() == list(range(NUM_VAL))


@pytest.mark.long
def test_damaged_shards_alone_are_computed_again(
    session_hpcdl: CommandLine, shards: Path, trained: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(alone, out)
    damaged = out / "val" / "shard-00003.h5"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    looked = session_hpcdl(["inspect", out, "--verify"])
    assert looked.code == 3 and "write them again with the same `hpcdl infer` command and --resume" in looked.err
    line = ["infer", trained, "--data", shards, "--out", out, "--deterministic", "--resume"]
    finished = session_hpcdl(line)
    assert finished.code == 0 and "shard-00003.h5" in finished.err, finished.err
    assert files_of(out) == files_of(alone)
    found = read_record(out).inference
    assert found is not None and (found.num_computed, found.num_kept) == (16, NUM_VAL - 16)
    again = session_hpcdl(line)
    assert again.code == 0 and "nothing is left to compute" in again.err


@pytest.mark.long
def test_several_outputs_and_all_splits_of_a_plain_model(
    session_hpcdl: CommandLine, shards: Path, models: Path, tmp_path: Path
) -> None:
    line = [
        "infer",
        models / "two.keras",
        "--data",
        shards,
        "--out",
        tmp_path / "out",
        "--split",
        "all",
        "--scale",
        "none",
    ]
    finished = session_hpcdl([*line, "--ranks", "2", "--shard-samples", "100"])
    assert finished.code == 0, finished.err
    for split in ("train", "val"):
        found = read(tmp_path / "out", split)
        labels = labels_of(shards, split)
        assert found["sample"].tolist() == list(range(len(labels)))
        assert found["near"].shape == (len(labels), 3)
        assert found["map"].shape == (len(labels), 26, 26, 2) and found["map"].dtype == np.float32
    assert session_hpcdl(["inspect", tmp_path / "out", "--verify"]).code == 0


@pytest.mark.long
def test_scale_decides_what_a_plain_model_is_fed(
    session_hpcdl: CommandLine, shards: Path, models: Path, tmp_path: Path
) -> None:
    for scale in ("0..1", "none"):
        line = ["infer", models / "other.keras", "--data", shards, "--out", tmp_path / scale, "--scale", scale]
        assert session_hpcdl(line).code == 0
    scaled, kept = read(tmp_path / "0..1")["output"], read(tmp_path / "none")["output"]
    assert np.allclose(255 * scaled, kept, rtol=1e-4, atol=1e-2) and not np.allclose(scaled, kept)


@pytest.mark.long
def test_outputs_that_are_not_finite_are_reported(
    session_hpcdl: CommandLine, shards: Path, models: Path, tmp_path: Path
) -> None:
    line = ["infer", models / "nan.keras", "--data", shards, "--out", tmp_path / "out", "--scale", "0..1"]
    finished = session_hpcdl(line)
    assert finished.code == 0 and f"the outputs of {NUM_VAL} samples hold NaN or infinity" in finished.err


@pytest.mark.long
def test_under_a_launcher_of_the_users_own(
    session_hpcdl: CommandLine, shards: Path, trained: Path, alone: Path, models: Path, tmp_path: Path, mpi: Mpi
) -> None:
    line = ["infer", trained, "--data", shards, "--out", tmp_path / "out", "--deterministic"]
    command = [*mpi.launcher, "-n", "2", sys.executable, "-m", "hpcdl", *map(str, line)]
    done = subprocess.run(command, env=mpi.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "out") == files_of(alone)
    line = ["infer", models / "mixed.keras", "--data", shards, "--out", tmp_path / "new", "--scale", "none"]
    command = [*mpi.launcher, "-n", "2", sys.executable, "-m", "hpcdl", *map(str, line)]
    refused = subprocess.run(command, env=mpi.environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "one row for each sample" in refused.stderr, refused.stderr
    assert not (tmp_path / "new").exists()


AGAIN = ["--out", "{alone}", "--resume", "--deterministic"]
PLAIN = ["--scale", "none", "--out", "{new}"]
REFUSED: Mapping[str, tuple[list[str], str]] = {
    "outputs are there": (["{run}", "--out", "{alone}"], "holds outputs already; continue with --resume"),
    "not empty": (["{run}", "--out", "{models}"], "is not empty"),
    "a file": (["{run}", "--out", "{models}/two.keras"], "is a file; name a new folder"),
    "another model": (["{other}", "--scale", "0..1", "--batch-size", "16", *AGAIN], "began with the model"),
    "another split": (["{run}", *AGAIN, "--split", "train"], "began with --split val"),
    "not deterministic": (["{run}", "--out", "{alone}", "--resume"], "--deterministic true, now it is false"),
    "no such split": (["{run}", "--out", "{new}", "--split", "tset"], "--split tset: digits has train, val, and all"),
    "no such model": (["{new}", "--out", "{new}"], "no such model"),
    "no run": (["{models}", "--out", "{new}"], "holds no run of `hpcdl train`"),
    "no Keras file": (["{alone}/record.json", "--out", "{new}"], "is not a .keras file"),
    "bytes of a plain model": (["{models}/two.keras", "--out", "{new}"], "give --scale 0..1"),
    "bytes of a run's file": (["{run}/model.keras", "--out", "{new}"], "or name its run"),
    "scale of a run": (["{run}", "--out", "{new}", "--scale", "none"], "--scale is for a .keras file"),
    "code in the file": (["{models}/code.keras", *PLAIN], "Lambda, which is not loaded"),
    "another shape": (["{models}/flat.keras", *PLAIN], "takes samples of (8,)"),
    "a fault of training": (["{run}", "--out", "{new}", "--inject", "eio:shard=0"], "not of `hpcdl infer`"),
    "a fault of no rank": (["{run}", "--out", "{new}", "--inject", "kill:rank=1@step=1"], "there are ranks 0 to 0"),
    "a trace that is none": (["{run}", "--out", "{new}", "--trace", "steps=9:1"], "steps=9:1 is not a range"),
    "no row for each sample": (["{models}/mixed.keras", *PLAIN], "one row for each sample"),
}
"""The arguments, and the only line of output; exit code 2."""


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_line_and_nothing_is_left(
    ask_hpcdl: CommandLine, shards: Path, trained: Path, alone: Path, models: Path, tmp_path: Path, case: str
) -> None:
    words, reported = REFUSED[case]
    places = {
        "run": trained,
        "other": models / "other.keras",
        "alone": alone,
        "models": models,
        "new": tmp_path / "new",
    }
    before = files_of(alone), (alone / "record.json").read_bytes()
    refused = ask_hpcdl(["infer", "--data", shards, *(word.format(**places) for word in words)])
    assert refused.code == 2 and reported in refused.err, refused.err
    assert len(refused.err.strip().splitlines()) == 1, refused.err
    assert before == (files_of(alone), (alone / "record.json").read_bytes())
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_other_data_is_not_taken_for_the_same(
    session_hpcdl: CommandLine, trained: Path, alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    source = Path(__file__).parents[2] / "share" / "hpcdl" / "examples" / "digits"
    split = ["--image-size", "28", "--split", "train=0.8,val=0.2", "--seed", "7"]
    assert session_hpcdl(["shard", source, folder, *split]).code == 0
    refused = session_hpcdl(["infer", trained, "--data", folder, "--out", alone, "--deterministic", "--resume"])
    assert refused.code == 2 and "began with the data" in refused.err
