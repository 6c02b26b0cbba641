"""Numbers of few bits with a scale for each block: their rounding error, their size, and values that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcdl.comm import threads
from hpcdl.comm.observed import observe
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import NotFiniteError
from hpcdl.strategies.allreduce.few_bits import BLOCK, FP4, INT8, BlockFormat, sum_in_two_passes
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.periodic.streaming import StreamedWeights
from hpcdl.strategies.table import find_strategy

FORMS = {"int8": INT8, "fp4": FP4}
LEVELS = [0.0, *(2.0**-place for place in range(6, -1, -1))]


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, 300 * BLOCK])
@pytest.mark.parametrize("scale", [1e-44, 1e-12, 1.0, 1e38])
def test_four_bits_are_the_nearest_of_eight_magnitudes(length: int, scale: float) -> None:
    values = (scale * np.random.default_rng(length).uniform(-1, 1, length)).astype(np.float32)
    rest = np.empty_like(values)
    packed = FP4.pack(values, rest)
    assert packed.nbytes == FP4.packed_bytes(length) == (length + 1) // 2 + 4 * -(-length // BLOCK)
    found = FP4.unpack(packed, length)
    np.testing.assert_array_equal(values - found, rest)
    for start in range(0, length, BLOCK):
        block, ours = values[start : start + BLOCK].astype(float), found[start : start + BLOCK].astype(float)
        largest = abs(block).max()
        if largest < np.finfo(np.float32).tiny:
            assert not ours.any()
            continue
        choices = largest * np.array([*LEVELS, *(-level for level in LEVELS)])
        nearest = abs(block[:, None] - choices).min(axis=1)
        assert abs(abs(block - ours) - nearest).max() <= 1e-6 * largest


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_not_hidden(name: str, value: float) -> None:
    values = np.ones(3 * BLOCK, np.float32)
    values[BLOCK + 5] = value
    with np.errstate(invalid="ignore"):
        found = FORMS[name].unpack(FORMS[name].pack(values, np.empty_like(values)), values.size)
    assert not np.isfinite(found[BLOCK : 2 * BLOCK]).any()
    assert np.isfinite(found[:BLOCK]).all() and np.isfinite(found[2 * BLOCK :]).all()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("length", [1, 3, 1000])
def test_sums_and_what_ranks_have_lost_add_up(name: str, length: int) -> None:
    """The sum of all ranks plus their rounding errors is the exact sum, also with fewer values than ranks."""
    made = [np.random.default_rng(rank).standard_normal(length).astype(np.float32) for rank in range(4)]

    def rank(communicator: Any) -> tuple[np.ndarray, np.ndarray]:
        form: BlockFormat = FORMS[name]
        values, rest = made[communicator.rank].copy(), np.zeros(length, np.float32)
        sum_in_two_passes(values, rest, communicator, form)
        return values, rest

    found = threads.run(4, rank)
    assert len({values.tobytes() for values, _ in found}) == 1
    np.testing.assert_allclose(found[0][0] + sum(rest for _, rest in found), sum(made), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compress", FORMS)
def test_a_change_that_is_no_number_ends_the_run_with_a_variable_named(compress: str) -> None:
    context = Context(
        info=find_strategy("streaming-diloco"), communicator=observe(threads.alone()), num_workers=1, num_servers=0,
        exchange=ExchangeConfig(compress=compress), optimizer=OptimizerConfig(),
        elastic=ElasticConfig(period=2, fragments=1, overlap=0),
    )  # fmt: skip
    shared = StreamedWeights(context)
    shared.variables = [("a/kernel", 2 * BLOCK), ("b/kernel", 3)]
    shared.start(np.ones(2 * BLOCK + 3, np.float32))
    shared.lay_out([])
    own = shared.weights.copy()
    own[-1] = np.nan
    shared.before_step(0, 0.1)
    assert shared.before_step(1, 0.1)
    with pytest.raises(NotFiniteError, match="of b/kernel is not finite at step 1 on rank 0"):
        shared.exchange(own)
    shared.close()
