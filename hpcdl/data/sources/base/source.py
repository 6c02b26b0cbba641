"""The interface of a source: it lists its samples once, on disk, and then reads any of them by its row in the list.

Each format supports some flags about its source; others are refused by name.

The list is a folder: `rows.SPLIT` holds one fixed-size row per sample, `names` file names, each ended by a zero byte.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdl.core.errors import NO_PLACE, HpcdlError, SourceError, UsageError
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import counted
from hpcdl.data.format.manifest import FILE_NAME as MANIFEST_NAME
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources import SOURCES
from hpcdl.data.sources.base.glance import IMAGE_SUFFIXES, files_of, has_folders_of_images, remedy_for

Array = npt.NDArray[Any]
Content = bytes | memoryview
MOST_SAMPLE_BYTES = 1 << 30
"""A larger image file or record is refused: a sample must fit into memory several times."""


FILES_LISTED = ("image-folder", "csv")
"""Formats whose samples are single files, with size, time and inode in their rows."""
_LOOKED_INTO = 16
CHANGED_ADVICE = (
    "shards of before and after would be mixed; leave the source unchanged, and shard it again into an empty folder"
)


class UnreadableSample(HpcdlError):
    """One sample cannot be read; `--on-error skip` omits it."""


class NotFinite(UnreadableSample):
    """An image holds NaN or infinity; `--nan` chooses what to do with it."""

    def __init__(self, count: int = 0) -> None:
        more = f", {counted(count, 'sample')} in all" if count else ""
        super().__init__(
            f"it holds values that are not finite (NaN or infinity){more}; --nan skip leaves such samples out, --nan "
            "keep takes them"
        )


class SourceChanged(HpcdlError):
    """The source has changed since its samples were listed."""


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """All arguments of a source's constructor, as plain values that can be passed to another process.

    `checks`: refuse files of a wrong type during listing (off if they are to be skipped). `asks`: question what names
    of columns and arrays may mean (off for data that were written before, whose shards are mended). `normalised`:
    training will scale numbers.
    """

    format: str
    location: str
    samples: int | None = None
    image_field: str | None = None
    label_field: str | None = None
    axes: str = "auto"
    head: str = "auto"
    inputs: Sequence[str] = ()
    targets: Sequence[str] = ()
    target_kind: str = ""
    categories: Sequence[str] = ()
    known_words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The words of another data folder by column, in the order of their codes."""
    nan: str = "stop"
    split_names: str = "auto"
    leave_out: Sequence[str] = ()
    sample_is: str = ""
    sample_axis: str = "first"
    follow_links: bool = False
    image_size: Sequence[int] | None = None
    channels: int | None = None
    seed: int = 0
    checks: bool = True
    asks: bool = True
    normalised: bool = False
    work: str = ""
    """Folder for what a source unpacks; it exists until the writing ends."""
    reader: str = ""
    """FILE.py:NAME of the user's own reader; `reader_digest` is the SHA-256 of its file: no other content ever runs."""
    reader_digest: str = ""
    workers: int = 1
    """Most processes that read items of that reader during listing."""


@dataclass(frozen=True, kw_only=True)
class ArrayLocation:
    """The position of an array in `file`: its values are contiguous from byte `offset`; `shape` is a sample's.

    `offsets` names a file of int64 if lengths vary: the start of each sample, counted along the first axis.
    """

    file: str
    offset: int
    shape: Sequence[int]
    dtype: str
    offsets: str = ""


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """The results of listing: `sample_shape` (H, W, C) is None for image files; `files` are indexed by rows.

    `samples_are` gives the form of samples: `pixels` (arrays), `files` (JPEG, PNG, ... bytes) or `fields`. With
    `fields`, rows index parts of the source: the `arrays` of part p start at p x len(fields), one for each of the
    `fields`, and `stamps` belong to the arrays. `remarks` tell the user what was decided; `skipped` names samples that
    listing omitted because they cannot be read.
    """

    class_names: Sequence[str]
    samples_are: str
    sample_shape: Sequence[int] | None = None
    dtype: str = "uint8"
    files: Sequence[str] = ()
    stamps: Sequence[int] = ()
    fields: Sequence[Field] = ()
    arrays: Sequence[ArrayLocation] = ()
    remarks: Sequence[str] = ()
    skipped: Sequence[str] = ()
    left_out: Sequence[str] = ()
    """Splits omitted because of --leave-out."""
    linked: Sequence[str] = ()
    """Files outside the source that its links lead to."""
    num_samples: int = 0
    decodes: bool = False
    """Whether image files become a field: --image-size and --channels then apply."""


