"""Tables, whatever file they come from: which columns are inputs and targets, and which are put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.sources.base.arrays import (
    EXACT,
    INPUT_NAMES,
    TARGET_NAMES,
    ArrayGroup,
    FieldSource,
    FoundArray,
    PlacedArray,
    field_name,
    largest,
    shape_text,
)
from hpcdl.data.sources.base.flat import is_id
from hpcdl.data.sources.base.index import IndexWriter
from hpcdl.data.sources.base.source import Array, SourceFacts
from hpcdl.data.sources.base.splits import left_out

_STACKED = 1 << 21
"""Values that are put together at once."""
_PACKED = "x"
"""The field that all columns of numbers are put together in, unless --input says otherwise."""


def _no_numbers() -> PlacedArray:
    raise AssertionError("only columns of kind number are asked for their numbers")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """`kind` is `number` (one a row), `text`, or `other`; `shown` is what a message says of it."""

    shown: str
    kind: str
    place: Callable[[], PlacedArray]
    numbers: Callable[[], PlacedArray] = _no_numbers


class ColumnSource(FieldSource):
    """Samples that are rows of columns."""

    def list_columns(self, tables: Mapping[str, Mapping[str, TableColumn]], index: IndexWriter) -> SourceFacts:
        """List the rows of a table for each split; all tables have the same columns."""
        patterns = self._spec.leave_out
        self.named.update(own for columns in tables.values() for own in columns)
        tables = {
            split: {own: column for own, column in columns.items() if not left_out(own, patterns)}
            for split, columns in tables.items()
        }
        packed, name = self._packed(next(iter(tables.values())))
        groups = []
        for split, columns in tables.items():
            arrays = {
                own: FoundArray(column.shown, column.place) for own, column in columns.items() if own not in packed
            }
            if packed:
                numbers = [columns[own].numbers for own in packed]
                arrays[name] = FoundArray(
                    shape_text((len(packed),), "float32"), functools.partial(self._together, packed, numbers)
                )
            groups.append(ArrayGroup(split=split, arrays=arrays))
        if packed:
            self.inputs = (f"{name}={field_name(name)}",)
        return self.list_parts(groups, index)

    def _together(self, names: list[str], numbers: list[Callable[[], PlacedArray]]) -> PlacedArray:
        """Columns of numbers as one array of float32, some rows at a time."""
        columns = [own() for own in numbers]
        for name, column in zip(names, columns, strict=True):
            if (most := max(map(largest, column.chunks()), default=0)) > EXACT:
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds whole numbers up to {most}, which float32 "
                    f"rounds: give --leave-out {name}, or keep types by naming inputs, each with --input COLUMN=NAME"
                )
        return self.written(self._stacked(columns))

    def _stacked(self, columns: Sequence[PlacedArray]) -> Iterator[Array]:
        """The rows of columns that lie in files of their own."""
        num_rows = columns[0].num_samples
        step = max(1, _STACKED // len(columns))
        for first in range(0, num_rows, step):
            rows = np.empty((min(step, num_rows - first), len(columns)), np.float32)
            for place, column in enumerate(columns):
                at = column.offset + first * column.dtype.itemsize
                rows[:, place] = np.fromfile(column.path, column.dtype, len(rows), offset=at)
            yield rows

    def _packed(self, columns: Mapping[str, TableColumn]) -> tuple[list[str], str]:
        """The columns of numbers that become one input where none is named, and its path; SourceError for questions."""
        if self._spec.inputs:
            return [], ""
        targets = [wish.rpartition("=")[0] or wish for wish in self._spec.targets]
        usual = next((name for name in TARGET_NAMES for own in columns if own.lower() == name), None)
        if not targets:
            targets = [own for own in columns if own.lower() == usual][:1]
        known = ", ".join(shown(name) for name in list(columns)[:20])
        if not targets:
            raise SourceError(
                f"{self._location}: which column is the target? Give --target COLUMN=NAME, one of {known}"
            )
        left = [name for name in columns if name not in targets]
        if not left:
            raise SourceError(
                f"{self._location}: no column is left for an input beside {', '.join(map(shown, targets))}"
            )
        if len(left) == 1 and columns[left[0]].kind != "number":
            self.inputs = (f"{left[0]}={field_name(left[0])}",)
            return [], ""
        odd = next((name for name in left if columns[name].kind != "number"), None)
        if odd is not None:
            raise SourceError(
                f"{self._location}: the column {shown(odd)} holds {columns[odd].shown}; name the columns that are "
                "inputs, each with --input COLUMN=NAME, or leave it out of the table"
            )
        number = next((own for own in left if is_id(own)), None)
        if number is not None:
            raise SourceError(
                f"{self._location}: is the column {shown(number)} a feature, or a number of the rows? Give --leave-out "
                f"{number}, or name the inputs, each with --input COLUMN=NAME"
            )
        return left, _PACKED if _PACKED not in targets else f"{_PACKED}_{INPUT_NAMES[-2]}"
