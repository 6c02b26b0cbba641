"""A user's network: its layers come from its record, or are unknown, which is reported and widens the interval."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.predict.jobs import lengths_of
from tests.conftest import ROOT, CommandLine
from tests.report.synthetic import make_record, write_run

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
        # On a slow network the exchange dominates a step; on a fast one, the noise of eight steps hides the rest.
        reported = session_hpcdl(
            ["predict", run, "--nodes", "1,64", "--strategy", "ring", "--network", "1gbe", "--json"]
        )
        assert reported.code == 0, reported.err
        far = reported.json()["predictions"][-1]["step_seconds"]
        return reported.out + reported.err, far["high"] / far["low"]

    known, narrow = predicted()
    path.write_text(json.dumps({**record, "gradient_elements": []}))
    unknown, wide = predicted()
    assert "are not known, only their bytes" not in known and "are not known, only their bytes" in unknown
    reported = f"{run / 'model.keras'} does not tell the layers of {record['model']}: it names "
    assert reported in unknown, "a layer of the user's own is no reason to run the user's own code"
    assert wide > narrow


OWN = """
import keras

def build(num_classes=10):
    return keras.Sequential([
        keras.Input((28, 28, 1)), keras.layers.Conv2D(8, 5), keras.layers.Flatten(), keras.layers.Dense(num_classes)
    ])

def needs(num_classes):
    return build(num_classes)

def loops():
    return keras.Sequential([keras.Input((9, 4)), keras.layers.LSTM(8), keras.layers.Dense(2)])

def empty():
    return keras.Sequential([keras.Input((9,)), keras.layers.Flatten()])
"""
LENGTHS = (5 * 5 * 8, 8, 24 * 24 * 8 * 10, 10)
MACS = 24 * 24 * 5 * 5 * 8 + 24 * 24 * 8 * 10
FACTS = ["--network", "1gbe", "--strategy", "ring,ps", "--nodes", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("own")
    (place / "net.py").write_text(OWN)
    lines = (
        f"import sys; sys.path.insert(0, {str(place)!r}); import net; net.build().save({str(place / 'net.keras')!r})"
    )
    subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True, timeout=300)
    return place


@pytest.mark.long
@pytest.mark.parametrize("spec", ["net.py:build", "net.keras"])
def test_a_network_of_one_s_own_from_facts_alone(session_hpcdl: CommandLine, folder: Path, spec: str) -> None:
    """A user's network can be predicted from facts alone, with its own lengths and operations."""
    reported = session_hpcdl(["predict", "--model", folder / spec, *FACTS, "--json"])
    assert reported.code == 0, reported.err
    document = reported.json()
    assert {row["strategy"] for row in document["predictions"]} == {"ring", "ps"}
    assert f"{MACS / 1e6:.3g} million MACs" in reported.out and "only their bytes" not in reported.out
    assert all(row["step_seconds"]["low"] > 0 for row in document["predictions"])
    wanted = "FILE.py:FUNCTION" if spec.endswith(".keras") else str(folder / spec)
    assert f"--model {wanted} " in document["next_run"]["command"]


