from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.units import format_list, format_mask, parse_list, parse_mask
from tests.node.machine_xml import format_words

SETS = st.frozensets(st.integers(0, 400), max_size=40)


@given(SETS)
def test_lists_round_trip(cpus: frozenset[int]) -> None:
    assert parse_list(format_list(cpus)) == tuple(sorted(cpus))


@given(SETS)
def test_masks_round_trip(cpus: frozenset[int]) -> None:
    assert parse_mask(format_words(cpus)) == parse_mask(format_mask(cpus)) == tuple(sorted(cpus))


def test_forms_that_kernels_write() -> None:
    assert parse_list("0-3,8\n") == (0, 1, 2, 3, 8)
    assert format_list([8, 0, 1, 2, 3]) == "0-3,8"
    assert parse_mask("0x00000001,,0x80000000") == (31, 64)  # hwloc omits zero words
    assert format_mask([0, 4]) == "0x11"


def test_no_list_is_an_error() -> None:
    with pytest.raises(ValueError):
        parse_list("a-b")
