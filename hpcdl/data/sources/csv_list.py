"""A table of image files with a class or a quantity each; paths are absolute, or relative to the table.

The column of files is found by its values. The columns of labels and splits are found by their names in the header, or
by position: file,label or file,label,split.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.chosen import remarks_on_unused
from hpcdl.data.sources.base.labels import (
    NUMBER,
    numbered,
    plausible,
    question_of_quantities,
    question_of_words,
    sparse,
    spellings,
)
from hpcdl.data.sources.base.names import is_id, names_group, names_quantity
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array, Index, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import SPLIT_WORDS, leaves_out_split, left_out, names_division, some, typed
from hpcdl.data.sources.checks.groups import remark_on_groups
from hpcdl.data.sources.checks.missing import NAN_SKIPPED
from hpcdl.data.sources.checks.numbers import doubts, unscaled
from hpcdl.data.sources.image_folder import MOST_ODD, WholeFiles, check_magic, is_called_image
from hpcdl.data.sources.layouts.images import PictureField, quantity_field

LONGEST_LINE = 1 << 20
_LABELS = (
    "label", "labels", "class", "classes", "target", "targets", "category", "y", "class_name", "label_name", "class_id",
    "classid", "label_id", "diagnosis", "species", "breed",
)  # fmt: skip
_SPLITS = ("split", "set", "subset", "partition", "usage", "dataset", "phase")
_BATCH = 4096
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# Numbers of 18 digits fit int64, those of 19 not all.
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NAMED_BY_SUFFIX = re.compile(r".*\.[A-Za-z][A-Za-z0-9]{1,5}", re.DOTALL)
_ADDRESS = re.compile(r"[^@\s/]+@[^@\s/]+|[^\s/]+\.(?:com|org|net|edu|gov)", re.IGNORECASE)
"""Addresses of e-mail and of sites, which end as files do."""
_DATE = re.compile(r"[0-9 .:/-]+|#?n/a|#div/0!", re.IGNORECASE)
"""Values with a slash that are no files: dates, missing values."""
_SEPARATOR = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([;,\t])"?\r?\n')
"""A first line that names the delimiter, for Excel."""
_SPLIT = re.compile(r"\w[\w-]{0,63}")
"""A split's name is also the name of a folder."""
_Batch = dict[str, list[tuple[int, int, tuple[bytes, os.stat_result]]]]
"""Line number, label and file, by split."""


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The number of each column by its use; `names` are those in the header, if there is one."""

    count: int
    file: int
    label: int
    split: int | None
    names: Sequence[str]


class CsvSource:
    """Image files that a table lists."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec, self._table = spec, Path(spec.location)
        self._root = os.fsencode(self._table.parent)
        self._files = WholeFiles()
        self._picture = PictureField(spec)
        self._quantities: Array | None = None
        self._index: Index | None = None
        self.named: set[str] = set()
        """Splits and columns that the table names."""
        self._missing: dict[str, None] = {}
        """Files that are not there, which --on-error skip leaves out."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a file called *.csv or *.tsv that lists files."""
        return location.is_file() and location.suffix.lower() in (".csv", ".tsv") and is_list_of_files(location)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the rows of the table, in its order."""
        columns = self._columns()
        labels = [label for _, label, _ in self._lines(columns)]
        if not labels:
            raise SourceError(f"{self._table} lists no files; it needs lines of file,label")
        remarks = self._remarks(columns)
        left = sorted(self._left())
        remarks += [f"left out: the split {split}" for split in left]
        remarks += self._remarks_on_groups(columns)
        self.named.update(columns.names)
        if self._are_quantities(labels, columns):
            self._list(index, columns, [0] * len(labels))
            values = np.array([float(label) for label in labels], np.float32)
            if not np.isfinite(values).all():
                line = int(np.argmin(np.isfinite(values)))
                raise SourceError(
                    f"{self._table}: the quantity {shown(labels[line])} is not finite; leave that line out"
                )
            values.tofile(Path(self._spec.work) / "array0")
            paths = (path for path, _, _ in self._lines(columns) if path not in self._missing)
            picture = self._picture.field("image", (self._open(path) for path in paths))
            name = columns.names[columns.label] if columns.names else "target"
            fields = [picture, quantity_field(name)]
            remarks.append(f"labels are quantities from {values.min():g} to {values.max():g}")
            remarks += self._remarks_on_quantities(fields[1], values, columns)
            remarks += self._remarks_on_repeats(columns, quantities=True)
            return SourceFacts(
                class_names=["all"],
                samples_are="fields",
                sample_shape=picture.shape,
                dtype=picture.dtype,
                fields=fields,
                decodes=True,
                skipped=[*self._missing],
                remarks=remarks,
            )
        remarks += self._remarks_on_repeats(columns)
        names, numbers, lines = _classes(labels, self._spec.target_kind, str(self._table))
        self._list(index, columns, [numbers[label] for label in labels])
        return SourceFacts(class_names=names, samples_are="files", skipped=[*self._missing], remarks=[*remarks, *lines])

    def read(self, row: Any, facts: SourceFacts, index: Index) -> memoryview:
        """Return the bytes of an image file."""
        path = os.path.join(self._root, index.name(int(row["place"])))  # noqa: PTH118
        return self._files.read(path, row, lambda: self.describe(row, facts, index))

    def read_fields(self, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """Return the pixels and the quantity of a row."""
        index = self._index = self._index or Index(Path(self._spec.work))
        if self._quantities is None:
            self._quantities = np.fromfile(Path(self._spec.work) / "array0", np.float32)
        return [self._picture.read(self.read(row, facts, index), facts.fields[0]), self._quantities[int(row["file"])]]

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the file's name as in the table."""
        return index.name(int(row["place"])).decode("utf-8", "replace")

    def lengths(self, rows: Any, number: int, facts: SourceFacts) -> Array:
        """Never called: no field of images varies in length."""
        raise AssertionError("images and quantities are of one shape each")

    def _open(self, name: str) -> tuple[str, bytes]:
        path = os.fsdecode(os.path.join(self._root, os.fsencode(name)))  # noqa: PTH118
        with open_regular(path) as file:
            return name, file.read()

    def _list(self, index: IndexWriter, columns: _Columns, labels: Sequence[int]) -> None:
        batch: _Batch = {}
        checked = 0
        for count, ((name, _, split), label) in enumerate(zip(self._lines(columns), labels, strict=True)):
            path = os.path.join(self._root, os.fsencode(name))  # noqa: PTH118  bytes: names need not be UTF-8
            try:
                stat = os.stat(path)  # noqa: PTH116
            except (OSError, ValueError) as error:  # ValueError: a zero byte
                # Others, such as a missing permission, concern more than one file.
                if isinstance(error, FileNotFoundError) and not self._spec.checks:
                    self._missing[name] = None
                    continue
                why = error.strerror if isinstance(error, OSError) else error
                advice = self._found_below(name) or self._is_no_file(name, columns)
                advice = advice or "; correct the list, or give --on-error skip"
                raise SourceError(f"{self._table}: cannot read {shown(name)}: {why}{advice}") from error
            if self._spec.checks and not is_called_image(name) and checked < MOST_ODD:
                check_magic(os.fsdecode(path), name)
                checked += 1
            entries = batch.setdefault(split, [])
            # The number of the line goes into the row's `file`: a quantity is found by it.
            entries.append((count, label, (os.fsencode(name), stat)))
            if count % _BATCH == _BATCH - 1:
                _add(index, batch)
        _add(index, batch)
        if self._missing and all(name in self._missing for name, _, _ in self._lines(columns)):
            name = next(iter(self._missing))
            raise SourceError(f"{self._table}: no file of it is there, such as {shown(name)}{self._found_below(name)}")

    def _is_no_file(self, name: str, columns: _Columns) -> str:
        """Say what a name is instead of a file's: an address, or the head of a list that was joined to this one."""
        if _URL.match(name):
            return "; it is an address: copy the files here, and list their paths"
        if columns.names and name == columns.names[columns.file]:
            return "; it repeats the first line: were lists joined? Then take it out"
        return ""

    def _found_below(self, name: str) -> str:
        """Say where the file is, if a folder beside the table contains it, or if the list comes from Windows."""
        slashed = name.replace("\\", "/")
        if slashed != name and "\0" not in name and (self._table.parent / slashed).exists():
            return f"; {shown(slashed)} is there: write / in place of \\ in the list"
        if not name.startswith("/") and "\0" not in name and (self._table.parent.parent / name).exists():
            return (
                f"; it is relative to the folder above, {shown(str(self._table.parent.parent))}: move the table there"
            )
        below = (folder for folder in self._table.parent.iterdir() if folder.is_dir() and "\0" not in name)
        holder = next((folder for folder in below if (folder / name).exists()), None)
        return (
            f"; it is in {holder.name}: write {holder.name}/ before the names, or move the table there"
            if holder
            else ""
        )

    def _are_quantities(self, labels: Sequence[str], columns: _Columns) -> bool:
        """Return whether labels are measured numbers; SourceError if that is unclear and no --target-kind was given."""
        flag_value = self._spec.target_kind
        different = set(labels)
        odd = next((label for label in different if not NUMBER.fullmatch(label)), None)
        if flag_value == "regression" and odd is not None:
            raise SourceError(
                f"{self._table}: the label {shown(odd)} is not a number; correct it, or leave out "
                "--target-kind regression"
            )
        if flag_value:
            return flag_value == "regression"
        what = shown(columns.names[columns.label]) if columns.names else "the second column"
        if all(map(is_called_image, different)):
            raise SourceError(
                f"{self._table}: {what} names images, such as {shown(min(different))}: masks? Put images and masks "
                "into two folders, under the same names, and give --input images=image --target masks=mask. For "
                "classes called so give --target-kind class"
            )
        if question := question_of_words(sorted(different)) or question_of_quantities(sorted(different)):
            raise SourceError(f"{self._table}: {what} holds {question}")
        if odd is None and not all(_WHOLE.fullmatch(label) for label in different):
            if any(float(label) % 1 for label in different):
                return True
            raise SourceError(
                f"{self._table}: {what} holds whole numbers written as {shown(min(different))}: classes or quantities? "
                "Give --target-kind class or --target-kind regression"
            )
        # Codes such as 0412 are classes, however far apart their numbers are.
        padded = any(label.lstrip("+-").startswith("0") and len(label) > 1 for label in different)
        called = bool(columns.names) and names_quantity(columns.names[columns.label]) and len(different) > 2
        if odd is None and not padded and (called or sparse(map(int, different))):
            raise SourceError(
                f"{self._table}: {what} holds {len(different)} different whole numbers from {min(map(int, different))} "
                f"to {max(map(int, different))}: classes or quantities? Give --target-kind class or --target-kind "
                "regression"
            )
        if not plausible(len(different), len(labels)) or (columns.names and is_id(columns.names[columns.label])):
            remedy = "" if odd is not None else ", or --target-kind regression for quantities"
            raise SourceError(
                f"{self._table}: {what} holds {len(different)} different values in {len(labels)} lines: are these "
                f"classes? Give --target-kind class{remedy}, or --label-field with another column"
            )
        return False

    def _remarks(self, columns: _Columns) -> list[str]:
        used = {columns.file, columns.label, columns.split}
        unused = [name for number, name in enumerate(columns.names) if number not in used]
        division = next((name for name in unused if columns.split is None and names_division(name)), None)
        if division is not None and not left_out(division, self._spec.leave_out):
            raise SourceError(
                f"{self._table}: does the column {shown(division)} divide the files into training and held-out ones? "
                f"Then call it split, with the words train, val and test. If not, give --leave-out {typed(division)}"
            )
        if not columns.names:
            return []
        remarks = [f"files in the column {columns.names[columns.file]}, labels in {columns.names[columns.label]}"]
        kept = [name for name in unused if columns.split is None or not names_division(name)]
        return remarks + remarks_on_unused(kept, self._spec, "column")

    def _remarks_on_groups(self, columns: _Columns) -> list[str]:
        """Return a remark if files of one patient, or what else the table names, are in several splits."""
        number = next((number for number, name in enumerate(columns.names) if names_group(name)), None)
        if number is None or columns.split is None or number in (columns.label, columns.file):
            return []
        rows = ((self._split_of(at, fields, columns), fields) for at, fields in itertools.islice(self._rows(), 1, None))
        words = ((split, [fields[number].strip()]) for split, fields in rows if split not in self._left())
        return remark_on_groups(columns.names[number], words)

    def _left(self) -> list[str]:
        return [split for split in self.named if leaves_out_split(split, self._spec.leave_out)]

    def _remarks_on_quantities(self, field: Field, values: Array, columns: _Columns) -> list[str]:
        """Return what is doubtful in the quantities, which are those of the lines."""
        splits = np.array([split for _, _, split in self._lines(columns)])
        names = [split for split in dict.fromkeys(splits.tolist()) if split not in self._left()]
        arrays = []
        for number, split in enumerate(names):
            own, path = values[splits == split], Path(self._spec.work) / f"quantities{number}"
            own.tofile(path)
            arrays.append(PlacedArray(path=path, shape=own.shape, dtype=own.dtype))
        lines = [line for line in (unscaled(field, arrays), *doubts(field, arrays, names)) if line] if arrays else []
        return [line.replace(NAN_SKIPPED, "take these lines out") for line in lines]  # a list refuses NaN

    def _remarks_on_repeats(self, columns: _Columns, *, quantities: bool = False) -> list[str]:
        """Return remarks on files listed more than once; SourceError if their labels differ and are classes."""
        # 8 bytes for each name; only names that seem to repeat are kept and compared below.
        keys = np.array([xxhash.xxh3_64_intdigest(os.fsencode(name)) for name, *_ in self._lines(columns)], np.uint64)
        often, counts = np.unique(keys, return_counts=True)
        repeated = set(often[counts > 1].tolist())
        if not repeated:
            return []
        seen: dict[str, tuple[str, str]] = {}
        over_splits: dict[str, None] = {}
        unlike: dict[str, None] = {}
        for (name, label, split), key in zip(self._lines(columns), keys.tolist(), strict=True):
            if key not in repeated:
                continue
            other, before = seen.setdefault(name, (label, split))
            if other != label and quantities:
                unlike[name] = None
            elif other != label and self._spec.target_kind != "class":
                raise SourceError(
                    f"{self._table}: {shown(name)} is listed as {shown(other)} and as {shown(label)}: several labels "
                    "of one picture need an array of 0 and 1 for each (--reader FILE.py:NAME); correct the list, or "
                    "give --target-kind class for a sample of each line"
                )
            if before != split:
                over_splits[name] = None
        remarks = [f"{len(seen)} files are listed more than once, such as {shown(next(iter(seen)))}"] if seen else []
        remarks += [f"files with different quantities in two lines: {some(unlike)}"] if unlike else []
        return remarks + ([f"files in more than one split: {some(over_splits)}"] if over_splits else [])

    def _columns(self) -> _Columns:
        lines = [fields for _, fields in itertools.islice(self._rows(), 2)]
        if not lines:
            raise SourceError(f"{self._table} lists no files; it needs lines of file,label")
        head = _is_head(lines, self._table.parent)
        names = [field.strip() for field in lines[0]] if head else []
        sample = lines[-1]
        if names and len(sample) > 1 and len(sample) != len(names):
            raise SourceError(f"{self._table} line 2: {len(sample)} fields; {len(names)} as in the head")
        files = [number for number, field in enumerate(sample) if _is_file(field, self._table.parent)] or [0]
        flag_value = self._spec.image_field
        file = self._named(flag_value, names) if flag_value else files[0]
        if len(files) > 1 and not flag_value and names:
            raise SourceError(
                f"{self._table}: the columns {some(names[number] for number in files)} name files: which are the "
                f"images? Give --image-field, and --label-field for the labels"
            )
        label = self._label_column(names, file, len(sample))
        split = self._split_column(names, {file, label}, len(sample))
        return _Columns(count=len(lines[0]), file=file, label=label, split=split, names=names)

    def _named(self, flag_value: str, names: Sequence[str]) -> int:
        if flag_value not in names:
            known = f"it has {some(names)}" if names else "it has no head; write one that names the columns"
            raise SourceError(f"{self._table} has no column {shown(flag_value)}; {known}")
        return names.index(flag_value)

    def _label_column(self, names: Sequence[str], file: int, count: int) -> int:
        if self._spec.label_field:
            return self._named(self._spec.label_field, names)
        if count == 1:
            raise SourceError(f"{self._table} line 1: 1 fields; write file,label or file,label,split")
        matches = [number for number, name in enumerate(names) if name.lower() in _LABELS and number != file]
        if len(matches) == 1:
            if names[matches[0]] == "y" and "x" in names:
                raise SourceError(
                    f"{self._table}: x and y may be one point, or x a number beside the label; give --label-field y "
                    "for y alone, and for both a reader that yields them as one array (--reader FILE.py:NAME)"
                )
            return matches[0]
        others = [number for number in range(count) if number != file]
        if names and len(others) > 1:
            usual = [number for number in others if names[number].lower() not in _SPLITS]
            if len(usual) != 1:
                raise SourceError(
                    f"{self._table}: which column is the label? Give --label-field, one of "
                    f"{some(names[number] for number in others)}"
                )
            return usual[0]
        return others[0]

    def _split_column(self, names: Sequence[str], taken: set[int], count: int) -> int | None:
        if not names:
            return 2 if count == 3 else None
        matches = [number for number, name in enumerate(names) if name.lower() in _SPLITS and number not in taken]
        return matches[0] if matches else None

    def _lines(self, columns: _Columns) -> Iterator[tuple[str, str, str]]:
        rows = self._rows()
        for number, fields in itertools.islice(rows, 1, None) if columns.names else rows:
            split = self._split_of(number, fields, columns)
            self.named.add(split)
            if not leaves_out_split(split, self._spec.leave_out):
                yield self._line(number, fields, columns, split)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        number = 0
        mark = delimiter(self._table)
        with open_regular(self._table) as file:
            try:
                for number, fields in enumerate(csv.reader(text_lines(file), delimiter=mark), 1):
                    if fields:
                        yield number, fields
            except (csv.Error, ValueError) as error:
                raise SourceError(f"{self._table} line {number + 1}: {error}") from error

    def _split_of(self, number: int, fields: list[str], columns: _Columns) -> str:
        split = UNSPLIT
        if columns.split is not None and columns.split < len(fields):
            split = fields[columns.split].strip().lower()
        if not _SPLIT.fullmatch(split):
            raise SourceError(
                f"{self._table} line {number}: a split cannot be called {shown(split)}; write train, val or test"
            )
        return SPLIT_WORDS.get(split, split)

    def _line(self, number: int, fields: list[str], columns: _Columns, split: str) -> tuple[str, str, str]:
        least = max(columns.file, columns.label, columns.split or 0) + 1
        right = len(fields) == columns.count if columns.names else least <= len(fields) <= 3
        right = right or (not columns.names and len(fields) in (2, 3))
        for at, what in ((columns.file, "file"), (columns.label, "label")):
            if right and not fields[at].strip():
                without = f", or give --leave-out {typed(split)} for a split without labels" if split != UNSPLIT else ""
                raise SourceError(f"{self._table} line {number}: the {what} is empty; write one{without}")
        if not right:
            wanted = f"{columns.count} as in the head" if columns.names else "write file,label or file,label,split"
            raise SourceError(f"{self._table} line {number}: {len(fields)} fields; {wanted}")
        return fields[columns.file].strip(), fields[columns.label].strip(), split


