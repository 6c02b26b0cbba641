"""float16 sums by TensorFlow's kernels equal numpy's bit for bit, for every pair of exponents and buffer length."""

from __future__ import annotations

import numpy
import pytest

from hpcdl.collectives.slices import Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.strategies.allreduce.compression import BLOCK, WORTH_A_CALL, add_float16, cast

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of intended overflows
ALL = numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.float16)


def same(left: numpy.ndarray, right: numpy.ndarray) -> bool:
    """Return whether both have the same bits; NaN equals any NaN."""
    return bool(
        ((left.view(numpy.uint16) == right.view(numpy.uint16)) | (numpy.isnan(left) & numpy.isnan(right))).all()
    )


@pytest.mark.parametrize("length", [1, WORTH_A_CALL - 1, WORTH_A_CALL, 1 << 16, 3 * BLOCK + 1])
def test_sums_are_those_of_float32_rounded_once(length: int) -> None:
    drawn = numpy.random.default_rng(length)
    target, incoming = drawn.choice(ALL, length), drawn.choice(ALL, length)
    expected = (target.astype(numpy.float32) + incoming.astype(numpy.float32)).astype(numpy.float16)
    before = incoming.copy()
    add_float16(target, incoming)
    assert same(target, expected) and same(incoming, before)


def test_every_number_there_and_back() -> None:
    wide, back = numpy.empty(ALL.size, numpy.float32), numpy.empty_like(ALL)
    cast(ALL, wide)
    assert numpy.array_equal(wide, ALL.astype(numpy.float32), equal_nan=True)
    cast(wide, back)
    assert same(back, ALL)


def test_casts_round_to_even_and_overflow() -> None:
    values = numpy.random.default_rng(1).standard_normal(2 * BLOCK + 3).astype(numpy.float32)
    values *= numpy.float32(2.0) ** numpy.random.default_rng(2).integers(-30, 20, values.size)
    halves = numpy.empty(values.size, numpy.float16)
    cast(values, halves)
    assert same(halves, values.astype(numpy.float16))


def test_parts_of_a_buffer_alone() -> None:
    """Adding to a slice of a buffer, as collectives do, changes the slice alone."""
    buffer = numpy.ones(3 * WORTH_A_CALL, numpy.float16)
    part = slice(WORTH_A_CALL + 1, 2 * WORTH_A_CALL + 1)
    add_float16(buffer[part], buffer[:WORTH_A_CALL].copy())
    assert (buffer[part] == 2).all() and buffer.sum(dtype=numpy.float64) == 4 * WORTH_A_CALL


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_every_all_reduce_leaves_the_bits_that_numpy_s_sums_leave(name: str) -> None:
    num_ranks, length = 6, 7 * WORTH_A_CALL  # a rank's part is long enough for TensorFlow's kernel

    def body(communicator: ThreadCommunicator) -> list[bytes]:
        own = numpy.random.default_rng(communicator.rank).standard_normal(length).astype(numpy.float16)
        buffers = [own.copy(), own.copy()]
        for buffer, add in zip(buffers, (add_float16, None), strict=True):
            COLLECTIVES.load(name)(communicator, buffer, Workspace(measure=False), add)
        return [buffer.tobytes() for buffer in buffers]

    assert len({one for buffers in run(num_ranks, body) for one in buffers}) == 1
