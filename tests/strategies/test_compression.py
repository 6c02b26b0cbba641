"""The precision of compressed gradients: float16 keeps 11 bits for gradients of any size; biases lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import find_strategy

tf = pytest.importorskip("tensorflow")

NUM_RANKS = 3


def summed(gradients: list[list[Any]], compress: str, strategy: str = "ring") -> list[np.ndarray]:
    """Return the sums of each rank's values, the same on all ranks."""

    def rank(communicator: ThreadCommunicator) -> list[np.ndarray]:
        from hpcdl.strategies.allreduce.worker import AllReduceWorker

        context = Context(
            info=find_strategy(strategy),
            communicator=communicator,
            num_workers=NUM_RANKS,
            num_servers=0,
            exchange=ExchangeConfig(compress=compress),
            optimizer=OptimizerConfig(),
            deterministic=True,
        )
        worker = AllReduceWorker(context)
        found = [
            np.asarray(total)
            for total in worker.sum_up([tf.constant(g) for g in gradients[communicator.rank]], ["matrix", "bias"])
        ]
        worker.after_step(0)
        worker.finish()
        return found

    results = run(NUM_RANKS, rank)
    for one in results[1:]:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, results[0], strict=True))
    return results[0]


def gradients(scale: float) -> tuple[list[list[Any]], list[np.ndarray]]:
    """Return a matrix and a bias for each rank, and their sums in float64."""
    generator = np.random.default_rng(3)
    made = [
        [(scale * generator.normal(size=shape)).astype(np.float32) for shape in ((40, 30), (30,))]
        for _ in range(NUM_RANKS)
    ]
    return made, [np.sum([one[place] for one in made], axis=0, dtype=np.float64) for place in range(2)]


@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1.0, 3e4, 1e12])
@pytest.mark.parametrize(("compress", "bits"), [("fp16", 11), ("bf16", 8)])
def test_matrices_keep_their_bits_at_any_size_and_biases_all(compress: str, bits: int, scale: float) -> None:
    made, exact = gradients(scale)
    matrix, bias = summed(made, compress)
    roundings = 2 * NUM_RANKS
    assert abs(matrix - exact[0]).max() <= roundings * 2.0**-bits * abs(exact[0]).max()
    assert abs(matrix - exact[0]).max() > 0, "nothing was compressed"
    np.testing.assert_allclose(bias, exact[1], rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("strategy", ["tree", "recursive-doubling", "halving-doubling", "hierarchical"])
def test_every_algorithm_scales(strategy: str) -> None:
    made, exact = gradients(1e-8)
    matrix, _ = summed(made, "fp16", strategy)
    assert abs(matrix - exact[0]).max() <= 2 * NUM_RANKS * 2.0**-11 * abs(exact[0]).max()


@pytest.mark.long
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_overflow_is_not_hidden(value: float) -> None:
    made, _ = gradients(1.0)
    made[1][0][3, 4] = value
    with pytest.raises(Exception, match="the gradient of matrix is not finite on rank 1"):
        summed(made, "fp16")


def test_nothing_but_zeros() -> None:
    matrix, bias = summed([[np.zeros((3, 2), np.float32), np.zeros(2, np.float32)]] * NUM_RANKS, "fp16")
    assert not matrix.any() and not bias.any()


def test_the_scale_is_a_power_of_two_below_the_top() -> None:
    from hpcdl.comm.arithmetic import float16_scale

    for bound in (1e-20, 3e-5, 0.5, 1.0, 32768.0, 65504.0, 1e20):
        scale = float16_scale(np.array([bound], np.float32))
        assert np.frexp(scale)[0] == 0.5 and 2**14 <= scale[0] * np.float32(bound) <= 2**15
    for bound in (0.0, np.inf, np.nan):
        assert float16_scale(np.array([bound], np.float32)) == 1
