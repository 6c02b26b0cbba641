"""Checkpoint files are complete or absent, and checked on reading; ranks as threads."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint.folders import CheckpointWriter, Snapshot
from hpcdl.comm import threads
from hpcdl.comm.threads import alone
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import read_record, write_record
from hpcdl.core.storage import files
from hpcdl.run.ended import note_lost
from tests.report.synthetic import make_record

FILES = ["shared.npz", "rank-0.npz", "checkpoint.json"]


def snapshot(step: int, rank: int = 0) -> Snapshot:
    return Snapshot(
        step=step,
        shared={"weights/0": numpy.full((3, 4), step, numpy.float32)},
        own={"totals": numpy.array([rank, step], numpy.float64)},
        facts={"ranks": 2},
    )


def write(run_dir: Path, steps: list[int], keep: int = 3) -> CheckpointWriter:
    writer = CheckpointWriter(run_dir, alone(), keep)
    for step in steps:
        writer.start(snapshot(step))
    writer.wait()
    return writer


def test_every_rank_leaves_its_own_state(tmp_path: Path) -> None:
    def rank(communicator: object) -> None:
        writer = CheckpointWriter(tmp_path, communicator, 3)  # type: ignore[arg-type]
        writer.start(snapshot(12, communicator.rank))  # type: ignore[attr-defined]
        writer.wait()

    threads.run(3, rank)
    assert checkpoints.newest_valid(tmp_path, []) == 12
    shared, facts = checkpoints.read_shared(tmp_path, 12)
    numpy.testing.assert_array_equal(shared["weights/0"], numpy.full((3, 4), 12))
    assert facts == {"ranks": 2}
    assert [checkpoints.read_own(tmp_path, 12, rank)["totals"][0] for rank in range(3)] == [0, 1, 2]
    assert checkpoints.read_own(tmp_path, 12, 3) == {}


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3, 4, 5], keep=2)
    assert checkpoints.list_checkpoints(tmp_path / "checkpoints") == [5, 4]


def test_the_newest_is_what_was_written_last(tmp_path: Path) -> None:
    """The newest checkpoint is the last one written, even with a lower step, as on more ranks with larger batches."""
    write(tmp_path, [10, 20, 30])
    write(tmp_path, [18, 24])
    assert checkpoints.list_checkpoints(tmp_path / checkpoints.FOLDER) == [24, 18, 10]
    assert checkpoints.newest_valid(tmp_path, []) == 24


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def damage_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_truncate, damage_bit, Path.unlink])
@pytest.mark.parametrize("name", ["shared.npz", "rank-0.npz", "checkpoint.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: object) -> None:
    write(tmp_path, [1, 2])
    newest = checkpoints.folder_of(tmp_path / "checkpoints", 2)
    damage(newest / name)  # type: ignore[operator]
    warnings: list[str] = []
    assert checkpoints.newest_valid(tmp_path, warnings) == 1
    assert len(warnings) == 1
    assert "step-0000000002" in warnings[0]


@pytest.mark.parametrize("name", ["", *FILES])
def test_without_permission_nothing_counts_as_damaged(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier step, or the start, would be taken in silence; root may read everything, so it is refused here."""

    def denied(plain: Callable[[Path], object]) -> Callable[[Path], object]:
        def read(path: Path) -> object:
            if path.name == name and path.parent.name == "step-0000000002":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return plain(path)

        return read

    write(tmp_path, [1, 2])
    monkeypatch.setattr(checkpoints, "digest_of", denied(checkpoints.digest_of))
    monkeypatch.setattr(files, "read_bytes", denied(files.read_bytes))
    if not name:
        monkeypatch.setattr(os, "access", lambda *_: False)
    warnings: list[str] = []
    with pytest.raises(UsageError, match=f"{name}.* permission denied; .*chmod -R u\\+rwX .*checkpoints$"):
        checkpoints.newest_valid(tmp_path, warnings)
    assert not warnings


