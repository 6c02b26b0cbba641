"""Time of writing arrays as shards, beside a plain h5py script and a TFRecord writer, in turn in one run.

    python benchmarks/array_writing.py [--mib 166] [--repeats 5] [--folder DIR]

64 x 64 x 3 uint8 in a .npy file, in the page cache; every variant reads it, writes 4 files, and waits until they are
on the device. `hpcdl` shuffles, computes checksums of every block and sample, and starts a second process if it finds
that worthwhile; that start is included in the time.
The h5py script writes the rows in order, one data set per file, without checksums.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from benchmarks.data_writing import sharding
from hpcdl.data.sources.layouts.records import masked_crc

_FILES = 4


def plain_h5py(source: Path, target: Path) -> None:
    """A hand-written script: rows of the array into one data set per file."""
    images, labels = np.load(source / "images.npy", mmap_mode="r"), np.load(source / "labels.npy")
    target.mkdir()
    for number in range(_FILES):
        part = slice(len(images) * number // _FILES, len(images) * (number + 1) // _FILES)
        path = target / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file["images"], file["labels"] = images[part], labels[part]
        with path.open("rb") as file:
            os.fsync(file.fileno())


def tfrecord(source: Path, target: Path) -> None:
    """Records of raw bytes with their two checksums, in TensorFlow's format."""
    images = np.load(source / "images.npy", mmap_mode="r")
    target.mkdir()
    for number in range(_FILES):
        with (target / f"{number}.tfrecord").open("wb") as file:
            for row in images[len(images) * number // _FILES : len(images) * (number + 1) // _FILES]:
                content = row.tobytes()
                head = struct.pack("<Q", len(content))
                file.write(head + struct.pack("<I", masked_crc(head)) + content)
                file.write(struct.pack("<I", masked_crc(content)))
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=166)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-writing-") as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        source.mkdir()
        count = (chosen.mib << 20) // 12_288
        images = np.random.default_rng(0).integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)
        np.save(source / "images.npy", images)
        np.save(source / "labels.npy", np.arange(count) % 10)
        del images
        one, two = (sharding(source, shards=_FILES, workers=workers) for workers in (1, 2))
        variants: dict[str, Callable[[], None]] = {
            "h5py": lambda: plain_h5py(source, target),
            "tfrecord": lambda: tfrecord(source, target),
            "hpcdl, one worker": lambda: one(target),
            "hpcdl, two workers": lambda: two(target),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(chosen.repeats):
            for name, run in variants.items():
                shutil.rmtree(target, ignore_errors=True)
                os.sync()
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)

    def ratio(base: str, name: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[base], seconds[name], strict=True)), 2)

    print(json.dumps({
        "mib": chosen.mib,
        "median_seconds": {name: round(statistics.median(times), 3) for name, times in seconds.items()},
        "speed of one worker / h5py": ratio("h5py", "hpcdl, one worker"),
        "speed of one worker / tfrecord": ratio("tfrecord", "hpcdl, one worker"),
        "speed of two workers / one": ratio("hpcdl, one worker", "hpcdl, two workers"),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
