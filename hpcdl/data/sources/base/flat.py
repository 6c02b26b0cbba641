"""Read files by byte range, as long as they are unchanged since listing; and code shared by all array formats."""

from __future__ import annotations

import contextlib
import os
import re
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
_MAPPED_SHOWN = 5
_PADDED = re.compile(r"-?0[0-9]+")
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
FEW_CLASSES = 50
_LEAST_SAMPLES = 4
"""The user is asked about more classes than FEW_CLASSES if they have fewer samples each than this."""
_QUANTITY = re.compile(
    r"[<>~]?[+-]?(?:[0-9.,]+ +[^\W\d_]{1,4}[\u00b2\u00b3]?"
    r"|[0-9]+[.,][0-9]+ ?(?:[^\W\d_]{1,4}|%)|[0-9]+(?:[:/-][0-9]+)+(?:[ T].*)?)"
)
"""5 kg, 0.5kg, 12:03, 2024-01-05, 20-29."""
_GROUP = re.compile(r"(?:patient|subject|participant|person|user|speaker|animal|group|cluster|donor|writer)s?(?:id)?")
"""Names of what several samples belong to."""
_TIME = re.compile(r"(?:date|time|datetime|timestamp|year)s?")
_MEASURED = re.compile(
    r"ages?|prices?|costs?|scores?|ratings?|quality|counts?|energy|energies|mass|masses|weights?|heights?|lengths?"
    r"|temperatures?|pressures?|speeds?|velocity|velocities|distances?|durations?|salary|income|amounts?|quantity"
    r"|intensity|redshift|dose|doses|bmi|mpg|points"
)
"""Last words in names of quantities, which whole numbers may be too."""
_WIDE, _FEWEST_FILLED = 100, 10
"""The user is asked about class numbers in a range of _WIDE and more that is not filled to a tenth, and about as many
as _FEWEST_FILLED with gaps."""
_STORED = {"uint8": "uint8", "float16": "float16", "float32": "float32", "float64": "float32"}
"""The type in which pixels of a type are stored."""
MOST_CLASSES = 1_000_000
_MOST_GROUPS = 1_000_000
"""Most patients, or what else a column names, that are kept in memory to find those in several splits."""
CLASS_LISTS = ("class_names", "classes", "label_names", "target_names", "class_labels", "category_names", "categories")
"""Names of arrays that list the classes of integer labels."""
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
        raise SourceError(f"{where}: labels go from {min(labels)} to {max(labels)}, but there are {len(names)} classes")
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


def numbered(labels: Array) -> tuple[list[str], list[str]]:
    """Return the class names of labels `labels` (sorted), and a remark if labels are renumbered.

    Labels that begin with 0 keep their numbers, even if a few are missing.
    """
    if not len(labels) or labels[0] == 0:
        return class_numbers(int(labels[-1]) + 1 if len(labels) else 0), []
    pairs = ", ".join(f"{value} -> {number}" for number, value in enumerate(labels[:_MAPPED_SHOWN].tolist()))
    more = ", ..." if len(labels) > _MAPPED_SHOWN else ""
    remarks = f"labels are renumbered: {pairs}{more}; the old ones are the classes' names"
    return [str(value) for value in labels.tolist()], [remarks]


def named_labels(labels: Array, called: Mapping[int, str]) -> tuple[list[str], list[str]]:
    """Return the class names of labels (sorted) by the source's names of them, and a remark if they are renumbered."""
    wanted = labels.tolist()
    if set(wanted) <= set(called) and not set(range(max(wanted) + 1)) <= set(called):
        return [called[number] for number in wanted], [""]  # has gaps: numbers between are no classes
    names, remarks = numbered(labels)
    return [called.get(int(number), number) for number in names], remarks


def names_remark(name: str, names: Sequence[str]) -> str:
    """Return the remark for the user that classes have names from the source."""
    return f"{name}: classes are called as in the source: {some(names)}"


def spellings(labels: Iterable[str], target_kind: str, where: str) -> dict[int, str] | None:
    """Return the spelling of integers with leading zeros (codes such as 0412), by number.

    Returns None if two labels are one number and the user declared each a class; without that, raises SourceError.
    """
    spelled: dict[int, str] = {}
    for label in sorted(labels):
        earlier = spelled.setdefault(int(label), label)
        # +1 beside 1 is no code, but one number with its sign.
        if earlier != label and "+" not in earlier + label:
            if target_kind == "class":
                return None
            raise SourceError(
                f"{where}: the labels {shown(earlier)} and {shown(label)} are one number, written in two ways: one "
                "class or two? Write them alike, or give --target-kind class to keep both"
            )
    return {number: label for number, label in spelled.items() if _PADDED.fullmatch(label)}


