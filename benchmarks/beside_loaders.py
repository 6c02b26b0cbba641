"""Writing and reading pictures, beside what other libraries offer for it, in turn in one run.

    python -m benchmarks.beside_loaders [--pictures 2000] [--repeats 5] [--folder DIR]

The pictures are JPEG files of ImageNet's size (500 x 375, about 110 kB) in class folders, in the page cache. Writing
packs them unchanged: `hpcdl shard --encoding encoded` (listed, checked, shuffled, with checksums), webdataset's
ShardWriter (tar files in the folder's order), a plain h5py script (bytes of varying length) and a TFRecord writer. Each
ends when all bytes are on the device. Reading gives shuffled batches of decoded pixels: hpcdl's and TensorFlow's with
two threads, webdataset's and PyTorch's DataLoader (over the files, by Pillow) with two processes. hpcdl does not
install webdataset and torch: a missing one is named and skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from benchmarks.data_writing import jpegs, sharding

BATCH, PROCESSES, FILES = 16, 2, 4
Write = Callable[[Path], None]


def listed(source: Path) -> list[tuple[Path, int]]:
    """Return the files with their classes, by name."""
    return [(path, int(path.parent.name)) for path in sorted(source.rglob("*.jpg"))]


def settled(folder: Path) -> None:
    """Wait until the device has all files of a folder."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def with_webdataset(source: Path) -> Write:
    """Write tar files with one member for each picture and one for its class."""
    import webdataset

    files = listed(source)

    def run(target: Path) -> None:
        target.mkdir()
        with webdataset.ShardWriter(f"{target}/%d.tar", maxcount=-(-len(files) // FILES), verbose=0) as out:
            for path, number in files:
                out.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": number})
        settled(target)

    return run


def with_h5py(source: Path) -> Write:
    """Write files with one array of bytes of varying length."""
    files = listed(source)

    def run(target: Path) -> None:
        target.mkdir()
        for at in range(FILES):
            part = files[at::FILES]
            with h5py.File(target / f"{at}.h5", "w") as file:
                pictures = file.create_dataset("images", (len(part),), h5py.vlen_dtype(np.uint8))
                for place, (path, _) in enumerate(part):
                    pictures[place] = np.frombuffer(path.read_bytes(), np.uint8)
                file["labels"] = [number for _, number in part]
        settled(target)

    return run


def with_tfrecord(source: Path) -> Write:
    """Write records of tf.train.Example."""
    import tensorflow as tf

    files = listed(source)

    def run(target: Path) -> None:
        target.mkdir()
        for at in range(FILES):
            with tf.io.TFRecordWriter(f"{target}/{at}.tfrecord") as out:
                for path, number in files[at::FILES]:
                    feature = {
                        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[path.read_bytes()])),
                        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                    }
                    out.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
        settled(target)

    return run


def pixels(content: bytes) -> np.ndarray:
    """Return a decoded picture."""
    return np.array(Image.open(io.BytesIO(content)).convert("RGB"))


class PictureFiles:
    """A usual data set for PyTorch: one file per sample."""

    def __init__(self, source: Path) -> None:
        self._files = listed(source)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, at: int) -> tuple[np.ndarray, int]:
        path, number = self._files[at]
        return pixels(path.read_bytes()), number


def from_hpcdl(folder: Path) -> Iterator[Any]:
    """Yield batches of hpcdl's shards, without end."""
    import hpcdl.data

    return iter(hpcdl.data.open(str(folder), batch_size=BATCH, epochs=10**6))


def from_tfrecord(folder: Path) -> Iterator[Any]:
    """Yield batches by tf.data, as its guide recommends."""
    import tensorflow as tf

    spec = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}

    def parse(record):  # type: ignore[no-untyped-def]
        found = tf.io.parse_single_example(record, spec)
        return tf.ensure_shape(tf.io.decode_jpeg(found["image"], channels=3), (375, 500, 3)), found["label"]

    records = tf.data.TFRecordDataset([str(path) for path in sorted(folder.iterdir())], num_parallel_reads=PROCESSES)
    batches = records.shuffle(1000).repeat().map(parse, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH)
    return iter(batches.prefetch(tf.data.AUTOTUNE))


def from_webdataset(folder: Path) -> Iterator[Any]:
    """Yield batches of webdataset's own loader."""
    import webdataset

    files = [str(path) for path in sorted(folder.iterdir())]
    samples = webdataset.WebDataset(files, shardshuffle=len(files), seed=0, resampled=False).shuffle(1000).repeat()
    decoded = samples.to_tuple("jpg", "cls").map_tuple(pixels, int).batched(BATCH)
    return iter(webdataset.WebLoader(decoded, batch_size=None, num_workers=PROCESSES))


def from_files(source: Path) -> Iterator[Any]:
    """Yield batches of PyTorch's DataLoader over the files, epoch after epoch."""
    import torch

    loader = torch.utils.data.DataLoader(
        PictureFiles(source), BATCH, shuffle=True, num_workers=PROCESSES, persistent_workers=True, drop_last=True
    )
    while True:
        yield from loader


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    has = {name: importlib.util.find_spec(name) is not None for name in ("webdataset", "torch")}
    for name in (name for name, there in has.items() if not there):
        print(f"left out: {name} is not installed", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-beside-") as scratch:
        folder = Path(scratch)
        source = jpegs(folder, chosen.pictures)
        writers: dict[str, Write] = {
            "hpcdl": sharding(source, encoding="encoded", shards=FILES),
            **({"webdataset": with_webdataset(source)} if has["webdataset"] else {}),
            "h5py": with_h5py(source),
            "tfrecord": with_tfrecord(source),
        }
        written: dict[str, list[float]] = {name: [] for name in writers}
        for _ in range(chosen.repeats):
            for name, write in writers.items():
                shutil.rmtree(folder / name, ignore_errors=True)
                os.sync()
                began = time.perf_counter()
                write(folder / name)
                written[name].append(time.perf_counter() - began)
        batches = {
            "hpcdl": from_hpcdl(folder / "hpcdl"),
            "tf.data over TFRecord": from_tfrecord(folder / "tfrecord"),
            **({"webdataset": from_webdataset(folder / "webdataset")} if all(has.values()) else {}),
            **({"DataLoader over files": from_files(source)} if has["torch"] else {}),
        }
        read: dict[str, list[float]] = {name: [] for name in batches}
        steps = chosen.pictures // BATCH // 2
        for repeat in range(chosen.repeats + 1):
            for name, ready in batches.items():
                began = time.perf_counter()
                for _ in range(steps):
                    next(ready)
                if repeat:  # the first repeat fills the caches of each library
                    read[name].append(time.perf_counter() - began)
    report("writing", written, chosen.pictures)
    report("reading", read, steps * BATCH)


def report(what: str, seconds: dict[str, list[float]], pictures: int) -> None:
    """Report pictures per second, and hpcdl's speed relative to each other way: medians of ratios within a repeat."""
    ratios = {
        name: statistics.median(other / own for other, own in zip(times, seconds["hpcdl"], strict=True))
        for name, times in seconds.items()
    }
    rates = {name: round(pictures / statistics.median(times)) for name, times in seconds.items()}
    print(json.dumps({what: {
        "pictures a second": rates,
        "times as fast as": {name: round(ratio, 2) for name, ratio in ratios.items() if name != "hpcdl"},
    }}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