class Source(Protocol):
    """One format."""

    def __init__(self, spec: SourceSpec) -> None: ...

    @staticmethod
    def recognises(location: Path) -> bool:
        """Return whether the files at `location` are of this format, judging by their names and first bytes."""

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List every sample, split by split (`all` for an undivided source); SourceError says what is wrong."""

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Content | Array:
        """Return the sample of a row: the bytes of a file, or an (H, W, C) array; valid until the next read.

        Raises UnreadableSample or SourceChanged.
        """

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the name of a row's sample for messages."""


class FieldsReader(Protocol):
    """The additional methods of a source of fields."""

    def read_fields(self, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """Return the fields of a row's sample, valid until the next read; UnreadableSample, SourceChanged."""

    def lengths(self, rows: Any, number: int, facts: SourceFacts) -> Array:
        """Return the length of field `number` of each row's sample along its first axis."""


def open_source(spec: SourceSpec) -> Source:
    """Return the source of a spec, whose format must be determined."""
    source: Source = SOURCES.load(spec.format)(spec)
    return source


@contextmanager
def examining(location: str) -> Iterator[None]:
    """Turn errors of reading a source into SourceError: no permission, circular links, too little memory.

    NumPy does not warn of NaN and infinity, which have questions of their own.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    except MemoryError as error:
        raise SourceError(f"{location} needs more memory than there is; is it damaged?") from error
    except OSError as error:
        if error.errno in NO_PLACE:
            raise  # it is the list of samples that could not be written
        raise SourceError(f"cannot read {os.fsdecode(error.filename or location)}: {error.strerror}") from error


def check_location(location: str) -> Path:
    """Return the file or folder at `location`; SourceError if there is none, or for a pipe or device."""
    path = Path(location).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if path.exists():
        raise SourceError(f"{location} is neither a file nor a folder; give one of them, or synthetic:NAME")
    raise SourceError(f"no such source: {location}; give a folder or file, or synthetic:NAME")


def _ask_of_images_beside(path: Path, name: str) -> None:
    """Raise SourceError if array files are beside folders of images: they may be a model, a mean, or the data."""
    if name in ("hdf5", "numpy", "tfrecord") and path.is_dir() and has_folders_of_images(path):
        raise SourceError(
            f"{path} holds files of {name} and folders of images: give --format {name}, or --format image-folder for a "
            "class per folder"
        )


def _ask_of_shards(path: Path) -> None:
    """Raise SourceError for a data folder of hpcdl, or one of its splits: the arrays alone lack names of classes."""
    data_folder = next((folder for folder in (path, path.parent) if (folder / MANIFEST_NAME).is_file()), None)
    if data_folder is None or not path.is_dir():  # most sources: no folder of theirs is listed for this
        return
    if any(any(path.glob(pattern)) for pattern in ("shard-*.h5", "*/shard-*.h5")):
        raise SourceError(
            f"{data_folder} is a data folder of `hpcdl shard` already: shard its first source again. To take its plain "
            "arrays, without names of classes, give --format hdf5"
        )


def _ask_of_two(path: Path, name: str) -> None:
    """Raise SourceError if a folder holds files of two formats: one of them would be ignored silently."""
    kinds = ("numpy", "tfrecord", "hdf5", "webdataset", "parquet")
    if name not in kinds or not path.is_dir():
        return
    other = next((kind for kind in kinds if kind != name and SOURCES.load(kind).recognises(path)), None)
    if other:
        raise SourceError(
            f"{path} holds files of {name} and of {other}: give --format {name} or --format {other}; the others are "
            "then not read"
        )


def recognise(location: str) -> str:
    """Return the format of the source at `location`; SourceError if none fits."""
    from hpcdl.data.format.dataset import PREFIX

    if location.startswith(PREFIX):
        return "synthetic"
    path = check_location(location)
    with examining(location):
        if path.is_dir() and not any(path.iterdir()):
            raise SourceError(f"the source folder {location} is empty; it needs a folder of images for each class")
        # Before the formats, of which HDF5 would take the shards for a source.
        _ask_of_shards(path)
        for name in SOURCES:
            if SOURCES.load(name).recognises(path):
                _ask_of_images_beside(path, name)
                _ask_of_two(path, name)
                return name
        if remedy := remedy_for(path) if path.is_file() else _remedy_for_all(path):
            raise SourceError(f"{location} has no format that hpcdl reads; {remedy}")
        advice = _one_of(path)
    raise SourceError(f"cannot tell the format of {location}; give --format, one of: {', '.join(SOURCES)}{advice}")


def _remedy_for_all(folder: Path) -> str:
    """Return what the first files of a folder are that no source reads, and what to do, if that is one for all."""
    files = (file for file in files_of(folder) if not file.name.startswith("."))
    first = list(itertools.islice(files, _LOOKED_INTO))
    if any(file.name.lower().endswith(IMAGE_SUFFIXES) for file in first):
        return ""  # has advice of its own
    remedies = {remedy_for(file) for file in first}
    remedy = remedies.pop() if len(remedies) == 1 else ""
    return f"of its file {first[0].name}: {remedy}" if remedy else ""


def _one_of(path: Path) -> str:
    """Return advice to give one of a folder's files, if one of the first is of a known format; else a reader."""
    first = [*itertools.islice(files_of(path), _LOOKED_INTO)] if path.is_dir() else []
    if first and all(file.name.lower().endswith(IMAGE_SUFFIXES) for file in first):
        return (
            "; of images alone, put each class's into a folder of its own, or list files and labels in a .csv (hpcdl "
            "docs own-table)"
        )
    if path.is_file() and _seems_table(path):
        return "; it seems a table: then give --format table, and --head none if no first line names the columns"
    formats = [next((name for name in SOURCES if SOURCES.load(name).recognises(file)), "") for file in first]
    if formats.count("table") > 1:
        return f"; for the tables alone, such as {first[formats.index('table')].name}, give --format table"
    for file, name in zip(first, formats, strict=True):
        if name:
            return f"; or give one of its files, such as {file} ({name})"
    return "; for any other format write a reader: --reader FILE.py:NAME (hpcdl docs own-format)"


def _seems_table(path: Path) -> bool:
    """Return whether the first two lines of a file are text with the same number of commas, semicolons or tabs."""
    with open_regular(path) as file:
        lines = [file.readline(_LONGEST_LINE) for _ in range(2)]
    counts = [{mark: line.count(mark) for mark in (b",", b";", b"\t")} for line in lines]
    return b"\0" not in b"".join(lines) and counts[0] == counts[1] and any(counts[0].values())


_LONGEST_LINE = 1 << 16
_FIELDS = ("input", "target", "target_kind", "nan")
_ARRAYS = (*_FIELDS, "image_field", "label_field", "axes")
_NAMES = ("split_names", "leave_out")
_WORDS = ("categories", "categories_of")
_TAKEN: dict[str, tuple[str, ...]] = {
    "synthetic": ("samples",),
    "csv": ("image_field", "label_field", "target_kind", "nan", "leave_out"),
    "table": (*_FIELDS, *_WORDS, *_NAMES, "head"),
    "cifar10": (),
    "cifar100": (),
    "mnist": (),
    "numpy": (*_ARRAYS, *_NAMES, "sample_is", "sample_axis"),
    "tfds": (*_FIELDS, "image_field", "label_field"),
    "tfrecord": (*_FIELDS, "image_field", "label_field", *_NAMES),
    "hdf5": (*_ARRAYS, *_NAMES, "sample_is", "sample_axis", "follow_links"),
    "webdataset": (*_FIELDS, "image_field", "label_field", *_NAMES),
    "parquet": (*_FIELDS, *_WORDS, "image_field", "label_field", *_NAMES),
    "text": (*_FIELDS, "label_field", *_NAMES),
    "memmap": _FIELDS,
    "reader": (*_FIELDS, "leave_out"),
    "zip": ("target_kind", "nan", *_NAMES),
    "image-folder": ("input", "target", "target_kind", "nan", *_NAMES),
}
"""The flags that each format takes; a format added by a site gets every flag."""
_UNSET = (None, False, "auto", (), "names", "first")  # the defaults of these flags
_REMEDIES = {
    "image_field": "images are the files of the folders",
    "label_field": "a folder's name is the class of its images; a .csv of file,label lists others",
    "axes": "the axes of its images are known",
    "sample_is": "it is for several HDF5 or .npz files",
    "follow_links": "links in folders are followed",
}


def check_flags(name: str, chosen: Any) -> None:
    """Raise UsageError for the first given setting in `chosen` that the format `name` does not support."""
    if name not in _TAKEN:
        return
    all_flags = dict.fromkeys(flag for taken in _TAKEN.values() for flag in taken)
    for flag in all_flags:
        value = getattr(chosen, flag, None)
        # --samples is refused where the source is known not to be synthetic (write/listing.py).
        if flag in _TAKEN[name] or value in _UNSET or (flag == "samples"):
            continue
        flags_text = ", ".join(_typed(taken) for taken in _TAKEN[name]) or "none of the flags about a source"
        remedy = f" ({_REMEDIES[flag]})" if flag in _REMEDIES and name == "image-folder" else ""
        raise UsageError(f"{_typed(flag)} is not for --format {name}{remedy}; leave it out. It takes {flags_text}")
    if chosen.categories_of and not chosen.categories:
        raise UsageError(
            "--categories-of keeps the numbers of words, and no words are asked for; give --categories too"
        )
    named = chosen.input or chosen.target
    if named and (chosen.image_field or (chosen.label_field and name != "text")):
        flag = "image_field" if chosen.image_field else "label_field"
        raise UsageError(f"{_typed(flag)} beside --input or --target: name everything with --input and --target")


def knows(flag: str, name: str) -> bool:
    """Return whether the format `name` takes this flag."""
    return name not in _TAKEN or flag in _TAKEN[name]


def _typed(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


ROW = np.dtype([("place", "<i8"), ("size", "<i8"), ("label", "<i8"), ("stamp", "<i8"), ("file", "<i8")])
"""place: position of the sample (in `names`, or its number or offset in file `file`); size: encoded bytes, or 0;
stamp: modification time in ns if the sample is a single file, or 0."""
Rows = npt.NDArray[Any]
_CHUNK = 1 << 16
_AT_ONCE, _FEW = 32 << 20, 64
"""A list of at most this many bytes is read whole if more than one row in this many is wanted."""


class IndexWriter:
    """Writes rows split by split; a split exists once it has been named."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = (folder / "names").open("wb")
        self._files: dict[str, BinaryIO] = {}
        self._digest, self._state = xxhash.xxh3_64(), xxhash.xxh3_64()
        self.counts: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._names.close()
        for file in self._files.values():
            file.close()

    def add(self, split: str, rows: Rows) -> None:
        """Append rows (dtype ROW)."""
        if split not in self._files:
            self._files[split] = (self._folder / f"rows.{split}").open("wb")
            self.counts[split] = 0
        content = rows.tobytes()
        self._files[split].write(content)
        self.counts[split] += len(rows)
        stable = rows.copy()
        # A copy of the source has other times and is the same source; times are in `state`.
        stable["stamp"] = 0
        self._digest.update(split.encode() + b"\0" + stable.tobytes())

    def renumber(self, labels: Array) -> None:
        """Replace the label of each row by its position among all `labels`, int64 in rising order."""
        self.include(labels.tobytes())
        for file in self._files.values():
            file.flush()
            rows = np.memmap(file.name, ROW, "r+") if file.tell() else np.empty(0, ROW)
            for first in range(0, len(rows), _CHUNK):
                part = rows[first : first + _CHUNK]
                part["label"] = np.searchsorted(labels, part["label"])

    def add_files(
        self,
        split: str,
        file: int | list[int],
        label: int | list[int],
        entries: Sequence[tuple[bytes, os.stat_result]],
    ) -> None:
        """Append samples that are files, each with name and state; `file` and `label` are common to all or one each."""
        rows = np.zeros(len(entries), ROW)
        start = self._names.tell()
        for row, (name, stat) in zip(rows, entries, strict=True):
            row["place"], row["size"], row["stamp"] = start, stat.st_size, stat.st_mtime_ns
            start += len(name) + 1
            self.note(stat)
        rows["label"], rows["file"] = label, file
        content = b"".join(name + b"\0" for name, _ in entries)
        self._names.write(content)
        self._digest.update(content)
        self.add(split, rows)

    def note(self, stat: os.stat_result) -> None:
        """Include the state of one more file in `state`."""
        self._state.update(b"%d %d %d\0" % (stat.st_size, stat.st_mtime_ns, stat.st_ino))

    def state(self) -> str:
        """Return a checksum of the files' sizes, times and inodes."""
        return self._state.hexdigest()

    def include(self, content: bytes) -> None:
        """Include `content` in the fingerprint."""
        self._digest.update(content)

    def fingerprint(self) -> str:
        """Return a checksum of the list: names, sizes and labels."""
        return self._digest.hexdigest()


class Index:
    """Reads rows and names by number with pread; nothing is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[name]

    def rows(self, split: str, numbers: npt.NDArray[np.int64]) -> Rows:
        """Return the rows with these numbers."""
        descriptor, size = self._descriptor(f"rows.{split}"), ROW.itemsize
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes <= _AT_ONCE and len(numbers) * _FEW >= num_bytes // size:
            return np.frombuffer(os.pread(descriptor, num_bytes, 0), ROW)[numbers]
        result = np.empty(len(numbers), ROW)  # filled in place: a list of millions of rows is five times as large
        # One small read for each of a few rows; below, one pass over the whole list for many.
        if len(numbers) * _FEW < num_bytes // size:
            buffer = result.view(np.uint8).data
            for at, number in enumerate(numbers):
                os.preadv(descriptor, [buffer[at * size : (at + 1) * size]], int(number) * size)
            return result
        order, first = np.argsort(numbers), 0
        wanted = numbers[order]
        for rows in self.chunks(split):
            begin, end = np.searchsorted(wanted, (first, first + len(rows)))
            result[order[begin:end]] = rows[wanted[begin:end] - first]
            first += len(rows)
        return result

    def chunks(self, split: str) -> Iterator[Rows]:
        """Yield all rows in order, some thousand at a time."""
        descriptor, offset = self._descriptor(f"rows.{split}"), 0
        while content := os.pread(descriptor, _CHUNK * ROW.itemsize, offset):
            offset += len(content)
            yield np.frombuffer(content, ROW)

    def name(self, start: int) -> bytes:
        """Return the name that starts at `start`."""
        # Linux has no longer paths (PATH_MAX).
        content = os.pread(self._descriptor("names"), 4096, start)
        return content.partition(b"\0")[0]

    def numbers(self, split: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row numbers at `positions` of a divided split (`members.SPLIT`, int64)."""
        descriptor = self._descriptor(f"members.{split}")
        return np.frombuffer(b"".join(os.pread(descriptor, 8, at * 8) for at in positions.tolist()), "<i8")

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
