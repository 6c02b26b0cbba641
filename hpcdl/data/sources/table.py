"""CSV tables with a column for each quantity, its type found from its values."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.arrays import TARGET_NAMES, PlacedArray
from hpcdl.data.sources.base.columns import ColumnSource, TableColumn
from hpcdl.data.sources.base.gathered import GatheredArray
from hpcdl.data.sources.base.index import IndexWriter
from hpcdl.data.sources.base.source import Array, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import SPLIT_WORDS, left_out
from hpcdl.data.sources.csv_list import delimiter, is_list_of_files, text_lines

_ENDINGS = (".csv", ".tsv")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_VALUES = 1 << 18
"""So many are held at once, 60 bytes each or more."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_LONG = re.compile(r"[+-]?[0-9]{19,}")
"""Digits of a number that neither int64 nor float64 holds: a code."""
_NOTATION = re.compile(
    r"[+-]?(?:[0-9]+,[0-9]+|[0-9]{1,3}(?:[., '][0-9]{3})+(?:[.,][0-9]+)?|[0-9.,]+ ?%|0[xX][0-9a-fA-F]+)"
)
"""Numbers that are not written as float() takes them: decimal commas, marks of thousands, percent, hexadecimal."""


class TableSource(ColumnSource):
    """A .csv or .tsv file whose first line names the columns; one called `split` divides the rows."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._names: list[str] = []

    @staticmethod
    def recognises(location: Path) -> bool:
        """A table that is not a list of files."""
        if not location.is_file() or location.suffix.lower() not in _ENDINGS:
            return False
        return not is_list_of_files(location)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read the table twice, some rows at a time: for the types of its columns, then for the values.

        Missing values are NaN. Text is read once more where it is asked for.
        """
        self._names, kinds = self._kinds()
        if "split" in kinds:
            del kinds["split"]
            splits = self._splits()
        else:
            splits = {"": UNSPLIT}
        numbers = {name: kind for name, kind in kinds.items() if kind != "text"}
        placed = self._numbers(numbers, splits)
        tables = {
            split: {
                name: self._column(name, split, splits, placed.get((split, name)), kind) for name, kind in kinds.items()
            }
            for split in dict.fromkeys(splits.values())
        }
        return self.list_columns(tables, index)

    def _column(
        self, name: str, split: str, splits: Mapping[str, str], placed: PlacedArray | None, kind: str
    ) -> TableColumn:
        if placed is None:
            return TableColumn(shown="text", kind="text", place=lambda: self._text(name, split, splits))
        return TableColumn(shown=kind, kind="number", place=lambda: placed, numbers=lambda: placed)

    def _kinds(self) -> tuple[list[str], dict[str, str]]:
        """The columns, and int64, float64 or text of each."""
        kinds: dict[str, str] = {}
        present: dict[str, bool] = {}
        odd: dict[str, _Odd] = {}
        names: list[str] = []
        for names, rows in self._rows():
            for name, column in zip(names, zip(*rows, strict=True), strict=True):
                values = [value.strip() for value in column]
                kinds[name] = _kind(values, kinds.get(name, "int64"))
                odd.setdefault(name, _Odd()).look(values, kinds[name])
                present[name] = present.get(name, False) or any(value.lower() not in _MISSING for value in values)
        if not kinds:
            raise SourceError(f"{self._location} holds no rows; the first line names the columns, samples follow")
        self._ask_of_odd(names, kinds, odd)
        return names, {name: kind if present[name] else "text" for name, kind in kinds.items()}

    def _ask_of_odd(self, names: Sequence[str], kinds: Mapping[str, str], odd: Mapping[str, _Odd]) -> None:
        """SourceError for columns that are used, and whose values are numbers otherwise written, or codes."""
        spec = self._spec
        inputs, targets = ([own.rpartition("=")[0] or own for own in wishes] for wishes in (spec.inputs, spec.targets))
        words = [own.rpartition("=")[0] for own in spec.categories]
        for name in names:
            if (
                name in words
                or left_out(name, spec.leave_out)
                or (name not in targets and inputs and name not in inputs)
            ):
                continue
            target = name in targets or (not targets and name.lower() in TARGET_NAMES)
            written, code = odd[name].written, odd[name].code
            if kinds[name] == "text" and written and not (target and spec.target_kind == "class"):
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds numbers written as {shown(written)}; write them "
                    "with a point alone, without marks of thousands or units (pandas.read_csv has decimal= and "
                    f"thousands=), or give --leave-out {name}"
                )
            numbers = kinds[name] != "text" or odd[name].numbers
            if numbers and code and not target and name not in inputs:
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds {shown(code)}: a number, or a code? Give "
                    f"--categories {name}=codes or {name}=one-hot, or --leave-out {name}, or for numbers name the "
                    "inputs, each with --input COLUMN=NAME"
                )

    def _splits(self) -> dict[str, str]:
        """The split by the word for it in the column `split`, in the order in which they come."""
        found: dict[str, str] = {}
        at = self._names.index("split")
        for _, rows in self._rows():
            words = dict.fromkeys(row[at].strip().lower() for row in rows)
            found |= {word: SPLIT_WORDS.get(word, word) for word in words}
        odd = min(set(found.values()) - {"train", "val", "test"}, default=None)
        if odd is not None:
            raise SourceError(f"{self._location}: the column split holds {shown(odd)}; write train, val or test")
        return found

    def _by_split(self, splits: Mapping[str, str]) -> Iterator[tuple[str, list[list[str]]]]:
        """Rows of one split each, some at a time."""
        at = self._names.index("split") if "" not in splits else None
        for _, rows in self._rows():
            if at is None:
                yield UNSPLIT, rows
                continue
            for split in dict.fromkeys(splits.values()):
                own = [row for row in rows if splits[row[at].strip().lower()] == split]
                if own:
                    yield split, own

    def _numbers(self, kinds: Mapping[str, str], splits: Mapping[str, str]) -> dict[tuple[str, str], PlacedArray]:
        """The values of the columns of numbers, by split and column, each in a file of the work folder."""
        every = [(split, name) for split in dict.fromkeys(splits.values()) for name in kinds]
        places = {name: self._names.index(name) for name in kinds}
        paths = {key: self._work / f"gathered{number}" for number, key in enumerate(every)}
        counts = dict.fromkeys(every, 0)
        for path in paths.values():
            path.touch()
        for split, rows in self._by_split(splits):
            for name, at in places.items():
                try:
                    values = _converted([row[at].strip() for row in rows], kinds[name])
                except ValueError as error:
                    raise SourceError(
                        f"{self._location} changed while it was read; let it rest, and try again"
                    ) from error
                with paths[split, name].open("ab") as file:  # one at a time: a table may have thousands of columns
                    values.tofile(file)
                counts[split, name] += len(values)
        return {
            key: PlacedArray(path=path, shape=(counts[key],), dtype=np.dtype(kinds[key[1]]))
            for key, path in paths.items()
        }

    def _text(self, name: str, split: str, splits: Mapping[str, str]) -> PlacedArray:
        at = self._names.index(name)
        path = self._work / f"gathered{len(list(self._work.glob('gathered*')))}"
        with GatheredArray(path, f"{self._location}: {name}") as gathered:
            for own, rows in self._by_split(splits):
                if own == split:
                    for row in rows:
                        gathered.add(row[at].strip(), "a row")
            return gathered.placed()

    def _rows(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """The names of the columns with some rows at a time."""
        names: list[str] = []
        rows: list[list[str]] = []
        for number, fields in self._lines():
            if not names:
                names = self._head(fields)
                if self._spec.head != "none":
                    continue
            if len(fields) != len(names):
                raise SourceError(
                    f"{self._location} line {number}: {len(fields)} values for {len(names)} columns; write all"
                )
            rows.append(fields)
            if len(rows) * len(names) >= _VALUES:
                yield names, rows
                rows = []
        if rows:
            yield names, rows

    def _head(self, fields: list[str]) -> list[str]:
        """The names of the columns, by the first line."""
        if self._spec.head == "none":
            return [f"c{place}" for place in range(1, len(fields) + 1)]
        names = [field.strip() for field in fields]
        if _is_sample(names):
            raise SourceError(
                f"{self._location} line 1 holds numbers only; the first line names the columns: add such a line, or "
                "give --head none, which calls them c1, c2, ..."
            )
        if "" in names:
            raise SourceError(
                f"{self._location} line 1: column {names.index('') + 1} has no name (pandas writes the numbers of rows "
                "so, unless index=False is given); name it, and leave it out by --leave-out if it is no feature"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SourceError(
                f"{self._location} line 1: the column {shown(twice)} is named twice; is this line a sample? Then give "
                "--head none"
            )
        return names

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        number = 0
        with open_regular(self._location) as file:
            try:
                for number, fields in enumerate(csv.reader(text_lines(file), delimiter=delimiter(self._location)), 1):
                    for field in fields:
                        field.encode()
                    if fields:
                        yield number, fields
            except UnicodeEncodeError as error:
                raise SourceError(
                    f"{self._location} line {number}: it is not UTF-8; save the table as UTF-8"
                ) from error
            except (csv.Error, ValueError) as error:
                raise SourceError(f"{self._location} line {number + 1}: {error}") from error


@dataclass
class _Odd:
    """What is odd about a column's values, by an example of each."""

    written: str = ""
    """Of a column all of whose values are numbers, this one is not written as float() takes it."""
    code: str = ""
    """A whole number with zeros before it, or of more digits than numbers keep."""
    numbers: bool = True

    def look(self, values: Sequence[str], kind: str) -> None:
        """Take more values of the column, which is of this kind so far."""
        if not self.code and kind != "text":
            self.code = next((own for own in values if own[:1] == "0" and len(own) > 1 and own.isdigit()), "")
        if kind != "text" or not self.numbers:
            return
        for own in values:
            if _NOTATION.fullmatch(own):
                self.written = self.written or own
            elif _LONG.fullmatch(own):
                self.code = self.code or own
            elif not _is_number(own):
                self.numbers, self.written = False, ""
                return


def _is_number(value: str) -> bool:
    try:
        _converted([value], "float64")
    except ValueError:
        return False
    return True


def _is_sample(head: list[str]) -> bool:
    """Whether a first line holds a sample: numbers alone that do not rise, as column numbers and wavelengths do."""
    try:
        numbers = [float(name) for name in head]
    except ValueError:
        return False
    return not all(before < after for before, after in itertools.pairwise(numbers))


def _kind(values: list[str], before: str) -> str:
    """int64, float64 or text, for these values and those `before`."""
    if before == "int64" and all(map(_WHOLE.fullmatch, values)):
        return before
    if before == "text" or any(len(value) > 18 and _LONG.fullmatch(value) for value in values):
        return "text"
    try:
        _converted(values, "float64")
    except ValueError:
        return "text"
    return "float64"


def _converted(values: list[str], kind: str) -> Array:
    """Values as numbers; NaN for what is missing. ValueError for others."""
    if kind == "int64":
        return np.array([int(value) for value in values], np.int64)
    try:
        return np.array([float(value) for value in values], np.float64)
    except ValueError:
        return np.array([float(value) if value.lower() not in _MISSING else np.nan for value in values], np.float64)
