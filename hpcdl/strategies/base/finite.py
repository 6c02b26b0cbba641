"""NaN and infinity in flat buffers, at the price of reading them once. Numpy alone: replicas and servers use it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def not_finite(bad: Sequence[str], what: str, step: int | None, rank: int) -> NotFiniteError:
    """The error of a rank whose `what` (`the gradient`) holds NaN or infinity in the variables `bad`."""
    where = "" if step is None else f" at step {step}"
    of = f" of {bad[0]}" if bad and bad[0] else ""
    more = f" and {len(bad) - 1} more" if of and len(bad) > 1 else ""
    return NotFiniteError(f"{what}{of}{more} is not finite{where} on rank {rank}")
