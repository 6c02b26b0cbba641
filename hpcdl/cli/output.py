"""Output of commands: one JSON document, or lines and tables for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from hpcdl.core.errors import printable
from hpcdl.core.paths import quoted
from hpcdl.core.progress import Progress, progress
from hpcdl.core.storage.files import without_infinities
from hpcdl.core.units import listed

VERBOSE = "HPCDL_VERBOSE"
"""Set by `-v`: tracebacks and TensorFlow's own log; ranks inherit it."""


def command_in(words: Sequence[str]) -> str:
    """Return the command that a command line names, empty if it names none."""
    return next((word for word in words if not word.startswith("-")), "")


def print_json(document: Any) -> None:
    """Print `document` on stdout, indented; null for numbers that JSON lacks."""
    print(json.dumps(without_infinities(document), indent=1, allow_nan=False))


def say(text: str) -> None:
    """Print lines for people on stderr; names of files or classes never reach a terminal with control codes."""
    put(text, sys.stderr)


def put(text: str = "", stream: TextIO | None = None) -> None:
    """Print lines on stdout or on `stream`, in the same way."""
    print("\n".join(map(printable, text.split("\n"))), file=stream)


def say_beside(folder: Path, others: Sequence[str]) -> None:
    """Say that a folder for output holds files that hpcdl did not write, if it does."""
    if others:
        say(f"note: {quoted(folder)} holds other files, which stay as they are: {listed(list(map(quoted, others)))}")


class Commentary:
    """Messages of a command beside its result: progress, plans, what to type next. With -q, only warnings."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Print lines on stderr."""
        if not self.quiet or text.startswith("warning"):
            say(text)

    def progress(self, description: str, total: float) -> Progress:
        """Return a bar on a terminal, else a line per minute."""
        return progress(description, total, enabled=not self.quiet)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a plain table on stdout; columns that hold numbers are right-aligned."""
    for line in table_lines(header, rows):
        print(line)


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of such a table, the header first."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    numeric = [all(re.fullmatch(r"[-\d.,]+( \S+)?|", row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in [list(header), *cells]:
        fields = zip(row, widths, numeric, strict=True)
        lines.append("  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in fields).rstrip())
    return lines
