"""JPEG or PNG files in a folder per class (ImageNet's layout), divided into train, val, test folders or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcdl.core.errors import SourceError
from hpcdl.core.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base import MOST_SAMPLE_BYTES, SourceChanged, SourceFacts, SourceSpec, UnreadableSample
from hpcdl.data.sources.index import Index, IndexWriter

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"RIFF": "WebP",
}
"""First bytes of the image files that are taken."""
CHECKED_AT_ONCE = 20_000
"""Up to so many files are opened while listing, so that a file that is no image is refused before anything is written;
of larger sources one file per class."""
_BATCH = 4096


class ImageFolderSource:
    """A folder of class folders of image files."""

    def __init__(self, spec: SourceSpec) -> None:
        self._root = os.fsencode(spec.location)
        self._checks = spec.checks
        self._files = WholeFiles()
        self._checked = 0

    @staticmethod
    def recognises(location: Path) -> bool:
        """A folder that holds folders."""
        return location.is_dir() and bool(_folders(os.fsencode(location)))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the files of every class, in the order of their names."""
        if not Path(os.fsdecode(self._root)).is_dir():
            raise SourceError(f"{os.fsdecode(self._root)} is no folder; it needs a folder of images for each class")
        divided = self._split_folders()
        roots = divided or {UNSPLIT: b""}
        classes = {split: _folders(os.path.join(self._root, below)) for split, below in roots.items()}  # noqa: PTH118
        names = sorted({name for found in classes.values() for name in found})
        if not names:
            raise SourceError(
                f"{self._text(b'')} holds no class folders; put each class's images into a folder of its own"
            )
        class_names = [os.fsdecode(name) for name in names]
        numbers = {name: number for number, name in enumerate(names)}
        folders: list[str] = []
        for split, below in roots.items():
            for name in classes[split]:
                relative = os.path.join(below, name) if below else name  # noqa: PTH118  bytes: names need not be UTF-8
                folders.append(os.fsdecode(relative))
                self._add_class(index, split, len(folders) - 1, numbers[name], relative)
        if not sum(index.counts.values()):
            raise SourceError(f"{self._text(b'')} holds no files in its class folders; there is nothing to shard")
        return SourceFacts(class_names=class_names, samples_are="files", files=[_portable(name) for name in folders])

    def read(self, row: Any, facts: SourceFacts, index: Index) -> memoryview:
        """The bytes of an image file."""
        return self._files.read(self._path(row, facts, index), row, lambda: self.describe(row, facts, index))

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Path of the file below the source."""
        return (
            os.fsdecode(os.path.relpath(self._path(row, facts, index), self._root)).encode("utf-8", "replace").decode()
        )

    def _path(self, row: Any, facts: SourceFacts, index: Index) -> bytes:
        folder = os.fsencode(_native(facts.files[int(row["file"])]))
        return os.path.join(self._root, folder, index.name(int(row["place"])))  # noqa: PTH118

    def _split_folders(self) -> dict[str, bytes]:
        """Split name to folder where the source is divided: all its folders are called train, val or test."""
        names = _folders(self._root)
        known = [os.fsdecode(name).lower() for name in names]
        if not names or any(name not in SPLIT_NAMES for name in known):
            return {}
        if not all(_folders(os.path.join(self._root, name)) for name in names):  # noqa: PTH118
            return {}
        return {SPLIT_NAMES[text]: name for text, name in zip(known, names, strict=True)}

    def _add_class(self, index: IndexWriter, split: str, folder: int, label: int, relative: bytes) -> None:
        batch: list[tuple[bytes, int, int]] = []
        checks = self._checks
        for name in _files(os.path.join(self._root, relative)):  # noqa: PTH118
            path = os.path.join(self._root, relative, name)  # noqa: PTH118
            stat = os.stat(path)  # noqa: PTH116
            if checks:
                check_magic(path, self._text(os.path.join(relative, name)))  # noqa: PTH118
                self._checked += 1
                checks = self._checked < CHECKED_AT_ONCE
            batch.append((name, stat.st_size, stat.st_mtime_ns))
            if len(batch) == _BATCH:
                index.add_files(split, folder, label, batch)
                batch = []
        index.add_files(split, folder, label, batch)

    def _text(self, relative: bytes) -> str:
        return os.path.join(self._root, relative).decode("utf-8", "replace").rstrip("/")  # noqa: PTH118


def check_magic(path: bytes, text: str) -> None:
    """SourceError unless the file starts as an image does."""
    try:
        with open_regular(os.fsdecode(path)) as file:
            head = file.read(8)
    except OSError as error:
        raise SourceError(f"cannot read {text}: {error.strerror}") from error
    if not any(head.startswith(magic) for magic in MAGIC):
        kinds = ", ".join(dict.fromkeys(MAGIC.values()))
        raise SourceError(f"{text} is no image; take it away or give --on-error skip (images: {kinds})")


class WholeFiles:
    """Reads whole files into one buffer, valid until the next read."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray())

    def read(self, path: bytes, row: Any, describe: Callable[[], str]) -> memoryview:
        """The bytes of a listed file; SourceChanged where size or time differ from the row's, UnreadableSample."""
        size = int(row["size"])
        try:
            with open_regular(os.fsdecode(path)) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size != size or stat.st_mtime_ns != int(row["stamp"]):
                    raise SourceChanged(
                        f"{describe()} changed after it was listed; leave the source alone and run again with --resume"
                    )
                if size > MOST_SAMPLE_BYTES:
                    raise UnreadableSample(f"{describe()} has {size} bytes; no image file has")
                if len(self._buffer) < size:
                    self._buffer = memoryview(bytearray(2 * size))
                count = os.readv(file.fileno(), [self._buffer[:size]]) if size else 0
        except FileNotFoundError as error:
            raise SourceChanged(
                f"{describe()} vanished after it was listed; put it back and run again with --resume"
            ) from error
        except OSError as error:
            raise UnreadableSample(f"cannot read {describe()}: {error.strerror}") from error
        return self._buffer[:count]


def _folders(path: bytes) -> list[bytes]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(b"."))


def _files(path: bytes) -> Iterator[bytes]:
    """Files below `path`, sorted folder by folder; hidden ones are left out."""
    for base, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(b"."))
        below = os.path.relpath(base, path)
        for name in sorted(names):
            if not name.startswith(b"."):
                yield name if below == b"." else os.path.join(below, name)  # noqa: PTH118


def _portable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").hex()


def _native(text: str) -> str:
    return bytes.fromhex(text).decode("utf-8", "surrogateescape")
