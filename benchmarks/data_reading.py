"""Reading raw shards against a plain loop of os.preadv over the same bytes, and tf.data output against TFRecord.

    python benchmarks/data_reading.py [--mib 1024] [--shards N] [--repeats 5] [--folder DIR] [--from-disk]
        [--without-tensorflow]

All variants of one repeat run in sequence in this process, on bytes in the page cache. Ratios are taken within a
repeat, and the median ratio is printed, of wall time and of processor time, which other work on the machine hardly
changes. Variants named `verified` check what they read against its checksums; `inspect --verify` is the command's own
function, with one thread per core. `--from-disk` drops the shards' bytes from the page cache before each reading, and
omits TensorFlow as `--without-tensorflow` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpcdl.config.load import Layer, load
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.order import Epoch
from hpcdl.data.format.prefetch import aligned_empty
from hpcdl.data.read.reader import SplitReader, open_reader
from hpcdl.data.read.windows import TrainingStream
from hpcdl.data.show.inspection import require_sound, verify
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.data.write.writing import shard

BATCH = 64
Seconds = npt.NDArray[np.float64]
"""Wall time, and processor time of all threads."""


def now() -> Seconds:
    return np.array([time.perf_counter(), time.process_time()])


def make(folder: Path, mib: int, shards: int | None) -> Dataset:
    target = folder / "shards"
    samples = mib * 1024**2 // (224 * 224 * 3)
    config = load(ShardConfig, [Layer(origin="benchmark", values={"samples": samples, "shards": shards})]).config
    shard(ShardRequest(source="synthetic:imagenet", target=target, config=config, resume=True), bar=False)
    return open_dataset(str(target))


def plain(dataset: Dataset) -> Seconds:
    """Read every shard from end to end with os.preadv into one buffer of a block's size."""
    assert dataset.folder is not None and dataset.manifest is not None
    size = dataset.manifest.block_samples * int(np.prod(dataset.sample_shape))
    buffer = aligned_empty((size,), np.uint8)
    buffer[:] = 0
    started = now()
    for entry in dataset.manifest.shards():
        descriptor = os.open(dataset.folder / entry.file, os.O_RDONLY)
        offset = 4096
        while count := os.preadv(descriptor, [buffer], offset):
            offset += count
        os.close(descriptor)
    return now() - started


def whole(dataset: Dataset) -> Seconds:
    """Run the function of `inspect --verify`."""
    assert dataset.folder is not None
    started = now()
    require_sound(dataset.folder, verify(dataset.folder))
    return now() - started


def blocks(dataset: Dataset) -> Seconds:
    """Read every block in shuffled order into one reused buffer."""
    reader = open_reader(dataset, dataset.train_split)
    assert isinstance(reader, SplitReader) and dataset.manifest is not None
    images = reader.columns["images"]
    buffer = aligned_empty((dataset.manifest.block_samples, *dataset.sample_shape), dataset.dtype)
    order = Epoch(reader.layout, 1, 0).blocks.tolist()
    for block in order[:: max(1, len(order) // 64)]:  # opens the shards and uses the buffer once
        images.read_block(block, buffer)
    started = now()
    for block in order:
        images.read_block(block, buffer)
    seconds = now() - started
    reader.close()
    return seconds


def single(dataset: Dataset) -> Seconds:
    """Read single samples, in random order, into reused batch buffers."""
    reader = open_reader(dataset, dataset.train_split)
    images = reader.columns["images"]
    buffer = aligned_empty((BATCH, *dataset.sample_shape), dataset.dtype)
    ids = np.random.default_rng(0).permutation(dataset.train_split.num_samples).astype(np.int64)
    images.read_samples(ids[:BATCH], buffer)
    started = now()
    for first in range(0, len(ids), BATCH):
        part = ids[first : first + BATCH]
        images.read_samples(part, buffer[: len(part)])
    seconds = now() - started
    reader.close()
    return seconds


def stream(dataset: Dataset) -> Seconds:
    """Read shuffled batches of the training stream as numpy arrays."""
    batches = TrainingStream(
        open_reader(dataset, dataset.train_split), batch_size=BATCH, worker=0, num_workers=1, seed=0
    )
    steps = batches.steps_per_epoch
    for step in range(steps):  # the first epoch allocates the buffers
        batches.batch(step)
    started = now()
    for step in range(steps, 2 * steps):
        batches.batch(step)
    seconds = now() - started
    batches.close()
    return seconds


def tf_shards(dataset: Dataset) -> Seconds:
    """Read one epoch of hpcdl.data.open: shuffled batches at the output of tf.data."""
    import hpcdl.data

    batches = iter(hpcdl.data.open(dataset, batch_size=BATCH, epochs=2))
    steps = dataset.train_split.num_samples // BATCH
    for _ in range(steps):  # the first epoch allocates the buffers
        next(batches)
    started = now()
    for _ in range(steps):
        next(batches)
    return now() - started


def tf_records(dataset: Dataset, folder: Path) -> Callable[[], Seconds]:
    """Read one epoch of the same batches by tf.data from TFRecord files, parsed, decoded and batched in parallel."""
    import tensorflow as tf

    path = folder / "records.tfrecord"
    if not path.exists():
        reader = open_reader(dataset, dataset.train_split)
        with tf.io.TFRecordWriter(str(path)) as out:
            for sample in range(dataset.train_split.num_samples):
                ids = np.array([sample], np.int64)
                image, label = (np.asarray(reader.read(item, ids)) for item in dataset.fields)
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=label.tolist())),
                }
                out.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
        reader.close()
    spec = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}

    def parse(records):  # type: ignore[no-untyped-def]
        found = tf.io.parse_example(records, spec)
        images = tf.reshape(tf.io.decode_raw(found["image"], tf.uint8), (-1, *dataset.sample_shape))
        return images, found["label"]

    steps = dataset.train_split.num_samples // BATCH
    batches = tf.data.TFRecordDataset(str(path)).repeat().batch(BATCH, drop_remainder=True)
    ready = iter(batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2))

    def run() -> Seconds:
        started = now()
        for _ in range(steps):
            next(ready)
        return now() - started

    run()
    return run