def words_among_numbers(values: Iterable[str]) -> list[str]:
    """Return the words among different values most of which are numbers; none if words are over a third."""
    different = sorted(set(values))
    words = [value for value in different if not NUMBER.fullmatch(value.strip())]
    return words if 3 * len(words) <= len(different) else []


def question_of_words(names: Sequence[str]) -> str:
    """Return the question about few words among classes that are numbers otherwise; empty if there are none."""
    words = words_among_numbers(names)
    if not words:
        return ""
    numbers = some(name for name in names if name not in words)
    return (
        f"{some(words)} among numbers ({numbers}): a class like them, or a number that is missing or mistyped? Correct "
        "it, take such samples out, or give --target-kind class: then each is a class"
    )


def question_of_quantities(names: Sequence[str]) -> str:
    """Return the question about classes that are all quantities with a unit, times, dates or ranges; else empty."""
    if not names or not all(map(_QUANTITY.fullmatch, names)):
        return ""
    return (
        f"{some(names)}: classes, or quantities, times or ranges? Write those as numbers, without units, or give "
        "--target-kind class: then each is a class"
    )


def is_image(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Return whether an array is by default taken as images rather than series, spectra or volumes."""
    called_so = path.rsplit("/", 1)[-1].lower() in ("images", "image", "pixels")
    if dtype.name not in _STORED or min(shape, default=0) < 1:
        return called_so and dtype.name in _STORED
    if len(shape) == 4:
        return min(shape[1], shape[3]) <= _MOST_CHANNELS
    return len(shape) == 3 and (called_so or dtype == np.uint8)


def name_classes(labels: Array, num_samples: int) -> bool:
    """Return whether labels are by default taken as class numbers rather than quantities or masks."""
    if labels.shape not in ((num_samples,), (num_samples, 1)) or labels.dtype.kind not in "iufb":
        return labels.shape[:1] != (num_samples,)  # an error later, not a field
    values = labels.reshape(-1)
    return values.dtype.kind != "f" or bool((np.isfinite(values) & (np.trunc(values) == values)).all())


def plausible(num_classes: int, num_samples: int) -> bool:
    """Return whether `num_classes` different labels can be classes without asking the user."""
    return num_classes <= FEW_CLASSES or num_classes * _LEAST_SAMPLES <= num_samples


def sparse(values: Iterable[int]) -> bool:
    """Return whether whole numbers are hardly those of classes: quantities, codes or marks.

    Such are few in a wide range (0, 1000, 4000), and many with gaps that do not begin with 0 or 1 (28, 30, 31...), or
    that lack over a third of the numbers between.
    """
    different = set(values)
    if not different:
        return False
    low, span = min(different), max(different) - min(different)
    missing = span + 1 - len(different)
    gaps = missing > 0 if low not in (0, 1) else 3 * missing > span + 1
    return (gaps and len(different) >= _FEWEST_FILLED) or span >= max(_WIDE, _FEWEST_FILLED * len(different))


def axes_remark(shape: Sequence[int], first: bool, axes: str) -> list[str]:
    """Return a remark if the channels of images of `shape` (height, width, channels) were moved unasked."""
    if not first or axes != "auto":
        return []
    height, width, channels = shape
    return [
        f"images: {channels}x{height}x{width} in the source, taken as channels first, and stored as "
        f"{height}x{width}x{channels}; --axes nhwc leaves the axes as they are"
    ]


_OF_IDS = ("id", "ids", "uid", "uuid", "idx", "index", "number", "nr", "key", "serial", "timestamp")
"""Last words in names of ids."""
_OF_ROWS = re.compile(r"row_?names?|(?:s|sr|sl|serial|row|record|obs|sample)_?(?:no|num)|row|rows|record")
"""Names of the numbers of rows; R calls them rownames."""


def is_id(name: str) -> bool:
    """Return whether a column or array is named like an id of samples, patients or events, and not like a class."""
    if names_class(name):
        return False
    parts = [part for part in re.split(r"[\W_]+", _in_words(name)) if part]
    if _OF_ROWS.fullmatch("_".join(parts)):
        return True
    if re.fullmatch(r"unnamed: ?[0-9]+(?:\.[0-9]+)?", name.lower()):  # so pandas calls the index of a table read again
        return True
    parts = parts[:-1] if parts[-1:] in (["x"], ["y"]) else parts  # which pandas.merge adds
    return bool(parts) and parts[-1] in _OF_IDS


def names_class(name: str) -> bool:
    """Return whether a column or array is named like class numbers (`class_id`, `labelId`)."""
    return re.fullmatch(r"(?:class|label|category|target|species|type)_?ids?", _in_words(name)) is not None


def names_by_number(words: Sequence[str], labels: Array) -> dict[int, str]:
    """Return the class of each label by a list of all classes, from 0 on, or from 1 on; empty if that is unclear."""
    if not len(labels) or len(set(words)) != len(words):
        return {}
    low, high = int(labels.min()), int(labels.max())
    first = 0 if low == 0 and high < len(words) else 1 if low == 1 and high == len(words) else None
    return {} if first is None else dict(enumerate(words, first))


def names_quantity(name: str) -> bool:
    """Return whether a column or array is named like a quantity (`age`, `num_cells`, `wine quality`)."""
    words = re.split(r"[\W_]+", _in_words(name))
    return _MEASURED.fullmatch(words[-1]) is not None or (words[0] in ("num", "n", "number") and len(words) > 1)


def names_group(name: str) -> bool:
    """Return whether a column or array is named like what several samples belong to (`patient`, `subject_id`)."""
    words = re.split(r"[\W_]+", _in_words(name))
    kept = [word for word in words if word not in ("id", "ids", "number", "nr", "no")]
    return len(kept) == 1 and _GROUP.fullmatch(kept[0]) is not None


def names_time(name: str) -> bool:
    """Return whether a column or array is named like the time of a sample."""
    return _TIME.fullmatch(name.rsplit("/", 1)[-1].lower()) is not None


def remark_on_groups(name: str, words_of: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return a remark if values of a column `name` occur in several splits; `words_of` yields splits and values."""
    first: dict[str, str] = {}
    shared: dict[str, str] = {}
    for split, words in words_of:
        for word in words:
            if word and first.setdefault(word, split) != split:
                shared.setdefault(word, split)
        if len(first) > _MOST_GROUPS:
            break
    if not shared:
        unseen = len(first) > _MOST_GROUPS
        return (
            [f"{shown(name)} has over {_MOST_GROUPS:,} values: splits that share one were not found"] if unseen else []
        )
    word, split = next(iter(shared.items()))
    return [
        f"{len(shared)} of {len(first)} values of {shown(name)} are in several splits, such as {shown(word)} in "
        f"{first[word]} and {split}: if samples of one belong together, results are too good; divide by {name} instead"
    ]


def _in_words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit("/", 1)[-1]).lower()


