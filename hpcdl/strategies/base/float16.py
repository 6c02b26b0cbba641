"""float16 on the wire: cast and added by TensorFlow's kernels, which have the processor's instructions for it.

A sum is widened to float32, formed, and rounded once, to nearest even, as numpy does it, bit for bit. numpy takes 6 ns
a number for that where TensorFlow takes 0.6, since it has no vectors of float16 (python -m benchmarks.memory_rates);
bfloat16, which is float32 cut off, it adds by integers in 1.6 (comm/arithmetic.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

BLOCK = 1 << 17
"""Elements at a time: TensorFlow adds so many with the calling thread alone, and they stay in the cache."""
WORTH_A_CALL = 1 << 13
"""With fewer elements numpy is done before TensorFlow has begun."""


def add_float16(target: Array, incoming: Array) -> None:
    """`target` += `incoming`, in place; where a sum overflows it is infinite, which nobody is warned of here."""
    if target.size < WORTH_A_CALL:
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.add(target, incoming, out=target)
        return
    with _on_the_host():
        for part in _blocks(target.size):
            target[part] = numpy.asarray(tf.raw_ops.AddV2(x=target[part], y=incoming[part]))


def cast(values: Array, target: Array) -> None:
    """`target` = `values`; one of them is float16, the other float32."""
    with _on_the_host():
        for part in _blocks(values.size):
            target[part] = numpy.asarray(tf.cast(values[part], target.dtype))


def _on_the_host() -> Any:
    """Never on a GPU, to which the buffers would travel and back."""
    return tf.device("CPU:0")


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, BLOCK):
        yield slice(start, start + BLOCK)
