"""bfloat16 in uint16 buffers: rounding to nearest even, infinities and NaN."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.comm.arithmetic import add_bfloat16, from_bfloat16, plain_add, to_bfloat16

FLOATS = st.floats(width=32)


def both_neighbours(value: float) -> tuple[float, float]:
    """Return the bfloat16 numbers just below and above a float32, by truncating and stepping."""
    cut = numpy.float32(value).view(numpy.uint32) & numpy.uint32(0xFFFF0000)
    step = numpy.uint32(cut + numpy.uint32(0x10000))
    return float(cut.view(numpy.float32)), float(step.view(numpy.float32))


@given(FLOATS)
def test_rounds_to_the_nearest(value: float) -> None:
    single = numpy.array([value], numpy.float32)
    rounded = float(from_bfloat16(to_bfloat16(single))[0])
    if math.isnan(value):
        assert math.isnan(rounded)
        return
    if math.isinf(value):
        assert rounded == value
        return
    near, far = both_neighbours(value)
    if math.isinf(far):  # beyond the largest number: overflow is right from half way on
        assert rounded in (near, far)
    else:
        assert abs(rounded - value) == min(abs(near - value), abs(far - value))


@pytest.mark.parametrize("bits, expected", [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81)])
def test_ties_go_to_even(bits: int, expected: int) -> None:
    assert to_bfloat16(numpy.array([bits], numpy.uint32).view(numpy.float32))[0] == expected


def test_nan_does_not_become_infinity() -> None:
    worst = numpy.array([0x7F800001, 0xFFFFFFFF], numpy.uint32).view(numpy.float32)
    assert numpy.isnan(from_bfloat16(to_bfloat16(worst))).all()


def test_sums_are_those_of_float32_rounded_once() -> None:
    generator = numpy.random.default_rng(1)
    left, right = (generator.standard_normal(150_001).astype(numpy.float32) for _ in range(2))
    target, incoming = to_bfloat16(left), to_bfloat16(right)
    expected = to_bfloat16(from_bfloat16(target) + from_bfloat16(incoming))
    add_bfloat16(target, incoming)
    assert (target == expected).all()
    half, other = left.astype(numpy.float16), right.astype(numpy.float16)
    exact = (half.astype(numpy.float32) + other.astype(numpy.float32)).astype(numpy.float16)
    plain_add(half, other)
    assert (half == exact).all()
