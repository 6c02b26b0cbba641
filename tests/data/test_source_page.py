"""docs/reference/sources.md agrees with hpcdl's behaviour, and published kinds of data are read right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hpcdl.data.sources import SOURCES
from tests.data import source_page
from tests.data.source_page import BEHAVIOUR, CASES, FORMS, PAGE, look, page

NAMES = [(kind, name) for kind, found in CASES.items() for name in found]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_published_kinds_are_read_asked_about_or_refused(kind: str, name: str) -> None:
    save, options, outcome, words = CASES[kind][name]
    found = look(kind, name, save, options, outcome)
    assert found.outcome == outcome and re.search(words, found.said), f"{found.outcome}: {found.said}"


def test_the_page_is_as_its_cases_are() -> None:
    assert page() == PAGE.read_text(), f"run python -m {source_page.__name__}"


def test_every_format_has_a_row_and_every_behaviour_a_test() -> None:
    assert list(FORMS) and set(FORMS) == set(SOURCES)
    for place in BEHAVIOUR.values():
        name, _, test = place.partition("::")
        tree = ast.parse((Path(__file__).parent / name).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place
