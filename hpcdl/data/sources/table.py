"""CSV tables with a column for each quantity; the type of a column is found from its values in all files."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.chosen import TARGET_NAMES
from hpcdl.data.sources.base.glance import IMAGE_SUFFIXES, files_of, folders_of
from hpcdl.data.sources.base.labels import NUMBER, spellings, words_among_numbers
from hpcdl.data.sources.base.names import is_id
from hpcdl.data.sources.base.placed import PlacedArray, TableColumn
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import SPLIT_WORDS, leaves_out_split, left_out, typed
from hpcdl.data.sources.csv_list import delimiter, is_list_of_files, text_lines
from hpcdl.data.sources.layouts.columns import ColumnSource
from hpcdl.data.sources.layouts.flat import files_by_split, is_made_of, remarks_on_files
from hpcdl.data.sources.layouts.gathered import GatheredArray

_SUFFIXES = (".csv", ".tsv")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_FIRST = "Unnamed: 0"
"""So pandas calls a first column without a name, in which it and R write the names or numbers of rows."""
_VALUES = 1 << 18
"""The most values held in memory at once, 60 bytes each or more."""
_TAIL = 1 << 16
"""Bytes at the end of a table in which whole last values are sought."""
_STEM, _PICTURES = re.compile(r"[\w.() -]{1,200}"), re.compile(r"(?:image|img|picture|photo|file)s?(?:_?name)?", re.I)
_SUFFIXES_OF_IMAGES = [*IMAGE_SUFFIXES, *(suffix.upper() for suffix in IMAGE_SUFFIXES)]
_MOST_FOLDERS = 32
"""Most folders in which the images of a table are sought, and columns of which."""
_SPACE = re.compile(r"[^\S\n]")
# int64 holds every number of 18 digits, and not all of 19.
_NOT_WHOLE = re.compile(r"^(?![+-]?[0-9]{1,18}$)", re.MULTILINE)
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_ZEROS = re.compile(r"^0[0-9]+$", re.MULTILINE)
_LONG_LINE = re.compile(r"^[+-]?[0-9]{19,}$", re.MULTILINE)
_LONG = re.compile(r"[+-]?[0-9]{19,}")
"""Numbers with too many digits for int64 and float64: codes."""
_NOT_THOUSANDS = re.compile(r"^(?!(?:[+-]?[1-9][0-9]{0,2}\.[0-9]{3}|[+-]?[0-9]{1,3}|)$)", re.MULTILINE)
_POINT, _NO_POINT = re.compile(r"^[+-]?[0-9]+\.[0-9]{3}$", re.MULTILINE), re.compile(r"^[+-]?[0-9]{1,3}$", re.MULTILINE)
"""Numbers that are no thousands written with a point (1.234, 980, 20.500), and those with and without one."""
_NOTATION = re.compile(
    r"[+-]?(?:[0-9]+,[0-9]+|[0-9]{1,3}(?:[., '_\u00a0\u2009\u202f][0-9]{3})+(?:[.,][0-9]+)?|[0-9.,]+ ?%"
    r"|0[xX][0-9a-fA-F]+|[0-9.]+[dD][+-]?[0-9]+|[$\u20ac\u00a3] ?[0-9.,]+|[0-9.,]+ ?[$\u20ac\u00a3])|\u2212[0-9.,]+"
)
"""Numbers that float() does not accept: decimal commas, thousands separators, percent, hexadecimal, Fortran's
exponents (1.5D+03), currencies, Unicode's minus."""


