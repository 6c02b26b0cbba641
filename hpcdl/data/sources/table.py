"""CSV tables with a column for each quantity, its type found from its values."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.arrays import PlacedArray
from hpcdl.data.sources.base.columns import ColumnSource, TableColumn
from hpcdl.data.sources.base.gathered import GatheredArray
from hpcdl.data.sources.base.index import IndexWriter
from hpcdl.data.sources.base.source import Array, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import SPLIT_WORDS
from hpcdl.data.sources.csv_list import delimiter, is_list_of_files, text_lines

_ENDINGS = (".csv", ".tsv")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_VALUES = 1 << 18
"""So many are held at once, 60 bytes each or more."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


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
        names: list[str] = []
        for names, rows in self._rows():
            for name, column in zip(names, zip(*rows, strict=True), strict=True):
                values = [value.strip() for value in column]
                kinds[name] = _kind(values, kinds.get(name, "int64"))
                present[name] = present.get(name, False) or any(value.lower() not in _MISSING for value in values)
        if not kinds:
            raise SourceError(f"{self._location} holds no rows; the first line names the columns, samples follow")
        return names, {name: kind if present[name] else "text" for name, kind in kinds.items()}

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
        twice = next((name for name in names if names.count(name) > 1 or not name), None)
        if twice is not None:
            raise SourceError(
                f"{self._location} line 1: the column {shown(twice)} is named twice, or not at all; is this line a "
                "sample? Then give --head none"
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
    if before == "text":
        return before
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
