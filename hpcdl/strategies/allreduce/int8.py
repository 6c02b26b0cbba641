"""Gradients as whole numbers of 8 bits with a scale for each block, about a byte a value: a quarter of a ring's bytes.

What rounding leaves over stays with the rank that rounded (two passes with error feedback: Tang and others 2019, arXiv
1905.05957).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.slices import spans
from hpcdl.strategies.allreduce.blocks import (
    BLOCK,
    BlockFormat,
    divisors,
    num_blocks,
    rows_of,
    scales_of,
    sum_in_two_passes,
)

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.strategies.allreduce.rest import BucketPart, Reduce

LARGEST = 127


class Int8:
    """The form `int8`."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Matrices and kernels; biases begin at zero and are few."""
        return len(shape) > 1

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """A byte a value, and the scales."""
        length = pieces[-1].span.stop
        return sum(packed_bytes(end - start) for start, end in spans(length, num_ranks))

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """The sum over the ranks; every rank unpacks the same bytes."""
        sum_in_two_passes(values, rest, communicator, INT8)

    def state(self) -> dict[str, Array]:
        """Nothing beside the rest."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Nothing."""


def packed_bytes(length: int) -> int:
    """Bytes of so many values: the scales of their blocks, then one each."""
    return length + 4 * num_blocks(length)


def pack(values: Array, rest: Array) -> Array:
    """float32 `values` (n,) as uint8 (packed_bytes(n),); `rest` (n,) gets what they lose.

    A block's scale is its largest magnitude over 127. One with a value that is not finite unpacks to NaN.
    """
    packed = numpy.empty(packed_bytes(values.size), numpy.uint8)
    scales, numbers = _halves(packed, values.size)
    for part, blocks, shape in rows_of(values.size):
        rows = values[part].reshape(shape)
        scales[blocks] = scales_of(rows, LARGEST)
        whole = numpy.rint(rows / divisors(scales[blocks]))
        numbers[part] = whole.astype(numpy.int8).reshape(-1)
        whole *= scales[blocks, None]
        numpy.subtract(rows, whole, out=rest[part].reshape(shape))
    return packed


def unpack(packed: Array, length: int) -> Array:
    """`length` float32 values of what `pack` made."""
    scales, numbers = _halves(packed, length)
    values = numbers.astype(numpy.float32)
    num_whole = length // BLOCK
    whole = values[: num_whole * BLOCK].reshape(num_whole, BLOCK)
    whole *= scales[:num_whole, None]
    if length % BLOCK:
        values[num_whole * BLOCK :] *= scales[-1]
    return values


def _halves(packed: Array, length: int) -> tuple[Array, Array]:
    """Views of the scales and of the numbers in what `length` values are packed in."""
    start = 4 * num_blocks(length)
    return packed[:start].view(numpy.float32), packed[start:].view(numpy.int8)


INT8 = BlockFormat(packed_bytes=packed_bytes, pack=pack, unpack=unpack)