class TableSource(ColumnSource):
    """A .csv or .tsv file whose first line names the columns, or a folder of files with the same columns.

    A column `split` divides the rows, else names of files such as train*, val*, test* do.
    """

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._names: list[str] = []
        self._splits: dict[str, str] = {}
        """The split by the word for it in the column `split`, in order of occurrence."""
        self._num_files = 0
        self._files: dict[str, list[Path]] = {}
        self._also_values: dict[str, None] = {}
        """Columns with a value that is their name."""
        self._written: list[str] = []
        """The first line as it is written."""
        self._first: list[str] = []
        """The first row."""
        self._points: list[str] = []
        """Remarks on columns whose points may mark thousands."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a table that is not a list of files, or a folder with only such tables."""
        if not is_made_of(location, _SUFFIXES, alone=True):
            return False
        return not any(is_list_of_files(path) for path in ([location] if location.is_file() else files_of(location)))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read the tables once in pieces of rows: numbers go to separate files by column and split.

        Missing values become NaN. Text is read a second time if it is needed.
        """
        files = files_by_split(self._location, _SUFFIXES, self._spec)
        if not files and self._location.is_dir():
            raise SourceError(f"{self._location} holds no tables ({', '.join(_SUFFIXES)})")
        files = files or {UNSPLIT: [self._location]}
        left = [split for split in files if leaves_out_split(split, self._spec.leave_out)]
        self.named.update(left)
        self._files = {split: paths for split, paths in files.items() if split not in left}
        facts = self._listed(index)
        remarks = [*remarks_on_files(self._location, _SUFFIXES), *(f"left out: the split {split}" for split in left)]
        num_tables = max(map(len, self._files.values()), default=0)
        joined = f"{num_tables} tables{' of a split' if len(self._files) > 1 else ''}: each row is a sample"
        remarks += [f"{joined}; if each table is one (a series), save all as an array"] if num_tables > 1 else []
        remarks += [
            f"{path.name}: its last line has no end, as in a file that was cut; check its last value"
            for paths in self._files.values()
            for path in paths
            if _ends_within_line(path)
        ]
        remarks += [
            f"{shown(name)} names a column, and is a value in it: if the first line is a sample, give --head none"
            for name in itertools.islice(self._also_values, 1)
        ]
        if _FIRST in self._names and not self._written[0].strip():
            remarks.append(f"the first column has no name; here it is called {shown(_FIRST)}")
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks, *self._points])

    def _listed(self, index: IndexWriter) -> SourceFacts:
        columns: dict[str, _Column] = {}
        for split, rows in self._rows():
            columns = columns or {name: _Column(self._new_path) for name in self._names}
            self._first = self._first or rows[0]
            for (name, column), raw, values in zip(
                columns.items(), self._written, zip(*rows, strict=True), strict=True
            ):
                column.take(values, split)
                if self._spec.head != "none" and (name in values or raw in values):
                    self._also_values[name] = None
        if not columns:
            raise SourceError(f"{self._location} holds no rows; the first line names the columns, samples follow")
        self._ask_of_head(columns)
        self._ask_of_images(columns)
        self._ask_of_odd(columns)
        splits = set(self._splits.values()) if "split" in self._names else set()
        odd = min(splits - {"train", "val", "test", UNSPLIT}, default=None)
        if odd is not None:
            raise SourceError(f"{self._location}: the column split holds {shown(odd)}; write train, val or test")
        columns.pop("split", None)
        self._points = [
            f"{shown(name)}: {column.thousands[0]} is read as a fraction, and {column.thousands[1]} is whole: do "
            "points mark thousands? If so, take them out of the source"
            for name, column in columns.items()
            if column.kind == "float64" and len(column.thousands) == 2 and not left_out(name, self._spec.leave_out)
        ]
        for name, column in columns.items():
            if column.kind != "text" and column.code and self._names_classes(name):
                column.written_as = self._spellings(name)
        tables = {
            split: {name: self._column(name, column, split) for name, column in columns.items()}
            for split in dict.fromkeys(self._splits.values())
        }
        return self.list_columns(tables, index)

    def _new_path(self) -> Path:
        self._num_files += 1
        return self._work / f"gathered{self._num_files}"

    def _column(self, name: str, column: _Column, split: str) -> TableColumn:
        if column.kind == "text" or not column.present or column.written_as is None:
            return TableColumn(shown="text", kind="text", place=lambda: self._text(name, split))
        placed = column.placed(split)
        return TableColumn(shown=column.kind, kind="number", place=lambda: placed, numbers=lambda: placed)

    def _names_classes(self, name: str) -> bool:
        """Return whether the values of a column are classes, as far as known before reading them."""
        targets = [flag_value.rpartition("=")[0] or flag_value for flag_value in self._spec.targets]
        called = name in targets or (not targets and name.lower() in TARGET_NAMES)
        return called and self._spec.target_kind != "regression" and not left_out(name, self._spec.leave_out)

    def _spellings(self, name: str) -> dict[int, str] | None:
        """Return how a column of codes writes its numbers; None if they must stay text."""
        different: set[str] = set()
        for split in dict.fromkeys(self._splits.values()):
            for words in self._text(name, split).string_chunks():
                different.update(word for word in words.tolist() if word.lower() not in _MISSING)
        whole = {word for word in different if _WHOLE.fullmatch(word)}
        return spellings(whole, self._spec.target_kind, f"{self._location}: {name}") if whole == different else {}

    def _ask_of_head(self, columns: Mapping[str, _Column]) -> None:
        """Raise SourceError if the names of all columns could be values in them, and a word among them is one."""
        if self._spec.head != "auto" or not self._spec.asks:
            return
        numbers = {name for name in columns if NUMBER.fullmatch(name)}
        named = any(name not in numbers | self._also_values.keys() for name in columns if columns[name].kind != "text")
        words = [name for name in self._also_values if name not in numbers and columns[name].kind == "text"]
        if words and not named and len(numbers | self._also_values.keys()) > 1:
            raise SourceError(
                f"{self._location}: is the first line a sample? {shown(words[0])} names a column, and is a value in "
                "it. Then give --head none, which calls the columns c1, c2, ...; else --head names"
            )

    def _ask_of_images(self, columns: Mapping[str, _Column]) -> None:
        """Raise SourceError if a column seems to name image files near the table, without their ending."""
        targets = {flag_value.rpartition("=")[0] or flag_value for flag_value in self._spec.targets}
        if self._location.is_dir() or self._spec.inputs or not self._spec.asks:
            return
        folder = self._location.parent
        near = [folder, *itertools.islice(folders_of(folder), _MOST_FOLDERS)]
        for (name, column), value in itertools.islice(zip(columns.items(), self._first, strict=False), _MOST_FOLDERS):
            words = column.kind == "text" and not NUMBER.fullmatch(value)
            called = words or is_id(name) or _PICTURES.fullmatch(name)
            target = name in targets or (not targets and name.lower() in TARGET_NAMES)
            if not called or target or left_out(name, self._spec.leave_out) or not _STEM.fullmatch(value):
                continue
            paths = (place / f"{value}{suffix}" for place in near for suffix in _SUFFIXES_OF_IMAGES)
            if found := next((path for path in paths if path.is_file()), None):
                raise SourceError(
                    f"{self._location}: the column {shown(name)} seems to name images, and "
                    f"{shown(str(found.relative_to(folder)))} is there: write such names, with folder and ending. For "
                    f"the columns alone give --leave-out {typed(name)}"
                )

    def _ask_of_odd(self, columns: Mapping[str, _Column]) -> None:
        """Raise SourceError for used columns whose values are numbers in another notation, or codes."""
        spec = self._spec
        inputs, targets = (
            [flag_value.rpartition("=")[0] or flag_value for flag_value in flag_values]
            for flag_values in (spec.inputs, spec.targets)
        )
        coded = [flag_value.rpartition("=")[0] for flag_value in spec.categories]
        for name, column in columns.items():
            if (
                name in coded
                or left_out(name, spec.leave_out)
                or (name not in targets and inputs and name not in inputs)
            ):
                continue
            target = name in targets or (not targets and name.lower() in TARGET_NAMES)
            if column.kind == "text" and column.written and not (target and spec.target_kind == "class"):
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds numbers written as {shown(column.written)}; "
                    "write them with a point alone, without marks of thousands or units (pandas.read_csv has decimal= "
                    f"and thousands=), or give --leave-out {typed(name)}"
                )
            if column.word and not target and name not in inputs:
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds numbers, and among them {shown(column.word)}: "
                    f"correct it (a missing number is nan, or nothing), or give --categories {typed(name + '=codes')} "
                    f"or {typed(name + '=one-hot')}, or --leave-out {typed(name)}, or for text name the inputs, each "
                    "with --input COLUMN=NAME"
                )
            numbers = column.kind != "text" or column.numbers
            if numbers and column.code and not target and name not in inputs:
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds {shown(column.code)}: a number, or a code? Give "
                    f"--categories {typed(name + '=codes')} or {typed(name + '=one-hot')}, or --leave-out "
                    f"{typed(name)}, or for numbers name the inputs, each with --input COLUMN=NAME"
                )

    def _by_split(self, of_file: str, rows: list[list[str]]) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield the rows of each split by the words in the column `split`, and record these in `_splits`.

        Without that column all rows are of the file's split.
        """
        if "split" not in self._names:
            self._splits[of_file] = of_file
            yield of_file, rows
            return
        at = self._names.index("split")
        words = [row[at].strip().lower() for row in rows]
        self._splits |= {word: SPLIT_WORDS.get(word, word) for word in dict.fromkeys(words)}
        for split in dict.fromkeys(self._splits.values()):
            part = [row for row, word in zip(rows, words, strict=True) if self._splits[word] == split]
            if part:
                yield split, part

    def _text(self, name: str, split: str) -> PlacedArray:
        at = self._names.index(name)
        with GatheredArray(self._new_path(), f"{self._location}: {name}") as gathered:
            for part_split, part in self._rows():
                if part_split == split:
                    for row in part:
                        gathered.add(row[at].strip(), "a row")
            return gathered.placed()

    def _rows(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield some rows at a time, with their split."""
        for split, paths in self._files.items():
            for path in paths:
                for rows in self._rows_of(path):
                    yield from self._by_split(split, rows)

    def _rows_of(self, path: Path) -> Iterator[list[list[str]]]:
        """Yield some rows of a file at a time; SourceError if its columns are not those of the first file."""
        names: list[str] = []
        head: list[str] = []
        rows: list[list[str]] = []
        for number, fields in self._lines(path):
            if not names:
                names, head = self._head(path, fields), fields
                self._names, self._written = self._names or names, self._written or fields
                self._check_names(path, names)
                if self._spec.head != "none":
                    continue
            if fields == head and self._spec.head != "none":
                raise SourceError(
                    f"{path} line {number} repeats the first: were tables joined? Then take it out. Or is the first "
                    "a sample? Then give --head none"
                )
            if len(fields) != len(names) or (not rows and len(names) == 1):
                _check_fields(f"{path} line {number}", names, fields)
            rows.append(fields)
            if len(rows) * len(names) >= _VALUES:
                yield rows
                rows = []
        if rows:
            yield rows

    def _check_names(self, path: Path, names: Sequence[str]) -> None:
        if names == self._names:
            return
        first, odd = next(iter(self._files.values()))[0].name, sorted({*names} ^ {*self._names})
        raise SourceError(
            f"{self._location}: {shown(first)} and {shown(path.name)} differ in their columns "
            f"({shown(odd[0]) if odd else 'their order'}); make them alike, or give --leave-out {typed(first)} or "
            f"{typed(path.name)}"
        )

    def _head(self, path: Path, fields: list[str]) -> list[str]:
        """Return the names of the columns from the first line of a file."""
        if self._spec.head == "none":
            return [f"c{number}" for number in range(1, len(fields) + 1)]
        names = [field.strip() for field in fields]
        if not names[0] and all(names[1:]) and _FIRST not in names and len(names) > 1:
            names[0] = _FIRST
        if _is_sample(names):
            raise SourceError(
                f"{path} line 1 holds numbers only; the first line names the columns: add such a line, or "
                "give --head none, which calls them c1, c2, ..."
            )
        if "" in names:
            raise SourceError(f"{path} line 1{_without_name(names)}")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SourceError(
                f"{path} line 1: the column {shown(twice)} is named twice; is this line a sample? Then give --head none"
            )
        return names

    def _lines(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        number = 0
        with open_regular(path) as file:
            try:
                for number, fields in enumerate(csv.reader(text_lines(file), delimiter=delimiter(path)), 1):
                    # Bytes that are not UTF-8 arrive as surrogates, which do not encode.
                    "".join(fields).encode()
                    if fields:
                        yield number, fields
            except UnicodeEncodeError as error:
                raise SourceError(f"{path} line {number}: it is not UTF-8; save the table as UTF-8") from error
            except (csv.Error, ValueError) as error:
                raise SourceError(f"{path} line {number + 1}: {error}") from error


class _Column:
    """A column being read: its type so far, oddities of its values, and its numbers in a file per split."""

    def __init__(self, new_path: Callable[[], Path]) -> None:
        self._new_path = new_path
        self._paths: dict[str, Path] = {}
        self._counts: dict[str, int] = {}
        self.kind = "int64"
        """The type that fits all values so far: int64, float64 or text."""
        self.whole = True
        """Whether all values that are present are integers."""
        self.present = False
        """Whether any value is present."""
        self.written = ""
        """A number that float() does not accept, if all values of the column are numbers."""
        self.code = ""
        """An integer with leading zeros, or with more digits than the number types hold."""
        self.written_as: dict[int, str] | None = {}
        """How codes write their numbers, for a target; None if they must stay text."""
        self.thousands: list[str] = []
        """Numbers with a point and without, if all may be whole numbers with points between thousands."""
        self._may_be_thousands = True
        self.numbers = True
        """For text: whether all values are numbers in some notation."""
        self.word = ""
        """For text: the first word, if numbers came before and words are few."""

    def take(self, column: Sequence[str], split: str) -> None:
        """Append values of a split."""
        # Nothing about such a column can change any more.
        if self.kind == "text" and not self.numbers and self.present:
            return
        values, lines = _as_lines(column)
        numbers = self._numbers(values, lines)
        if numbers is None:
            # What the text is like decides which question the user gets.
            self._look_at_text(values)
            self.kind = "text"
        self._look_at_points(lines)
        self.present = self.present or any(value.lower() not in _MISSING for value in values)
        if numbers is None:
            return
        if not self.code and (zeros := _ZEROS.search(lines)):
            self.code = zeros[0]
        if split not in self._paths:
            self._paths[split], self._counts[split] = self._new_path(), 0
        with self._paths[split].open("ab") as file:  # open one file at a time: a table may have thousands of columns
            numbers.tofile(file)
        self._counts[split] += len(numbers)

    def placed(self, split: str) -> PlacedArray:
        """Return the numbers of a split."""
        shape, called = (self._counts[split],), self.written_as or {}
        dtype, filled = np.dtype(self.kind), self.kind == "float64" and self.whole
        return PlacedArray(path=self._paths[split], shape=shape, dtype=dtype, called=called, filled=filled)

    def _numbers(self, values: Sequence[str], lines: str) -> Array | None:
        """Return values as numbers of the column's type, which may be widened; None for text."""
        if self.kind == "text":
            return None
        if self.kind == "int64":
            if not _NOT_WHOLE.search(lines):
                return np.fromiter(map(int, values), np.int64, len(values))
            self._widen()
        if _LONG_LINE.search(lines):
            return None
        if self.whole:
            self.whole = not any(_NOT_WHOLE.search(value) for value in values if value.lower() not in _MISSING)
        try:
            return _floats(values)
        except ValueError:
            return None

    def _widen(self) -> None:
        """Convert integers to float64, with the same rounding to nearest as float() of their digits."""
        self.kind = "float64"
        for split, old in self._paths.items():
            self._paths[split] = self._new_path()
            with self._paths[split].open("wb") as file:
                for start in range(0, self._counts[split], _VALUES):
                    part = np.fromfile(old, np.int64, _VALUES, offset=8 * start)
                    part.astype(np.float64).tofile(file)

    def _look_at_points(self, lines: str) -> None:
        if not self._may_be_thousands or "." not in lines:
            return
        if _NOT_THOUSANDS.search(lines):
            self._may_be_thousands, self.thousands = False, []
        elif len(self.thousands) < 2:
            matches = [form.search(lines) for form in (_POINT, _NO_POINT)]
            self.thousands = [match[0] for match in matches if match]

    def _look_at_text(self, values: Sequence[str]) -> None:
        for value in values if self.numbers else ():
            if _NOTATION.fullmatch(value):
                self.written = self.written or value
            elif _LONG.fullmatch(value):
                self.code = self.code or value
            elif not _is_number(value):
                self.numbers, self.written = False, ""
                words = words_among_numbers(text for text in values if text.lower() not in _MISSING)
                if self.kind != "text" and (words or self.present):
                    self.word = value
                return


def _ends_within_line(path: Path) -> bool:
    """Return whether a table's last line has no end, and a last value that may be a part of one.

    A whole one is among those above it, or has their number of decimals.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        # The end alone: a table may have gigabytes.
        start = file.seek(max(0, size - _TAIL))
        tail = file.read(size - start)
    if not tail or tail.endswith(b"\n"):
        return False
    # The first line is the head, or began before what was read.
    *others, last = [line.rpartition(delimiter(path).encode())[2].strip() for line in tail.splitlines()[1:]] or [b""]
    decimals = {len(value.partition(b".")[2]) for value in others}
    return last not in others and (decimals == {0} or decimals != {len(last.partition(b".")[2])})


def _without_name(names: Sequence[str]) -> str:
    """Say what is probably wrong with a first line in which names are empty."""
    if names[0] and not any(names[1:]) and len(names) > 2:
        return _title(names[0])
    if all(names[:-1]):
        return (
            " ends with a comma, semicolon or tab: take it away in each line, or name the last column, and leave it "
            "out by --leave-out if it is no feature"
        )
    return f": column {names.index('') + 1} has no name; name it, and leave it out by --leave-out if it is no feature"


def _title(text: str) -> str:
    return f": is {shown(text)} a title or a comment? The names of columns come first: delete the lines above them"


def _check_fields(where: str, names: Sequence[str], fields: Sequence[str]) -> None:
    """Raise SourceError for a line that has not one value for each column, or that seems to hold several in one."""
    if len(names) == len(fields) == 1:
        parts = [len(re.split(r"[\s|:]+", text.strip("# "))) for text in (names[0], fields[0])]
        alike = parts[0] == parts[1] or names == ["c1"]
        if parts[1] > 1 and alike and not fields[0].startswith("#"):
            both = shown(fields[0]) if names == ["c1"] else f"{shown(names[0])} and {shown(fields[0])}"
            raise SourceError(
                f"{where.rpartition(' line ')[0]} holds {both} in one column: values "
                'are read between commas, semicolons or tabs; save it so, with pandas.read_csv(FILE, sep=r"\\s+") or '
                "another sep="
            )
        if not fields[0].startswith("#"):
            return
    if len(names) == 1:
        raise SourceError(f"{where.rpartition(' line ')[0]} line 1{_title(names[0])}")
    more = "; put a value that holds a comma between double quotes" if len(fields) > len(names) else "; write all"
    raise SourceError(f"{where}: {len(fields)} values for {len(names)} columns{more}")


def _is_number(value: str) -> bool:
    try:
        _floats([value])
    except ValueError:
        return False
    return True


def _is_sample(head: list[str]) -> bool:
    """Return whether a first line is a sample: only numbers, not rising as column numbers and wavelengths do."""
    try:
        numbers = [float(name) for name in head]
    except ValueError:
        return False
    return not all(before < after for before, after in itertools.pairwise(numbers))


def _as_lines(column: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return values without surrounding spaces, and the same as one text with a line each, for pattern searches."""
    lines = "\n".join(column)
    if not _SPACE.search(lines) and lines.count("\n") == len(column) - 1:
        return column, lines
    values = [value.strip().replace("\n", " ") for value in column]  # a value of two lines is text, not two numbers
    return values, "\n".join(values)


def _floats(values: Sequence[str]) -> Array:
    """Return values as numbers, missing ones as NaN. ValueError for others, even those only Python accepts (1_000)."""
    if any("_" in value for value in values):
        raise ValueError
    try:
        return np.fromiter(map(float, values), np.float64, len(values))
    except ValueError:
        # Only here: looking for missing values would cost time in the usual case, which has none.
        return np.array([float(value) if value.lower() not in _MISSING else np.nan for value in values], np.float64)
