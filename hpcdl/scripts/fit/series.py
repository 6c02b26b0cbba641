"""Whether the ranks cut windows from every n-th time of one series, as `x[hpcdl.rank() :: hpcdl.size()]` gives them.

The steps of such windows are longer than those of the series that the model is meant for, and nothing else shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.scripts.fit.pipelines import arrays_in, kind_of, stages_of
from hpcdl.scripts.process.session import warn_once

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

_FEWEST_TIMES, _MOST_TIMES = 64, 512
"""Times of a series to compare."""
_SHORTEST = 3
"""Times of a window."""
_NEAR = 0.3
"""Largest relative difference of the slope from that of every n-th time."""
_MOST_SCATTER = 1.4
"""Independent series have twice the slope as their ratio of squares, and a random walk once."""
_OF_KERAS = {"Tensor", "Repeat", "Range", "Zip"}
"""Stages of `timeseries_dataset_from_array`."""


def check_series(group: ScriptGroup, data: Any) -> None:
    """Warn if ranks cut the windows in `data`, which they gave to a fit, from every n-th time of a series. Collective.

    A fit without such windows costs one small message.
    """
    series = _series_of(data)
    by_rank = group.messages.allgather_json([] if series is None else series.astype(float).tolist())
    if min(map(len, by_rank)) >= _FEWEST_TIMES and all(
        is_between(numpy.array(one), numpy.array(other), group.size) for one, other in pairwise(by_rank)
    ):
        warn_once(
            group,
            "times of one series",
            f"each rank cut its windows from one time in {group.size} of a series, as x[hpcdl.rank() :: hpcdl.size()] "
            "gives them: their steps are that much longer. Cut the whole series into windows first, and give each rank "
            "a part of these",
        )


def is_between(first: Array, second: Array, num_ranks: int) -> bool:
    """Return whether each number of `second` seems to lie 1 / `num_ranks` of the way between two of `first`."""
    length = min(len(first), len(second))
    first, second = first[:length], second[:length]
    steps, ways = first[1:] - first[:-1], (second - first)[:-1]
    squares = float(steps @ steps)
    if not numpy.isfinite(squares) or not squares:
        return False
    slope, scatter = float(ways @ steps) / squares, float(ways @ ways) / squares
    return abs(slope * num_ranks - 1) < _NEAR and scatter < _MOST_SCATTER * slope


def _series_of(data: Any) -> Array | None:
    """Return the first times of the series from which windows are cut, one column; None if there are none."""
    for array in _whole_series(data) if isinstance(data, tf.data.Dataset) else map(_cut_from, _arrays_in(data)):
        if array is not None and array.dtype.kind == "f" and len(array) >= _FEWEST_TIMES:
            return array[:_MOST_TIMES].reshape(min(len(array), _MOST_TIMES), -1)[:, 0]
    return None


def _whole_series(data: Any) -> list[Any]:
    """Return the arrays from which stages of tf.data cut windows."""
    kinds = {kind_of(stage) for stage in stages_of(data)}
    if "Shard" not in kinds and ("Window" in kinds or kinds >= _OF_KERAS):
        return [one[:_MOST_TIMES].numpy() if one.shape.rank else None for one in arrays_in(data)]
    return []


def _arrays_in(data: Any) -> Sequence[Any]:
    return [one for one in tf.nest.flatten(data) if isinstance(one, numpy.ndarray | tf.Tensor)]


def _cut_from(windows: Any) -> Array | None:
    """Return the first numbers of windows of which each begins one time after the one before; None of others."""
    if len(windows.shape) < 2 or windows.shape[1] < _SHORTEST or not len(windows):
        return None
    for number in (2, _MOST_TIMES):  # two tell of most data that they are none
        some: Array = numpy.asarray(windows[:number])
        some = some.reshape(*some.shape[:2], -1)[..., 0]
        if not numpy.array_equal(some[1:, :-1], some[:-1, 1:]):
            return None
    return some[:, 0]
