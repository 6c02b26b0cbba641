"""Array files read by byte range, as long as they are what was listed; and what all array formats share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError
from hpcdl.core.files import open_descriptor
from hpcdl.data.sources.base import MOST_SAMPLE_BYTES, Array, SourceChanged, SourceFacts, UnreadableSample
from hpcdl.data.write.index import ROW, IndexWriter

_BATCH = 1 << 14
_MOST_CHANNELS = 16
MOST_CLASSES = 1_000_000
SPLIT_PREFIXES = (("train", "train"), ("val", "val"), ("test", "test"))


class FlatFiles:
    """Byte ranges of files that must not change; what is read lies in one buffer, valid until the next read."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._buffer = memoryview(bytearray())

    def read(self, path: str, stamp: int, offset: int, num_bytes: int) -> memoryview:
        """`num_bytes` of `path` from `offset` on; SourceChanged unless its modification time still is `stamp`."""
        try:
            if path not in self._open:
                self._open[path] = open_descriptor(path)
            found = os.fstat(self._open[path])
            if found.st_mtime_ns != stamp:
                raise changed(path)
            if num_bytes > min(found.st_size - offset, MOST_SAMPLE_BYTES):  # before room is made for it
                raise UnreadableSample(f"{path} at byte {offset}: {num_bytes} bytes are told of; cut short or damaged")
            if len(self._buffer) < num_bytes:
                self._buffer = memoryview(bytearray(num_bytes))
            wanted = self._buffer[:num_bytes]
            count = os.preadv(self._open[path], [wanted], offset) if num_bytes else 0
        except FileNotFoundError as error:
            raise changed(path) from error
        except OSError as error:
            raise UnreadableSample(f"cannot read {path} at byte {offset}: {error.strerror}") from error
        if count != num_bytes:
            raise UnreadableSample(f"{path} ends at byte {offset + count}")
        return wanted


def changed(path: str) -> SourceChanged:
    """The error for a file that is not what it was when it was listed."""
    return SourceChanged(f"{path} changed after it was listed; leave the source alone and run again with --resume")


def stamp_of(path: str | Path) -> int:
    """Modification time of a file in ns."""
    return Path(path).stat().st_mtime_ns


def add_numbered(index: IndexWriter, split: str, file: int, labels: Array, *, first: int = 0, size: int = 0) -> None:
    """List samples that are numbered from `first` on within `file`; `labels` (N,) may be of any integer type."""
    for start in range(0, len(labels), _BATCH):
        part = labels[start : start + _BATCH]
        rows = np.zeros(len(part), ROW)
        rows["place"] = np.arange(first + start, first + start + len(part))
        rows["label"], rows["file"], rows["size"] = part, file, size
        index.add(split, rows)


class ArrayFiles:
    """What the files of an array source hold, listed one by one; `kept` says where a file's samples are read from."""

    def __init__(self, index: IndexWriter) -> None:
        self._index = index
        self._files: list[str] = []
        self._stamps: list[int] = []
        self._kinds: set[tuple[tuple[int, int, int], str]] = set()
        self._most = 0

    def __len__(self) -> int:
        return len(self._files)

    def add(self, split: str, labels: Array, kind: tuple[tuple[int, int, int], str], kept: str, path: Path) -> None:
        """List a file's samples; `kind` is their shape and type, `path` the file that must not change from now on."""
        self._kinds.add(kind)
        self._most = max(self._most, int(labels.max(initial=0)))
        add_numbered(self._index, split, len(self._files), labels)
        self._files.append(kept)
        self._stamps.append(stamp_of(path))

    def facts(self, location: Path, least_classes: int = 0) -> SourceFacts:
        """What was listed; SourceError where that is nothing, or samples of several shapes or types."""
        if not self._files:
            raise SourceError(f"{location} holds no images of this format; check its files' names, or --format")
        if len(self._kinds) != 1:
            kinds = ", ".join(f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype in sorted(self._kinds))
            raise SourceError(f"{location}: the files differ in shape or type of their images: {kinds}")
        ((shape, dtype),) = self._kinds
        return SourceFacts(
            class_names=class_numbers(max(least_classes, self._most + 1)),
            samples_are="pixels",
            sample_shape=shape,
            dtype=dtype,
            files=self._files,
            stamps=self._stamps,
        )


def class_numbers(count: int) -> list[str]:
    """Names of classes that have only numbers; SourceError for more of them than any data set has."""
    if count > MOST_CLASSES:
        raise SourceError(f"there is a label {count - 1}, and no data set has over {MOST_CLASSES} classes; correct it")
    return [str(number) for number in range(count)]


def checked_labels(labels: Array, num_samples: int, where: str) -> Array:
    """`labels` as (N,) integers; SourceError where they are no labels of `num_samples` samples."""
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or len(flat) != num_samples:
        raise SourceError(
            f"{where}: labels have the shape {labels.shape}; one number for each of {num_samples} samples is needed"
        )
    if flat.dtype.kind not in "iufb":
        raise SourceError(f"{where}: labels are {flat.dtype}; whole numbers are needed")
    if flat.dtype.kind == "f" and not (np.abs(flat) < 2**53).all():
        raise SourceError(f"{where}: labels are {flat.dtype} and not all whole numbers")
    whole = flat.astype(np.int64)
    if not np.array_equal(whole, flat):
        raise SourceError(f"{where}: labels are {flat.dtype} and not all whole numbers")
    if len(whole) and whole.min() < 0:
        at = int(np.argmin(whole))
        raise SourceError(f"{where}: sample {at} has the label {whole[at]}, out of range: labels start at 0")
    return whole


def channels_last(shape: Sequence[int], axes: str, where: str) -> tuple[tuple[int, int, int], bool]:
    """(height, width, channels) of one sample of `shape`, and whether its channels come first."""
    if min(shape, default=0) < 1:
        raise SourceError(f"{where}: a sample has the shape {tuple(shape)}; images have at least one pixel")
    if len(shape) == 2:
        return (shape[0], shape[1], 1), False
    if len(shape) != 3:
        raise SourceError(f"{where}: a sample has the shape {tuple(shape)}; images have two or three axes")
    first = axes == "nchw" or (axes == "auto" and shape[0] <= _MOST_CHANNELS and shape[0] < shape[2])
    if axes == "auto" and not first and shape[2] > _MOST_CHANNELS:
        raise SourceError(f"{where}: cannot tell the channels among {tuple(shape)}; give --axes nhwc or nchw")
    return ((shape[1], shape[2], shape[0]), True) if first else ((shape[0], shape[1], shape[2]), False)


def stored_dtype(dtype: np.dtype[Any], where: str) -> str:
    """The type that pixels of `dtype` are stored as: uint8, float16 or float32 (for float64 too)."""
    names = {"uint8": "uint8", "float16": "float16", "float32": "float32", "float64": "float32"}
    if dtype.name not in names:
        raise SourceError(f"{where}: pixels are {dtype.name}; uint8, float16, float32 and float64 can be sharded")
    return names[dtype.name]


def split_of(name: str) -> str | None:
    """The split that a file's name begins with, if it does."""
    return next((split for prefix, split in SPLIT_PREFIXES if name.lower().startswith(prefix)), None)
