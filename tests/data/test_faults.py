"""Nothing is lost or overlooked if sharding is killed, the disk is full or bits flip."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.storage import lock
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.format.manifest import read_manifest
from hpcdl.data.format.shard_file import faults
from hpcdl.data.show.inspection import require_sound, verify
from hpcdl.data.write import journal, tasks, writing
from hpcdl.data.write.shards import ShardWriter
from tests.conftest import CommandLine
from tests.data.sharding import contents, image_folder, make, report, request


def killed_at(seconds: float, arguments: list[str | Path], home: Path) -> bool:
    """Start the command and kill it after `seconds`; return whether it was still running."""
    line = [sys.executable, "-m", "hpcdl", *map(str, arguments)]
    process = subprocess.Popen(line, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    alive = process.poll() is None
    process.kill()  # only the command itself: its writing processes must end with it
    process.wait()
    return alive


def kill_and_resume(command: CommandLine, folder: Path, times: int, seed: int) -> None:
    line: list[str | Path] = ["shard", "synthetic:imagenet", "--samples", "1000", "--shards", "20", "--workers", "2"]
    line += ["--compression", "gzip"]  # makes the work take seconds, so that another process is started
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    started = time.monotonic()
    assert command([*line, undisturbed]).code == 0
    whole_s = time.monotonic() - started
    wanted = contents(undisturbed)
    shutil.rmtree(undisturbed)
    moments, kills, hits = random.Random(seed), 0, 0
    while kills < times or (not hits and kills < 3 * times):
        hit = killed_at(moments.uniform(0.3, 0.95) * whole_s, [*line, disturbed, "--resume"], command.home)
        kills, hits = kills + 1, hits + hit
        whole_s *= 1.0 if hit else 0.6  # the machine was busier when the duration was measured
        if (disturbed / "manifest.json").exists():
            assert contents(disturbed) == wanted
            shutil.rmtree(disturbed)
    partial = sum(1 for _ in disturbed.glob("shard-*.h5"))
    done = command([*line, disturbed, "--resume", "--json"])
    assert done.code == 0, done.err
    assert contents(disturbed) == wanted
    assert hits, "every kill came too late to test anything"
    assert done.json()["kept"] >= partial - 2  # complete shards are kept; those just renamed may not be recorded yet


@pytest.mark.long
def test_killed_while_writing_then_resumed(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    kill_and_resume(run_hpcdl, tmp_path, times=3, seed=1)


@pytest.mark.soak
def test_killed_twenty_times(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    kill_and_resume(run_hpcdl, tmp_path, times=20, seed=2)


def test_resume_redoes_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("synthetic:mnist", tmp_path / "whole", samples=600, shards=6)
    real, count = ShardWriter.begin, 0

    def fail_at_fourth(self: ShardWriter, *args: object) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise HpcdlError("the power goes")
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "begin", fail_at_fourth)
    with pytest.raises(HpcdlError, match="the power goes"):
        make("synthetic:mnist", tmp_path / "out", samples=600, shards=6)
    monkeypatch.setattr(ShardWriter, "begin", real)
    with pytest.raises(UsageError, match="is not finished; continue with the same `hpcdl shard` command and --resume"):
        open_dataset(str(tmp_path / "out"))
    with (
        lock.writing(tmp_path / "out"),
        pytest.raises(UsageError, match=f"another hpcdl writes to .*pid {os.getpid()} .*; wait for it"),
    ):
        open_dataset(str(tmp_path / "out"))
    partial = tmp_path / "out" / "manifest.partial.00000"
    partial.write_bytes(partial.read_bytes() + b'{"split": "all", "numb')  # a line truncated by a crash
    (tmp_path / "out" / ".shard-00004.h5.99.tmp").write_bytes(b"half a shard")
    again = report("synthetic:mnist", tmp_path / "out", samples=600, shards=6, resume=True)
    assert (again.kept, again.written) == (3, 3)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "options", [{}, {"compression": "gzip"}, {"encoding": "encoded"}], ids=["raw", "gzip", "encoded"]
)
def test_one_flipped_bit_anywhere_is_found_and_named(options: dict[str, str], tmp_path: Path) -> None:
    source = image_folder(tmp_path / "s", {"a": 30, "b": 30}, size=20)
    make(source, tmp_path / "out", shards=2, max_ranks=6, **options)
    require_sound(tmp_path / "out", verify(tmp_path / "out"))
    manifest, _ = read_manifest(tmp_path / "out")
    entry = manifest.shards()[1]
    path = tmp_path / "out" / entry.file
    original = path.read_bytes()
    positions = random.Random(3)
    for position in [0, 8, len(original) - 1, *(positions.randrange(len(original)) for _ in range(120))]:
        damaged = bytearray(original)
        damaged[position] ^= 1 << positions.randrange(8)
        path.write_bytes(damaged)
        found = faults(tmp_path / "out", entry)
        assert len(found) == 1 and found[0].startswith(f"{entry.file}: "), (position, found)
    damaged = bytearray(original)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"shard-00001\.h5: block \d+ \(samples \d+ to 29\)"):
        require_sound(tmp_path / "out", verify(tmp_path / "out"))


def test_damage_is_met_at_opening_where_that_is_cheap(tmp_path: Path) -> None:
    make("synthetic:mnist", tmp_path / "out", samples=300, shards=3)
    shard = tmp_path / "out" / "shard-00001.h5"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError, match=r"shard-00001\.h5 has \d+ bytes, the manifest says"):
        open_dataset(str(tmp_path / "out"))
    shard.unlink()
    with pytest.raises(CorruptError, match=r"shard-00001\.h5 cannot be read"):
        open_dataset(str(tmp_path / "out"))
    shard.write_bytes(whole)
    manifest = tmp_path / "out" / "manifest.json"
    text = manifest.read_text()
    for broken in (
        text.replace('"num_samples": 100', '"num_samples": 101', 1),
        text[:-30],
        "[]",
        text.replace("/1", "/9", 1),
    ):
        manifest.write_text(broken)
        with pytest.raises(CorruptError):
            open_dataset(str(tmp_path / "out"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_reported_and_resumed(
    small_disk: Path, run_hpcdl: CommandLine, tmp_path: Path, workers: int
) -> None:
    line: list[str | Path] = ["shard", "synthetic:imagenet", small_disk / "out", "--samples", "130", "--shards", "10"]
    line += ["--workers", str(workers)]  # 19 MiB
    (small_disk / "other").write_bytes(bytes(12 * 1024**2))
    early = run_hpcdl(line)
    assert early.code == 1 and "18.7 MiB are needed" in early.err.replace("18.8", "18.7") and "--resume" in early.err
    assert not (small_disk / "out").exists()
    (small_disk / "other").unlink()
    other = small_disk / "other"
    process = subprocess.Popen([sys.executable, "-m", "hpcdl", *map(str, line)], stderr=subprocess.PIPE, text=True)
    while not (small_disk / "out" / "manifest.partial.00000").exists():  # the free space was checked by then
        assert process.poll() is None
    with other.open("wb") as file:
        try:
            for _ in range(20):
                file.write(bytes(1024**2))
        except OSError:
            pass
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "no space left" in err and "are needed" in err and "Traceback" not in err
    assert (small_disk / "out" / "manifest.partial.00000").exists()
    other.unlink()
    assert run_hpcdl([*line, "--resume"]).code == 0
    make("synthetic:imagenet", tmp_path / "whole", samples=130, shards=10)
    assert contents(small_disk / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_with_compressed_shards_is_reported_and_resumed(
    small_disk: Path, run_hpcdl: CommandLine, tmp_path: Path, workers: int
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (1200, 64, 64, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(1200) % 10)  # 14 MiB that no compression reduces
    line: list[str | Path] = ["shard", tmp_path / "a.npz", small_disk / "out", "--shards", "12"]
    line += ["--compression", "gzip", "--workers", str(workers)]
    (small_disk / "other").write_bytes(bytes(15 * 1024**2))
    full = run_hpcdl(line)
    assert full.code == 1 and "no space left" in full.err and "at most" in full.err and "--resume" in full.err
    assert "Traceback" not in full.err and "HDF5" not in full.err and "died" not in full.err, full.err
    kept = {path.name: path.read_bytes() for path in (small_disk / "out").glob("shard-*.h5")}
    assert 0 < len(kept) < 12
    (small_disk / "other").unlink()
    done = run_hpcdl([*line, "--resume", "--json"])
    assert done.code == 0 and done.json()["kept"] >= len(kept) - workers, "entered, but for those just renamed"
    make(tmp_path / "a.npz", tmp_path / "whole", shards=12, compression="gzip")
    assert contents(small_disk / "out") == contents(tmp_path / "whole")


LARGE: tuple[str, dict[str, Any]] = ("synthetic:imagenet", {"samples": 600, "shards": 12, "workers": 2})
"""86 MiB of shards; slow to write with `late`."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Delay each shard of this process by a second, so that the other process starts before all is written."""
    begin = ShardWriter.begin

    def begin_late(self: ShardWriter, *args: Any) -> Any:
        time.sleep(1)
        return begin(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "begin", begin_late)
        yield


