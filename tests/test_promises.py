"""CONTRIBUTING.md's table of promises: its pages and tests exist, and each promise keeps a test in `make test`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

HEAD = "| promise | said in | shown by |"


def rows() -> list[tuple[str, str, list[str]]]:
    """Return promise, page and test files of each row."""
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition(HEAD)
    found = []
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        promise, page, shown = (cell.strip() for cell in line.strip("|").split("|"))
        (address,) = re.findall(r"\]\((\S+)\)", page)
        found.append((promise, address, re.findall(r"`(\S+)`", shown)))
    return found


def left_in_make_test(path: Path) -> list[str]:
    """Return the tests of a file that are not wholly in the long version."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [one.name for one in functions if "pytest.mark.soak" not in map(ast.unparse, one.decorator_list)]


def test_there_are_promises() -> None:
    assert len(rows()) > 20


@pytest.mark.parametrize(("promise", "page", "tests"), rows(), ids=[promise for promise, _, _ in rows()])
def test_a_promise_is_written_somewhere_and_shown_in_every_run(promise: str, page: str, tests: list[str]) -> None:
    assert (ROOT / page).is_file(), f"{promise}: {page}"
    assert tests, f"{promise}: no test"
    for test in tests:
        assert (ROOT / test).is_file(), f"{promise}: {test}"
        assert left_in_make_test(ROOT / test), f"{promise}: all of {test} is in the long version"
