"""What commands print: one JSON document, or lines and tables for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

VERBOSE = "HPCDL_VERBOSE"
"""Set by `-v`: tracebacks and TensorFlow's own log; ranks inherit it."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_json(document: Any) -> None:
    """Print `document` on stdout, indented."""
    print(json.dumps(document, indent=1, allow_nan=False))


def say(line: str) -> None:
    """Print one line for people on stderr, without control codes that a file name could carry."""
    print(printable(line), file=sys.stderr)


def printable(text: str) -> str:
    """`text` without terminal control codes."""
    return _CONTROL.sub("?", text)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a plain table on stdout; columns that hold numbers are right-aligned."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    numeric = [all(re.fullmatch(r"[-\d.,]+( \S+)?|", row[column]) for row in cells) for column in range(len(header))]
    for row in [list(header), *cells]:
        fields = zip(row, widths, numeric, strict=True)
        print("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in fields).rstrip())
