"""Read files by byte range, as long as they are unchanged since listing; and code shared by all array formats."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_descriptor
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import is_picture
from hpcdl.data.sources.base.glance import files_of, folders_of, has_folders_of_images
from hpcdl.data.sources.base.labels import (
    NUMBER,
    class_numbers,
    named_labels,
    names_remark,
    numbered,
    plausible,
    sparse,
)
from hpcdl.data.sources.base.source import (
    CHANGED_ADVICE,
    ROW,
    Array,
    IndexWriter,
    Rows,
    SourceChanged,
    SourceFacts,
    SourceSpec,
    UnreadableSample,
)
from hpcdl.data.sources.base.splits import by_names, is_clutter, remarks_on_missing, some, split_in

_BATCH = 1 << 14
_MOST_CHANNELS = 16
_STORED = {"uint8": "uint8", "float16": "float16", "float32": "float32", "float64": "float32"}
"""The type in which pixels of a type are stored."""
MOST_ARRAY_BYTES = 0x7FFFF000
"""Limit for a sample: Linux reads no more in one call."""
_MOST_OPEN = 64
"""Most files that one reader keeps open: a source may have a file for each sample."""
LAST = "last"
"""The value of --sample-axis for samples along the last axis of arrays."""


def turned_remark(name: str) -> str:
    """Return the remark for the user that an array was turned."""
    return f"{name}: its last axis counts samples"


class FlatFiles:
    """Reads byte ranges of files that must not change, into one buffer that is valid until the next read."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._buffer = memoryview(bytearray())

    def read(self, path: str, stamp: int, offset: int, num_bytes: int) -> memoryview:
        """Read `num_bytes` of `path` from `offset`; SourceChanged unless its modification time still is `stamp`."""
        try:
            if path not in self._open:
                if len(self._open) >= _MOST_OPEN:
                    os.close(self._open.pop(next(iter(self._open))))
                self._open[path] = open_descriptor(path)
            status = os.fstat(self._open[path])
            if status.st_mtime_ns != stamp:
                raise changed(path)
            if num_bytes > min(status.st_size - offset, MOST_ARRAY_BYTES):  # check before memory is allocated
                raise UnreadableSample(
                    f"{path} at byte {offset}: {num_bytes} bytes are announced; cut short or damaged"
                )
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

    def read_rows(self, path: str, stamp: int, offset: int, row_numbers: Array, out: Array) -> bool:
        """Fill `out` with the rows `row_numbers`, which start at `offset` and have its row size; one copy each.

        Returns False if that fails: `read` reports the reason.
        """
        view = out.reshape(-1).view(np.uint8).data
        size = len(view) // max(1, len(row_numbers))
        if not size:
            return False
        with contextlib.suppress(UnreadableSample, SourceChanged, OSError):
            # Opens the file and compares its time; no byte is read.
            self.read(path, stamp, offset, 0)
            file, preadv = self._open[path], os.preadv
            starts = (offset + row_numbers * size).tolist()
            return all(
                preadv(file, [view[at : at + size]], start) == size
                for at, start in zip(range(0, len(view), size), starts, strict=True)
            )
        return False


def changed(path: str) -> SourceChanged:
    """Return the error for a file that has changed since listing."""
    return SourceChanged(f"{path} changed after it was listed; {CHANGED_ADVICE}")


def stamp_of(path: str | Path) -> int:
    """Return the modification time of a file in ns."""
    return Path(path).stat().st_mtime_ns


def add_numbered(index: IndexWriter, split: str, file: int, labels: Array, *, first: int = 0) -> None:
    """List samples numbered from `first` within `file`; `labels` (N,) may be of any integer type."""
    for start in range(0, len(labels), _BATCH):
        part = labels[start : start + _BATCH]
        rows = np.zeros(len(part), ROW)
        rows["place"] = np.arange(first + start, first + start + len(part))
        rows["label"], rows["file"] = part, file
        index.add(split, rows)


