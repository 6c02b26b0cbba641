"""The report on a terminal: summary, warnings, and the table of each section. Color only on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.core.units import counted
from hpcdl.report.document import Column, Document, Listing, Table, cell_text, is_numeric, plain

MOST_ROWS = 40
"""Maximum number of rows of one table. The files hold all."""
_WIDTH_IN_A_PIPE = 160


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Print the report on stdout; write nothing."""
    # Imported here, so that `hpcdl --help` does not load rich.
    from rich.console import Console
    from rich.text import Text

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_IN_A_PIPE
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    console.print(Text(plain(document.title), style="bold"))
    for line in document.summary:
        console.print(Text(f"  {plain(line)}"))
    for line in document.warnings:
        console.print(Text(f"  ! {plain(line)}", style="yellow"))
    for section in document.sections:
        if section.in_files:
            num_rows = sum(len(item.rows) for item in section.items if isinstance(item, Table))
            console.print()
            console.print(Text(f"{section.title}: {counted(num_rows, 'row')} in the files that --out DIR writes"))
            continue
        for item in section.items:
            if isinstance(item, Table):
                console.print()
                _print_table(console, item)
            elif isinstance(item, Listing):
                console.print()
                console.print(Text(plain(item.title), style="italic"))
                for line in item.lines:
                    console.print(Text(f"  {plain(line)}"))
    return []


def _print_table(console: object, table: Table) -> None:
    """Print a table in columns if no word or number has to be broken, else as a paragraph for each row."""
    from rich.console import Console
    from rich.text import Text

    assert isinstance(console, Console)
    columns = list(table.columns)
    rows = [
        [cell_text(column, cell) for column, cell in zip(columns, row, strict=True)] for row in table.rows[:MOST_ROWS]
    ]
    common: list[str] = []
    if _least_width(columns, rows) > console.width and len(table.rows) > 1:
        same_everywhere = [len({row[at] for row in rows}) == 1 for at in range(len(columns))]
        common = [
            f"{plain(columns[at].name)} {rows[0][at]}"
            for at in range(len(columns))
            if same_everywhere[at] and rows[0][at]
        ]
        rows = [[cell for cell, same in zip(row, same_everywhere, strict=True) if not same] for row in rows]
        columns = [column for column, same in zip(columns, same_everywhere, strict=True) if not same]
    if _least_width(columns, rows) <= console.width:
        _print_columns(console, table.title, columns, rows)
    else:
        console.print(Text(plain(table.title), style="italic"))
        for row in rows:
            pairs = [f"{plain(column.name)} {cell}" for column, cell in zip(columns, row, strict=True) if cell]
            console.print(_unbroken(pairs, console.width), soft_wrap=True)
    if common:
        console.print(_unbroken([f"all: {common[0]}", *common[1:]], console.width), soft_wrap=True)
    num_more = len(table.rows) - MOST_ROWS
    if num_more > 0:
        console.print(Text(f"  and {num_more:,} more rows in the files"))
    if table.note:
        console.print(Text(f"  {plain(table.note)}", style="dim"))


def _print_columns(console: object, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    assert isinstance(console, Console)
    shown = RichTable(title=Text(plain(title)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        numeric = is_numeric(column)
        shown.add_column(
            Text(plain(column.name)),
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=_least_of(column, [row[at] for row in rows]),
        )
    for row in rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _least_of(column: Column, cells: Sequence[str]) -> int:
    """Return the screen columns that `column` needs: whole numbers, or the longest word of text."""
    pieces = [*plain(column.name).split(), *(cells if is_numeric(column) else " ".join(cells).split())]
    return max(map(len, pieces), default=1)


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table, including the rules between its columns."""
    least = [_least_of(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    return sum(least) + 3 * len(columns) + 1


def _unbroken(pairs: Sequence[str], width: int) -> str:
    """Return pairs of name and value, separated by two spaces, in lines of at most `width`.

    A pair is split only if it is longer than a line. Words are never split.
    """
    lines, indent = [""], "  "
    for pair in pairs:
        longer = f"{lines[-1]}  {pair}" if lines[-1] else f"{indent}{pair}"
        if lines[-1] and len(longer) > width:
            indent = "      "
            lines.append(f"{indent}{pair}")
        else:
            lines[-1] = longer
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in lines
    )