@pytest.mark.usefixtures("late")
def test_a_writing_process_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, real = [], tasks._Process.give

    def give_and_kill(self: tasks._Process, task: tasks.Task) -> None:
        real(self, task)
        given.append(task)
        if len(given) == 2:
            os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(tasks._Process, "give", give_and_kill)
    source, options = LARGE
    with pytest.raises(HpcdlError, match=r"a writing process died \(signal 9\)"):
        make(source, tmp_path / "out", **options)
    assert not [thread for thread in threading.enumerate() if thread.name == "hpcdl-writing"]
    monkeypatch.undo()
    assert report(source, tmp_path / "out", **{**options, "workers": 1}, resume=True).kept >= 1


def test_a_quota_that_is_used_up_is_reported_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While samples are listed the error that has no file gets one; of shards no free room of the disk is told."""

    def used_up(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched, pytest.raises(OSError) as listing:
        patched.setattr(writing, "make_job", used_up)
        make("synthetic:mnist", tmp_path / "out", samples=20)
    assert listing.value.filename == str(tmp_path / "out" / ".hpcdl-work") and not (tmp_path / "out").exists()
    monkeypatch.setattr(writing, "write_all", used_up)
    with pytest.raises(HpcdlError, match=r"are needed, and your quota is used up; make room and .* --resume"):
        make("synthetic:mnist", tmp_path / "out", samples=20)


@pytest.mark.usefixtures("late")
def test_a_disk_that_is_full_for_another_process_is_reported(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "check_space", lambda *_: None)
    own = tasks._OwnPart._taken

    def few(self: tasks._OwnPart) -> Iterator[tasks.Task]:
        """Yield three tasks and wait, so that the other process fills the disk however long it takes to start."""
        yield from itertools.islice(own(self), 3)
        self._stop.wait(120)

    monkeypatch.setattr(tasks._OwnPart, "_taken", few)
    with pytest.raises(HpcdlError, match="no space left"):
        make(LARGE[0], small_disk / "out", **LARGE[1])
    assert list((small_disk / "out").glob("shard-*.h5"))


def test_an_error_in_the_own_part_ends_the_other_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, started = ShardWriter.begin, []

    def fail_at_third(self: ShardWriter, *args: Any) -> Any:
        started.append(args)
        if len(started) == 3:
            raise HpcdlError("the power goes")
        return begin(self, *args)

    monkeypatch.setattr(ShardWriter, "begin", fail_at_third)
    source, options = LARGE
    with pytest.raises(HpcdlError, match="the power goes"):
        make(source, tmp_path / "out", **options)
    assert not [thread for thread in threading.enumerate() if thread.name == "hpcdl-writing"]
    assert len(started) == 3 and not list((tmp_path / "out").glob(".*.tmp*"))
    monkeypatch.undo()
    assert report(source, tmp_path / "out", **options, resume=True).kept >= 2
    make(source, tmp_path / "whole", **{**options, "workers": 1})
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_who_stops_taking_shards_stops_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: journal.PartialManifest, result: object) -> None:
        raise OSError(errno.EIO, "the journal is gone")

    monkeypatch.setattr(journal.PartialManifest, "enter", fail)
    with pytest.raises(OSError, match="the journal is gone"):
        make(LARGE[0], tmp_path / "out", **{**LARGE[1], "shards": 60})
    assert not [thread for thread in threading.enumerate() if thread.name == "hpcdl-writing"]
    assert len(list((tmp_path / "out").glob("shard-*.h5"))) < 20


@pytest.mark.long
@pytest.mark.usefixtures("late")
def test_both_parts_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a source takes long, two processes write its shards, byte by byte as one process would."""
    given: list[tasks.Task] = []
    real = tasks._Process.give

    def give(self: tasks._Process, task: tasks.Task) -> None:
        given.append(task)
        real(self, task)

    monkeypatch.setattr(tasks._Process, "give", give)
    source, options = LARGE
    make(source, tmp_path / "two", **options)
    assert 0 < len(given) < options["shards"]
    monkeypatch.undo()
    make(source, tmp_path / "one", **{**options, "workers": 1})
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_little_data_is_written_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: tasks._Process, *_: object) -> None:
        raise AssertionError("another process was started")

    monkeypatch.setattr(tasks._Process, "__init__", start)
    wanted = {"samples": 60, "shards": 6, "workers": 2}
    make("synthetic:imagenet", tmp_path / "out", **wanted)
    reasons = writing.dry_run(request("synthetic:imagenet", tmp_path / "other", **wanted)).plan.reasons
    assert reasons[-1] == "one process writes, and up to 2 as soon as the rest would take it more than 3 s"
    reasons = writing.dry_run(request("synthetic:imagenet", tmp_path / "other", **{**wanted, "shards": 1})).plan.reasons
    assert reasons[-1] == "one process writes"