class ArrayFiles:
    """The content of an array source's files, listed one by one; `kept` says how to read a file's samples."""

    def __init__(self, index: IndexWriter) -> None:
        self._index = index
        self._files: list[str] = []
        self._stamps: list[int] = []
        self._kinds: set[tuple[tuple[int, int, int], str]] = set()
        self._labels: list[tuple[str, Array]] = []

    def __len__(self) -> int:
        return len(self._files)

    def add(self, split: str, labels: Array, kind: tuple[tuple[int, int, int], str], kept: str, path: Path) -> None:
        """Add a file's samples; `kind` is their shape and type, `path` the file that must not change any more."""
        self._kinds.add(kind)
        self._labels.append((split, labels))
        self._files.append(kept)
        self._stamps.append(stamp_of(path))

    def facts(self, location: Path, least_classes: int = 0, called: Mapping[int, str] | None = None) -> SourceFacts:
        """List the samples added; SourceError if there are none, or if they differ in shape or type.

        `called`: the source's names of labels.
        """
        if not self._files:
            raise SourceError(f"{location} holds no images of this format; check its files' names, or --format")
        if len(self._kinds) != 1:
            kinds = ", ".join(f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype in sorted(self._kinds))
            raise SourceError(f"{location}: the files differ in shape or type of their images: {kinds}")
        ((shape, dtype),) = self._kinds
        label_values = np.unique(np.concatenate([np.unique(labels) for _, labels in self._labels]))
        names, remarks = named_labels(label_values, called or {})
        label_remarks = [names_remark("labels", names)] if called else remarks
        scaled = (
            [] if dtype == "uint8" else [f"images of {dtype} keep their values: training scales bytes alone to 0..1"]
        )
        if dtype == "uint8" and not is_picture(shape):
            scaled.append(
                f"images: bytes of {'x'.join(map(str, shape))} are taken as pictures of {shape[2]} channels, which "
                "training scales to 0..1; for volumes name the arrays, --input PATH=NAME and --target PATH=NAME"
            )
        for number, (split, labels) in enumerate(self._labels):
            add_numbered(self._index, split, number, np.searchsorted(label_values, labels) if remarks else labels)
        return SourceFacts(
            class_names=names if remarks or called else class_numbers(max(least_classes, len(names))),
            samples_are="pixels",
            sample_shape=shape,
            dtype=dtype,
            files=self._files,
            stamps=self._stamps,
            remarks=[*label_remarks, *scaled],
        )