def test_it_has_the_numbers_of_the_same_network_in_the_table(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text("from hpcdl.models.lenet import build as lenet\n\n"
                                       "def build():\n    return lenet(10, (28, 28, 1))\n")  # fmt: skip
    ours, table = (
        session_hpcdl(["predict", "--model", model, *FACTS, "--json"]).json()["predictions"]
        for model in (tmp_path / "again.py:build", "lenet")
    )
    for one, other in zip(ours, table, strict=True):
        assert one["step_seconds"] == pytest.approx(other["step_seconds"])


TABLE = "strategy,model,nodes,ranks,batch_per_rank,gradient_bytes,step_seconds\n"


def imported(folder: Path, num_bytes: int) -> list[str | Path]:
    path = folder / "runs.csv"
    seconds = {1: 0.02, 2: 0.0216, 4: 0.0224}  # over a link of 1 Gbit/s
    rows = [f"ring,mine,{nodes},{nodes},16,{num_bytes},{one}\n" for nodes, one in seconds.items()]
    path.write_text(TABLE + "".join(rows))
    return ["predict", "--import", "csv", path, "--network", "1gbe", "--nodes", "64", "--strategy", "ring", "--json"]


@pytest.mark.long
def test_layers_that_runs_lack_come_from_the_model_file(
    session_hpcdl: CommandLine, folder: Path, tmp_path: Path
) -> None:
    words = imported(tmp_path, 4 * sum(LENGTHS))
    without = session_hpcdl(words)
    assert without.code == 0, without.err
    assert "--model FILE.keras or FILE.py:FUNCTION gives them" in without.out
    assert "--model FILE.py:FUNCTION " in without.json()["next_run"]["command"], "mine is no network that train knows"
    given = session_hpcdl([*words, "--model", folder / "net.keras"])
    assert given.code == 0, given.err
    assert "only their bytes" not in given.out
    unknown, known = (reported.json()["predictions"][0]["step_seconds"] for reported in (without, given))
    assert known != unknown, "the file is not only looked at"


@pytest.mark.long
def test_the_model_file_of_a_run_holds_what_its_record_lacks(
    session_hpcdl: CommandLine, folder: Path, tmp_path: Path
) -> None:
    """The model file of a run supplies what its record lacks, if its bytes are the run's and it contains no code."""
    num_bytes = 4 * sum(LENGTHS)
    for workers, seconds in ((1, 0.02), (2, 0.0216), (4, 0.0224)):
        record = make_record(workers, workers * 32 / seconds, model="mine", gradient_bytes=num_bytes, repeat=0)
        write_run(tmp_path / "runs" / str(workers), record)
    words = ["predict", tmp_path / "runs", "--network", "1gbe", "--nodes", "64", "--strategy", "ring", "--json"]

    def predicted() -> tuple[str, float]:
        reported = session_hpcdl(words)
        assert reported.code == 0, reported.err
        return " ".join(reported.json()["warnings"]), reported.json()["predictions"][0]["step_seconds"]["mean"]

    without, guessed = predicted()
    assert "the layers of mine are not known, only their bytes" in without
    left = tmp_path / "runs" / "2" / "model.keras"
    shutil.copy(folder / "net.keras", left)
    reported, known = predicted()
    assert f"the layers of mine are those of {left}" in reported and "only their bytes" not in reported
    assert known != guessed
    left.write_bytes(b"PK and nothing else")
    damaged, again = predicted()
    assert f"{left} does not tell the layers of mine: " in damaged and "only their bytes" in damaged
    assert again == guessed


REFUSED = {
    "net.py:needs": ("needs num_classes, which only data determine", "give the argument a default"),
    "net.py:loops": ("its graph does not tell its operations", "one node has to be measured: hpcdl train --model"),
    "net.py:empty": ("has nothing to train",),
    "net.py:other": ("'other'", "build"),
    "gone.keras": ("there is no such file",),
    "net.py": ("give FILE.keras, FILE.py:FUNCTION",),
}


@pytest.mark.long
@pytest.mark.parametrize("spec", REFUSED)
def test_what_it_cannot_tell_is_refused(session_hpcdl: CommandLine, folder: Path, spec: str) -> None:
    reported = session_hpcdl(["predict", "--model", folder / spec, *FACTS])
    assert (reported.code, reported.out) == (2, "")
    assert reported.err.count("\n") == 1
    for text in REFUSED[spec]:
        assert text in reported.err


@pytest.mark.long
def test_a_network_that_the_runs_did_not_train_is_refused(
    session_hpcdl: CommandLine, folder: Path, tmp_path: Path
) -> None:
    reported = session_hpcdl([*imported(tmp_path, 4_000), "--model", folder / "net.keras"])
    assert reported.code == 2
    assert f"has {4 * sum(LENGTHS):,} bytes of gradients, the runs of mine have 4,000" in reported.err
