"""What the workers' sum for equation (2) travels as: weights in float32, or their distances from the center in half.

Every rank of sync-easgd 2 and 3 has the center, the same bits, so what is summed may be W_i - W~: numbers so small that
16 bits hold them with a relative error of 2^-11 (fp16) or 2^-8 (bf16) of the distance, not of the weight. What rounding
leaves over is still there at the next exchange. TensorFlow for float16 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy

from hpcdl.comm.arithmetic import add_bfloat16, float16_scale, from_bfloat16, to_bfloat16
from hpcdl.strategies.elastic.equations import attract_center, attract_center_by, blocks

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array

Reduce = Callable[["Array", "Add | None"], None]
"""Sums a buffer over the workers in place."""
EXPECTED = 4.0
"""Sums of distances are expected below so many times the center's largest weight. float16 then has its full
precision down to 2^-26 of that weight, which is less than float32 can tell of it."""


class WholeWeights:
    """Weights as they are: 4 bytes each."""

    def start(self, num_weights: int) -> None:
        """Touch the buffers."""
        self.total: Array = numpy.zeros(num_weights, numpy.float32)

    def exchange(self, weights: Array, center: Array, reduce: Reduce) -> None:
        """Sum the workers' `weights`; collective."""
        self.total[:] = weights
        reduce(self.total, None)

    def attract(self, center: Array, num_workers: int, alpha: float) -> None:
        """Equation (2)."""
        attract_center(center, self.total, num_workers, alpha)


class HalfDifferences:
    """Distances from the center, 2 bytes each: float16 brought to its range by a power of two, or bfloat16."""

    def __init__(self, number_format: str) -> None:
        self._scaled = number_format == "fp16"

    def start(self, num_weights: int) -> None:
        """Touch the buffers."""
        self.total: Array = numpy.zeros(num_weights, numpy.float32)
        self._sent: Array = numpy.zeros(num_weights, numpy.float16 if self._scaled else numpy.uint16)

    def exchange(self, weights: Array, center: Array, reduce: Reduce) -> None:
        """Sum the workers' W_i - W~ into `total`; collective."""
        # Weights that have diverged overflow here; they travel on as infinity and are found where weights are checked.
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.subtract(weights, center, out=self.total)
            if not self._scaled:
                self._as_bfloat16(reduce)
                return
            # All ranks know the center's range, and nobody has to be asked: workers are hardly ever further apart.
            expected = _largest(center) * EXPECTED
            if expected[0]:
                self._as_float16(expected, reduce)
            if not (expected[0] and numpy.isfinite(_largest(self.total)[0])):  # so on all ranks: they have one sum
                numpy.subtract(weights, center, out=self.total)
                bound = _largest(self.total)
                reduce(bound, None)
                self._as_float16(bound, reduce)

    def attract(self, center: Array, num_workers: int, alpha: float) -> None:
        """Equation (2)."""
        attract_center_by(center, self.total, alpha)

    def _as_float16(self, bound: Array, reduce: Reduce) -> None:
        """`total`, of which no partial sum over ranks should exceed `bound`, shape (1,)."""
        from hpcdl.strategies.base.float16 import add_float16, cast

        scale = float16_scale(bound)
        self.total *= scale
        cast(self.total, self._sent)
        reduce(self._sent, add_float16)
        cast(self._sent, self.total)
        self.total /= scale

    def _as_bfloat16(self, reduce: Reduce) -> None:
        for part in blocks(self.total.size):
            self._sent[part] = to_bfloat16(self.total[part])
        reduce(self._sent, add_bfloat16)
        for part in blocks(self.total.size):
            self.total[part] = from_bfloat16(self._sent[part])


def _largest(values: Array) -> Array:
    """The largest magnitude, shape (1,)."""
    return numpy.array([max(values.max(), -values.min())], numpy.float32)


def carrier(compress: str) -> WholeWeights | HalfDifferences:
    """What --compress asks for."""
    return WholeWeights() if compress == "none" else HalfDifferences(compress)
