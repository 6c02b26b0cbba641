"""The report as data: report.json for programs, scaling.csv and each table as CSV, and tables for LaTeX's `\\input`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl.core.storage.files import json_text, write_output
from hpcdl.report.analysis.scaling import COLUMNS, flat_row
from hpcdl.report.document import Bounds, Cell, Column, Document, Interval, Table, cell_text, is_numeric, plain


def render_json(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write report.json into `folder`."""
    path = folder / "report.json"
    write_output(path, json_text(document.data))
    return [path]


# OWASP's list for CSV injection: tab and carriage return may precede a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_UNITS = {"seconds": "s", "bytes": "B"}
"""Units of columns whose cells are written without them. Shares are from 0 to 1."""


def render_csv(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write scaling.csv (only its header if there are no points) and tables/NAME.csv into `folder`."""
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
    """Return a CSV table with a column for each value, and further ones for half widths or ends of intervals."""
    header: list[str] = []
    columns: list[list[Any]] = []
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
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
    """Return `text` so that no spreadsheet takes it for a formula: a quote precedes text that starts like one."""
    text = plain(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "†": r"$\dagger$",
    "‡": r"$\ddagger$", "²": r"$^2$", "×": r"$\times$", "<": r"$<$", ">": r"$>$", "|": r"$|$", "…": r"\ldots{}",
    "α": r"$\alpha$", "β": r"$\beta$", "κ": r"$\kappa$", "σ": r"$\sigma$", "µ": r"$\mu$", "∞": r"$\infty$",
    "[": "{[}", "*": "{*}",  # at the start of a row they would belong to the line break before it
}  # fmt: skip


def render_latex(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Write tables/NAME.tex into `folder`."""
    paths = []
    for name, table in document.tables().items():
        path = folder / "tables" / f"{name}.tex"
        write_output(path, "\n".join(_lines(table)) + "\n")
        paths.append(path)
    return paths


def escaped(text: str) -> str:
    """Return `text` for LaTeX: no command, no mathematics, one line. Other letters are left to the engine."""
    return "".join(_SPECIAL.get(letter, letter) for letter in plain(text))


def _lines(table: Table) -> Iterator[str]:
    yield f"% {escaped(table.title)}. It needs \\usepackage{{booktabs}}."
    yield rf"\begin{{tabular}}{{{''.join('r' if is_numeric(column) else 'l' for column in table.columns)}}}"
    yield r"\toprule"
    yield " & ".join(escaped(column.name) for column in table.columns) + r" \\"
    yield r"\midrule"
    for row in table.rows:
        yield (
            " & ".join(escaped(cell_text(header, cell)) for header, cell in zip(table.columns, row, strict=True))
            + r" \\"
        )
    yield r"\bottomrule"
    yield r"\end{tabular}"
    if table.note:
        yield f"% {escaped(table.note)}"
