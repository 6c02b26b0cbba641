"""Packing and unpacking of gradients in buckets: the values stay right, and large ones are not copied."""

from __future__ import annotations

from typing import Any

import numpy
import tensorflow as tf

from hpcdl.comm.arithmetic import plain_add
from hpcdl.strategies.allreduce.compression import WIRES
from hpcdl.strategies.allreduce.worker import ALIGNMENT, LARGE_BYTES, exchange_bucket, packed

LARGE, ODD = LARGE_BYTES // 4, LARGE_BYTES // 4 + 1
SHAPES = [(3,), (), (2, LARGE), (ODD,), (5, 2, 1), (LARGE,), (1, ODD, 2)]
"""Small and large arrays, some of which end between two alignment boundaries."""


def exchanged(shapes: list[tuple[int, ...]], wire: str = "none") -> tuple[list[Any], list[Any], list[Any], Any]:
    """Return gradients, the result of an exchange that doubles them, the buffers it saw, and what it reported."""
    generator = numpy.random.default_rng(1)
    gradients = [generator.integers(-8, 8, shape).astype(numpy.float32) for shape in shapes]
    buffers = []

    def double(buffer: Any) -> tuple[Any, bool]:
        (WIRES[wire].add or plain_add)(buffer, buffer.copy())
        buffers.append(buffer)
        return buffer, True

    @tf.function
    def run(one: Any) -> Any:
        mine = [gradient * one for gradient in gradients]
        return exchange_bucket(packed(mine), mine, double, WIRES[wire])

    came, reported = run(tf.constant(1.0))
    return gradients, came, buffers, reported


def test_each_gradient_gets_its_own_sum_in_its_own_shape() -> None:
    for shapes in (SHAPES, SHAPES[:2], SHAPES[2:3], SHAPES[1:2], [(4,)] * 3):
        for wire in ("none", "bf16"):
            gradients, came, buffers, reported = exchanged(shapes, wire)
            assert len(buffers) == 1 and bool(reported)
            for before, after in zip(gradients, came, strict=True):
                assert before.shape == after.shape and numpy.array_equal(2 * before, after.numpy())


def test_large_gradients_are_used_where_they_lie_in_the_bucket() -> None:
    _, came, (buffer,), _ = exchanged(SHAPES)
    begin = buffer.ctypes.data
    lies = [numpy.asarray(memoryview(came[place])).ctypes.data for place in (2, 5)]
    assert begin % ALIGNMENT == 0, "or nothing could stay"
    assert all(begin <= place < begin + buffer.nbytes for place in lies)
