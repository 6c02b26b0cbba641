"""Reading fields of raw shards against a plain loop of os.preadv over the same bytes: a table, series, volumes.

    python -m benchmarks.field_reading [--mib 256] [--repeats 7] [--folder DIR]

A table of 1,000 float32 values per row, series of 128 x 6 and volumes of 64 x 64 x 64 (float32), each with a float64
target. All variants of one repeat run in sequence in this process, on bytes in the page cache and without checksums;
ratios are taken within a repeat, and the median ratio is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.order import Epoch
from hpcdl.data.format.prefetch import aligned_empty
from hpcdl.data.read.reader import SplitReader
from hpcdl.data.read.windows import open_stream
from tests.data.sharding import make

SHAPES = {"table of 1,000 values": (1000,), "series 128 x 6": (128, 6), "volumes 64 x 64 x 64": (64, 64, 64)}
BATCH = 32
FIELD = "x"


def sharded(folder: Path, shape: tuple[int, ...], mib: int) -> Dataset:
    """Make shards of random samples with one input of `shape`."""
    samples = max(2 * BATCH, mib * 1024**2 // (4 * int(np.prod(shape))))
    rng = np.random.default_rng(0)
    folder.mkdir()
    np.savez(folder / "a.npz", x=rng.random((samples, *shape), np.float32), y=rng.random(samples))
    make(folder / "a.npz", folder / "shards", shards=4, input=(FIELD,), target=("y",), max_ranks=64)
    (folder / "a.npz").unlink()
    return dataclasses.replace(open_dataset(str(folder / "shards")), verified=False)


def plain(dataset: Dataset) -> float:
    """Read every shard from end to end into one buffer of a block's size."""
    assert dataset.folder is not None and dataset.manifest is not None
    buffer = aligned_empty((dataset.manifest.block_samples * dataset.inputs[0].row_bytes,), np.uint8)
    buffer[:] = 0
    started = time.perf_counter()
    for entry in dataset.manifest.shards():
        descriptor, offset = os.open(dataset.folder / entry.file, os.O_RDONLY), 4096
        while count := os.preadv(descriptor, [buffer], offset):
            offset += count
        os.close(descriptor)
    return time.perf_counter() - started


def blocks(dataset: Dataset) -> float:
    """Read every block of the input in shuffled order into one reused buffer."""
    assert dataset.folder is not None and dataset.manifest is not None
    reader = SplitReader(dataset.folder, dataset, dataset.train_split)
    column = reader.columns[FIELD]
    buffer = aligned_empty((dataset.manifest.block_samples, *column.sample_shape), column.dtype)
    order = Epoch(reader.layout, 1, 0).blocks.tolist()
    for block in order[:: max(1, len(order) // 64)]:  # opens the shards and uses the buffer once
        column.read_block(block, buffer)
    started = time.perf_counter()
    for block in order:
        column.read_block(block, buffer)
    seconds = time.perf_counter() - started
    reader.close()
    return seconds


def stream(dataset: Dataset) -> float:
    """Read shuffled batches of both fields as numpy arrays."""
    batches = open_stream(dataset, batch_size=BATCH, worker=0, num_workers=1, seed=0)
    steps = batches.steps_per_epoch
    for step in range(steps):  # the first epoch allocates the buffers
        batches.batch(step)
    started = time.perf_counter()
    for step in range(steps, 2 * steps):
        batches.batch(step)
    seconds = time.perf_counter() - started
    batches.close()
    return seconds


def main() -> None:
    """Measure each kind and print JSON."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--mib", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--folder", type=Path)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-fields-") as scratch:
        for kind, shape in SHAPES.items():
            dataset = sharded(Path(scratch) / kind.split()[0], shape, chosen.mib)
            seconds: dict[str, list[float]] = {"plain preadv": [], "shuffled blocks": [], "training stream": []}
            plain(dataset)
            for _ in range(chosen.repeats):
                for name, run in zip(seconds, (plain, blocks, stream), strict=True):
                    seconds[name].append(run(dataset))
            size = dataset.train_split.num_samples * dataset.inputs[0].row_bytes
            base = seconds["plain preadv"]
            rates = {name: round(size / statistics.median(times) / 1e9, 2) for name, times in seconds.items()}
            ratios = {
                name: round(statistics.median(b / s for b, s in zip(base, times, strict=True)), 2)
                for name, times in seconds.items()
            }
            print(json.dumps({"kind": kind, "gb_per_second": rates, "of_plain": ratios}), flush=True)


if __name__ == "__main__":
    main()