class EncodedFiles:
    """Image files within other files (archives, tables, records), listed with a class each, a number or a name."""

    def __init__(self, index: IndexWriter, spec: SourceSpec) -> None:
        self._index, self._location, self._target_kind = index, spec.location, spec.target_kind
        self._folders = spec.format == "zip"
        """Whether labels are names of folders, which are made on purpose."""
        self._files: list[tuple[str, Path, Rows, list[Any]]] = []

    def add_file(self, split: str, path: Path, samples: Iterable[tuple[int, int, Any]]) -> None:
        """Add the images of a file: (offset, size in bytes, label) each."""
        row_numbers, sizes, labels = array("q"), array("q"), []
        shared: dict[Any, Any] = {}
        for offset, size, label in samples:
            row_numbers.append(offset)
            sizes.append(size)
            # One object for equal labels saves memory; by exact type, because True and 1.0 are equal to 1.
            labels.append(shared.setdefault(label, label) if type(label) in (int, str) else label)
        rows = np.zeros(len(labels), ROW)
        rows["place"], rows["size"] = row_numbers, sizes
        self._files.append((split, path, rows, labels))

    def facts(self, class_names: Sequence[str] = ()) -> SourceFacts:
        """List the images added; SourceError if labels are not classes."""
        all_labels = [label for *_, labels in self._files for label in labels]
        kinds = {str if isinstance(value, str) else int: value for value in all_labels}
        odd = [value for value in all_labels if not isinstance(value, int | str) or isinstance(value, bool)]
        if any(isinstance(value, Mapping | bytes) for value in odd):
            raise SourceError(
                f"{self._location}: the labels are files, such as masks, not numbers or names: give --input "
                "IMAGE=image --target MASK=mask, with the names of both"
            )
        if odd or len(kinds) > 1:
            raise SourceError(
                f"{self._location}: a label is a whole number or a name, alike for all images; found "
                f"{' and '.join(map(shown, odd[:1] or kinds.values()))}; for quantities give --target-kind regression"
            )
        labels = set(all_labels)
        if not class_names and not self._target_kind and not plausible(len(labels), len(all_labels)):
            raise SourceError(
                f"{self._location}: the labels are {len(labels)} different ones of {len(all_labels)} images: are these "
                "classes? Give --target-kind class, or --target-kind regression for quantities"
            )
        asks = str in kinds and not class_names and not self._target_kind and not self._folders
        words = labels if asks else set()
        if words and all(map(NUMBER.fullmatch, words)) and any(float(word) % 1 for word in words):
            raise SourceError(
                f"{self._location}: labels are numbers as text, such as {shown(min(words))}: classes or quantities? "
                "Give --target-kind class or --target-kind regression"
            )
        if not class_names and not self._target_kind and int in kinds and sparse(labels):
            raise SourceError(
                f"{self._location}: the labels are {len(labels)} different numbers from {min(labels)} to "
                f"{max(labels)}: classes or quantities? Give --target-kind class or --target-kind regression"
            )
        names, remarks = _named(labels, class_names, self._location)
        numbers = {own: number for number, own in enumerate(sorted(labels))} if remarks or labels & set(names) else {}
        for number, (split, _, rows, own) in enumerate(self._files):
            rows["label"], rows["file"] = [numbers.get(label, label) for label in own], number
            self._index.add(split, rows)
        return SourceFacts(
            class_names=names,
            samples_are="files",
            files=[str(path) for _, path, *_ in self._files],
            stamps=[stamp_of(path) for _, path, *_ in self._files],
            remarks=remarks,
        )


def _named(labels: set[Any], names: Sequence[str], where: str) -> tuple[Sequence[str], list[str]]:
    """Return class names, and a remark if labels are renumbered; `names` are those stored in the format."""
    if labels and all(isinstance(label, str) for label in labels):
        return sorted(labels), []
    if not names:
        return numbered(np.array(sorted(labels), np.int64))
    if labels and not 0 <= min(labels) <= max(labels) < len(names):
        none = "; -1 may stand for no label: leave such a split out (--leave-out test), or take these samples out"
        raise SourceError(
            f"{where}: labels go from {min(labels)} to {max(labels)}, but there are {len(names)} classes"
            f"{none if min(labels) == -1 else ''}"
        )
    return names, []


def files_by_split(location: Path, suffixes: Sequence[str], spec: SourceSpec) -> dict[str, list[Path]]:
    """Return the files with these endings by split, from file or folder names; SourceError if some name no split."""
    paths = _found(location, suffixes)
    if not paths:
        return {}
    return {UNSPLIT: paths} if location.is_file() else by_names(paths, spec, location)


