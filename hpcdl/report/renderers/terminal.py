"""The report on a terminal: summary, warnings, and the table of each section. Colour only where it is a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcdl.report.cells import cell_text, is_numeric, plain
from hpcdl.report.document import Document, Listing, Table

MOST_ROWS = 40
"""Rows of one table; the files hold all."""
_WIDTH_IN_A_PIPE = 160


def render(document: Document, folder: Path, drawings: Mapping[str, str]) -> list[Path]:
    """Print the report on stdout; nothing is written."""
    # Imported here: `hpcdl --help` must not pay for rich.
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
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    assert isinstance(console, Console)
    shown = RichTable(title=Text(plain(table.title)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        shown.add_column(Text(plain(column.name)), justify="right" if is_numeric(column) else "left", overflow="fold")
    for row in table.rows[:MOST_ROWS]:
        shown.add_row(*(Text(cell_text(column, cell)) for column, cell in zip(table.columns, row, strict=True)))
    console.print(shown)
    rest = len(table.rows) - MOST_ROWS
    if rest > 0:
        console.print(Text(f"  and {rest:,} more rows in the files"))
    if table.note:
        console.print(Text(f"  {plain(table.note)}", style="dim"))
