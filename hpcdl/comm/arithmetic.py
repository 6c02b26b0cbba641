"""Arithmetic on flat buffers in numpy alone: sums, bfloat16, and checks that all numbers are finite.

Numbers in bfloat16 are widened to float32, added, and rounded once, to nearest even: a sum over p ranks is rounded once
per partial sum sent. The module strategies/allreduce/compression.py adds float16; `plain_add` here is the default.
Replicas and servers also use the check for NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy

from hpcdl.core.errors import NotFiniteError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


WIDENED_BLOCK = 1 << 16
"""Elements that are widened at a time: their float32 copies stay in the cache."""


def plain_add(target: Array, incoming: Array) -> None:
    """Add `incoming` to `target` in place: the default addition of all-reduces."""
    numpy.add(target, incoming, out=target)


def add_bfloat16(target: Array, incoming: Array) -> None:
    """Add `incoming` to `target` in place; both are bfloat16 numbers in uint16 buffers."""
    for start in range(0, target.size, WIDENED_BLOCK):
        part = target[start : start + WIDENED_BLOCK]
        part[...] = to_bfloat16(from_bfloat16(part) + from_bfloat16(incoming[start : start + WIDENED_BLOCK]))


def to_bfloat16(values: Array) -> Array:
    """Return the upper halves of float32 `values`, rounded to nearest even, as uint16; NaN stays NaN."""
    bits = values.view(numpy.uint32)
    # 0x7FFF and the last bit that stays: ties go to the even neighbour.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding could carry a NaN's lowest bits over into infinity or zero.
    nan = numpy.isnan(values)
    if nan.any():
        rounded = numpy.where(nan, 0x7FC0, rounded)  # a quiet NaN
    halves: Array = rounded.astype(numpy.uint16)
    return halves


def from_bfloat16(halves: Array) -> Array:
    """Return the float32 numbers of uint16 `halves`; exact."""
    wide: Array = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
    return wide


def float16_scale(bound: Array) -> Array:
    """Return the power of two that scales sums of at most `bound` to 2^14..2^15, the most precise range of float16.

    `bound` (1,): the sum over ranks of each one's largest magnitude, which no partial sum exceeds in any order of
    addition. If it is zero or not finite, the scale is 1: an overflow is sent unchanged.
    """
    if not numpy.isfinite(bound[0]) or bound[0] == 0:
        return numpy.ones_like(bound)
    # Unlimited, a bound below 2^-113 would give a scale beyond float32.
    exponent = numpy.clip(15 - numpy.frexp(bound)[1], -100, 100)
    scale: Array = numpy.ldexp(numpy.ones_like(bound), exponent)
    return scale


BLOCK = 1 << 17
"""Elements checked together: 512 KiB of float32."""


def all_finite(values: Array, exponent: int | None = None) -> bool:
    """Whether flat `values` hold no NaN and no infinity.

    For 16-bit numbers `exponent` is the mask of the exponent bits, which NaN and infinity have all set. Others are
    checked by their sum of squares, the cheapest check; if it overflows, element by element.
    """
    blocks = (values[start : start + BLOCK] for start in range(0, values.size, BLOCK))
    if exponent is not None:
        mask = numpy.uint16(exponent)
        return not any(((block.view(numpy.uint16) & mask) == mask).any() for block in blocks)
    # `@` warns of an overflow without an errstate, which is slow for small buffers. numpy.vdot never warns.
    return all(math.isfinite(numpy.vdot(block, block)) or bool(numpy.isfinite(block).all()) for block in blocks)


def not_finite(bad: Sequence[str], what: str, step: int | None, rank: int) -> NotFiniteError:
    """Return the error for a rank whose `what` (`the gradient`) holds NaN or infinity in the variables `bad`."""
    at_step = "" if step is None else f" at step {step}"
    of = f" of {bad[0]}" if bad and bad[0] else ""
    omission = f" and {len(bad) - 1} more" if of and len(bad) > 1 else ""
    return NotFiniteError(f"{what}{of}{omission} is not finite{at_step} on rank {rank}")