def _found(location: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files with these endings: in a folder, its folder `data`, or folders some of which name splits."""
    if location.is_file():
        return [location] if location.name.lower().endswith(tuple(suffixes)) else []
    paths = _with_suffix(location, suffixes)
    # Data sets of Hugging Face keep their files there.
    if not paths and (location / "data").is_dir():
        paths = _with_suffix(location / "data", suffixes)
    if paths:
        return paths
    folders = [path for path in folders_of(location) if not is_clutter(path.name)]
    if not any(split_in(folder.name) for folder in folders):
        return []
    return [path for folder in folders for path in _with_suffix(folder, suffixes)]


def remarks_on_files(location: Path, suffixes: Sequence[str]) -> list[str]:
    """Return remarks on files missing from a numbered set, and on folders that are not searched."""
    if location.is_file():
        return []
    paths = _found(location, suffixes)
    return [
        *remarks_on_missing(paths),
        *remarks_on_folders(paths, location, lambda folder: _with_suffix(folder, suffixes)),
    ]


def remarks_on_folders(read: Sequence[Path], location: Path, files_in: Callable[[Path], Sequence[Path]]) -> list[str]:
    """Return a remark on folders beside the files `read` with such files (by `files_in`); none for a single file."""
    if location.is_file():
        return []
    parents = {path.parent for path in read}
    beside = [folder for parent in sorted(parents) for folder in folders_of(parent) if folder not in parents]
    names = some(
        str(folder.relative_to(location)) for folder in beside if not is_clutter(folder.name) and files_in(folder)
    )
    return [f"not read: the folders {names}, which hold such files too"] if names else []


def is_made_of(location: Path, suffixes: Sequence[str], *, alone: bool = False) -> bool:
    """Return whether `location` consists of files with these endings, rather than of folders of images.

    `alone`: there are no other files beside them.
    """
    paths = _found(location, suffixes)
    if not paths or location.is_file():
        return bool(paths)
    folders = {path.parent for path in paths}
    if alone and any(_with_suffix(folder, suffixes) != _with_suffix(folder, [""]) for folder in folders):
        return False
    return not any(map(has_folders_of_images, folders))


def _with_suffix(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    paths = [path for path in files_of(folder) if not is_clutter(path.name)]
    return [path for path in paths if path.name.lower().endswith(tuple(suffixes))]


def is_image(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Return whether an array is by default taken as images rather than series, spectra or volumes."""
    called_so = path.rsplit("/", 1)[-1].lower() in ("images", "image", "pixels")
    if dtype.name not in _STORED or min(shape, default=0) < 1:
        return called_so and dtype.name in _STORED
    if len(shape) == 4:
        return min(shape[1], shape[3]) <= _MOST_CHANNELS
    return len(shape) == 3 and (called_so or dtype == np.uint8)


def axes_remark(shape: Sequence[int], first: bool, axes: str) -> list[str]:
    """Return a remark if the channels of images of `shape` (height, width, channels) were moved unasked."""
    if not first or axes != "auto":
        return []
    height, width, channels = shape
    return [
        f"images: {channels}x{height}x{width} in the source, taken as channels first, and stored as "
        f"{height}x{width}x{channels}; --axes nhwc leaves the axes as they are"
    ]


def channels_last(shape: Sequence[int], axes: str, where: str) -> tuple[tuple[int, int, int], bool]:
    """Return (height, width, channels) of a sample of `shape`, and whether its channels come first."""
    if min(shape, default=0) < 1:
        raise SourceError(f"{where}: a sample has the shape {tuple(shape)}; images have at least one pixel")
    if len(shape) == 2:
        return (shape[0], shape[1], 1), False
    if len(shape) != 3:
        raise SourceError(f"{where}: a sample has the shape {tuple(shape)}; images have two or three axes")
    first = axes == "nchw" or (axes == "auto" and shape[0] <= _MOST_CHANNELS and shape[0] < shape[2])
    # One and three channels are so usual that a side of 1 or 3 is taken for channels unasked.
    either = max(shape[0], shape[2]) <= _MOST_CHANNELS and not {shape[0], shape[2]} & {1, 3}
    square = shape[1] == (shape[2] if first else shape[0])
    if axes == "auto" and ((either and not square) or (not first and shape[2] > _MOST_CHANNELS)):
        raise SourceError(f"{where}: cannot tell the channels among {tuple(shape)}; give --axes nhwc or nchw")
    return ((shape[1], shape[2], shape[0]), True) if first else ((shape[0], shape[1], shape[2]), False)


def stored_dtype(dtype: np.dtype[Any], where: str) -> str:
    """Return the type in which pixels of `dtype` are stored: uint8, float16 or float32 (also for float64)."""
    if dtype.name not in _STORED:
        raise SourceError(
            f"{where}: pixels are {dtype.name}, images are {', '.join(_STORED)}; name the arrays with --input "
            "PATH=NAME and --target PATH=NAME to keep them as they are"
        )
    return _STORED[dtype.name]
