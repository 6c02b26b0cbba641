"""Means, deviations and ranges of fields, joined from block to block and from shard to shard in a fixed order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpcdl.data.format.fields import Field, Statistics

_MOST_CHANNELS = 16


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of `count` values each: mean, sum of squared deviations from it, least and greatest."""

    count: int = 0
    mean: Sequence[float] = ()
    squares: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @staticmethod
    def of(values: npt.NDArray[np.generic], item: Field) -> Moments:
        """Those of a block (samples first) of the field `item`, for each channel; what is not finite is left out."""
        columns = values.reshape(-1, _channels(item)).astype(np.float64)
        if not np.isfinite(columns).all():
            columns = columns[np.isfinite(columns).all(1)]
        if not len(columns):
            return Moments()
        mean = columns.mean(0)
        return Moments(
            count=len(columns),
            mean=mean.tolist(),
            squares=np.square(columns - mean).sum(0).tolist(),
            low=columns.min(0).tolist(),
            high=columns.max(0).tolist(),
        )

    def joined(self, other: Moments) -> Moments:
        """Those of both together (Chan, Golub and LeVeque 1983)."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        mine, other_mean = np.array(self.mean), np.array(other.mean)
        step = other_mean - mine
        squares = np.array(self.squares) + np.array(other.squares) + step**2 * (self.count * other.count / count)
        return Moments(
            count=count,
            mean=(mine + step * (other.count / count)).tolist(),
            squares=squares.tolist(),
            low=np.minimum(self.low, other.low).tolist(),
            high=np.maximum(self.high, other.high).tolist(),
        )

    def statistics(self) -> Statistics:
        """As the manifest keeps them."""
        deviation = np.sqrt(np.array(self.squares) / max(1, self.count))
        return Statistics(mean=self.mean, std=deviation.tolist(), low=self.low, high=self.high)


def _channels(item: Field) -> int:
    """Elements of the last axis that are scaled each by themselves: features, or channels; 1 for volumes and images."""
    channels_last = len(item.shape) < 3 or item.shape[-1] <= _MOST_CHANNELS
    return item.shape[-1] if item.shape and channels_last and not (item.variable and len(item.shape) == 1) else 1


def scaled(fields: Sequence[Field], shards: Iterable[Sequence[Moments]]) -> list[Field]:
    """`fields` with the statistics that the moments of the shards amount to."""
    wanted = [item.name for item in fields if item.normalise != "none"]
    totals = {name: Moments() for name in wanted}
    for moments in shards:
        for name, own in zip(wanted, moments, strict=False):  # of a shard without samples there are none
            totals[name] = totals[name].joined(own)
    return [
        dataclasses.replace(item, statistics=totals[item.name].statistics()) if item.name in totals else item
        for item in fields
    ]
