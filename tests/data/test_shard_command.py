"""The shard command as users meet it: real processes, exit codes, one-line errors, no leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.cli.main import run
from hpcdl.data.format.manifest import read_manifest
from tests.conftest import DIGITS, CommandLine, patience
from tests.data.sharding import contents, everything, image_folder, make


def test_the_digits(shards: Path) -> None:
    manifest, _ = read_manifest(shards)
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 1438, "val": 359}
    assert tuple(manifest.sample_shape) == (28, 28, 1) and list(manifest.class_names) == list("0123456789")
    images, labels = everything(shards, manifest, "train")
    assert images.shape == (1438, 28, 28, 1) and labels.min() == 0 and labels.max() == 9
    assert sorted(contents(shards)) == ["manifest.json", "train/shard-00000.h5", "val/shard-00000.h5"]


def test_shards_are_plain_hdf5(shards: Path) -> None:
    """Shards are plain HDF5: contiguous, uncompressed, described by attributes."""
    path = shards / "train" / "shard-00000.h5"
    with h5py.File(path) as file:
        assert file["images"].chunks is None and file["images"].compression is None
        assert file["images"].id.get_offset() % 4096 == 0
        assert file["labels"].dtype == "<i8"
        assert (
            dict(file.attrs)["source_format"] == "image-folder" and file.attrs["seed"] == read_manifest(shards)[0].seed
        )
        assert [name.decode() for name in file.attrs["class_names"]] == list("0123456789")
        assert {"hpcdl_version", "height", "width", "channels", "dtype"} <= set(file.attrs)


@pytest.mark.lab("hdf5-tools")
def test_the_tools_of_hdf5_read_shards(shards: Path) -> None:
    path = shards / "train" / "shard-00000.h5"
    reported = subprocess.run(["h5dump", "-d", "/labels", "-c", "3", path], capture_output=True, text=True, check=True)
    assert "H5T_STD_I64LE" in reported.stdout


def test_plan_first(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    done = ask_hpcdl(
        ["shard", "--dry-run", "--json", DIGITS, tmp_path / "out", "--image-size", "28", "--max-ranks", "8"]
    )
    assert done.code == 0 and not (tmp_path / "out").exists()
    plan = done.json()["plan"]
    assert plan["num_samples"] == {"all": 1797} and plan["shards"] == {"all": 1}
    reasons = " ".join(plan["reasons"])
    assert "floor(samples / (batch size x workers))" in reasons and "leaves 5 of 1,797" in reasons
    assert "is not Lustre" in reasons


def test_a_dry_run_refuses_the_targets_that_the_call_refuses(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    source = image_folder(tmp_path / "s", {"a": 3, "b": 3})
    for target in (source / "out", source / "a" / "out"):
        for more in ([], ["--dry-run"]):
            done = ask_hpcdl(["shard", source, target, *more])
            assert done.code == 2 and "is inside the source; name a folder outside it" in done.err, (more, done)
        assert not target.exists()
    assert ask_hpcdl(["shard", source, source / ".out", "--dry-run"]).code == 0


def test_the_result_depends_on_source_and_plan_only(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    base = ["shard", "synthetic:cifar10", "--samples", "3000", "--shards", "6"]
    for name, more in (("one", ["--workers", "1"]), ("three", ["--workers", "3"])):
        done = ask_hpcdl([*base, tmp_path / name, *more])
        assert done.code == 0, done.err
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


BAD = {
    "no such source": (["nothing", "out"], "no such source"),
    "empty source": (["empty", "out"], "is empty"),
    "unknown format": (["pictures", "out", "--format", "jpeg"], "not one of"),
    "a bad split": (["pictures", "out", "--split", "train=2"], "NAME=FRACTION"),
    "more ranks than samples": (["pictures", "out", "--max-ranks", "99"], "--max-ranks"),
    "samples of files": (["pictures", "out", "--samples", "3"], "--samples is for synthetic"),
    "sizes of arrays": (
        ["synthetic:mnist", "out", "--samples", "99", "--image-size", "9"],
        "--image-size is for image files",
    ),
    "encoded arrays": (["synthetic:mnist", "out", "--samples", "99", "--encoding", "encoded"], "--encoding raw"),
    "unknown synthetic": (["synthetic:lsun", "out"], "synthetic:imagenet"),
    "stripes off Lustre": (["pictures", "out", "--stripe-count", "4"], "not on Lustre"),
    "a block too large": (["pictures", "out", "--block-size", "1GiB"], "32MiB or less"),
    "a target with other files": (["pictures", "pictures"], "not empty"),
    "a target that is a file": (["pictures", "file"], "is a file"),
    "two mistakes at once": (["pictures", "out", "--shards", "0", "--seed", "-1"], "--seed"),
}


def test_bad_input_is_one_line_exit_2_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path
    monkeypatch.chdir(home)
    image_folder(home / "pictures", {"a": 5, "b": 5})
    (home / "empty").mkdir()
    (home / "file").write_text("")
    for name, (arguments, message) in BAD.items():
        before = sorted(home.rglob("*"))
        code = run(["shard", *arguments])
        err = capsys.readouterr().err
        assert code == 2 and message in err, (name, err)
        assert len(err.splitlines()) == (2 if name == "two mistakes at once" else 1), (name, err)
        assert sorted(home.rglob("*")) == before, name


def test_unreadable_samples_stop_or_are_skipped(ask_hpcdl: CommandLine) -> None:
    home = ask_hpcdl.home
    source = image_folder(home / "s", {"a": 12, "b": 12}, size=40, kind="jpg")
    path = source / "a" / "0004.jpg"
    path.write_bytes(path.read_bytes()[:400])
    done = ask_hpcdl(["shard", source, "out"])
    assert done.code == 2 and "a/0004.jpg" in done.err and "--on-error skip" in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("hpcdl: ")]) == 1
    for encoding in ("raw", "encoded"):
        done = ask_hpcdl(["shard", source, f"out-{encoding}", "--on-error", "skip", "--encoding", encoding, "--json"])
        assert done.code == 0, done.err
        assert done.json()["skipped"] == ["a/0004.jpg"] and done.json()["splits"] == {"all": 23}
    assert ask_hpcdl(["inspect", "out-raw", "--verify"]).code == 0


def test_resume_starts_continues_and_is_done(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = [
        "shard",
        "synthetic:mnist",
        tmp_path / "out",
        "--samples",
        "500",
        "--shards",
        "5",
        "--workers",
        "1",
        "--json",
    ]
    first = ask_hpcdl([*line, "--resume"])
    assert first.code == 0 and first.json()["written"] == 5
    before = contents(tmp_path / "out")
    again = ask_hpcdl([*line, "--resume"])
    assert again.code == 0 and (again.json()["written"], again.json()["kept"]) == (0, 5)
    assert contents(tmp_path / "out") == before
    assert ask_hpcdl(line).code == 2  # finished, and --resume was not given


def start(arguments: list[str | Path], home: Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "hpcdl", *map(str, arguments)]
    return subprocess.Popen(line, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def wait_for(path: Path, pattern: str, num: int = 1) -> None:
    deadline = time.monotonic() + patience(60)
    while len(list(path.glob(pattern))) < num:
        assert time.monotonic() < deadline, f"{pattern} does not appear in {path}"
        time.sleep(0.01)


LONG = ["--samples", "4000", "--shards", "60", "--workers", "2"]


@pytest.mark.long
def test_a_second_writer_stops_at_once_and_a_dead_one_lets_go(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Must take longer than the start of two more commands on a busy machine.
    line: list[str | Path] = ["shard", "synthetic:hep", out, "--samples", "20000", "--shards", "300", "--workers", "2"]
    writer = start(line, run_hpcdl.home)
    try:
        wait_for(out, "shard-*.h5")
        second = run_hpcdl([*line, "--resume"])
        assert second.code == 2 and f"pid {writer.pid} on " in second.err
        assert "pid" in run_hpcdl(line).err  # also without --resume
        assert writer.poll() is None
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.communicate()
    small = run_hpcdl(["shard", "synthetic:hep", out, "--samples", "10", "--resume"])
    assert small.code == 2 and "begun with other options" in small.err  # the lock is free, but the options differ


def test_sigterm_leaves_something_to_resume(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    line: list[str | Path] = ["shard", "synthetic:hep", tmp_path / "out", *LONG]
    writer = start(line, run_hpcdl.home)
    wait_for(tmp_path / "out", "shard-*.h5", 2)
    writer.terminate()
    _, err = writer.communicate(timeout=300)
    assert writer.returncode == 75 and b"--resume" in err
    assert not (tmp_path / "out" / "manifest.json").exists()
    train = run_hpcdl(["inspect", tmp_path / "out"])
    assert train.code == 2 and "not finished" in train.err


def test_many_tiny_classes(tmp_path: Path) -> None:
    """100,000 classes with one sample each work, although their names do not fit into an attribute."""
    np.savez(tmp_path / "a.npz", images=np.zeros((100_000, 2, 2), np.uint8), labels=np.arange(100_000))
    manifest = make(tmp_path / "a.npz", tmp_path / "out", split="train=0.9,val=0.1", max_ranks=4, target_kind="class")
    assert manifest.num_classes == 100_000
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 90_000, "val": 10_000}
    with h5py.File(tmp_path / "out" / "val" / "shard-00000.h5") as file:
        assert file["class_names"].shape == (100_000,) and file["class_names"][99_999] == b"99999"
        assert "class_names" not in file.attrs


def test_modes_follow_umask_and_setgid(run_hpcdl: CommandLine) -> None:
    folder = run_hpcdl.home / "shared"
    folder.mkdir()
    folder.chmod(0o2775)
    code = "import os, sys; os.umask(0o002); os.execv(sys.executable, [sys.executable, '-m', 'hpcdl', *sys.argv[1:]])"
    line = [sys.executable, "-c", code, "shard", "synthetic:mnist", "shared/out", "--samples", "99"]
    subprocess.run(line, cwd=run_hpcdl.home, check=True, capture_output=True)
    assert (folder / "out").stat().st_mode & 0o7777 == 0o2775
    for path in (folder / "out").iterdir():
        assert path.stat().st_mode & 0o777 == 0o664, path


def test_config_file_and_unknown_key(ask_hpcdl: CommandLine) -> None:
    (ask_hpcdl.home / "c.toml").write_text("samples = 64\nmax-ranks = 4\n")
    done = ask_hpcdl(["shard", "synthetic:mnist", "out", "--config", "c.toml", "--json"])
    assert done.code == 0 and json.loads(done.out)["splits"] == {"all": 64}
    (ask_hpcdl.home / "c.toml").write_text("sampels = 64\n")
    done = ask_hpcdl(["shard", "synthetic:mnist", "out2", "--config", "c.toml"])
    assert done.code == 2 and "did you mean 'samples'" in done.err
