"""Gradients as whole numbers of 8 bits with a scale for each block, summed in float32 so that nothing overflows.

Each rank sums a part of the bucket: all others send it theirs as int8, and it sends the sum back as int8. What either
rounding leaves over stays with the rank that rounded (two passes with error feedback: Tang, Yu, Lian, Zhang and Liu
2019, arXiv 1905.05957). A rank sends 2(p-1)/p of about a byte a value, a quarter of a ring's, whatever p is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.pieces import swap_pieces
from hpcdl.collectives.slices import spans

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.strategies.allreduce.rest import BucketPart, Reduce

BLOCK = 256
"""Values under one scale: 4 bytes more for 256."""
AT_A_TIME = 128
"""Blocks that are rounded together: their copies stay in the cache."""
LARGEST = 127
SMALLEST_SCALE = numpy.finfo(numpy.float32).tiny
"""Below it a scale would have too few bits to divide by; such values stay in the rest."""


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
        parts = [slice(*bounds) for bounds in spans(values.size, communicator.size)]
        mine = parts[communicator.rank]
        outgoing = [pack(values[part], rest[part]) for part in parts]
        incoming = [numpy.empty(packed_bytes(mine.stop - mine.start), numpy.uint8) for _ in parts]
        swap_pieces(communicator, outgoing, incoming)
        total = numpy.zeros(mine.stop - mine.start, numpy.float32)
        for packed in incoming:  # in the order of ranks, the same in every run
            total += unpack(packed, total.size)
        left = numpy.empty_like(total)
        packed_sum = pack(total, left)
        rest[mine] += left
        sums = [numpy.empty(packed_bytes(part.stop - part.start), numpy.uint8) for part in parts]
        swap_pieces(communicator, [packed_sum] * communicator.size, sums)
        for part, packed in zip(parts, sums, strict=True):
            values[part] = unpack(packed, part.stop - part.start)

    def state(self) -> dict[str, Array]:
        """Nothing beside the rest."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Nothing."""


def packed_bytes(length: int) -> int:
    """Bytes of so many values: the scales of their blocks, then one each."""
    return length + 4 * -(-length // BLOCK)


def pack(values: Array, rest: Array) -> Array:
    """float32 `values` (n,) as uint8 (packed_bytes(n),); `rest` (n,) gets what they lose.

    A block's scale is its largest magnitude over 127. One with a value that is not finite unpacks to NaN.
    """
    num_blocks = -(-values.size // BLOCK)
    packed = numpy.empty(packed_bytes(values.size), numpy.uint8)
    scales, numbers = packed[: 4 * num_blocks].view(numpy.float32), packed[4 * num_blocks :].view(numpy.int8)
    num_whole = values.size // BLOCK
    for first in range(0, num_whole, AT_A_TIME):
        last = min(first + AT_A_TIME, num_whole)
        part = slice(first * BLOCK, last * BLOCK)
        blocks = (last - first, BLOCK)
        _round(
            values[part].reshape(blocks), scales[first:last], numbers[part].reshape(blocks), rest[part].reshape(blocks)
        )
    if num_blocks > num_whole:
        part = slice(num_whole * BLOCK, values.size)
        _round(values[None, part], scales[num_whole:], numbers[None, part], rest[None, part])
    return packed


def _round(values: Array, scales: Array, numbers: Array, rest: Array) -> None:
    """Blocks as rows: `scales` (rows,), `numbers` and `rest` like `values` (rows, length), are filled."""
    scales[:] = numpy.maximum(values.max(axis=1), -values.min(axis=1)) / numpy.float32(LARGEST)
    scales[scales < SMALLEST_SCALE] = 0
    divisors = numpy.where(scales == 0, numpy.float32(1), scales)[:, None]
    whole = numpy.rint(values / divisors)
    numbers[...] = whole.astype(numpy.int8)
    whole *= scales[:, None]
    numpy.subtract(values, whole, out=rest)


def unpack(packed: Array, length: int) -> Array:
    """`length` float32 values of what `pack` made."""
    num_blocks = -(-length // BLOCK)
    scales, numbers = packed[: 4 * num_blocks].view(numpy.float32), packed[4 * num_blocks :].view(numpy.int8)
    values = numbers.astype(numpy.float32)
    num_whole = length // BLOCK
    whole = values[: num_whole * BLOCK].reshape(num_whole, BLOCK)
    whole *= scales[:num_whole, None]
    if num_blocks > num_whole:
        values[num_whole * BLOCK :] *= scales[-1]
    return values
