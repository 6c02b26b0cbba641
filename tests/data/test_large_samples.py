"""Samples larger than 256 MiB are accepted, and impossible sample sizes are refused."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import h5py
import numpy as np
import pytest

from hpcdl.data.sources.base.source import MOST_SAMPLE_BYTES
from hpcdl.data.sources.layouts.records import masked_crc
from tests.conftest import CommandLine

SIDE = 9_459
"""A bitmap with this many pixels per side has a little over 256 MiB."""
NUMBERS = (256 << 20) // 4 + 1024


@pytest.fixture(scope="module")
def bitmap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from PIL import Image

    path = tmp_path_factory.mktemp("large") / "large.bmp"
    Image.new("RGB", (SIDE, SIDE), (10, 200, 30)).save(path)
    assert path.stat().st_size > 256 << 20
    yield path
    path.unlink()


def small(path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 40), (200, 10, 30)).save(path)


def sums(folder: Path, name: str) -> list[float]:
    """Return the sorted means of a field's samples over all shards."""
    found: list[float] = []
    for path in folder.rglob("*.h5"):
        with h5py.File(path) as shard:
            found += [float(np.mean(sample, dtype=np.float64)) for sample in shard[name]]
    return sorted(found)


def test_a_picture_of_more_than_256_mib(bitmap: Path, run_hpcdl: CommandLine, tmp_path: Path) -> None:
    small(tmp_path / "pictures" / "a" / "small.png")
    (tmp_path / "pictures" / "b").mkdir()
    (tmp_path / "pictures" / "b" / "large.bmp").hardlink_to(bitmap)
    line = ["shard", tmp_path / "pictures", tmp_path / "out", "--image-size", "32", "--workers", "1"]
    done = run_hpcdl(line)
    assert done.code == 0, done.err
    assert sums(tmp_path / "out", "images") == [80.0, 80.0]  # (10 + 200 + 30) / 3, for both samples


@pytest.mark.soak
def test_a_picture_in_an_archive(bitmap: Path, run_hpcdl: CommandLine, tmp_path: Path) -> None:
    small(tmp_path / "small.png")
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w", zipfile.ZIP_STORED) as archive:
        archive.write(tmp_path / "small.png", "a/small.png")
        archive.write(bitmap, "b/large.bmp")
    done = run_hpcdl(["shard", tmp_path / "pictures.zip", tmp_path / "out", "--image-size", "32", "--workers", "1"])
    (tmp_path / "pictures.zip").unlink()
    assert done.code == 0, done.err
    assert sums(tmp_path / "out", "images") == [80.0, 80.0]


def frame(content: bytes) -> bytes:
    head = struct.pack("<Q", len(content))
    return head + struct.pack("<I", masked_crc(head)) + content + struct.pack("<I", masked_crc(content))


@pytest.mark.soak
def test_a_record_of_more_than_256_mib(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    import tensorflow as tf

    with (tmp_path / "volumes.tfrecord").open("wb") as file:
        for number in range(2):
            values = np.full(NUMBERS, number, np.float32)
            features = {
                "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[values.tobytes()])),
                "y": tf.train.Feature(float_list=tf.train.FloatList(value=[float(number)])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            file.write(frame(example.SerializeToString()))
    line = ["shard", tmp_path / "volumes.tfrecord", tmp_path / "out", "--input", f"x=x:float32:{NUMBERS}"]
    done = run_hpcdl([*line, "--target", "y", "--target-kind", "regression", "--workers", "1"])
    (tmp_path / "volumes.tfrecord").unlink()
    assert done.code == 0, done.err
    assert sums(tmp_path / "out", "x") == [0.0, 1.0]


def test_a_record_beyond_any_sample_is_refused_by_its_size(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    head = struct.pack("<Q", MOST_SAMPLE_BYTES + 1)
    crc = int(google_crc32c.value(head))
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    (tmp_path / "huge.tfrecord").write_bytes(head + struct.pack("<I", masked) + b"\0" * 64)
    done = run_hpcdl(["shard", tmp_path / "huge.tfrecord", tmp_path / "out", "--input", "x", "--target", "y"])
    assert done.code in (2, 3) and "the record at byte 0 has 1 GiB, and one has at most 1 GiB" in done.err, done.err
