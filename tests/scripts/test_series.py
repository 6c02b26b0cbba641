"""Whether ranks cut windows from every n-th time of one series: what series show, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hpcdl.scripts.fit.series import _series_of, is_between

NUMBER, LENGTH = 2400, 12
TIMES = np.arange(NUMBER)
DRAWN = np.random.default_rng(3).normal(size=NUMBER)
WALK = DRAWN.cumsum()
DAILY = np.sin(TIMES * 2 * np.pi / 24) + 0.05 * DRAWN


def windows(series: np.ndarray) -> np.ndarray:
    return np.stack([series[at : at + LENGTH] for at in range(len(series) - LENGTH)])


def of_keras(series: np.ndarray) -> Any:
    return keras.utils.timeseries_dataset_from_array(series, series, LENGTH)


def of_tensorflow(series: np.ndarray) -> Any:
    cut = tf.data.Dataset.from_tensor_slices(series).window(LENGTH, shift=1, drop_remainder=True)
    return cut.flat_map(lambda window: window.batch(LENGTH)).batch(8)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("cut", [windows, of_keras, of_tensorflow])
@pytest.mark.parametrize(("series", "shows"), [(WALK, True), (DAILY, True), (DRAWN, False), (TIMES * 0.0, False)])
def test_every_nth_time_of_a_series_is_found(
    series: np.ndarray, shows: bool, cut: Callable[[np.ndarray], Any], size: int
) -> None:
    whole = np.stack([series, DRAWN], axis=1).astype("float32")
    length = NUMBER // size // 24 * 24  # pieces that begin at one time of the day

    def found(parts: list[Any]) -> bool:
        each = [_series_of(part) for part in parts]
        return None not in [one if one is None else 0 for one in each] and all(
            is_between(*pair, size)  # type: ignore[arg-type]
            for pair in pairwise(each)
        )

    assert found([cut(whole[rank::size]) for rank in range(size)]) == shows
    assert not found([cut(whole[rank * length : (rank + 1) * length]) for rank in range(size)])
    assert not found([windows(whole)[rank::size] for rank in range(size)])
    assert not found([of_keras(whole).shard(size, rank) for rank in range(size)])


@pytest.mark.parametrize(
    "data", [None, np.zeros((0, 4)), np.ones(3), np.random.default_rng(3).random((100, 8, 8, 3)), {"words": [["a"]]}]
)
def test_other_data_have_no_series(data: Any) -> None:
    assert _series_of(data) is None
