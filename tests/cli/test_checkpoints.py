"""`hpcdl checkpoints` lists what a run can resume from, and damaged checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest

from hpcdl.checkpoint.folders import CheckpointWriter, Snapshot
from hpcdl.comm.threads import alone
from hpcdl.core.records.run_record import write_record
from hpcdl.run.listing import ways_on
from hpcdl.run.rundir import without_model
from tests.conftest import CommandLine
from tests.report.synthetic import make_record

FACTS = {"train": {"ranks": 1, "steps_per_epoch": 8}, "script": {"ranks": 1, "values": {"epoch": 3}}}


def run_with(run_dir: Path, steps: list[int], kind: str = "train") -> Path:
    run_dir.mkdir()
    writer = CheckpointWriter(run_dir, alone(), keep=5)
    for step in steps:
        weights = {"weights/0": numpy.full((30, 40), step, numpy.float32)}
        writer.start(Snapshot(step=step, shared=weights, own={"totals": numpy.ones(3)}, facts=FACTS[kind]))
    writer.wait()
    return run_dir


@pytest.mark.parametrize(("kind", "epochs"), [("train", [2.5, 1.0]), ("script", [3.0, 3.0])])
def test_all_are_listed_newest_first(ask_hpcdl: CommandLine, tmp_path: Path, kind: str, epochs: list[float]) -> None:
    run_dir = run_with(tmp_path / "run", [8, 20], kind)
    rows = ask_hpcdl(["checkpoints", run_dir, "--json"]).json()["checkpoints"]
    assert [(row["step"], row["epoch"], row["whole"]) for row in rows] == [
        (step, epoch, True) for step, epoch in zip([20, 8], epochs, strict=True)
    ]
    newest = run_dir / "checkpoints" / "step-0000000020"
    assert rows[0]["path"] == str(newest) and rows[0]["level"] == "file system" and 0 <= rows[0]["age_seconds"] < 600
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in newest.iterdir()) > 30 * 40 * 4
    shown = ask_hpcdl(["checkpoints", run_dir])
    assert shown.code == 0 and shown.out.splitlines()[1].split()[0] == "20" and "damaged" not in shown.out


def test_a_script_is_continued_with_its_arguments(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    run_dir = run_with(tmp_path / "my run", [8], "script")
    (run_dir / "run.toml").write_text('[facts]\nscript = "fit.py"\narguments = ["--epochs", "a b"]\n')
    shown = ask_hpcdl(["checkpoints", run_dir])
    assert shown.err == f"next: hpcdl run --resume --run-dir '{run_dir}' fit.py --epochs 'a b'\n"


@pytest.mark.parametrize("name", ["shared.npz", "rank-0.npz", "checkpoint.json"])
def test_one_flipped_bit_is_found_and_named(ask_hpcdl: CommandLine, tmp_path: Path, name: str) -> None:
    run_dir = run_with(tmp_path / "run", [8, 20])
    path = run_dir / "checkpoints" / "step-0000000020" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    found = ask_hpcdl(["checkpoints", run_dir, "--json"])
    assert found.code == 3 and len(found.err.splitlines()) == 1
    assert name in found.err and "continues after step 8" in found.err
    rows = found.json()["checkpoints"]
    assert [row["whole"] for row in rows] == [False, True] and name in rows[0]["problem"]
    shown = ask_hpcdl(["checkpoints", run_dir])
    assert shown.code == 3 and shown.out.count("damaged") == 1


def test_a_run_without_any_and_no_run(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.toml").touch()
    begun = ask_hpcdl(["checkpoints", tmp_path / "begun"])
    assert begun.code == 0 and "no checkpoint yet" in begun.out
    write_record(tmp_path / "begun", make_record(status="finished", study="sizes"))
    ended = ask_hpcdl(["checkpoints", tmp_path / "begun"])
    assert ended.code == 0 and "has finished and kept none" in ended.out and "yet" not in ended.out
    for missing in (tmp_path, tmp_path / "nowhere"):
        refused = ask_hpcdl(["checkpoints", missing, "--json"])
        assert refused.code == 2 and refused.out == "" and len(refused.err.splitlines()) == 1
        assert str(missing) in refused.err and "is not a run" in refused.err


@pytest.mark.parametrize(
    "changes, code, reported",
    [
        ({"status": "stopped"}, 3, "let the run continue with --resume"),
        ({"status": "finished"}, 3, "they were removed; train it again: hpcdl train --resume --run-dir"),
        ({"status": "finished", "study": "sizes"}, 2, "its study kept none; give hpcdl sweep --keep-models"),
    ],
)
def test_a_run_without_a_model_says_why_it_has_none(
    tmp_path: Path, changes: dict[str, str], code: int, reported: str
) -> None:
    """A finished run without a model gets a reason other than `--resume`, which would do nothing."""
    write_record(tmp_path, make_record(**changes))
    error = without_model(tmp_path)
    assert error.exit_code == code and reported in str(error)


RUN_TOML = 'model = "lenet"\ndata = "{}"\n[origins]\nmodel = "flag"\ndata = "flag"\n'


@pytest.mark.parametrize("data", ["synthetic:mnist@40", "here", "elsewhere"])
def test_what_is_advised_works_from_this_folder(
    ask_hpcdl: CommandLine, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    """A relative --data counts from the folder in which the run began."""
    monkeypatch.chdir(ask_hpcdl.home)
    run_dir = Path("run")
    for folder in ("run", "here"):
        Path(folder).mkdir()
    (run_dir / "run.toml").write_text(RUN_TOML.format(data))
    advised = [] if data == "elsewhere" else ["hpcdl train --resume --run-dir run", f"hpcdl evaluate run --data {data}"]
    assert ways_on(run_dir) == advised
    resumed = ask_hpcdl(["train", "--resume", "--run-dir", "run", "--steps", "1", "--batch-size", "1", "--dry-run"])
    line = "--data elsewhere, which is not found here; type this in the folder in which the run began, or give --data"
    assert (line in resumed.err) == (data == "elsewhere"), resumed.err


def test_another_users_run_is_evaluated_with_trust_and_not_continued(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    (tmp_path / "run.toml").write_text(RUN_TOML.format("synthetic:mnist"))
    os.chown(tmp_path, 4711, -1)
    assert ways_on(tmp_path) == [f"hpcdl evaluate {tmp_path} --data synthetic:mnist --trust"]
