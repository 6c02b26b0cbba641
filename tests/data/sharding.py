"""Helpers of the tests in this folder: shard by function call, make small sources of every format, compare folders."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from hpcdl.config.load import Layer, load
from hpcdl.data.format.manifest import Manifest, read_manifest
from hpcdl.data.write.request import ShardConfig, ShardRequest
from hpcdl.data.write.writing import ShardReport, shard


def request(source: str | Path, target: Path, /, *, resume: bool = False, **options: Any) -> ShardRequest:
    config = load(
        ShardConfig, [Layer(origin="test", values={k.replace("_", "-"): v for k, v in options.items()})]
    ).config
    return ShardRequest(source=str(source), target=target, config=config, resume=resume)


def make(source: str | Path, target: Path, /, **options: Any) -> Manifest:
    report(source, target, **options)
    return read_manifest(target)[0]


def report(source: str | Path, target: Path, /, **options: Any) -> ShardReport:
    return shard(request(source, target, **{"workers": 1, **options}), bar=False)


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def everything(folder: Path, manifest: Manifest, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all images and labels of a split, read with plain h5py."""
    images, labels = [], []
    for entry in manifest.splits[split].shards:
        with h5py.File(folder / entry.file) as file:
            images.append(file["images"][:])
            labels.append(file["labels"][:])
    return np.concatenate(images), np.concatenate(labels)


def image_folder(root: Path, classes: dict[str, int], *, size: int = 16, grey: bool = False, kind: str = "png") -> Path:
    """Make a folder of random images; `classes` maps class name to number of files."""
    rng = np.random.default_rng(7)
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            shape = (size, size) if grey else (size, size, 3)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(root / name / f"{number:04d}.{kind}")
    return root


def pixels(count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def numbers(count: int, classes: int, seed: int = 1) -> np.ndarray:
    found = np.random.default_rng(seed).integers(0, classes, count, dtype=np.uint8)
    found[-1] = classes - 1  # so that the labels alone show the number of classes
    return found


def idx_folder(root: Path, *, packed: bool = False) -> tuple[Path, np.ndarray, np.ndarray]:
    root.mkdir()
    images, labels = pixels(20, (28, 28)), numbers(20, 10)
    files = {
        "train-images-idx3-ubyte": struct.pack(">IIII", 0x803, 20, 28, 28) + images.tobytes(),
        "train-labels-idx1-ubyte": struct.pack(">II", 0x801, 20) + labels.tobytes(),
    }
    for name, content in files.items():
        (root / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return root, images[..., None], labels


def cifar_folder(root: Path, *, pickled: bool, hundred: bool) -> tuple[Path, np.ndarray, np.ndarray]:
    """Make a CIFAR folder; also return the images (N, 32, 32, 3) and labels of its training batch."""
    root.mkdir()
    classes = 100 if hundred else 10
    planes, labels = pixels(24, (3, 32, 32)), numbers(24, classes)
    flat = planes.reshape(24, -1)
    names = [f"class{number}" for number in range(classes)]
    if pickled:
        key = b"fine_labels" if hundred else b"labels"
        with (root / ("train" if hundred else "data_batch_1")).open("wb") as file:
            pickle.dump({b"data": flat, key: labels.tolist(), b"batch_label": b"x"}, file, protocol=2)
        with (root / ("meta" if hundred else "batches.meta")).open("wb") as file:
            pickle.dump({b"fine_label_names" if hundred else b"label_names": names}, file, protocol=2)
    else:
        before = np.stack([numbers(24, 20), labels], 1) if hundred else labels[:, None]
        np.concatenate([before, flat], 1).tofile(root / ("train.bin" if hundred else "data_batch_1.bin"))
        (root / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("\n".join(names))
    return root, planes.transpose(0, 2, 3, 1), labels


def same_samples(found: tuple[np.ndarray, np.ndarray], images: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether both hold the same (image, label) pairs, in any order."""

    def keys(pictures: np.ndarray, classes: np.ndarray) -> list[tuple[bytes, int]]:
        return sorted((np.ascontiguousarray(p).tobytes(), int(c)) for p, c in zip(pictures, classes, strict=True))

    return found[0].dtype == images.dtype and keys(*found) == keys(images, labels)
