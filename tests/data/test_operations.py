"""A data set's count of file operations agrees with what the kernel sees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.sharding import image_folder, make, numbers, pixels

READ = """
import dataclasses, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.read.reader import open_reader
from hpcdl.data.read.windows import TrainingStream
dataset = open_dataset(sys.argv[1])
start = dataset.operations.seen
stream = TrainingStream(open_reader(dataset, dataset.train_split), batch_size=8, worker=1, num_workers=2, seed=3)
for step in range(2 * stream.steps_per_epoch):
    stream.batch(step)
stream.close()
print(json.dumps([dataclasses.asdict(start), dataclasses.asdict(dataset.operations.seen)]))
"""
OPENS, STATS = {"open", "openat"}, {"stat", "lstat", "newfstatat", "statx"}


def raw(folder: Path, **options: object) -> int:
    np.savez(folder / "a.npz", images=pixels(203, (8, 8, 3)), labels=numbers(203, 7))
    return len(make(folder / "a.npz", folder / "data", split="train=0.8,val=0.2", **options).shards())


def encoded(folder: Path) -> int:
    images = image_folder(folder / "images", {"a": 30, "b": 20})
    return len(make(images, folder / "data", shards=3, encoding="encoded").shards())


def named_fields(folder: Path) -> int:
    rng = np.random.default_rng(0)
    np.savez(folder / "a.npz", x=rng.normal(size=(90, 40, 3)).astype("f4"), y=rng.normal(size=90).astype("f4"))
    return len(make(folder / "a.npz", folder / "data", shards=3).shards())


CASES: dict[str, tuple[Callable[[Path], int], int]] = {
    "raw": (lambda folder: raw(folder, shards=3), 1024),
    "compressed": (lambda folder: raw(folder, shards=3, compression="gzip"), 1024),
    "more shards than files may be open": (lambda folder: raw(folder, shards=40), 40),
    "encoded": (encoded, 1024),
    "named fields": (named_fields, 1024),
}


@pytest.mark.lab("strace")
@pytest.mark.parametrize("case", CASES)
def test_what_is_counted_is_what_the_kernel_sees(case: str, tmp_path: Path) -> None:
    shard, most_files = CASES[case]
    num_shards, folder = shard(tmp_path), tmp_path / "data"
    strace = ["strace", "-f", "-qq", "-s", "4096", "-e", "trace=%file", "-o", tmp_path / "calls"]
    line = [*strace, sys.executable, "-c", READ, folder, str(most_files)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    start, after = json.loads(done.stdout)
    assert start == {"opens": 1, "stats": 2 + num_shards}
    called = [
        call[1]
        for text in (tmp_path / "calls").read_text().splitlines()
        if (call := re.match(rf'\d+ +(\w+)\((?:AT_FDCWD, )?"{re.escape(str(folder))}[/"]', text))
    ]
    assert set(called) <= OPENS | STATS
    seen = {"opens": sum(name in OPENS for name in called), "stats": sum(name in STATS for name in called)}
    assert after == seen
    if most_files < num_shards:
        line = [sys.executable, "-c", READ, folder, "1024"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
        assert after["opens"] > json.loads(done.stdout)[1]["opens"], "files were closed, and opened again"


@pytest.mark.lab("strace")
@pytest.mark.parametrize("kind", [[], ["--links"]], ids=["files", "links"])
def test_a_file_costs_one_stat_and_one_open_when_it_is_sharded(kind: list[str], tmp_path: Path) -> None:
    line = [sys.executable, "benchmarks/shard_metadata.py", "--files", "3000", "--classes", "20", "--folder", tmp_path]
    done = subprocess.run([*line, *kind], capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert 1 <= found["stats_a_file"] <= 1.2
    assert 1 <= found["opens_a_file"] <= 1 + 500 / 3000 + 0.01, "each file once, and 500 of them for the plan"
    assert found["listings_a_class"] <= 4