def ask_of_labels(name: str, labels: Array, target_kind: str, where: str) -> None:
    """Raise SourceError if image labels (N,) may be quantities or sample ids, and no --target-kind was given."""
    if target_kind == "class":
        return
    different = np.unique(labels)
    if is_id(name):
        why = "is called as numbers of samples are"
    elif not plausible(len(different), len(labels)):
        why = f"holds {len(different)} different whole numbers in {len(labels)} samples"
    elif len(different) > 2 and names_quantity(name):
        why = f"is called as a quantity, and holds whole numbers ({different[0]:g} to {different[-1]:g})"
    elif labels.dtype.kind in "iu" and sparse(different.tolist()):
        why = f"holds {len(different)} different whole numbers from {different[0]} to {different[-1]}"
    elif labels.dtype.kind == "f" and not np.array_equal(different, np.arange(len(different))):
        why = f"is {labels.dtype.name}, and holds whole numbers only ({different[0]:g} to {different[-1]:g})"
    else:
        return
    raise SourceError(
        f"{where} {why}: classes or quantities? Give --target-kind class or --target-kind regression, or name another "
        "array with --label-field"
    )


def class_numbers(count: int) -> list[str]:
    """Return the names of classes that have only numbers; SourceError if they are too many."""
    if count > MOST_CLASSES:
        raise SourceError(f"there is a label {count - 1}, and no data set has over {MOST_CLASSES} classes; correct it")
    return [str(number) for number in range(count)]


def checked_labels(labels: Array, num_samples: int, where: str) -> Array:
    """Return `labels` as (N,) integers; SourceError if they are not labels of `num_samples` samples."""
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if flat.ndim != 1 or len(flat) != num_samples:
        raise SourceError(
            f"{where}: labels have the shape {labels.shape}; one number for each of {num_samples} samples is needed"
        )
    if flat.dtype.kind not in "iufb":
        raise SourceError(f"{where}: labels are {flat.dtype}; whole numbers are needed")
    # Beyond 2^53 float64 has no odd numbers: labels may have been rounded already. NaN fails too.
    if flat.dtype.kind == "f" and not (np.abs(flat) < 2**53).all():
        raise SourceError(f"{where}: labels are {flat.dtype} and not all whole numbers")
    whole = flat.astype(np.int64)
    if not np.array_equal(whole, flat):
        raise SourceError(f"{where}: labels are {flat.dtype} and not all whole numbers")
    return whole


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
