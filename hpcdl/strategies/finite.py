"""NaN and infinity in flat buffers, at the price of reading them once. Numpy alone: replicas and servers use it too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy

from hpcdl.core.errors import NotFiniteError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

BLOCK = 1 << 17
"""Elements that are looked at together: 512 KiB of float32."""


def all_finite(values: Array, exponent: int | None = None) -> bool:
    """Whether flat `values` hold no NaN and no infinity.

    `exponent` is the mask of the exponent's bits where `values` are numbers of 16 bits, which have them all set then.
    Others are told by their sum of squares, the cheapest reading there is; where that overflows, one by one.
    """
    blocks = (values[start : start + BLOCK] for start in range(0, values.size, BLOCK))
    if exponent is not None:
        mask = numpy.uint16(exponent)
        return not any(((block.view(numpy.uint16) & mask) == mask).any() for block in blocks)
    with numpy.errstate(over="ignore", invalid="ignore"):
        return all(math.isfinite(block @ block) or bool(numpy.isfinite(block).all()) for block in blocks)


def check_finite(values: Array, what: str, rank: int) -> None:
    """NotFiniteError where `values` hold NaN or infinity: they must not reach weights."""
    if not all_finite(values):
        raise NotFiniteError(f"rank {rank}'s {what} not finite")
