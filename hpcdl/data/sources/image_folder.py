"""JPEG or PNG files in a folder per class (ImageNet's layout), optionally divided into train, val and test folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcdl.core.errors import SourceError
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import format_bytes
from hpcdl.data.sources.base.glance import HEAD_BYTES, IMAGE_SUFFIXES, check_is_image
from hpcdl.data.sources.base.source import (
    CHANGED_ADVICE,
    MOST_SAMPLE_BYTES,
    Array,
    Index,
    IndexWriter,
    SourceChanged,
    SourceFacts,
    SourceSpec,
    UnreadableSample,
)
from hpcdl.data.sources.base.splits import is_clutter
from hpcdl.data.sources.layouts.folders import (
    ClassFolder,
    FolderWalk,
    LeftOut,
    PicturePairs,
    ask_of_list,
    class_folders,
)

MOST_ODD = 500
"""Listing opens at most this many files without an image ending; planning checks some of the others, writing all.
Each check costs the file system's metadata server an open."""
_BATCH = 4096
_SPARE_BYTES = 256 << 20
"""Above this size the buffer is not made larger than the file that needs it."""


class ImageFolderSource:
    """A folder with a folder of image files for each class."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec, self._root = spec, Path(spec.location)
        self._files, self._pairs = WholeFiles(), PicturePairs(spec)
        self._index: Index | None = None
        self._checked = 0

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a folder that contains folders."""
        if not location.is_dir():
            return False
        with os.scandir(location) as entries:
            return any(entry.is_dir() and not is_clutter(entry.name) for entry in entries)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the files of every class, sorted by name."""
        if not self._root.is_dir():
            raise SourceError(f"{self._root} is not a folder; it needs a folder of images for each class")
        if self._spec.inputs or self._spec.targets:
            return self._pairs.scan(index)
        out = LeftOut()
        chosen = class_folders(self._root, self._spec, out)
        walk = FolderWalk(self._root, self._spec, out)
        names = sorted({folder.name for folder in chosen}, key=os.fsencode)
        numbers = {name: number for number, name in enumerate(names)}
        for number, folder in enumerate(chosen):
            self._add_class(index, number, numbers[folder.name], folder, walk)
        if not sum(index.counts.values()):
            raise SourceError(f"{self._root} holds no files in its class folders; there is nothing to shard")
        walk.ask_of_levels(names)
        ask_of_list(str(self._root), out.files, names, "give that file as SOURCE")
        remarks = out.lines()
        files = [_portable(folder.path) for folder in chosen]
        return SourceFacts(class_names=names, samples_are="files", files=files, remarks=remarks)

    def read(self, row: Any, facts: SourceFacts, index: Index) -> memoryview:
        """Return the bytes of an image file."""
        return self._files.read(self._path(row, facts, index), row, lambda: self.describe(row, facts, index))

    def read_fields(self, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """Return the pixels of an image and of its mask."""
        index = self._index = self._index or Index(Path(self._spec.work))
        return self._pairs.read_fields(self.read(row, facts, index), row, facts)

    def lengths(self, rows: Any, number: int, facts: SourceFacts) -> Array:
        """Never called: no field of images varies in length."""
        raise AssertionError("images and masks are of one shape each")

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the path of the file below the source."""
        path = os.path.relpath(self._path(row, facts, index), os.fsencode(self._root))
        return os.fsdecode(path).encode("utf-8", "replace").decode()

    def _path(self, row: Any, facts: SourceFacts, index: Index) -> bytes:
        if facts.fields:
            return os.path.join(os.fsencode(self._root), index.name(int(row["place"])))  # noqa: PTH118
        folder = os.fsencode(self._root / _native(facts.files[int(row["file"])]))
        return os.path.join(folder, index.name(int(row["place"])))  # noqa: PTH118  bytes: names need not be UTF-8

    def _add_class(self, index: IndexWriter, number: int, label: int, folder: ClassFolder, walk: FolderWalk) -> None:
        for split, files in walk.files(folder):
            batch: list[tuple[bytes, os.stat_result]] = []
            for name, entry in files:
                if self._spec.checks and not is_called_image(name) and self._checked < MOST_ODD:
                    check_magic(entry.path, entry.path)
                    self._checked += 1
                batch.append((os.fsencode(name), entry.stat()))
                if len(batch) == _BATCH:
                    index.add_files(split, number, label, batch)
                    batch = []
            index.add_files(split, number, label, batch)


def is_called_image(name: str) -> bool:
    """Return whether a file has the name ending of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def check_magic(path: str | Path, text: str) -> None:
    """Raise SourceError unless the file starts like an image; the message says what it is, if known."""
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise SourceError(f"cannot read {text}: {error.strerror}") from error
    check_is_image(head, text)


class WholeFiles:
    """Reads whole files into one buffer, valid until the next read."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray())

    def read(self, path: bytes, row: Any, describe: Callable[[], str]) -> memoryview:
        """Read a listed file; SourceChanged if size or time differ from the row's, UnreadableSample if that fails."""
        size = int(row["size"])
        try:
            with open_regular(os.fsdecode(path)) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size != size or stat.st_mtime_ns != int(row["stamp"]):
                    raise SourceChanged(f"{describe()} changed after it was listed; {CHANGED_ADVICE}")
                if size > MOST_SAMPLE_BYTES:
                    raise UnreadableSample(
                        f"{describe()} has {format_bytes(size)}; an image file has at most "
                        f"{format_bytes(MOST_SAMPLE_BYTES)}"
                    )
                if len(self._buffer) < size:
                    # Twice the size, so that files a little larger do not each need a new buffer.
                    self._buffer = memoryview(bytearray(min(2 * size, max(size, _SPARE_BYTES))))
                count = os.readv(file.fileno(), [self._buffer[:size]]) if size else 0
        except FileNotFoundError as error:
            raise SourceChanged(f"{describe()} vanished after it was listed; {CHANGED_ADVICE}") from error
        except OSError as error:
            raise UnreadableSample(f"cannot read {describe()}: {error.strerror}") from error
        return self._buffer[:count]


def _portable(name: str) -> str:
    # The job is stored as JSON, which cannot hold names that are not UTF-8.
    return name.encode("utf-8", "surrogateescape").hex()


def _native(text: str) -> str:
    return bytes.fromhex(text).decode("utf-8", "surrogateescape")