def test_without_permission_the_reason_why_a_run_ended_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, root may list everything, so that it is refused here."""
    write(tmp_path, [1, 2])
    write_record(tmp_path, make_record(status="running"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    note_lost(tmp_path, "its processes were killed")
    assert read_record(tmp_path).message == "its processes were killed"


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), name=st.sampled_from(FILES))
@settings(max_examples=150)
def test_one_flipped_bit_anywhere_is_found(
    place: float, bit: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A flipped bit is found in the files' bytes and in their digests; without a warning the content is unchanged."""
    run_dir = tmp_path_factory.mktemp("flipped")
    write(run_dir, [1, 2])
    path = checkpoints.folder_of(run_dir / "checkpoints", 2) / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    warnings: list[str] = []
    step = checkpoints.newest_valid(run_dir, warnings)
    assert (step, len(warnings)) in ((1, 1), (2, 0))
    if step == 2:
        assert name == "checkpoint.json"
        shared, facts = checkpoints.read_shared(run_dir, 2)
        assert facts == {"ranks": 2} and (shared["weights/0"] == 2).all()


WRONG: dict[str, object] = {
    "a list": [],
    "nothing": {},
    "a step of text": {"step": "2"},
    "another step": {"step": 1},
    "a step of 400 digits": {"step": 10**400},
    "no facts": {"facts": None},
    "ranks of text": {"facts": {"ranks": "2"}},
    "negative ranks": {"facts": {"ranks": -2}},
    "very many ranks": {"facts": {"ranks": 2**60}},
    "seconds of a list": {"facts": {"seconds": []}},
    "a history of numbers": {"facts": {"history": [1]}},
    "a history of wrong points": {"facts": {"history": [{"epoch": "x"}]}},
    "files of a list": {"files": []},
    "files of numbers": {"files": {"shared.npz": 3}},
    "a file elsewhere": {"files": {"shared.npz": [1, ""], "../../x": [1, ""]}},
    "a size of text": {"files": {"shared.npz": ["x", ""]}},
}


@pytest.mark.parametrize("digest", ["with a digest", "without"])
@pytest.mark.parametrize("wrong", WRONG)
def test_json_that_was_never_written_so_is_passed_over(wrong: str, digest: str, tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    path = checkpoints.folder_of(tmp_path / "checkpoints", 2) / "checkpoint.json"
    document = json.loads(path.read_text())
    changed = WRONG[wrong]
    if isinstance(changed, dict) and changed:
        changed = {**document, **changed}
        del changed["digest"]
        if digest == "with a digest":
            changed["digest"] = checkpoints.own_digest(changed)
    path.write_text(json.dumps(changed))
    warnings: list[str] = []
    assert checkpoints.newest_valid(tmp_path, warnings) == 1
    assert len(warnings) == 1 and "step-0000000002" in warnings[0]


def test_a_checkpoint_of_an_earlier_version_is_taken(tmp_path: Path) -> None:
    """A checkpoint of an earlier version, without a digest of its own JSON, is accepted."""
    write(tmp_path, [1])
    path = checkpoints.folder_of(tmp_path / "checkpoints", 1) / "checkpoint.json"
    document = json.loads(path.read_text())
    del document["digest"]
    path.write_text(json.dumps(document))
    assert checkpoints.newest_valid(tmp_path, []) == 1


def test_a_foreign_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [1])
    manifest = checkpoints.folder_of(tmp_path / "checkpoints", 1) / "checkpoint.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": "hpcdl.checkpoint/9"}))
    with pytest.raises(CorruptError, match=r"this hpcdl reads 'hpcdl.checkpoint/1'"):
        checkpoints.verify(manifest.parent)


def test_a_full_disk_costs_a_warning_and_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(tmp_path, [1])

    def full(path: Path, arrays: object, turn: object) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_arrays", full)
    writer.start(snapshot(2))
    writer.wait()
    monkeypatch.undo()
    assert len(writer.warnings) == 1
    assert "no checkpoint at step 2: No space left on device" in writer.warnings[0]
    assert checkpoints.newest_valid(tmp_path, []) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000001"]
    writer.start(snapshot(3))
    writer.wait()
    assert checkpoints.newest_valid(tmp_path, []) == 3


def test_half_written_folders_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, [1])
    (tmp_path / "checkpoints" / ".step-0000000009.tmp").mkdir()
    assert checkpoints.newest_valid(tmp_path, []) == 1
