"""The formats of gradients on the wire: float32, half precision (summed in float32 and rounded), or fewer bits.

A sum is widened to float32, computed, and rounded once to nearest even, bitwise as in numpy. For float16 numpy takes 6
ns per number and TensorFlow 0.6, because numpy has no float16 vectors (python -m benchmarks.memory_rates). Numbers in
bfloat16 are truncated float32; integer operations add them in 1.6 ns (comm/arithmetic.py).

Only tensors of two or more dimensions are compressed. Biases and scales are a thousandth of the bytes. They start at
zero, so a rounding error in their gradients is an error of the same relative size in their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.comm.arithmetic import add_bfloat16
from hpcdl.config.forms import Compression, parse_compression
from hpcdl.strategies.allreduce.few_bits import Int8
from hpcdl.strategies.allreduce.powersgd import PowerSgd
from hpcdl.strategies.allreduce.rest import Feedback, ReducedForm, TopK

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array


BLOCK = 1 << 17
"""Elements per TensorFlow call: it adds this many in the calling thread alone, and they stay in the cache."""
WORTH_A_CALL = 1 << 13
"""With fewer elements numpy is faster than the call overhead of TensorFlow."""


def add_float16(target: Array, incoming: Array) -> None:
    """Add `incoming` to `target` in place; overflowing sums become infinite without a warning."""
    if target.size < WORTH_A_CALL:
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.add(target, incoming, out=target)
        return
    with _on_the_host():
        for part in _blocks(target.size):
            target[part] = numpy.asarray(tf.raw_ops.AddV2(x=target[part], y=incoming[part]))


def cast(values: Array, target: Array) -> None:
    """Copy `values` into `target` with conversion; one of them is float16, the other float32."""
    with _on_the_host():
        for part in _blocks(values.size):
            target[part] = numpy.asarray(tf.cast(values[part], target.dtype))


def _on_the_host() -> Any:
    """Return the CPU device: on a GPU the buffers would be copied there and back."""
    return tf.device("CPU:0")


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, BLOCK):
        yield slice(start, start + BLOCK)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A number format on the wire: `encode` and `decode` work on flat tensors, `add` on their numpy arrays.

    With `scaled`, for formats of narrow range, a power of two moves every bucket near the top of the range.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]
    add: Add | None
    scaled: bool = False
    exponent: int | None = None
    """The exponent bits of a 16-bit format; NaN and infinity have all of them set."""
    feedback: Feedback | None = None
    """The exchange that replaces the all-reduce if only part of the values is sent."""

    def carries(self, shape: Sequence[int]) -> bool:
        """Whether gradients of this shape use the format; others are sent unchanged."""
        return len(shape) > 1 if self.feedback is None else self.feedback.form.takes(shape)


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

FORMS: Mapping[str, Callable[[Compression], ReducedForm]] = {
    "int8": lambda asked: Int8(),
    "topk": lambda asked: TopK(asked.percent),
    "powersgd": lambda asked: PowerSgd(asked.rank),
}


def wire_of(compress: str, *, repeatable: bool = False) -> Wire:
    """Return the format for `--compress`. `repeatable`: an interrupted step may be repeated."""
    compression = parse_compression(compress)
    if not compression.keeps_rest:
        return WIRES[compression.kind]
    feedback = Feedback(FORMS[compression.kind](compression), repeatable=repeatable)
    # The form packs inside its own exchange, so the graph converts nothing.
    return Wire(encode=lambda flat: flat, decode=lambda sent, dtype: sent, add=None, feedback=feedback)


def warnings_of(compress: str, num_ranks: int) -> list[str]:
    """Warn if `topk` sends more than all values would cost: each value goes to every rank, with its position."""
    compression = parse_compression(compress)
    # 8 bytes per value to each of p-1 ranks, against 8 (p-1)/p per value on a ring: they are equal at a share of 1/p.
    if compression.kind != "topk" or num_ranks == 1 or compression.percent * num_ranks < 100:
        return []
    return [
        f"--compress {compression.text} on {num_ranks} ranks sends as many bytes as none, or more; "
        f"use a share well below {100 / num_ranks:.3g}%, or int8"
    ]


def largest_magnitude(flat: Any) -> Any:
    """Return the largest |x| of a flat tensor, shape (1,), without copying the tensor."""
    return tf.reshape(tf.maximum(tf.reduce_max(flat), -tf.reduce_min(flat)), [1])
