"""Numbers of few bits with a scale per block of values: 8 bits for gradients, 4 bits for changes of weights.

Each rank sums one part of the buffer. The others send it their values packed, and it sends the sum back packed (Tang,
Yu, Lian, Zhang and Liu 2019, arXiv 1905.05957). Sums are computed in float32 and so do not overflow. A rank sends
2(p-1)/p of the packed buffer for p ranks.

The rounding error stays with the rank that rounded (two passes with error feedback: Tang and others 2019, arXiv
1905.05957).

Source: Streaming DiLoCo (Douillard and others 2025, arXiv 2501.18512, section 2.3) sends outer gradients this way, and
sums them in float32. A block's scale is its largest magnitude. The eight magnitudes are zero and the scale times 1,
1/2, ..., 1/64; a value takes the nearest one, and the larger one of two equally near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.slices import spans, swap_pieces

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.strategies.allreduce.rest import BucketPart, Reduce


BLOCK = 256
"""Values per scale: 4 more bytes per 256 values."""
AT_A_TIME = 128
"""Blocks that are rounded together: their copies stay in the cache."""
SMALLEST_SCALE = numpy.finfo(numpy.float32).tiny
"""A smaller scale would have too few bits to divide by; such values become zero."""


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A block number format: `pack(values, rest)` gives uint8 (packed_bytes(n),), `unpack(packed, n)` float32 again.

    `values` (n,) are float32; `rest` (n,) receives the rounding error. A block with a non-finite value unpacks to
    non-finite values.
    """

    packed_bytes: Callable[[int], int]
    pack: Callable[[Array, Array], Array]
    unpack: Callable[[Array, int], Array]


