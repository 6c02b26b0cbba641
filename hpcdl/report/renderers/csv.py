"""scaling.csv, one row for each point in columns that report.json's rows have; and each table of the report."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl.core.storage.files import write_output
from hpcdl.report.analysis.scaling import COLUMNS, flat_row
from hpcdl.report.document.document import Bounds, Cell, Column, Document, Interval, Table, plain

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_UNITS = {"seconds": "s", "bytes": "B"}
"""Of columns whose cells are written without their unit; shares are from 0 to 1."""


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write scaling.csv (without points its header alone) and tables/NAME.csv into `folder`."""
    path = folder / "scaling.csv"
    flat = map(flat_row, document.rows)
    write_output(path, _text(COLUMNS, ([row.get(name) for name in COLUMNS] for row in flat)))
    paths = [path]
    for name, table in document.tables().items():
        path = folder / "tables" / f"{name}.csv"
        write_output(path, _table(table))
        paths.append(path)
    return paths


def _text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([neutral(name) for name in header])
    writer.writerows([neutral(value) if isinstance(value, str) else value for value in row] for row in rows)
    return text.getvalue()


def _table(table: Table) -> str:
    """A column for each value, and further ones for half widths or ends of intervals where a table has them."""
    header: list[str] = []
    columns: list[list[Any]] = []
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        for suffix, values in _parts(cells):
            header.append(f"{_named(column)}{suffix}")
            columns.append(values)
    return _text(header, zip(*columns, strict=True))


def _named(column: Column) -> str:
    unit = _UNITS.get(column.kind)
    return f"{column.name} ({unit})" if unit else column.name


def _parts(cells: Sequence[Cell]) -> list[tuple[str, list[Any]]]:
    parts: list[tuple[str, list[Any]]] = [
        ("", [cell.value if isinstance(cell, Interval | Bounds) else cell for cell in cells])
    ]
    if any(isinstance(cell, Interval) for cell in cells):
        parts.append((" ±", [cell.half if isinstance(cell, Interval) else None for cell in cells]))
    if any(isinstance(cell, Bounds) for cell in cells):
        parts.append((" low", [cell.low if isinstance(cell, Bounds) else None for cell in cells]))
        parts.append((" high", [cell.high if isinstance(cell, Bounds) else None for cell in cells]))
    return parts


def neutral(text: str) -> str:
    """`text` such that no spreadsheet takes it for a formula: what starts like one gets a quote in front."""
    text = plain(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
