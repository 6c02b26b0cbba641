"""Runs on every rank: losses that are means over weights or unmasked values equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy
from optimizer_cases import RANK, SIZE, equal, main

import hpcdl

L = keras.layers
ROWS = 12
RATE_OF_SUMS = 0.001
"""A sum of 30 values diverges at 0.1: the loss grows 40,000-fold in an epoch, and differences of rounding with it."""
generator = numpy.random.default_rng(2)
numbers = generator.normal(size=(ROWS, 5, 2)).astype("float32")
targets = generator.normal(size=(ROWS, 5, 1)).astype("float32")
weights = generator.uniform(0.1, 9, (ROWS, 5)).astype("float32")
tokens = generator.integers(1, 9, (ROWS, 5))
for row, length in enumerate(generator.integers(1, 6, ROWS)):
    tokens[row, length:] = 0
    numbers[row, length:] = 0


def weighted(reduction: str) -> Any:
    return keras.losses.MeanSquaredError(reduction=reduction)


def dense(loss: Any) -> Any:
    return keras.Sequential([keras.Input((5, 2)), L.Dense(3, "tanh"), L.Dense(1)]), numbers, loss, {}


def masked(loss: Any) -> Any:
    return keras.Sequential([keras.Input((5, 2)), L.Masking(), L.Dense(3, "tanh"), L.Dense(1)]), numbers, loss, {}


def embedded(loss: Any) -> Any:
    layers = [keras.Input((5,), dtype="int32"), L.Embedding(9, 3, mask_zero=True), L.LSTM(3, return_sequences=True)]
    return keras.Sequential([*layers, L.Dense(1)]), tokens, loss, {}


def two_outputs(loss: Any) -> Any:
    inputs = keras.Input((5, 2))
    first, second = L.Dense(1)(L.Masking()(inputs)), L.Dense(1)(inputs)
    return keras.Model(inputs, [first, second]), numbers, [loss, "mae"], {"loss_weights": [1.0, 0.5]}


def equals_one_process(
    make: Callable[[Any], Any], loss: Any, with_weights: bool, rate: float = 0.1, **optimizer: Any
) -> None:
    ends, losses = [], []
    batch = ROWS // 2
    share = batch // SIZE
    mine = [row for start in (0, batch) for row in range(start + RANK * share, start + (RANK + 1) * share)]
    for distributed, rows in ((False, list(range(ROWS))), (True, mine)):
        keras.utils.set_random_seed(7)
        model, inputs, loss_, settings = make(loss)
        plain = keras.optimizers.SGD(rate, **optimizer)
        model.compile(hpcdl.DistributedOptimizer(plain) if distributed else plain, loss_, **settings)
        y = [targets[rows], targets[rows]] if len(model.outputs) > 1 else targets[rows]
        extra = {"sample_weight": weights[rows]} if with_weights else {}
        history = model.fit(
            inputs[rows], y, batch_size=share if distributed else batch, shuffle=False, epochs=2, verbose=0, **extra
        )
        ends.append([one.numpy() for one in model.weights])
        losses.append(numpy.array(history.history["loss"]))
    equal(ends[1], ends[0])
    assert numpy.abs(losses[0] - losses[1]).max() < 1e-5 * numpy.abs(losses[0]).max(), losses


MEAN, WEIGHTED, SUM = "sum_over_batch_size", "mean_with_sample_weight", "sum"
CASES: dict[str, Callable[[], None]] = {
    "mean over weights": lambda: equals_one_process(dense, weighted(WEIGHTED), True),
    "mean over samples with weights": lambda: equals_one_process(dense, weighted(MEAN), True),
    "sum": lambda: equals_one_process(dense, weighted(SUM), False, RATE_OF_SUMS),
    "sum with weights": lambda: equals_one_process(dense, weighted(SUM), True, RATE_OF_SUMS),
    "sum of unmasked values": lambda: equals_one_process(masked, weighted(SUM), False, RATE_OF_SUMS),
    "a number for each sample": lambda: equals_one_process(dense, weighted("none"), False, RATE_OF_SUMS),
    "numbers with weights": lambda: equals_one_process(dense, weighted("none"), True, RATE_OF_SUMS),
    "mask": lambda: equals_one_process(masked, "mse", False),
    "mask and mean over weights": lambda: equals_one_process(masked, weighted(WEIGHTED), True),
    "mask of an embedding": lambda: equals_one_process(embedded, "mse", False),
    "two outputs, one masked": lambda: equals_one_process(two_outputs, "mse", False),
    "mask with accumulation": lambda: equals_one_process(masked, "mse", False, gradient_accumulation_steps=2),
}

if __name__ == "__main__":
    main(CASES)
