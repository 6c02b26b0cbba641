"""MNIST's IDX files (LeCun's format), plain or compressed with gzip: also Fashion-MNIST, EMNIST and similar sets."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError
from hpcdl.core.storage.files import open_regular
from hpcdl.data.sources.base.labels import checked_labels
from hpcdl.data.sources.base.source import Array, Index, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.layouts.flat import ArrayFiles, FlatFiles

_PREFIXES = {"train": "train", "t10k": "test", "test": "test"}
# Two zero bytes, the type (08: unsigned bytes) and the number of axes; all numbers are big-endian.
_IMAGES, _LABELS = 0x0803, 0x0801
_HEADER = {_IMAGES: 16, _LABELS: 8}
_MNIST_CLASSES = 10


class IdxSource:
    """A folder with train-images-idx3-ubyte and its three sibling files."""

    def __init__(self, spec: SourceSpec) -> None:
        self._root, self._work = Path(spec.location), Path(spec.work)
        self._files = FlatFiles()

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a folder with an images file of such a name."""
        return any(_find(location, prefix, "images") for prefix in _PREFIXES)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the images; compressed files are unpacked into the work folder."""
        array_files = ArrayFiles(index)
        for prefix, split in _PREFIXES.items():
            images, labels = _find(self._root, prefix, "images"), _find(self._root, prefix, "labels")
            if images is None:
                continue
            if labels is None:
                raise SourceError(f"{images} has no labels beside it; {prefix}-labels-idx1-ubyte is missing")
            flat = self._plain(images, _IMAGES)
            count, height, width = _header(flat, _IMAGES, images)
            flat_labels = self._plain(labels, _LABELS)
            (num_labels,) = _header(flat_labels, _LABELS, labels)
            if not height * width:
                raise SourceError(f"{images} holds images of {height}x{width} pixels; fetch it again")
            label_values = np.fromfile(flat_labels, np.uint8, num_labels, offset=_HEADER[_LABELS])
            numbers = checked_labels(label_values, count, str(labels))
            array_files.add(split, numbers, ((height, width, 1), "uint8"), str(flat), flat)
        return array_files.facts(self._root, _MNIST_CLASSES)

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Array:
        """Return one image."""
        assert facts.sample_shape is not None
        height, width, _ = facts.sample_shape
        file, size = int(row["file"]), height * width
        content = self._files.read(
            facts.files[file], facts.stamps[file], _HEADER[_IMAGES] + int(row["place"]) * size, size
        )
        return np.frombuffer(content, np.uint8).reshape(height, width, 1)

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the number of the image and its file."""
        return f"image {int(row['place'])} of {Path(facts.files[int(row['file'])]).name}"

    def _plain(self, path: Path, magic: int) -> Path:
        if path.suffix != ".gz":
            return path
        unpacked = self._work / f"{path.stem}.plain"
        try:
            with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as content, unpacked.open("wb") as plain:
                head = content.read(_HEADER[magic])
                plain.write(head)
                sizes = _sizes(head, magic, path)
                bytes_left = math.prod(sizes) + 1  # read no more than the header says, whatever is compressed
                while bytes_left > 0 and (piece := content.read(min(bytes_left, 1 << 20))):
                    bytes_left -= plain.write(piece)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"{path} cannot be unpacked: {error}; fetch it again") from error
        return unpacked


def _find(folder: Path, prefix: str, what: str) -> Path | None:
    kind = "idx3" if what == "images" else "idx1"
    # Some copies of the files are called train-images.idx3-ubyte, with a dot.
    names = [f"{prefix}-{what}{mark}{kind}-ubyte{suffix}" for mark in ("-", ".") for suffix in ("", ".gz")]
    plain = next((folder / name for name in names if (folder / name).is_file()), None)
    if plain is not None or not folder.is_dir():
        return plain
    files = sorted(path for path in folder.iterdir() if path.name.endswith(tuple(f"-{name}" for name in names)))
    sets = {path.name.partition(f"-{prefix}-")[0] for path in files}
    if len(sets) > 1:
        raise SourceError(
            f"{folder} holds the data sets {', '.join(sorted(sets))}; put one of them into a folder alone"
        )
    return files[0] if files else None


def _header(path: Path, magic: int, remarks: Path) -> tuple[int, ...]:
    """Return the sizes in the header of an IDX file; SourceError if the magic number or the length is wrong."""
    with open_regular(path) as file:
        sizes = _sizes(file.read(_HEADER[magic]), magic, remarks)
        size = os.fstat(file.fileno()).st_size
    expected = _HEADER[magic] + math.prod(sizes)
    if size != expected:
        raise SourceError(f"{remarks} has {size} bytes, its header states {expected}; it is cut short or too long")
    return sizes


def _sizes(head: bytes, magic: int, remarks: Path) -> tuple[int, ...]:
    if len(head) < _HEADER[magic] or int.from_bytes(head[:4]) != magic:
        magic_text = f"{int.from_bytes(head[:4]):#010x}" if head else "nothing"
        raise SourceError(
            f"{remarks} has the magic number {magic_text}, an IDX file of this name {magic:#010x}; fetch it again"
        )
    return tuple(int.from_bytes(head[position : position + 4]) for position in range(4, _HEADER[magic], 4))
