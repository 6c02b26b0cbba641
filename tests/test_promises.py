"""CONTRIBUTING.md's table of promises: its pages and tests exist, and each promise keeps a test in `make test`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.promises import rows

LONG = frozenset({"soak", "long", "lab"})


def kept(path: Path, without: Collection[str]) -> list[str]:
    """Return the tests of a file that have none of these marks, of their own or of the file."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assigned = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    of_file = [mark for value in assigned for mark in (value.elts if isinstance(value, ast.List) else [value])]

    def marked(lines: Iterable[ast.expr]) -> bool:
        return any(re.match(rf"pytest\.mark\.({'|'.join(without)})\b", ast.unparse(line)) for line in lines)

    return [] if marked(of_file) else [one.name for one in functions if not marked(one.decorator_list)]


def test_there_are_promises() -> None:
    assert len(rows()) > 20


@pytest.mark.parametrize(("promise", "page", "tests"), rows(), ids=[promise for promise, _, _ in rows()])
def test_a_promise_is_written_somewhere_and_shown_in_every_run(promise: str, page: str, tests: list[str]) -> None:
    assert (ROOT / page).is_file(), f"{promise}: {page}"
    assert tests, f"{promise}: no test"
    for test in tests:
        assert (ROOT / test).is_file(), f"{promise}: {test}"
        assert kept(ROOT / test, {"soak"}), f"{promise}: all of {test} is in `make soak`"
    needs_the_lab = not any(kept(ROOT / test, {"soak", "lab"}) for test in tests)
    assert needs_the_lab or any(kept(ROOT / test, LONG) for test in tests), f"{promise}: nothing is in `make test`"
