"""Copies of the state in the nodes' memory: kept, checked, skipped if damaged, and removed when the run is over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy
import pytest

from hpcdl.checkpoint import memory as local
from hpcdl.checkpoint.folders import Snapshot
from hpcdl.checkpoint.memory import LocalCopies, folder_of_copies, guarded, newest_common, place, steps_in
from hpcdl.config.load import flag_layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import StoppedEarly, UsageError
from hpcdl.core.storage.lock import writing
from hpcdl.run.plan import prepare
from hpcdl.strategies.table import STRATEGIES
from tests.checkpoint.test_checkpoints import damage_bit, damage_truncate
from tests.conftest import CommandLine, Undisturbed
from tests.training_runs import NOTED, SHORT, events, images_of, record_of, same_run, steps_done, wait_for


def snapshot(step: int, size: int = 12) -> Snapshot:
    return Snapshot(
        step=step,
        shared={"weights/0": numpy.full(size, step, numpy.float32)},
        own={"totals": numpy.array([step, 0.5])},
        facts={"ranks": 1},
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "hpcdl-state"


def copies(folder: Path, said: list[str], steps: list[int], every: int = 10, rank: int = 0) -> LocalCopies:
    made = LocalCopies(folder, folder.parent / "run", rank, every, said.append)
    for step in steps:
        assert made.due(step)
        made.wait()
        made.start(snapshot(step))
        assert not made.due(step)
    made.wait()
    return made


def test_the_newest_two_are_kept_and_come_back(folder: Path, said: list[str]) -> None:
    copies(folder, said, [10, 20, 30])
    again = LocalCopies(folder, folder.parent / "run", 0, 10, said.append)
    assert again.whole() == [30, 20] and said == []
    shared, facts = again.read_shared(30)
    numpy.testing.assert_array_equal(shared["weights/0"], numpy.full(12, 30))
    assert facts == {"ranks": 1} and again.read_own(30)["totals"].tolist() == [30, 0.5]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [damage_truncate, damage_bit, Path.unlink])
@pytest.mark.parametrize("suffix", ["npz", "json"])
def test_a_damaged_copy_is_passed_over_with_one_line(
    folder: Path, said: list[str], damage: object, suffix: str
) -> None:
    copies(folder, said, [10, 20])
    damage(next(folder.glob(f"step-*20.rank-0.{suffix}")))  # type: ignore[operator]
    gone = (damage, suffix) == (Path.unlink, "json")
    assert LocalCopies(folder, folder.parent / "run", 0, 10, said.append).whole() == [10]
    assert len(said) == (0 if gone else 1) and all("an older state is taken" in text for text in said)


def test_notes_after_the_restored_state_are_dropped(folder: Path, said: list[str]) -> None:
    made = copies(folder, said, [10, 20])
    made.resume(15)
    assert steps_in(folder) == [10] and not made.due(19) and made.due(20)


def test_too_little_room_ends_the_copying_not_the_run(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(folder.parent)
    full = os.statvfs_result([1, 1, 1000, 0, 100, *real[5:]])  # 100 bytes free, of 1,000
    monkeypatch.setattr(local.os, "statvfs", lambda path: full)
    made = LocalCopies(folder, folder.parent / "run", 0, 10, said.append)
    for step in (10, 20):
        assert made.due(step), "every rank must come to the same steps, whatever fails on one"
        made.start(snapshot(step, size=1000))
        made.wait()
    assert len(said) == 1 and "are needed" in said[0] and steps_in(folder) == []


def test_a_link_in_its_place_is_not_followed(folder: Path, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    copies(folder, said, [10])
    assert len(said) == 1 and "is a link" in said[0] and not any((tmp_path / "elsewhere").iterdir())


def test_at_the_end_nothing_stays_and_after_a_loss_everything(folder: Path, said: list[str]) -> None:
    for ends in (None, StoppedEarly("saved")):
        first, second = copies(folder, said, [10]), copies(folder, said, [10], rank=1)
        with first.until_over():
            pass
        assert steps_in(folder, 1) == [10], "another rank's is there still"
        if ends is None:
            with second.until_over():
                pass
        else:
            with pytest.raises(StoppedEarly), second.until_over():
                raise ends
        assert not folder.exists()
    kept = copies(folder, said, [10])
    with pytest.raises(RuntimeError), kept.until_over():
        raise RuntimeError("a peer is gone")
    assert steps_in(folder) == [10]


def test_what_dead_runs_have_left_is_removed_and_what_live_ones_need_is_not(tmp_path: Path, said: list[str]) -> None:
    runs = [tmp_path / name for name in ("dead", "alive", "own")]
    for run_dir in runs:
        run_dir.mkdir()
    dead, alive, own = (place(tmp_path, run_dir, "somebody") for run_dir in runs)
    with writing(runs[1]):
        LocalCopies(alive, runs[1], 0, 10, said.append)
        LocalCopies(dead, runs[0], 0, 10, said.append)
        LocalCopies(own, runs[2], 0, 10, said.append)
    assert not dead.exists() and alive.exists() and own.exists() and said == []


def test_a_guard_that_was_killed_ends_no_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with guarded(tmp_path / "copies", run_dir):
        # Popen returns when exec has closed its pipe; for a moment more the kernel shows an empty command line.
        guard = next(filter(None, (_process_about(tmp_path / "copies") for _ in range(1000))))
        os.kill(guard, signal.SIGKILL)
        while b"State:\tZ" not in (Path("/proc") / str(guard) / "status").read_bytes():
            time.sleep(0.01)
    assert folder_of_copies(run_dir) is None


def _process_about(folder: Path) -> int | None:
    """Return the process whose command line names `folder`; None after a pause if there is none."""
    for path in Path("/proc").glob("[0-9]*"):
        if str(folder).encode() in _command_line(path):
            return int(path.name)
    time.sleep(0.01)
    return None


def _command_line(process: Path) -> bytes:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def test_the_newest_step_that_all_have() -> None:
    assert newest_common([([30, 20], "a"), ([20, 10], "b")], 10) == (20, "")
    assert newest_common([([20, 10], "a"), ([20, 10], "b")], 20) == (None, "")
    step, reported = newest_common([([30, 20], "a"), ([], "b")], 10)
    assert step is None and "rank 1 on b" in reported and "newest checkpoint" in reported
    assert newest_common([([], "a"), ([], "b")], 0) == (None, "")


def test_without_elastic_nobody_would_use_them() -> None:
    layer = flag_layer({"model": "lenet", "data": "synthetic:hep", "local_checkpoint_every": "5", "epochs": "1"})
    with pytest.raises(UsageError, match="add --elastic"):
        prepare(load(TrainConfig, [layer]))


ELASTIC = ["--elastic", "--checkpoint-every", "1h", "--local-checkpoint-every", "10"]


@pytest.mark.long
@pytest.mark.mpi
def test_new_ranks_continue_from_memory_bit_for_bit_and_leave_nothing(
    undisturbed: Undisturbed, session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    run_dir, near = tmp_path / "run", tmp_path / "near"
    near.mkdir()
    faults = "kill:rank=0@step=64,kill:rank=1@step=133"
    line = [*NOTED, "--data", shards, "--run-dir", run_dir, *ELASTIC, "--local-checkpoint-folder", near]
    finished = session_hpcdl(
        [*line, "--inject", faults, "--background", "gaps"],
        env={"RECORD_DIR": str(tmp_path), "STEP_S": "0.02"},
        timeout_s=900,
    )
    assert finished.code == 0, finished.err
    same_run(run_dir, undisturbed.run_dir)
    assert images_of(tmp_path) == undisturbed.images
    struck = [event["step"] for event in events(run_dir, "message") if event["text"].startswith("injected")]
    resumed = record_of(run_dir)["resumed_from_steps"]
    assert len(resumed) == 2 and all(step % 10 == 0 for step in resumed)
    assert all(0 <= there - back <= 20 for there, back in zip(struck, resumed, strict=True)), (struck, resumed)
    assert not (run_dir / "checkpoints").exists(), "no checkpoint was due: memory it was"
    wait_for(lambda: not any(near.iterdir()), timeout_s=30)


@pytest.mark.mpi
@pytest.mark.soak
def test_copies_that_are_damaged_are_reported_and_not_taken(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """Damaged copies are reported and not used: all copies of rank 1 lose a bit while new ranks start.

    There is no checkpoint, so the run begins again. `make test-all` has every damage of each file without ranks, above.
    """
    run_dir, near = tmp_path / "run", tmp_path / "near"
    near.mkdir()
    line = [*SHORT, "--data", shards, "--run-dir", run_dir, *ELASTIC, "--local-checkpoint-folder", near]
    process = session_hpcdl.start([*line, "--steps", "60", "--inject", "kill:rank=0@step=44"])
    wait_for(lambda: any("new ranks continue" in event["text"] for event in events(run_dir, "message")))
    for path in near.glob("*/*.rank-1.npz"):
        damage_bit(path)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    reported = [event["text"] for event in events(run_dir, "message")]
    assert sum("is damaged" in text and "rank-1.npz" in text for text in reported) in (1, 2), reported
    assert sum(text.endswith("going back to the newest checkpoint") for text in reported) == 1, reported
    assert record_of(run_dir)["resumed_from_steps"] == [] and record_of(run_dir)["status"] == "finished"


@pytest.mark.mpi
@pytest.mark.soak
def test_a_run_that_is_killed_as_a_whole_leaves_nothing(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    """A `ring` run killed whole leaves nothing; `make test-all`: one with a server (test_launcher_command.py)."""
    near = tmp_path / "near"
    near.mkdir()
    line = [*NOTED, "--epochs", "99", "--data", shards, "--run-dir", tmp_path / "run", *ELASTIC]
    process = session_hpcdl.start([*line, "--local-checkpoint-folder", near], env={"STEP_S": "0.02"})
    wait_for(lambda: any(near.glob("*/step-*.json")) and steps_done(tmp_path / "run") > 0)
    listed = session_hpcdl(["checkpoints", tmp_path / "run", "--json"])
    assert listed.code == 0 and {row["level"] for row in listed.json()["checkpoints"]} == {"node memory"}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.communicate()
    wait_for(lambda: not any(near.iterdir()), timeout_s=30)


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_every_strategy_continues_from_memory(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path, strategy: str
) -> None:
    features = STRATEGIES[strategy].features
    line = [*SHORT, "--strategy", strategy, "--ranks", "3", "--data", shards, "--run-dir", tmp_path / "run"]
    # Enough epochs for worker 0 to reach its step 30, if others do the work while it evaluates.
    line += [*ELASTIC, "--epochs", "12", "--stall-timeout", "10s", "--inject", "kill:rank=0@step=30"]
    line += ["--optimizer", features.optimizers[0], "--learning-rate", "0.01"] if features.optimizers else []
    line += [] if features.mpi else ["--allow-grpc"]
    if not features.keras_optimizer or not features.deterministic:
        line.remove("--deterministic")
    finished = session_hpcdl(line, timeout_s=300)
    assert finished.code == 0, finished.err
    (resumed,) = record_of(tmp_path / "run")["resumed_from_steps"]
    assert resumed > 0, "there was no checkpoint: only memory has such a step"
