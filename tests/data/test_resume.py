"""--resume of a source whose files were replaced: an identical copy is accepted, a change is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.data.write import shards, tasks
from hpcdl.data.write.plan import WORK_NAME
from tests.data.sharding import contents, make, report


def forty(folder: Path, kind: str, value: int, *, only: int | None = None) -> Path:
    """40 samples of pixels `value` and up; with `only`, change just that sample of an existing source to `value`."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = np.arange(40, dtype=np.uint8)[:, None, None, None] + np.full((40, 4, 4, 3), value, np.uint8)
    if kind == "array":
        if only is not None:
            pictures = np.load(folder / "images.npy")
            pictures[only] = value
        np.save(folder / "images.npy", pictures)
        np.save(folder / "labels.npy", np.arange(40) % 2)
        return folder
    for number in range(40) if only is None else [only]:
        path = folder / "ab"[number % 2] / f"{number}.bmp"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pictures[number]).save(path)
    return folder


def stopped_after(count: int, source: Path, target: Path, **options: Any) -> None:
    """Shard, and stop as Ctrl-C does after `count` more complete shards."""
    calls, begin = [], shards.ShardWriter.begin

    def stopped(self: Any, *args: Any) -> Any:
        calls.extend([args] * (self._target == target))
        if len(calls) > count:
            raise KeyboardInterrupt
        return begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.ShardWriter, "begin", stopped)
        with pytest.raises(HpcdlError, match="--resume"):
            make(source, target, shards=8, **options)


MIXED = r"before its files changed \(shard-0000\d\.h5 comes out otherwise now\): .*half old, half new"


@pytest.mark.parametrize("kind", ["files", "array"])
def test_a_source_that_changed_is_not_mixed_by_resume(kind: str, tmp_path: Path) -> None:
    source, target = forty(tmp_path / "s", kind, 1), tmp_path / "out"
    stopped_after(3, source, target)
    assert list(target.glob("shard-*.h5"))
    shutil.copytree(target, tmp_path / "same")
    make(source, tmp_path / "same", shards=8, resume=True)  # nothing has changed
    forty(source, kind, 2)
    for workers in (1, 2):
        with pytest.raises(UsageError, match=MIXED):
            make(source, target, shards=8, resume=True, workers=workers)
    assert not (target / "manifest.json").exists() and not (target / WORK_NAME).exists()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["files", "array"])
def test_a_copy_of_the_source_is_compared_and_resumed(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "OTHERS_FROM_S", 0.0)
    source, target = forty(tmp_path / "s", kind, 1), tmp_path / "out"
    stopped_after(2, source, target)
    copy = tmp_path / "elsewhere" / "s"
    shutil.copytree(source, copy)
    stopped_after(2, copy, target, resume=True)
    whole = tmp_path / "whole"
    make(source, whole, shards=8)
    shutil.rmtree(source)
    found = report(copy, target, shards=8, resume=True, workers=workers)
    assert found.kept >= 3 and contents(target) == contents(whole)


@pytest.mark.parametrize("kind", ["files", "array"])
def test_shards_of_a_copy_are_compared_with_the_first_source(kind: str, tmp_path: Path) -> None:
    """Shards made from a copy are compared with the first source too, whose sizes, times and inodes are restored."""
    source, target = forty(tmp_path / "s", kind, 1), tmp_path / "out"
    stopped_after(2, source, target)
    before = {path: path.stat() for path in source.rglob("*") if path.is_file()}
    copy = tmp_path / "elsewhere" / "s"
    shutil.copytree(source, copy)
    stopped_after(3, copy, target, resume=True)
    of_copy = {int(own) for path in sorted(target.glob("shard-*.h5"))[3:5] for own in first_pixels(path)}
    changed = forty(source, kind, 200, only=min(of_copy) - 1)
    for path, state in before.items():
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert (path.stat().st_ino, path.stat().st_size) == (state.st_ino, state.st_size)
    with pytest.raises(UsageError, match=MIXED):
        make(changed, target, shards=8, resume=True)