def _classes(labels: Sequence[str], target_kind: str, where: str) -> tuple[Sequence[str], dict[str, int], list[str]]:
    """Return class names, the number of each label, and remarks; classes keep their numbers or are sorted by name."""
    different = sorted(set(labels))
    whole = all(_WHOLE.fullmatch(label) for label in different)
    spelled = spellings(different, target_kind, where) if whole else None
    if spelled is None:
        return different, {label: number for number, label in enumerate(different)}, []
    values = np.unique(np.array([int(label) for label in different], np.int64))
    names, remarks = numbered(values)
    numbers = {label: int(np.searchsorted(values, int(label))) if remarks else int(label) for label in different}
    return [spelled.get(int(name), name) for name in names], numbers, remarks


def _add(index: IndexWriter, batch: _Batch) -> None:
    for split, entries in batch.items():
        index.add_files(
            split,
            [count for count, _, _ in entries],
            [label for _, label, _ in entries],
            [file for *_, file in entries],
        )
    batch.clear()


def is_list_of_files(path: Path) -> bool:
    """Return whether each line of a table, after its header, names a file."""
    with open_regular(path) as file:
        try:
            lines = list(itertools.islice(csv.reader(text_lines(file), delimiter=delimiter(path)), 3))
        except (csv.Error, ValueError):
            return False
    lines = [fields for fields in lines if fields]
    if not lines:
        return path.suffix.lower() == ".csv"
    if _names_file_and_label(lines[0]):
        return True
    if not _is_head(lines[:2], path.parent):
        # Names of columns may look so too (Sepal.Width, S.No), and no further line does.
        return len(lines[0]) <= 3 and all(_is_file(fields[0], path.parent) for fields in lines[:2])
    return len(lines) > 1 and any(_is_file(field, path.parent) for field in lines[1])


