"""The report on a terminal: summary, warnings, and the table of each section. Color only on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcdl.core.units import NOT_BOUNDED, counted, listed
from hpcdl.report.document import Cell, Column, Document, Listing, Table, cell_text, is_numeric, plain

MOST_ROWS = 40
"""Maximum number of rows of one table. The files hold all."""
_WIDTH_IN_A_PIPE = 160  # Rich assumes 80 columns in a pipe, too few for a table of scaling
_RULES = 3
"""Screen columns between two columns of a table."""


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Print the report on stdout; write nothing."""
    # Imported here, so that `hpcdl --help` does not load rich.
    from rich.console import Console
    from rich.text import Text

    # Rich asks the terminal for its width, and takes COLUMNS by itself.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_IN_A_PIPE
    # Names may hold brackets and colons, which are no markup and no emoji.
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
    known = [row for row in table.rows if NOT_BOUNDED not in row]
    rows = [[cell_text(column, cell) for column, cell in zip(columns, row, strict=True)] for row in known[:MOST_ROWS]]
    common: list[str] = []
    # Values that all rows share move into a line below the table, which makes room for the others.
    if _least_width(columns, rows) > console.width and len(rows) > 1:
        same_everywhere = [len({row[at] for row in rows}) == 1 for at in range(len(columns))]
        common = [
            f"{plain(columns[at].name)} {rows[0][at]}"
            for at in range(len(columns))
            if same_everywhere[at] and rows[0][at]
        ]
        rows = [[cell for cell, same in zip(row, same_everywhere, strict=True) if not same] for row in rows]
        columns = [column for column, same in zip(columns, same_everywhere, strict=True) if not same]
    if rows and _least_width(columns, rows) <= console.width:
        _print_columns(console, table.title, columns, rows)
    else:
        console.print(Text(plain(table.title), style="italic"))
        for row in rows:
            pairs = [f"{plain(column.name)} {cell}" for column, cell in zip(columns, row, strict=True) if cell]
            console.print(_unbroken(pairs, console.width), soft_wrap=True)
    if common:
        console.print(_unbroken([f"all: {common[0]}", *common[1:]], console.width), soft_wrap=True)
    num_more = len(known) - MOST_ROWS
    if num_more > 0:
        console.print(Text(f"  and {num_more:,} more rows in the files"))
    for line in _not_bounded(table):
        console.print(Text(f"  {line}"))
    if table.note:
        console.print(Text(f"  {plain(table.note)}", style="dim"))


def _not_bounded(table: Table) -> Iterator[str]:
    """Yield a line for each first cell of the rows that hold no number: the table would repeat `not bounded`."""
    groups: dict[Cell, list[str]] = {}
    for row in table.rows:
        if NOT_BOUNDED in row:
            groups.setdefault(row[0], []).append(str(row[1]))
    for name, sizes in groups.items():
        yield f"{NOT_BOUNDED} by these runs: {plain(str(name))} on {listed(sizes, 12)} {table.columns[1].name}"


def _print_columns(console: object, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    assert isinstance(console, Console)
    shown = RichTable(title=Text(plain(title)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column, width in zip(columns, _widths(columns, rows, console.width), strict=True):
        shown.add_column(
            Text(plain(column.name)),
            justify="right" if is_numeric(column) else "left",
            # Rich's default replaces the end of a long name by an ellipsis.
            overflow="fold",
            width=width,
        )
    for row in rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def _least_of(column: Column, cells: Sequence[str]) -> int:
    """Return the screen columns that `column` needs: whole numbers, or the longest word of text."""
    pieces = [*plain(column.name).split(), *(cells if is_numeric(column) else " ".join(cells).split())]
    return max(map(len, pieces), default=1)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], most: int) -> list[int]:
    """Return the width of each column: the widest cell's, less where the table would be wider than `most`.

    Rich would shrink the widest columns below what numbers need, and cut off the last column.
    """
    least = [_least_of(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    widths = [max(len(cell) for cell in (plain(column.name), *(row[at] for row in rows)))
              for at, column in enumerate(columns)]  # fmt: skip
    while sum(widths) + _RULES * len(columns) + 1 > most and (slack := max(map(int.__sub__, widths, least))) > 0:
        widths[list(map(int.__sub__, widths, least)).index(slack)] -= 1
    return widths


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table, including the rules between its columns."""
    least = [_least_of(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    return sum(least) + _RULES * len(columns) + 1


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