def every_pixel(folder: Path) -> list[int]:
    return sorted(value for path in folder.rglob("*.h5") for value in first_pixels(path))


@pytest.mark.parametrize("begun", ["train=0.75,val=0.25", "val=0.25,train=0.75"])
def test_a_split_in_another_order_continues_as_it_was_begun(begun: str, tmp_path: Path) -> None:
    source, target, other = forty(tmp_path / "s", "files", 1), tmp_path / "out", ",".join(begun.split(",")[::-1])
    stopped_after(5, source, target, split=begun)
    with pytest.raises(UsageError, match="begun with other options"):
        make(source, target, shards=8, split="train=0.76,val=0.24", resume=True)
    make(source, target, shards=8, split=other, resume=True)
    assert every_pixel(target) == list(range(1, 41))
    make(source, tmp_path / "at once", shards=8, split=begun)
    assert contents(target) == contents(tmp_path / "at once")
    assert report(source, target, shards=8, split=other, resume=True).written == 0


def first_pixels(path: Path) -> list[int]:
    with h5py.File(path) as file:
        return file["images"][:, 0, 0, 0].tolist()


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another source": ("t", {}, "made from 's' and not from .*t; name another folder"),
    "another division": ("s", {"split": "a=0.5,b=0.5"}, "made with --split a=0.75,b=0.25 and not with --split a=0.5"),
    "a flag more": ("s", {"image_size": "2x2"}, "made without --image-size and not with --image-size 2x2"),
    "another format": ("s", {"format": "zip"}, "made with --format image-folder and not with --format zip"),
    "a flag less": ("s", {"shards": None}, "made with --shards 8 and not without --shards"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_finished_data_are_not_taken_for_others(case: str, tmp_path: Path) -> None:
    name, changes, message = OTHERS[case]
    asked: dict[str, Any] = {"shards": 8, "split": "a=0.75,b=0.25"}
    source, target = forty(tmp_path / "s", "files", 1), tmp_path / "out"
    make(source, target, **asked)
    before = contents(target)
    same = report(source, target, resume=True, **asked | {"split": "a=0.750,b=0.25", "workers": 2, "on_error": "skip"})
    assert (same.written, same.kept) == (0, 16)
    options = {key: value for key, value in (asked | changes).items() if value is not None}
    with pytest.raises(UsageError, match=message):
        make(forty(tmp_path / name, "files", 1), target, resume=True, **options)
    assert contents(target) == before


def test_what_a_writer_killed_at_its_very_end_has_left_goes(tmp_path: Path) -> None:
    source, target = forty(tmp_path / "s", "files", 1), tmp_path / "out"
    make(source, target)
    before = contents(target)
    (target / WORK_NAME).mkdir()
    for name in (f"{WORK_NAME}/array0", f"{WORK_NAME}/rows.all", ".hpcdl-lock", "manifest.partial.00000"):
        (target / name).touch()
    assert report(source, target, resume=True).written == 0
    assert contents(target) == before and not (target / WORK_NAME).exists()


def test_fields_that_changed_are_not_mixed_by_resume(tmp_path: Path) -> None:
    source, target = tmp_path / "a.npz", tmp_path / "out"
    for value in (1.5, 2.5):
        np.savez(source, x=np.full((40, 4), value), y=np.arange(40) + value)
        if value == 1.5:
            stopped_after(3, source, target)
    with pytest.raises(UsageError, match=MIXED):
        make(source, target, resume=True, shards=8)


def test_files_of_the_user_with_names_like_the_partial_manifests_are_kept(tmp_path: Path) -> None:
    source, target = forty(tmp_path / "s", "files", 1), tmp_path / "out"
    make(source, target)
    notes = target / "manifest.partial.notes"
    notes.write_text("mine")
    assert report(source, target, resume=True).written == 0
    assert notes.read_text() == "mine"
    notes = notes.rename(target / "manifest.partial.00007")
    with pytest.raises(UsageError, match=r"manifest.partial.00007 is not a file of hpcdl.*move it away"):
        make(source, target, resume=True)
    assert notes.read_text() == "mine"