def num_blocks(length: int) -> int:
    """Return the number of blocks of `length` values."""
    return -(-length // BLOCK)


def rows_of(length: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield which values and blocks are rounded together, and the shape of the values with blocks as rows."""
    num_whole = length // BLOCK
    for first in range(0, num_whole, AT_A_TIME):
        last = min(first + AT_A_TIME, num_whole)
        yield slice(first * BLOCK, last * BLOCK), slice(first, last), (last - first, BLOCK)
    if length % BLOCK:
        yield slice(num_whole * BLOCK, length), slice(num_whole, num_whole + 1), (1, length % BLOCK)


def scales_of(values: Array, largest: int) -> Array:
    """Return the scale of each row of `values` (rows, length): max |x| / `largest`, float32 (rows,); 0 if tiny."""
    scales: Array = numpy.maximum(values.max(axis=1), -values.min(axis=1)) / numpy.float32(largest)
    scales[scales < SMALLEST_SCALE] = 0
    return scales


def divisors(scales: Array) -> Array:
    """Return the divisors of each row's values: (rows, 1)."""
    # A block of scale 0 has tiny values only: divided by 1 they all round to zero.
    per_row: Array = numpy.where(scales == 0, numpy.float32(1), scales)[:, None]
    return per_row


def sum_in_two_passes(values: Array, rest: Array, communicator: Communicator, form: BlockFormat) -> None:
    """Replace `values` (n,), float32, by their sum over the ranks; every rank unpacks the same bytes. Collective.

    `rest` (n,), float32, receives the rounding errors of this rank's values, and of the part of the sum it sends.
    """
    parts = [slice(*bounds) for bounds in spans(values.size, communicator.size)]
    own_span = parts[communicator.rank]
    outgoing = [form.pack(values[part], rest[part]) for part in parts]
    incoming = [numpy.empty(form.packed_bytes(own_span.stop - own_span.start), numpy.uint8) for _ in parts]
    swap_pieces(communicator, outgoing, incoming)
    total = numpy.zeros(own_span.stop - own_span.start, numpy.float32)
    for packed in incoming:  # in the order of ranks, the same in every run
        total += form.unpack(packed, total.size)
    new_rest = numpy.empty_like(total)
    packed_sum = form.pack(total, new_rest)
    # No other rank knows this error, so the next gradient of this rank carries it (docs/decisions/0215).
    rest[own_span] += new_rest
    sums = [numpy.empty(form.packed_bytes(part.stop - part.start), numpy.uint8) for part in parts]
    swap_pieces(communicator, [packed_sum] * communicator.size, sums)
    # The own part is unpacked too: its exact sum would differ from what the others have.
    for part, packed in zip(parts, sums, strict=True):
        values[part] = form.unpack(packed, part.stop - part.start)


LARGEST = 127  # int8 also has -128, but the scale must serve both signs


class Int8:
    """The form `int8`."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether to compress: matrices and kernels only. Biases start at zero and are few."""
        return len(shape) > 1

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """Return the bytes sent: one per value, and the scales."""
        length = pieces[-1].span.stop
        return sum(int8_bytes(end - start) for start, end in spans(length, num_ranks))

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """Sum over the ranks; every rank unpacks the same bytes."""
        sum_in_two_passes(values, rest, communicator, INT8)

    def state(self) -> dict[str, Array]:
        """Return an empty state: only the rest is kept."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Do nothing: there is no state."""


def int8_bytes(length: int) -> int:
    """Return the bytes of `length` packed values: the scales of their blocks, then one byte each."""
    return length + 4 * num_blocks(length)


def pack_int8(values: Array, rest: Array) -> Array:
    """Pack float32 `values` (n,) as uint8 (packed_bytes(n),); `rest` (n,) receives the rounding errors.

    A block's scale is its largest magnitude over 127. A block with a non-finite value unpacks to NaN.
    """
    packed = numpy.empty(int8_bytes(values.size), numpy.uint8)
    scales, numbers = _halves(packed, values.size)
    for part, blocks, shape in rows_of(values.size):
        rows = values[part].reshape(shape)
        scales[blocks] = scales_of(rows, LARGEST)
        rounded = numpy.rint(rows / divisors(scales[blocks]))
        # NaN becomes some integer here; the block's non-finite scale still makes every unpacked value non-finite.
        numbers[part] = rounded.astype(numpy.int8).reshape(-1)
        rounded *= scales[blocks, None]
        numpy.subtract(rows, rounded, out=rest[part].reshape(shape))
    return packed


def unpack_int8(packed: Array, length: int) -> Array:
    """Return the `length` float32 values that `pack_int8` packed."""
    scales, numbers = _halves(packed, length)
    values = numbers.astype(numpy.float32)
    num_whole = length // BLOCK
    whole_blocks = values[: num_whole * BLOCK].reshape(num_whole, BLOCK)
    whole_blocks *= scales[:num_whole, None]
    if length % BLOCK:
        values[num_whole * BLOCK :] *= scales[-1]
    return values


def _halves(packed: Array, length: int) -> tuple[Array, Array]:
    """Return views of the scales and of the numbers in the buffer of `length` packed values."""
    # Scales come first: the buffer's start is aligned for float32, whatever the length.
    start = 4 * num_blocks(length)
    return packed[:start].view(numpy.float32), packed[start:].view(numpy.int8)


INT8 = BlockFormat(packed_bytes=int8_bytes, pack=pack_int8, unpack=unpack_int8)


LEVELS = numpy.array([0.0, *(2.0 ** (code - 7) for code in range(1, 8))], numpy.float32)
"""Magnitudes by their three-bit code; the fourth bit is the sign."""
SIGN = 8
_SIGNED = numpy.concatenate([LEVELS, -LEVELS])
_HALF = 1 << 22
"""Half of a float32's mantissa: added to the bits, it rounds the exponent up if the next power of two is nearer."""
_LOWEST = 127 - 7
"""The exponent bits of half the smallest magnitude."""


def fp4_bytes(length: int) -> int:
    """Return the bytes of `length` packed values: the scales of their blocks, then half a byte each."""
    return -(-length // 2) + 4 * num_blocks(length)


def pack_fp4(values: Array, rest: Array) -> Array:
    """Pack float32 `values` (n,) as uint8 (packed_bytes(n),); `rest` (n,) receives the rounding errors."""
    packed = numpy.empty(fp4_bytes(values.size), numpy.uint8)
    start = 4 * num_blocks(values.size)
    scales, numbers = packed[:start].view(numpy.float32), packed[start:]
    for part, blocks, shape in rows_of(values.size):
        rows = values[part].reshape(shape)
        scales[blocks] = scales_of(rows, 1)
        codes = _codes(rows / divisors(scales[blocks]))
        numpy.subtract(rows, _SIGNED[codes] * scales[blocks, None], out=rest[part].reshape(shape))
        flat = codes.reshape(-1)
        half = numbers[part.start // 2 :][: (flat.size + 1) // 2]  # BLOCK is even: a block begins with a whole byte
        half[:] = flat[0::2]
        half[: flat.size // 2] |= flat[1::2] << 4
    return packed


def _codes(shares: Array) -> Array:
    """Return the code of each of `shares`, -1 to 1, as uint8."""
    # Without its sign a float32 orders by its bits, exponent first.
    exponents = shares.view(numpy.uint32) & 0x7FFFFFFF
    # int32, because exponents below the lowest give negative codes.
    codes = ((exponents + _HALF) >> 23).astype(numpy.int32) - _LOWEST
    # From half of the smallest magnitude on that magnitude is at least as near as zero, and the larger one wins a tie.
    codes[(codes == 0) & (exponents >> 23 == _LOWEST)] = 1
    # The largest exponent is that of NaN: its code does not matter, because the block's scale is NaN as well.
    numpy.clip(codes, 0, 7, out=codes)
    codes[shares < 0] |= SIGN
    as_bytes: Array = codes.astype(numpy.uint8)
    return as_bytes


def unpack_fp4(packed: Array, length: int) -> Array:
    """Return the `length` float32 values that `pack_fp4` packed."""
    start = 4 * num_blocks(length)
    scales, numbers = packed[:start].view(numpy.float32), packed[start:]
    codes = numpy.empty(2 * numbers.size, numpy.uint8)
    codes[0::2], codes[1::2] = numbers & 15, numbers >> 4
    values: Array = _SIGNED[codes[:length]]
    for part, blocks, shape in rows_of(length):
        rows = values[part].reshape(shape)
        rows *= scales[blocks, None]
    return values


FP4 = BlockFormat(packed_bytes=fp4_bytes, pack=pack_fp4, unpack=unpack_fp4)
