"""Runs on every rank: a state restores weights of a model that its first batch builds, and continues its epochs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf
from optimizer_cases import RANK, main, refused

import hpcdl

ROWS, BATCH = 24, 6
generator = numpy.random.default_rng(RANK)
x = generator.normal(size=(ROWS, 4))
y = x.sum(1, keepdims=True).astype("float32")


class Named(keras.Model):  # type: ignore[misc]
    """A model with named inputs, which has no weights before its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.head(keras.ops.concatenate([self.body(inputs["left"]), inputs["right"]], axis=-1))


class Rows(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches by number."""

    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


def plain() -> Any:
    return keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    """Record the weights at the beginning of the first epoch of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Any] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.weights is None:
            self.weights = self.model.get_weights()


def fitted(make: Callable[[], Any], data: dict[str, Any], folder: str, epochs: int) -> tuple[Any, Any, Seen]:
    """Return a model that starts from random weights and is trained up to `epochs` in all, as in Horovod's scripts."""
    keras.utils.set_random_seed(100 * epochs + RANK)
    model, seen = make(), Seen()
    model.compile(hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mean_squared_error")
    state = hpcdl.State(model, folder=folder)
    model.fit(**data, epochs=epochs - state.epoch, callbacks=[hpcdl.callbacks(state), seen], verbose=0)
    assert state.epoch == epochs, (state.epoch, epochs)
    state.save()
    return model, state, seen


def goes_on(make: Callable[[], Any], data: dict[str, Any]) -> None:
    folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
    model, _, seen = fitted(make, data, folder, 2)
    for epochs in (3, 5):
        left = model.get_weights()
        model, _, seen = fitted(make, data, folder, epochs)
        assert seen.weights is not None
        assert all(numpy.array_equal(one, other) for one, other in zip(left, seen.weights, strict=True))


def refused_where_nobody_can_tell() -> None:
    folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
    fitted(plain, {"x": x, "y": y}, folder, 1)
    with refused("has none before its first batch", "begin it with keras.Input(shape)"):
        fitted(plain, {"x": iter(Rows()), "steps_per_epoch": 2}, folder, 2)


def absolute_epochs_are_kept() -> None:
    folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
    _, state, _ = fitted(plain, {"x": x, "y": y}, folder, 2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
    model.compile(hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mean_squared_error")
    state = hpcdl.State(model, folder=folder)
    model.fit(x, y, epochs=4, initial_epoch=state.epoch, callbacks=[hpcdl.callbacks(state)], verbose=0)
    assert state.epoch == 4, state.epoch


def a_step_alone_begins_as_rank_0s() -> None:
    folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def step(distributed: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        if distributed:
            tape = hpcdl.DistributedGradientTape(tape)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    step(False)
    moved = [numpy.array(one) for one in (*model.weights, *optimizer.variables)]
    hpcdl.State(model, optimizer, folder=folder)
    rows = hpcdl.allgather_object([one.tolist() for one in moved])
    held = [numpy.array(one).tolist() for one in (*model.weights, *optimizer.variables)]
    assert held == rows[0]
    for _ in range(5):
        step(True)
    rows = hpcdl.allgather_object([numpy.array(one).tolist() for one in (*model.weights, *optimizer.variables)])
    assert all(row == rows[0] for row in rows)


def an_own_network_stays_a_rank_s_own() -> None:
    folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    hpcdl.combine(model.weights, "own")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply_gradients(
        zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
    )
    before = [numpy.array(one) for one in (*model.weights, *optimizer.variables)]
    hpcdl.State(model, optimizer, folder=folder)
    after = [numpy.array(one) for one in (*model.weights, *optimizer.variables)]
    assert all(numpy.array_equal(one, other) for one, other in zip(before, after, strict=True))


CASES: dict[str, Callable[[], None]] = {
    "arrays": lambda: goes_on(plain, {"x": x, "y": y}),
    "a data set": lambda: goes_on(plain, {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}),
    "a PyDataset": lambda: goes_on(plain, {"x": Rows()}),
    "arrays by name": lambda: goes_on(Named, {"x": {"left": x, "right": x[:, :1]}, "y": y}),
    "an iterator": refused_where_nobody_can_tell,
    "absolute epochs": absolute_epochs_are_kept,
    "a step alone": a_step_alone_begins_as_rank_0s,
    "a network of a rank's own": an_own_network_stays_a_rank_s_own,
}

if __name__ == "__main__":
    main(CASES)
