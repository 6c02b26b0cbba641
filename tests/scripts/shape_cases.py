"""Runs on every rank: layers whose gradients lose their static shape, by {static, dynamic} batch and kind of input.

Each case trains with hpcdl on parts of the batches and plainly on whole batches; the weights must agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf
from optimizer_cases import RANK, SIZE, equal, main

import hpcdl

L = keras.layers
LAYERS: dict[str, Callable[[], list[Any]]] = {
    "Dense on sequences": lambda: [keras.Input((4, 3)), L.Dense(2)],
    "Dense on sequences of open length": lambda: [keras.Input((None, 3)), L.Dense(2)],
    "LSTM": lambda: [keras.Input((4, 3)), L.LSTM(4, return_sequences=True), L.Dense(2)],
    "GRU": lambda: [keras.Input((4, 3)), L.GRU(4, return_sequences=True), L.Dense(2)],
    "Bidirectional": lambda: [keras.Input((4, 3)), L.Bidirectional(L.LSTM(2, return_sequences=True)), L.Dense(2)],
    "TimeDistributed": lambda: [keras.Input((4, 3)), L.TimeDistributed(L.Dense(2))],
    "EinsumDense": lambda: [keras.Input((4, 3)), L.EinsumDense("abc,cd->abd", (4, 2), bias_axes="d")],
    "Conv1D": lambda: [keras.Input((4, 3)), L.Conv1D(2, 1)],
    "MultiHeadAttention": lambda: [keras.Input((4, 3)), _SelfAttention(), L.Dense(2)],
    "LayerNormalization": lambda: [keras.Input((4, 3)), L.LayerNormalization(), L.Dense(2)],
}
EMBEDDED: dict[str, Callable[[], list[Any]]] = {
    "Embedding, Dense": lambda: [keras.Input((4,), dtype="int32"), L.Embedding(9, 3), L.Dense(2)],
    "Embedding, LSTM": lambda: [
        keras.Input((4,), dtype="int32"), L.Embedding(9, 3), L.LSTM(3, return_sequences=True), L.Dense(2),
    ],
}  # fmt: skip
ROWS, BATCH = 10, 4


class _SelfAttention(L.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 3)

    def call(self, values: Any) -> Any:
        return self.attention(values, values)


def numbers(*shape: int) -> Any:
    return numpy.random.default_rng(3).normal(size=shape).astype("float32")


def batches(*arrays: Any, share: bool, static: bool) -> Any:
    """Return batches of a tf.data.Dataset, or this rank's `share` of each; `static`: without the smaller last one."""
    size = BATCH // SIZE if share else BATCH
    rows = tf.data.Dataset.from_tensor_slices(arrays)
    if share:
        starts = [*range(RANK * size, ROWS - BATCH + 1, BATCH)]
        mine = [row for start in starts for row in range(start, start + size)]
        mine += [] if static else [8 + RANK]  # of the last batch of two rows
        rows = tf.data.Dataset.from_tensor_slices(mine).map(
            lambda row: tuple(tf.gather(array, row) for array in arrays)
        )
    return rows.batch(size, drop_remainder=static)


def trained(layers: list[Any], data: Any, distributed: bool) -> list[Any]:
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer=hpcdl.DistributedOptimizer(optimizer) if distributed else optimizer, loss="mse")
    model.fit(data, verbose=0)
    return [one.numpy() for one in model.weights]


def fits(layers: Callable[[], list[Any]], inputs: Any, static: bool) -> None:
    targets = numbers(ROWS, 4, 2)
    keras.utils.set_random_seed(5)
    expected = trained(layers(), batches(inputs, targets, share=False, static=static), distributed=False)
    keras.utils.set_random_seed(5 + RANK)
    equal(trained(layers(), batches(inputs, targets, share=True, static=static), distributed=True), expected)


