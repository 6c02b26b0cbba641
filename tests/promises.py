"""CONTRIBUTING.md's table of promises: what it says of each, and the test files that show them."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
HEAD = "| promise | said in | shown by |"


def rows() -> list[tuple[str, str, list[str]]]:
    """Return promise, page and test files of each row."""
    _, _, table = (_ROOT / "CONTRIBUTING.md").read_text().partition(HEAD)
    found = []
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        promise, page, shown = (cell.strip() for cell in line.strip("|").split("|"))
        (address,) = re.findall(r"\]\((\S+)\)", page)
        found.append((promise, address, re.findall(r"`(\S+)`", shown)))
    return found


def files_of_promises() -> set[Path]:
    """Return the test files of all rows."""
    return {_ROOT / test for _, _, tests in rows() for test in tests}
