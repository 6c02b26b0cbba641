"""CSV tables with a column for each quantity, its type found from its values."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.files import open_regular
from hpcdl.data.dataset import UNSPLIT
from hpcdl.data.sources.arrays import (
    INPUT_NAMES,
    TARGET_NAMES,
    ArrayGroup,
    FieldSource,
    FoundArray,
    PlacedArray,
    field_name,
    shape_text,
)
from hpcdl.data.sources.base import Array, SourceFacts
from hpcdl.data.sources.csv_list import is_list_of_files, text_lines
from hpcdl.data.sources.image_folder import SPLIT_NAMES
from hpcdl.data.write.index import Index, IndexWriter

_ENDINGS = {".csv": ",", ".tsv": "\t"}
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_PACKED = "x"
"""The field that all columns of numbers are put together in, unless --input says otherwise."""


class TableSource(FieldSource):
    """A .csv or .tsv file whose first line names the columns; one called `split` divides the rows."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """A table that is no list of files."""
        if not location.is_file() or location.suffix.lower() not in _ENDINGS:
            return False
        return location.suffix.lower() != ".csv" or not is_list_of_files(location)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read the table into columns; missing values are NaN."""
        columns = self._columns()
        splits = [SPLIT_NAMES.get(value.lower(), value.lower()) for value in columns.pop("split", [])]
        if splits and not set(splits) <= {"train", "val", "test"}:
            raise SourceError(
                f"{self._location}: the column split holds {shown(min(set(splits)))}; write train, val or test"
            )
        values = {name: _typed(column) for name, column in columns.items()}
        self._ask_what_is_what(values)
        rows: dict[str, Array | None] = {
            name: np.array([own == name for own in splits]) for name in dict.fromkeys(splits)
        }
        rows = rows or {UNSPLIT: None}
        groups = []
        for split, chosen in rows.items():
            arrays = {
                name: FoundArray(
                    shape_text((), "text" if column.dtype.kind == "O" else column.dtype.name),
                    functools.partial(self._placed_column, name, column, chosen),
                )
                for name, column in values.items()
            }
            groups.append(ArrayGroup(split=split, arrays=arrays))
        return self.list_parts(groups, index)

    def read(self, row: object, facts: SourceFacts, index: Index) -> Array:
        """Never: a table's samples are fields."""
        raise SourceError(f"{self._location} holds no images")

    def _placed_column(self, name: str, column: Array, chosen: Array | None) -> PlacedArray:
        own = column if chosen is None else column[chosen]
        return self.placed_text(own.tolist(), name) if own.dtype.kind == "O" else self.placed(own)

    def _ask_what_is_what(self, values: dict[str, Array]) -> None:
        """Pack columns of numbers into one input where none is named; SourceError for what cannot be guessed."""
        if self._spec.inputs:
            return
        targets = [wish.rpartition("=")[0] or wish for wish in self._spec.targets]
        usual = next((name for name in TARGET_NAMES for own in values if own.lower() == name), None)
        if not targets:
            targets = [own for own in values if own.lower() == usual][:1]
        known = ", ".join(shown(name) for name in list(values)[:20])
        if not targets:
            raise SourceError(
                f"{self._location}: which column is the target? Give --target COLUMN=NAME, one of {known}"
            )
        texts = [name for name, column in values.items() if name not in targets and column.dtype.kind == "O"]
        if texts:
            raise SourceError(
                f"{self._location}: the column {shown(texts[0])} holds text; name the columns that are "
                "inputs, each with --input COLUMN=NAME, or leave it out of the table"
            )
        numbers = [name for name in values if name not in targets]
        if not numbers:
            raise SourceError(
                f"{self._location}: no column is left for an input beside {', '.join(map(shown, targets))}"
            )
        packed = np.stack([values.pop(name) for name in numbers], 1).astype(np.float32)
        name = _PACKED if _PACKED not in values else f"{_PACKED}_{INPUT_NAMES[-2]}"
        values[name] = packed
        self.inputs = (f"{name}={field_name(name)}",)

    def _columns(self) -> dict[str, list[str]]:
        names: list[str] = []
        rows: list[list[str]] = []
        for number, fields in self._lines():
            if not names:
                names = [field.strip() for field in fields]
                twice = next((name for name in names if names.count(name) > 1 or not name), None)
                if twice is not None:
                    raise SourceError(
                        f"{self._location} line 1: the column {shown(twice)} is named twice, or not at all"
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
                for number, fields in enumerate(csv.reader(text_lines(file), delimiter=_delimiter(self._location)), 1):
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


def _delimiter(path: Path) -> str:
    return _ENDINGS.get(path.suffix.lower(), ",")


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
