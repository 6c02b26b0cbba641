"""What gradients travel as: float32, or half precision with float32 weights and sums rounded once per addition.

Only tensors of two or more dimensions are worth it. Biases and scales are a thousandth of the bytes, but begin at zero:
a rounding error in their gradients is an error of the same relative size in their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.comm.sums import add_bfloat16
from hpcdl.strategies.base.float16 import add_float16

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A number format on the wire: `encode` and `decode` work on flat tensors, `add` on what numpy gets of them.

    A format of narrow range is `scaled`: every bucket is brought near the top of it by a power of two.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]
    add: Add | None
    scaled: bool = False
    exponent: int | None = None
    """Of formats with 16 bits: where the exponent's are, all of which NaN and infinity have set."""


WIRES = {
    "none": Wire(encode=lambda flat: flat, decode=lambda sent, dtype: sent, add=None),
    "fp16": Wire(
        encode=lambda flat: tf.cast(flat, tf.float16),
        decode=tf.cast,
        add=add_float16,
        scaled=True,
        exponent=0x7C00,
    ),
    "bf16": Wire(  # numpy has no bfloat16: its bits travel as uint16
        encode=lambda flat: tf.bitcast(tf.cast(flat, tf.bfloat16), tf.uint16),
        decode=lambda sent, dtype: tf.cast(tf.bitcast(sent, tf.bfloat16), dtype),
        add=add_bfloat16,
        exponent=0x7F80,
    ),
}


def largest_magnitude(flat: Any) -> Any:
    """The largest |x| of a flat tensor, shape (1,), without a copy of it."""
    return tf.reshape(tf.maximum(tf.reduce_max(flat), -tf.reduce_min(flat)), [1])
