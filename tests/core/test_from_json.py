"""Dataclasses from JSON are as promised in what msgspec leaves open, with either parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hpcdl.core.records.from_json import check_fields, decoded, from_json


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: float
    number: int = 1
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    schema: str = "s/1"
    rows: Sequence[Sequence[int] | None] = ()
    inner: Inner | None = None
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    anything: Mapping[str, Any] = field(default_factory=dict)


WHOLE = {"rows": [[1, 2], None], "inner": {"size": 2}, "by_name": {"a": {"size": 0.5, "note": "x"}}, "odd": 1}


def test_lists_become_tuples_and_vars_names_defaults() -> None:
    for found in (from_json(Outer, WHOLE), decoded(Outer, json.dumps(WHOLE).encode())):
        assert found is not None and found == from_json(Outer, {**WHOLE, "schema": "s/1"})
        assert found.rows == ((1, 2), None) and hash(found.rows)
        assert found.inner is not None
        assert vars(found.inner) == {"size": 2.0, "number": 1, "note": None} and type(found.inner.size) is float
        assert vars(found.by_name["a"])["number"] == 1 and set(vars(found)) == set(Outer.__dataclass_fields__)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"rows": [[1, "b"]]}, r"^rows\[0\]\[1\] is 'b', expected int$"),
        ({"rows": 3}, r"^rows is 3, expected array$"),
        ({"inner": {"size": True}}, r"^inner\.size is True, expected float$"),
        ({"inner": {}}, r"^inner: Object missing required field size$"),
        ({"by_name": {"a": {"size": None}}}, r"by_name\[\.\.\.\]\.size: Expected float, got null"),
        ({"inner": {"size": 1, "number": 2**63}}, r"^inner: number: a whole number of more than 64 bits$"),
        ({"rows": [[-(2**63)]]}, r"^rows: a whole number of more than 64 bits$"),
        ({"inner": {"size": 10**400}}, r"^inner\.size: Number out of range$"),
        ({"anything": {"a": json.loads("[" * 80 + "]" * 80)}}, r"^anything: it is nested more than 64 deep$"),
        ([1], r"^Outer is \[1\], expected object$"),
    ],
)
def test_what_does_not_fit_is_reported_with_its_place(document: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(Outer, document)
    assert decoded(Outer, json.dumps(document).encode()) is None


def test_fields_that_are_there_are_checked_alone() -> None:
    check_fields(Inner, {})
    check_fields(Inner, {"number": 3})
    with pytest.raises(ValueError, match="number is 'x'"):
        check_fields(Inner, {"number": "x"})
