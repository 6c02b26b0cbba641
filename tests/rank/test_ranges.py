"""A model that is fed numbers of another range than in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcdl.data.format.dataset import open_dataset
from hpcdl.rank.ranges import difference, other_types

RANDOM = np.random.default_rng(7)
PICTURES = RANDOM.random((32, 400))
TABLE = np.column_stack([RANDOM.normal(size=32), RANDOM.normal(50, 15, 32), RANDOM.integers(0, 2, 32)])
NAMES = ("pressure", "age", "smoker")


@pytest.mark.parametrize(
    ("new", "old", "text"),
    [
        pytest.param(PICTURES * 255, PICTURES, "goes from", id="bytes for 0 to 1"),
        pytest.param(PICTURES, PICTURES * 255, "goes from", id="0 to 1 for bytes"),
        pytest.param(PICTURES * 2 - 1, PICTURES, "goes from", id="-1 to 1 for 0 to 1"),
        pytest.param(PICTURES, PICTURES * 2 - 1, "goes from", id="0 to 1 for -1 to 1"),
        pytest.param(TABLE * [40, 1, 1] + [[60, 0, 0]], TABLE, "has pressure about", id="a column of another unit"),
        pytest.param(np.full((32, 400), 273.0), RANDOM.normal(size=(32, 400)), "goes from", id="Kelvin for z"),
    ],
)
def test_another_range_is_described(new: Any, old: Any, text: str) -> None:
    assert text in difference(new, old, NAMES if old.shape[1] == 3 else ())


@pytest.mark.parametrize(
    ("new", "old"),
    [
        pytest.param(RANDOM.random((32, 400)), PICTURES, id="other pictures"),
        pytest.param(PICTURES * 0.2, PICTURES, id="darker pictures"),
        pytest.param(RANDOM.normal(size=(32, 8)), RANDOM.normal(size=(32, 8)), id="standardised"),
        pytest.param(RANDOM.lognormal(0, 2, (32, 50)), RANDOM.lognormal(0, 2, (32, 50)), id="long tails"),
        pytest.param(np.eye(32)[RANDOM.integers(0, 32, 32)], np.eye(32), id="one-hot"),
        pytest.param(PICTURES * (RANDOM.random((32, 400)) > 0.99), PICTURES * (PICTURES > 0.99), id="mostly zeros"),
        pytest.param(np.column_stack([np.zeros(32), TABLE[:, 1:]])[::-1], TABLE, id="a column that is zero"),
        pytest.param(np.full((4, 3), np.nan), TABLE, id="nothing but NaN"),
        pytest.param(PICTURES, np.zeros((32, 400)), id="nothing but zeros in training"),
    ],
)
def test_the_same_range_is_not(new: Any, old: Any) -> None:
    assert not difference(new, old, NAMES if old.shape[1] == 3 else ())


def test_types_alone_are_asked_about_where_no_sample_is_left() -> None:
    bytes_, floats = (open_dataset(f"synthetic:8x8x1:2:{dtype}@16") for dtype in ("uint8", "float32"))
    (line,) = other_types(floats, bytes_)
    assert "holds float32, and uint8 in" in line and line.endswith("are both in the same range?")
    assert other_types(bytes_, bytes_) == []