def _names_file_and_label(head: Sequence[str]) -> bool:
    return {field.strip().lower() for field in head[:2]} in (
        {"file", "label"},
        {"filename", "label"},
        {"path", "label"},
    )


def _is_head(lines: Sequence[Sequence[str]], folder: Path) -> bool:
    """Return whether a first line is a header: no field is a file or a number, and further lines follow."""
    if _names_file_and_label(lines[0]):
        return True
    if any(NUMBER.fullmatch(field.strip()) for field in lines[0]):
        return False
    if _names_column_of_images(lines, folder):
        return True
    if any(_is_file(field, folder) for field in lines[0]):
        return False
    return len(lines) > 1 and any(_is_file(field, folder) for field in lines[1])


def _names_column_of_images(lines: Sequence[Sequence[str]], folder: Path) -> bool:
    """Return whether a name with a point (Image.Name) stands above a file called as an image, and is no file itself."""
    for name, value in zip(lines[0], lines[1] if len(lines) > 1 else (), strict=False):
        if is_called_image(value.strip()):
            own = name.strip()
            is_file = "/" in own or is_called_image(own) or os.path.exists(folder / own)  # noqa: PTH110  long texts too
            return not is_file
    return False


def _is_file(field: str, folder: Path) -> bool:
    """Return whether a value names a file, by its ending; a path without one must be in the table's folder."""
    text = field.strip()
    # No path is longer (PATH_MAX): a text with a slash may be.
    if NUMBER.fullmatch(text) or _DATE.fullmatch(text) or " - " in text or len(text) >= 4096:
        return False
    if _NAMED_BY_SUFFIX.fullmatch(text):
        return _ADDRESS.fullmatch(text) is None or is_called_image(text)
    return "/" in text and (text.startswith("/") or os.path.exists(folder / text))  # noqa: PTH110  long texts too


def delimiter(path: Path) -> str:
    """Return the delimiter: by the file's ending, or for a .csv without commas, the one in its first line."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    with open_regular(path) as file:
        head = file.readline(LONGEST_LINE)
    if named := _SEPARATOR.fullmatch(head):
        return named[1].decode()
    if usual.encode() in head:
        return usual
    return next((other for other in ";\t," if other.encode() in head), usual)


def text_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of `file`, which may contain names that are not UTF-8; ValueError if they are unusable."""
    start = b"\xef\xbb\xbf"
    while line := file.readline(LONGEST_LINE):
        if start and b"\r" in line.rstrip(b"\r\n"):
            raise ValueError("its lines end with a carriage return (CR) alone; save it with line feeds (LF)")
        if len(line) == LONGEST_LINE:
            raise ValueError(f"it is longer than {LONGEST_LINE} bytes")
        if start and _SEPARATOR.fullmatch(line):
            line = b"\n"  # keeps the numbers of the lines below
        yield line.removeprefix(start).decode("utf-8", "surrogateescape")
        start = b""
