"""What gradients travel as: float32, or half precision with float32 weights and sums rounded once per addition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.collectives.half import add_bfloat16, add_float16

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A number format on the wire: `encode` and `decode` work on flat tensors, `add` on what numpy gets of them."""

    item_bytes: int | None
    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]
    add: Add | None


WIRES = {
    "none": Wire(item_bytes=None, encode=lambda flat: flat, decode=lambda sent, dtype: sent, add=None),
    "fp16": Wire(
        item_bytes=2,
        encode=lambda flat: tf.cast(flat, tf.float16),
        decode=tf.cast,
        add=add_float16,
    ),
    "bf16": Wire(  # numpy has no bfloat16: its bits travel as uint16
        item_bytes=2,
        encode=lambda flat: tf.bitcast(tf.cast(flat, tf.bfloat16), tf.uint16),
        decode=lambda sent, dtype: tf.cast(tf.bitcast(sent, tf.bfloat16), dtype),
        add=add_bfloat16,
    ),
}
