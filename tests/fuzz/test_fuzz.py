"""Hostile input of every kind ends in success or in one line: no traceback, no hang, no gigabyte of memory."""

from __future__ import annotations

import pytest

from tests.fuzz.batches import AS_IT_IS, failures, outcome
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutations import SPECIAL


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_ends_in_one_line(kind: str) -> None:
    found = failures(kind, [*SPECIAL, *range(100)])
    assert not found, "\n".join(map(str, found))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_much_hostile_input_ends_in_one_line(kind: str) -> None:
    found = failures(kind, range(100, 1100))
    assert not found, "\n".join(map(str, found))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_kind_is_read(kind: str) -> None:
    """The unchanged example of each kind is read without error."""
    found = outcome(kind, [AS_IT_IS])
    assert found.codes == {0: 1} and not found.failures, found
