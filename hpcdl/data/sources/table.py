"""CSV tables with a column for each quantity, its type found from its values."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.columns import ColumnSource, TableColumn
from hpcdl.data.sources.base.index import IndexWriter
from hpcdl.data.sources.base.source import Array, SourceFacts
from hpcdl.data.sources.base.splits import SPLIT_WORDS
from hpcdl.data.sources.csv_list import delimiter, is_list_of_files, text_lines

_ENDINGS = (".csv", ".tsv")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


class TableSource(ColumnSource):
    """A .csv or .tsv file whose first line names the columns; one called `split` divides the rows."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """A table that is not a list of files."""
        if not location.is_file() or location.suffix.lower() not in _ENDINGS:
            return False
        return not is_list_of_files(location)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read the table into columns; missing values are NaN."""
        columns = self._columns()
        splits = [SPLIT_WORDS.get(value.lower(), value.lower()) for value in columns.pop("split", [])]
        if splits and not set(splits) <= {"train", "val", "test"}:
            raise SourceError(
                f"{self._location}: the column split holds {shown(min(set(splits)))}; write train, val or test"
            )
        values = {name: _typed(column) for name, column in columns.items()}
        rows: dict[str, Array | None] = {
            name: np.array([own == name for own in splits]) for name in dict.fromkeys(splits)
        }
        tables = {
            split: {name: self._column(name, own if chosen is None else own[chosen]) for name, own in values.items()}
            for split, chosen in (rows or {UNSPLIT: None}).items()
        }
        return self.list_columns(tables, index)

    def _column(self, name: str, values: Array) -> TableColumn:
        if values.dtype.kind == "O":
            return TableColumn(shown="text", kind="text", place=lambda: self.placed_text(values.tolist(), name))
        return TableColumn(
            shown=values.dtype.name, kind="number", place=lambda: self.placed(values), numbers=lambda: values
        )

    def _columns(self) -> dict[str, list[str]]:
        names: list[str] = []
        rows: list[list[str]] = []
        for number, fields in self._lines():
            if not names and self._spec.head == "none":
                names = [f"c{place}" for place in range(1, len(fields) + 1)]
            elif not names:
                names = [field.strip() for field in fields]
                if _is_sample(names):
                    raise SourceError(
                        f"{self._location} line 1 holds numbers only; the first line names the columns: add such a "
                        "line, or give --head none, which calls them c1, c2, ..."
                    )
                twice = next((name for name in names if names.count(name) > 1 or not name), None)
                if twice is not None:
                    raise SourceError(
                        f"{self._location} line 1: the column {shown(twice)} is named twice, or not at all; "
                        "is this line a sample? Then give --head none"
                    )
                continue
            if len(fields) != len(names):
                raise SourceError(
                    f"{self._location} line {number}: {len(fields)} values for {len(names)} columns; write all"
                )
            rows.append(fields)
        if not rows:
            raise SourceError(f"{self._location} holds no rows; the first line names the columns, samples follow")
        return {
            name: [value.strip() for value in column]
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }

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


def _typed(column: list[str]) -> Array:
    """A column as int64, as float64 with NaN for what is missing, or as strings (an array of objects)."""
    present = [value for value in column if value.lower() not in _MISSING]
    if present and len(present) == len(column) and all(map(_WHOLE.fullmatch, column)):
        return np.array([int(value) for value in column], np.int64)
    try:
        numbers = [float(value) if value.lower() not in _MISSING else np.nan for value in column]
    except ValueError:
        return np.array(column, object)
    return np.array(numbers, np.float64) if present else np.array(column, object)