def arrays_that_the_batch_does_not_divide() -> None:
    """Keras's own batches of arrays have an unknown size if the batch size does not divide the rows."""
    x, y = numbers(ROWS, 4, 3), numbers(ROWS, 4, 2)
    rows = [*range(2 * RANK, 2 * RANK + 2), *range(4 + 2 * RANK, 6 + 2 * RANK), 8 + RANK]
    weights = []
    for distributed, mine in ((False, list(range(ROWS))), (True, rows)):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(LAYERS["LSTM"]())
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer=hpcdl.DistributedOptimizer(optimizer) if distributed else optimizer, loss="mse")
        model.fit(x[mine], y[mine], batch_size=2 if distributed else 4, shuffle=False, verbose=0)
        weights.append([one.numpy() for one in model.weights])
    equal(weights[1], weights[0])


def loop(kind: str, static: bool) -> None:
    """Train in a loop of the script on ragged or sparse rows, with an embedding or a matrix, and Dense."""
    signature = {
        "ragged": tf.RaggedTensorSpec([BATCH // SIZE if static else None, None], tf.int32),
        "sparse": tf.SparseTensorSpec([BATCH // SIZE if static else None, 9], tf.float32),
    }[kind]
    x = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [1, 8]], dtype=tf.int32)
    if kind == "sparse":
        x = tf.sparse.from_dense(numpy.eye(9, dtype="float32")[[1, 3, 3, 8]])
    y = numbers(BATCH, 2)

    def end(distributed: bool, inputs: Any, targets: Any) -> list[Any]:
        table, dense = tf.Variable(numbers(9, 3)), tf.Variable(numbers(3, 2) + (RANK if distributed else 0))
        variables = [table, dense]
        optimizer = tf.Variable(0.1)

        def step(inputs: Any, targets: Any) -> None:
            tape = hpcdl.DistributedGradientTape() if distributed else tf.GradientTape()
            with tape:
                rows = tf.ragged.map_flat_values(tf.gather, table, inputs) if kind == "ragged" else None
                hidden = tf.sparse.sparse_dense_matmul(inputs, table) if rows is None else tf.reduce_sum(rows, 1)
                loss = tf.reduce_mean((hidden @ dense - targets) ** 2)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(optimizer * tf.convert_to_tensor(gradient))

        if distributed:
            spec = [signature, tf.TensorSpec([BATCH // SIZE if static else None, 2], tf.float32)]
            step = tf.function(step, input_signature=spec)
        for _ in range(2):
            step(inputs, targets)
        return [one.numpy() for one in variables]

    share = slice(RANK * BATCH // SIZE, (RANK + 1) * BATCH // SIZE)
    mine = tf.sparse.slice(x, [share.start, 0], [BATCH // SIZE, 9]) if kind == "sparse" else x[share]
    equal(end(True, mine, y[share]), end(False, x, y))


def an_open_shape_is_refused() -> None:
    """A gradient for a tensor whose size is unknown while the step is traced is refused."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(values: Any) -> Any:
        with hpcdl.DistributedGradientTape() as tape:
            tape.watch(values)
            loss = tf.reduce_sum(values**2)
        return tape.gradient(loss, values)

    try:
        step(tf.ones(3))
    except Exception as error:  # noqa: BLE001  TensorFlow wraps it
        assert "open shape (None,)" in str(error), error
    else:
        raise AssertionError("nobody noticed")


CASES: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {'static' if static else 'dynamic'} batch, dense": functools.partial(
            fits, layers, numbers(ROWS, 4, 3), static
        )
        for name, layers in LAYERS.items()
        for static in (True, False)
    },
    **{
        f"{name}, {'static' if static else 'dynamic'} batch, dense": functools.partial(
            fits, layers, numpy.arange(ROWS * 4).reshape(ROWS, 4) % 9, static
        )
        for name, layers in EMBEDDED.items()
        for static in (True, False)
    },
    **{
        f"loop, {'static' if static else 'dynamic'} batch, {kind}": functools.partial(loop, kind, static)
        for kind in ("ragged", "sparse")
        for static in (True, False)
    },
    "arrays": arrays_that_the_batch_does_not_divide,
    "refused": an_open_shape_is_refused,
}

if __name__ == "__main__":
    main(CASES)