def dropped(dataset: Dataset) -> None:
    """Drop the shards' bytes from the page cache."""
    assert dataset.folder is not None and dataset.manifest is not None
    for entry in dataset.manifest.shards():
        descriptor = os.open(dataset.folder / entry.file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=1024)
    arguments.add_argument("--shards", type=int, help="by default as many as the command chooses")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--folder", type=Path)
    arguments.add_argument("--from-disk", action="store_true")
    arguments.add_argument("--without-tensorflow", action="store_true")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        dataset = make(folder, chosen.mib, chosen.shards)
        unchecked = dataclasses.replace(dataset, verified=False)
        variants: dict[str, Callable[[], Seconds]] = {
            "plain preadv": lambda: plain(dataset),
            "inspect --verify": lambda: whole(dataset),
            "shuffled blocks": lambda: blocks(unchecked),
            "shuffled blocks, verified": lambda: blocks(dataset),
            "single samples": lambda: single(unchecked),
            "single samples, verified": lambda: single(dataset),
        }
        if not chosen.from_disk:
            variants |= {
                "training stream": lambda: stream(unchecked),
                "training stream, verified": lambda: stream(dataset),
            }
        if not (chosen.from_disk or chosen.without_tensorflow):
            records = tf_records(dataset, folder)
            variants |= {
                "tf.data, shards": lambda: tf_shards(unchecked),
                "tf.data, shards, verified": lambda: tf_shards(dataset),
                "tf.data, TFRecord": records,
            }
        plain(dataset)
        seconds = {name: [] for name in variants}
        for _ in range(chosen.repeats):
            for name, run in variants.items():
                if chosen.from_disk:
                    dropped(dataset)
                seconds[name].append(run())
        size = dataset.train_split.num_samples * int(np.prod(dataset.sample_shape))
    report(seconds, size)


def report(seconds: dict[str, list[Seconds]], size: int) -> None:
    def median_ratio(base: str, name: str) -> list[float]:
        return np.median(np.array(seconds[base]) / np.array(seconds[name]), axis=0).round(2).tolist()

    speeds = {name: (size / np.median(times, axis=0) / 1e9).round(2).tolist() for name, times in seconds.items()}
    pairs = {name: "tf.data, TFRecord" if "tf" in name else "plain preadv" for name in seconds}
    ratios = {f"{name} / {base}": median_ratio(base, name) for name, base in pairs.items()}
    for title, found in (("gb_per_second", speeds), ("ratios", ratios)):
        for number, kind in enumerate(("wall", "processor")):
            print(json.dumps({f"{title}, {kind} time": {name: both[number] for name, both in found.items()}}, indent=1))


if __name__ == "__main__":
    main()
