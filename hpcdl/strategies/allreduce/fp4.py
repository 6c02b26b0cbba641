"""Changes of weights in 4 bits a value with a scale for each block: a sign and three bits of exponent (E3M0).

Source: Streaming DiLoCo (Douillard and others 2025, arXiv 2501.18512, section 2.3) sends outer gradients so, and adds
them up in float32. A block's scale is its largest magnitude. The eight magnitudes are zero and the scale times 1, 1/2,
..., 1/64; a value takes the nearest one, the larger of two that are as near.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from hpcdl.strategies.allreduce.blocks import BlockFormat, divisors, num_blocks, rows_of, scales_of

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

LEVELS = numpy.array([0.0, *(2.0 ** (code - 7) for code in range(1, 8))], numpy.float32)
"""Magnitudes by their code of three bits; the fourth is the sign."""
SIGN = 8
_SIGNED = numpy.concatenate([LEVELS, -LEVELS])
_HALF = 1 << 22
"""Half of a float32's mantissa: added to its bits, it raises the exponent of what is nearer to the next power."""
_LOWEST = 127 - 7
"""The exponent's bits of half the smallest magnitude."""


def packed_bytes(length: int) -> int:
    """Bytes of so many values: the scales of their blocks, then half a byte each."""
    return -(-length // 2) + 4 * num_blocks(length)


def pack(values: Array, rest: Array) -> Array:
    """float32 `values` (n,) as uint8 (packed_bytes(n),); `rest` (n,) gets what they lose."""
    packed = numpy.empty(packed_bytes(values.size), numpy.uint8)
    start = 4 * num_blocks(values.size)
    scales, numbers = packed[:start].view(numpy.float32), packed[start:]
    for part, blocks, shape in rows_of(values.size):
        rows = values[part].reshape(shape)
        scales[blocks] = scales_of(rows, 1)
        codes = _codes(rows / divisors(scales[blocks]))
        numpy.subtract(rows, _SIGNED[codes] * scales[blocks, None], out=rest[part].reshape(shape))
        flat = codes.reshape(-1)
        half = numbers[part.start // 2 :][: (flat.size + 1) // 2]
        half[:] = flat[0::2]
        half[: flat.size // 2] |= flat[1::2] << 4
    return packed


def _codes(shares: Array) -> Array:
    """The code of each of `shares`, -1 to 1, as uint8."""
    exponents = shares.view(numpy.uint32) & 0x7FFFFFFF
    codes = ((exponents + _HALF) >> 23).astype(numpy.int32) - _LOWEST
    # Between half of the smallest magnitude and three quarters of it, zero is as far as that magnitude or farther.
    codes[(codes == 0) & (exponents >> 23 == _LOWEST)] = 1
    numpy.clip(codes, 0, 7, out=codes)
    codes[shares < 0] |= SIGN
    found: Array = codes.astype(numpy.uint8)
    return found


def unpack(packed: Array, length: int) -> Array:
    """`length` float32 values of what `pack` made."""
    start = 4 * num_blocks(length)
    scales, numbers = packed[:start].view(numpy.float32), packed[start:]
    codes = numpy.empty(2 * numbers.size, numpy.uint8)
    codes[0::2], codes[1::2] = numbers & 15, numbers >> 4
    values: Array = _SIGNED[codes[:length]]
    for part, blocks, shape in rows_of(length):
        rows = values[part].reshape(shape)
        rows *= scales[blocks, None]
    return values


FP4 = BlockFormat(packed_bytes=packed_bytes, pack=pack, unpack=unpack)
