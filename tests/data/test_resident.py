"""Chip partitioning reads its copy of the data from this process's memory, whatever happens to the files."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcdl.core.errors import HpcdlError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.read.reader import open_reader
from hpcdl.data.read.staging import resident, staged
from hpcdl.run.groups import data_bytes
from tests.data.sharding import make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """64 small images in shards."""
    make("synthetic:8x8x1:4", tmp_path / "shards", split="train=0.75,val=0.25", samples=64)
    return tmp_path / "shards"


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def samples(dataset: object) -> tuple[np.ndarray, np.ndarray]:
    reader = open_reader(dataset, dataset.train_split)  # type: ignore[attr-defined, arg-type]
    ids = np.arange(dataset.train_split.num_samples)  # type: ignore[attr-defined]
    images, labels = (reader.read(item, ids) for item in dataset.fields)  # type: ignore[attr-defined]
    reader.close()
    return images, labels


def test_the_copy_is_what_is_read(folder: Path) -> None:
    dataset = open_dataset(str(folder), seed=0)
    expected = samples(dataset)
    held = resident(dataset)
    assert data_bytes(dataset) == sum(path.stat().st_size for path in held.copies)
    assert held.copies and all(str(copy).startswith("/proc/self/fd/") for copy in held.copies.values())
    entry = dataset.train_split.entry
    assert entry is not None
    assert [path.name for path in held.copies] == [Path(shard.file).name for shard in entry.shards]
    for original, copy in held.copies.items():
        assert "memfd:" in str(copy.readlink())
        content = original.read_bytes()
        assert copy.read_bytes() == content
    found = samples(held)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_the_images_come_from_memory(folder: Path) -> None:
    """The samples stay right after the files are overwritten: only the shard maps are read from files."""
    dataset = open_dataset(str(folder), seed=0)
    images, _ = samples(dataset)
    held = resident(dataset)
    reader = open_reader(held, held.train_split)
    ids = np.arange(held.train_split.num_samples)
    reader.read(held.targets[0], ids)  # reads the map of every shard
    for path in held.copies:
        path.write_bytes(bytes(path.stat().st_size))
    assert np.array_equal(reader.read(held.inputs[0], ids), images)


def test_a_staged_copy_is_held_too(folder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(folder), seed=0)
    place = tmp_path / "stage"
    place.mkdir()
    with staged(dataset, place) as near:
        held = resident(near)
        assert all(path.is_relative_to(place) for path in held.copies)
        assert np.array_equal(samples(held)[0], samples(dataset)[0])


def test_what_cannot_be_held_is_left_alone(tmp_path: Path) -> None:
    """Synthetic data and compressed shards are not held in memory and do not count as data that must fit."""
    make("synthetic:8x8x1:4", tmp_path / "shards", samples=64, compression="gzip")
    for name in ("synthetic:8x8x1:4", str(tmp_path / "shards")):
        dataset = open_dataset(name, seed=0)
        assert resident(dataset) is dataset and data_bytes(dataset) == 0


def test_a_shard_that_is_gone_is_named(folder: Path) -> None:
    dataset = open_dataset(str(folder), seed=0)
    shutil.rmtree(folder)
    before = open_files()
    with pytest.raises(HpcdlError, match=r"cannot hold .* in memory: No such file"):
        resident(dataset)
    assert open_files() == before


def test_more_shards_than_open_files_are_allowed(folder: Path) -> None:
    """The soft limit on open files is raised; if the hard limit is too low, the message says what to do."""
    script = (
        "import resource, sys; from hpcdl.data.read import staging as module\n"
        "from hpcdl.data.format.dataset import open_dataset\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, int(sys.argv[2])))\n"
        "dataset = open_dataset(sys.argv[1], seed=0)\n"
        "held = module.resident(dataset)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "import itertools, os\n"
        "if sys.argv[2] == '32':\n"
        "    for _ in itertools.count(): module._copied(next(iter(held.copies)))\n"
    )

    def run(hard: int) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", script, str(folder), str(hard)]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = run(hard)
    assert raised.returncode == 0, raised.stderr
    assert int(raised.stdout) > 512
    refused = run(32)
    assert refused.returncode == 1 and "ulimit -n" in refused.stderr.splitlines()[-1]
