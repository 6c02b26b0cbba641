"""Writing raw shards against a plain sequential write with fsync; packing JPEG files against `cp`.

    python benchmarks/data_writing.py [--mib 512] [--jpegs 4000] [--repeats 5] [--folder DIR]

Variants of one repeat run in sequence; ratios are taken within a repeat, and the median ratio is printed. Sharding
is timed from listing to manifest, as the command does it, with one process and without the start of Python. The raw
source is a .npy file in the page cache; the plain write takes the same bytes from memory. Before each variant, as much
memory as it will fill is allocated, written and freed: otherwise the first variant in a virtual machine would pay for
getting pages from the host, which costs several times the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from hpcdl.config.load import Layer, load
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.data.write.writing import shard

Write = Callable[[Path], None]
"""Makes a new folder."""


def sharding(source: Path, **options: object) -> Write:
    config = load(ShardConfig, [Layer(origin="benchmark", values={"workers": 1, **options})]).config

    def run(target: Path) -> None:
        shard(ShardRequest(source=str(source), target=target, config=config), bar=False)

    return run


def plain(content: np.ndarray) -> Write:
    """Write the bytes in pieces of a block into files of a shard's size, each with an fsync."""

    def run(target: Path) -> None:
        target.mkdir()
        view = memoryview(content).cast("B")
        piece, part = 7 * 150_528, max(1, round(len(view) / (64 * 1024**2)))
        edges = [len(view) * number // part for number in range(part + 1)]
        for number in range(part):
            with (target / str(number)).open("wb", buffering=0) as file:
                for first in range(edges[number], edges[number + 1], piece):
                    file.write(view[first : min(first + piece, edges[number + 1])])
                os.fsync(file.fileno())

    return run


def copying(source: Path, *, synced: bool = False) -> Write:
    """Copy with cp, which leaves the bytes in memory unless `synced`; finished shards are on the device."""

    def run(target: Path) -> None:
        subprocess.run(["cp", "-r", source, target], check=True)
        if synced:
            os.sync()

    return run


def jpegs(folder: Path, count: int) -> Path:
    """Make a folder of JPEG files of ImageNet's size (about 110 kB), ten classes."""
    root = folder / "jpegs"
    if root.exists():
        return root
    rng = np.random.default_rng(0)
    for number in range(count):
        (root / str(number % 10)).mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (120, 160, 3), dtype=np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(root / str(number % 10) / f"{number}.jpg", quality=92)
    return root


def touch_memory(mib: int) -> None:
    """Make the host return this much memory to the machine, then free it for the page cache."""
    np.empty(mib * 1024**2, np.uint8).fill(1)


def measured(run: Write, target: Path, mib: int) -> tuple[float, float]:
    """Return wall and processor seconds of making `target`, from a clean state."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    touch_memory(mib)
    started, used = time.perf_counter(), processor_seconds()
    run(target)
    return time.perf_counter() - started, processor_seconds() - used


def processor_seconds() -> float:
    """Return user and system time of this process and its ended children, which neighbours hardly affect."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=512)
    arguments.add_argument("--jpegs", type=int, default=4000)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--folder", type=Path)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        arrays = folder / "arrays"
        arrays.mkdir(parents=True, exist_ok=True)
        count = chosen.mib * 1024**2 // 150_528
        images = np.random.default_rng(0).integers(0, 256, (count, 224, 224, 3), dtype=np.uint8)
        np.save(arrays / "images.npy", images)
        np.save(arrays / "labels.npy", np.arange(count) % 10)
        source = jpegs(folder, chosen.jpegs)
        variants = {
            "plain write": plain(images),
            "raw shards": sharding(arrays),
            "cp of JPEG files": copying(source),
            "encoded shards": sharding(source, encoding="encoded"),
            "cp of JPEG files, then sync": copying(source, synced=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        processor: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(chosen.repeats):
            for name, run in variants.items():
                wall, used = measured(run, folder / "target", 2 * chosen.mib)
                seconds[name].append(wall)
                processor[name].append(used)
        size = sum(path.stat().st_size for path in source.rglob("*.jpg"))

    def ratio(times: dict[str, list[float]], base: str, name: str) -> float:
        return round(statistics.median(b / s for b, s in zip(times[base], times[name], strict=True)), 2)

    print(json.dumps({
        "median_seconds": {name: round(statistics.median(times), 3) for name, times in seconds.items()},
        "raw_mib": chosen.mib, "jpeg_files": chosen.jpegs, "jpeg_mib": round(size / 1024**2),
        "median_processor_seconds": {name: round(statistics.median(times), 3) for name, times in processor.items()},
        **{
            title: {
                "raw shards / plain write with fsync": ratio(times, "plain write", "raw shards"),
                "encoded shards / cp of the files": ratio(times, "cp of JPEG files", "encoded shards"),
                "encoded shards / cp and sync": ratio(times, "cp of JPEG files, then sync", "encoded shards"),
            }
            for title, times in (("ratios", seconds), ("ratios_of_processor_seconds", processor))
        },
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
