"""Numbers of few bits with a scale for each block of values: how such buffers are summed in two passes.

Each rank sums a part of the buffer: all others send it theirs packed, and it sends the sum back packed (Tang, Yu, Lian,
Zhang and Liu 2019, arXiv 1905.05957). Sums are formed in float32, so that nothing overflows. A rank sends 2(p-1)/p of
the packed buffer, whatever p is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.pieces import swap_pieces
from hpcdl.collectives.slices import spans

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

BLOCK = 256
"""Values under one scale: 4 bytes more for 256."""
AT_A_TIME = 128
"""Blocks that are rounded together: their copies stay in the cache."""
SMALLEST_SCALE = numpy.finfo(numpy.float32).tiny
"""Below it a scale would have too few bits to divide by; such values become zero."""


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A number format by block: `pack(values, rest)` gives uint8 (packed_bytes(n),), `unpack(packed, n)` float32 again.

    `values` (n,) are float32; `rest` (n,) gets what they lose. A block with a value that is not finite comes back so.
    """

    packed_bytes: Callable[[int], int]
    pack: Callable[[Array, Array], Array]
    unpack: Callable[[Array, int], Array]


def num_blocks(length: int) -> int:
    """Blocks of so many values."""
    return -(-length // BLOCK)


def rows_of(length: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Which values and which of their blocks are rounded together, and the shape of the values with blocks as rows."""
    num_whole = length // BLOCK
    for first in range(0, num_whole, AT_A_TIME):
        last = min(first + AT_A_TIME, num_whole)
        yield slice(first * BLOCK, last * BLOCK), slice(first, last), (last - first, BLOCK)
    if length % BLOCK:
        yield slice(num_whole * BLOCK, length), slice(num_whole, num_whole + 1), (1, length % BLOCK)


def scales_of(values: Array, largest: int) -> Array:
    """What `largest` stands for in each row of `values` (rows, length): float32 (rows,); 0 where it is too small."""
    scales: Array = numpy.maximum(values.max(axis=1), -values.min(axis=1)) / numpy.float32(largest)
    scales[scales < SMALLEST_SCALE] = 0
    return scales


def divisors(scales: Array) -> Array:
    """What the values of each row are divided by: (rows, 1)."""
    found: Array = numpy.where(scales == 0, numpy.float32(1), scales)[:, None]
    return found


def sum_in_two_passes(values: Array, rest: Array, communicator: Communicator, form: BlockFormat) -> None:
    """`values` (n,), float32, become their sum over the ranks; every rank unpacks the same bytes. Collective.

    `rest` (n,), float32, gets what of this rank's values, and of the sum that it sends back, is not in it.
    """
    parts = [slice(*bounds) for bounds in spans(values.size, communicator.size)]
    mine = parts[communicator.rank]
    outgoing = [form.pack(values[part], rest[part]) for part in parts]
    incoming = [numpy.empty(form.packed_bytes(mine.stop - mine.start), numpy.uint8) for _ in parts]
    swap_pieces(communicator, outgoing, incoming)
    total = numpy.zeros(mine.stop - mine.start, numpy.float32)
    for packed in incoming:  # in the order of ranks, the same in every run
        total += form.unpack(packed, total.size)
    left = numpy.empty_like(total)
    packed_sum = form.pack(total, left)
    rest[mine] += left
    sums = [numpy.empty(form.packed_bytes(part.stop - part.start), numpy.uint8) for part in parts]
    swap_pieces(communicator, [packed_sum] * communicator.size, sums)
    for part, packed in zip(parts, sums, strict=True):
        values[part] = form.unpack(packed, part.stop - part.start)
