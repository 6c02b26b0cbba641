"""hpcdl's own environment variables stand in one table, which the site guide shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hpcdl.core import variables
from tests.conftest import ROOT

FILES = sorted(path for path in (ROOT / "hpcdl").rglob("*.py") if path != ROOT / "hpcdl" / "core" / "variables.py")


def literals(path: Path) -> list[str]:
    """The strings of a file, but for those that explain."""
    tree = ast.parse(path.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
    ]


def test_no_other_file_spells_a_name() -> None:
    found = {str(path): text for path in FILES for text in literals(path) if variables.PREFIX in text}
    assert found == {}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_what_explanations_name_is_in_the_table(path: Path) -> None:
    assert set(re.findall(rf"{variables.PREFIX}[A-Z_]+", path.read_text())) <= set(variables.VARIABLES)


def test_every_constant_is_in_the_table() -> None:
    constants = {value for name, value in vars(variables).items() if isinstance(value, str) and name.isupper()}
    named = {value for value in constants if value.startswith(variables.PREFIX)} - {variables.PREFIX}
    assert named == set(variables.VARIABLES)


def test_the_site_guide_lists_them() -> None:
    assert variables.table() in (ROOT / "docs" / "site-guide.md").read_text()
