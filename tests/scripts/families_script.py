"""Runs on every rank: scripts of many families, each in one process with whole batches and on shares of them.

FAMILIES holds them by family and variation. A script is a function of the side that it runs on: it takes its rows, its
batch size and its optimizers from there, and returns the arrays that must end alike. NOT_EXACT gives the reason why a
script does not equal one process. Results go to FOLDER/<rank>.json: "equal", "alike", or what went wrong.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf
from optimizer_cases import RANK, SIZE, alike, together

import hpcdl
from hpcdl.core.errors import original
from hpcdl.scripts.process.session import session

L, O = keras.layers, keras.optimizers  # noqa: E741
ROWS, BATCH = 24, 12
generator = numpy.random.default_rng(11)
numbers = generator.normal(size=(ROWS, 4)).astype("float32")
targets = (numbers @ numpy.array([[1.0], [-2], [0.5], [1]]) / 2).astype("float32")
binary = (targets > 0).astype("float32")
classes = generator.integers(0, 3, ROWS)
pictures = generator.normal(size=(ROWS, 6, 6, 2)).astype("float32")
sequences = generator.normal(size=(ROWS, 5, 3)).astype("float32")
tokens = generator.integers(1, 9, (ROWS, 5))
for row, length in enumerate(generator.integers(1, 6, ROWS)):
    tokens[row, length:] = 0
weighing = generator.uniform(0.2, 4, ROWS).astype("float32")


@dataclass(frozen=True, kw_only=True)
class Side:
    """Where a script runs: alone with whole batches, or on this rank with its share of them."""

    distributed: bool
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return BATCH // SIZE if self.distributed else BATCH

    def part(self, data: Any, rows: int = ROWS) -> Any:
        """Return this side's rows of every batch."""
        if not self.distributed:
            return tf.nest.map_structure(lambda one: one[:rows], data)
        whole = [numpy.arange(start, min(start + BATCH, rows)) for start in range(0, rows, BATCH)]
        mine = numpy.concatenate([numpy.array_split(one, SIZE)[RANK] for one in whole])
        return tf.nest.map_structure(lambda one: one[mine], data)

    def batches(self, *data: Any, epochs: int = 2) -> Iterator[Any]:
        own = [self.part(one) for one in data]
        for _ in range(epochs):
            for start in range(0, len(own[0]), self.batch):
                rows = [tf.constant(one[start : start + self.batch]) for one in own]
                yield rows if len(rows) > 1 else rows[0]

    def optimizer(self, plain: Any, **settings: Any) -> Any:
        return hpcdl.DistributedOptimizer(plain, **settings) if self.distributed else plain

    def tape(self, **settings: Any) -> Any:
        return hpcdl.DistributedGradientTape(**settings) if self.distributed else tf.GradientTape()

    def mean(self, value: Any) -> Any:
        return hpcdl.allreduce(value) if self.distributed else value


Script = Callable[[Side], Sequence[Any]]


def held(*models: Any) -> list[Any]:
    return [one.numpy() for model in models for one in model.weights]


def dense(*, width: int = 4, units: int = 1, last: str | None = None) -> Any:
    return keras.Sequential([keras.Input((width,)), L.Dense(6, "tanh"), L.Dense(units, last)])


def fitted(
    side: Side,
    model: Any,
    x: Any = numbers,
    y: Any = targets,
    *,
    optimizer: Any = None,
    loss: Any = "mse",
    settings: Any = None,
    rows: int = ROWS,
    weights: Any = None,
    shown: Sequence[str] = ("loss",),
    compiled: Any = None,
    **fit: Any,
) -> list[Any]:
    """Return a model's weights and the chosen parts of its history after two epochs."""
    chosen = O.SGD(0.1) if optimizer is None else optimizer
    model.compile(optimizer=side.optimizer(chosen, **(settings or {})), loss=loss, **(compiled or {}))
    if weights is not None:
        fit["sample_weight"] = side.part(weights, rows)
    fit = {"epochs": 2, "shuffle": False, "verbose": 0, "batch_size": side.batch, **fit}
    history = model.fit(side.part(x, rows), side.part(y, rows), **fit)
    return [*held(model), *(numpy.array(history.history[name]) for name in shown)]


def of_optimizer(make: Callable[[], Any]) -> Script:
    return lambda side: fitted(side, dense(), optimizer=make())


def of_layers(*layers: Callable[[], Any], data: Any = pictures, y: Any = targets, **fit: Any) -> Script:
    """Return a script that fits a sequence of layers on `data`; the layers are created for each side."""

    def script(side: Side) -> Sequence[Any]:
        kind = {"dtype": "int32"} if data.dtype.kind == "i" else {}
        inputs = keras.Input(data.shape[1:], **kind)
        return fitted(side, keras.Sequential([inputs, *(make() for make in layers)]), data, y, **fit)

    return script


def flat_to_one() -> tuple[Callable[[], Any], ...]:
    return L.Flatten, lambda: L.Dense(1)


def of_step(make: Callable[[Side], Any], *data: Any, shown: Sequence[str] = ()) -> Script:
    """Return a script that fits a model with its own train_step."""

    def script(side: Side) -> Sequence[Any]:
        model = make(side)
        x = [side.part(one) for one in data]
        history = model.fit(*x, batch_size=side.batch, epochs=2, shuffle=False, verbose=0)
        return [*held(model), *(numpy.array(history.history[name]) for name in shown)]

    return script


class Adversarial(keras.Model):  # type: ignore[misc]
    """Train the critic first, by gradients of a generator that no optimizer has named yet."""

    def __init__(self, side: Side, *, penalty: bool) -> None:
        super().__init__()
        self.critic, self.maker = dense(width=4), dense(width=4, units=4)
        self.penalty = penalty
        self.rules = {"critic": side.optimizer(O.SGD(0.05)), "maker": side.optimizer(O.SGD(0.05))}

    def train_step(self, real: Any) -> Any:
        noise = real[:, ::-1]
        with tf.GradientTape() as tape:
            made = self.maker(noise)
            loss = tf.reduce_mean(self.critic(made) - self.critic(real))
            if self.penalty:
                middle = (made + real) / 2
                with tf.GradientTape() as inner:
                    inner.watch(middle)
                    judged = self.critic(middle)
                slope = tf.norm(inner.gradient(judged, middle) + 1e-6, axis=1)
                loss += tf.reduce_mean((slope - 1) ** 2)
        self.rules["critic"].apply(tape.gradient(loss, self.critic.trainable_weights), self.critic.trainable_weights)
        with tf.GradientTape() as tape:
            made_loss = -tf.reduce_mean(self.critic(self.maker(noise)))
        self.rules["maker"].apply(tape.gradient(made_loss, self.maker.trainable_weights), self.maker.trainable_weights)
        return {"loss": loss}


class OwnLoss(keras.Model):  # type: ignore[misc]
    """Train all given networks with one optimizer and a loss written in the script."""

    def __init__(self, loss_of: Callable[[Any, Any, Any], Any], *networks: Any, frozen: Any = ()) -> None:
        super().__init__()
        self.loss_of, self.networks, self.frozen = loss_of, list(networks), list(frozen)

    def train_step(self, data: Any) -> Any:
        x, y = data if isinstance(data, tuple) else (data, None)
        moved = [one for network in self.networks for one in network.trainable_weights]
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        self.optimizer.apply(tape.gradient(loss, moved), moved)
        return {"loss": loss}


def own_loss(side: Side, loss_of: Callable[[Any, Any, Any], Any], *networks: Any, frozen: Any = ()) -> Any:
    model = OwnLoss(loss_of, *networks, frozen=frozen)
    model.compile(optimizer=side.optimizer(O.SGD(0.05)))
    return model


def auto_encoded(model: Any, x: Any, y: Any) -> Any:
    encoder, decoder = model.networks
    mean, log_variance = tf.split(encoder(x), 2, axis=1)
    code = mean + tf.exp(log_variance / 2) * tf.random.normal(tf.shape(mean))
    divergence = tf.reduce_mean(tf.exp(log_variance) + mean**2 - 1 - log_variance)
    return tf.reduce_mean((decoder(code) - x) ** 2) + divergence


def twin(model: Any, x: Any, y: Any) -> Any:
    first, second = model.networks[0](x), model.networks[0](x[:, ::-1])
    distance = tf.reduce_sum((first - second) ** 2, 1)
    return tf.reduce_mean(y[:, 0] * distance + (1 - y[:, 0]) * tf.maximum(1 - distance, 0))


def distilled(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model.networks[0](x) - model.frozen[0](x)) ** 2)


def contrastive(model: Any, x: Any, y: Any) -> Any:
    code = tf.math.l2_normalize(model.networks[0](x), 1)
    other = tf.math.l2_normalize(model.networks[0](x + 0.1), 1)
    labels = tf.range(tf.shape(x)[0])
    likeness = code @ tf.transpose(other)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, likeness))


def looped(
    step: Callable[[Any, Any, Any, Any], Any],
    *,
    graph: bool = True,
    by_tape: bool = True,
    rule: Callable[[], Any] = lambda: O.SGD(0.1),
    **settings: Any,
) -> Script:
    """Return a script with its own loop: `step(tape, model, x, y)` gives gradients, which a plain optimizer applies."""

    def script(side: Side) -> Sequence[Any]:
        model = dense()
        optimizer = rule() if by_tape else side.optimizer(rule(), **settings)

        def train(x: Any, y: Any) -> None:
            make = (lambda: side.tape(**settings)) if by_tape else tf.GradientTape
            optimizer.apply(step(make, model, x, y), model.trainable_weights)

        train = tf.function(train) if graph else train
        for x, y in side.batches(numbers, targets):
            train(x, y)
        return held(model)

    return script


def loss_on(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def plain_step(make: Any, model: Any, x: Any, y: Any) -> Any:
    with make() as tape:
        loss = loss_on(model, x, y)
    return tape.gradient(loss, model.trainable_weights)


def clipped_step(make: Any, model: Any, x: Any, y: Any) -> Any:
    return tf.clip_by_global_norm(plain_step(make, model, x, y), 0.1)[0]


def in_two_halves(make: Any, model: Any, x: Any, y: Any) -> Any:
    half = tf.shape(x)[0] // 2
    rows = [plain_step(make, model, x[:half], y[:half]), plain_step(make, model, x[half:], y[half:])]
    return [(first + second) / 2 for first, second in zip(*rows, strict=True)]


def second_order(make: Any, model: Any, x: Any, y: Any) -> Any:
    with make() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            out = model(x)
        loss = loss_on(model, x, y) + tf.reduce_mean(inner.gradient(out, x) ** 2)
    return tape.gradient(loss, model.trainable_weights)


def in_a_dict(make: Any, model: Any, x: Any, y: Any) -> Any:
    named = {str(index): one for index, one in enumerate(model.trainable_weights)}
    with make() as tape:
        loss = loss_on(model, x, y)
    found = tape.gradient(loss, named)
    return [found[name] for name in named]


def sharpness_aware(climb_with: str, *, rule: Callable[[], Any] = lambda: O.SGD(0.1), graph: bool = True) -> Script:
    """Compute two gradients for one update: the second at the point to which the first leads. Foret et al., 2021."""

    def script(side: Side) -> Sequence[Any]:
        model = dense()
        optimizer = side.optimizer(rule()) if climb_with == "optimizer" else rule()

        def train(x: Any, y: Any) -> None:
            weights = model.trainable_weights
            first = plain_step(side.tape if climb_with != "own" else tf.GradientTape, model, x, y)
            norm = tf.linalg.global_norm(first)
            steps = [0.05 * one / (norm + 1e-12) for one in first]
            for weight, one in zip(weights, steps, strict=True):
                weight.assign_add(one)
            second = plain_step(tf.GradientTape if climb_with == "optimizer" else side.tape, model, x, y)
            for weight, one in zip(weights, steps, strict=True):
                weight.assign_sub(one)
            optimizer.apply(second, weights)

        train = tf.function(train) if graph else train
        for x, y in side.batches(numbers, targets):
            train(x, y)
        return held(model)

    return script


def sharpness_aware_fit(side: Side) -> Sequence[Any]:
    class Sam(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = dense()

        def call(self, x: Any) -> Any:
            return self.net(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            weights = self.trainable_weights
            first = plain_step(side.tape, self.net, x, y)
            steps = [0.05 * one / (tf.linalg.global_norm(first) + 1e-12) for one in first]
            for weight, one in zip(weights, steps, strict=True):
                weight.assign_add(one)
            second = plain_step(tf.GradientTape, self.net, x, y)
            for weight, one in zip(weights, steps, strict=True):
                weight.assign_sub(one)
            self.optimizer.apply(second, weights)
            return {"loss": loss_on(self.net, x, y)}

    model = Sam()
    return fitted(side, model, shown=())


def q_learning(*, soft: bool) -> Script:
    """Copy a target network before the first update."""

    def script(side: Side) -> Sequence[Any]:
        model = dense(units=3)
        target = keras.models.clone_model(model)
        target.set_weights(model.get_weights())
        optimizer = side.optimizer(O.SGD(0.05))

        @tf.function
        def train(state: Any, action: Any) -> None:
            wanted = 0.9 * tf.reduce_max(target(state[:, ::-1]), 1) + state[:, 0]
            with tf.GradientTape() as tape:
                value = tf.gather(model(state), action, axis=1, batch_dims=1)
                loss = tf.reduce_mean((value - wanted) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

        for index, (state, action) in enumerate(side.batches(numbers, classes)):
            train(state, action)
            for mine, theirs in zip(target.weights, model.weights, strict=True):
                if soft:
                    mine.assign(0.9 * mine + 0.1 * theirs)
                elif index % 2:
                    mine.assign(theirs)
        return held(model, target)

    return script


def actor_critic(side: Side) -> Sequence[Any]:
    actor, critic = dense(units=3), dense()
    rules = [side.optimizer(O.SGD(0.05)), side.optimizer(O.SGD(0.1))]
    for state, action in side.batches(numbers, classes):
        with tf.GradientTape() as tape:
            value = critic(state)[:, 0]
            loss = tf.reduce_mean((value - state[:, 0]) ** 2)
        advantage = tf.stop_gradient(state[:, 0] - value)
        rules[1].apply(tape.gradient(loss, critic.trainable_weights), critic.trainable_weights)
        with tf.GradientTape() as tape:
            chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(action, actor(state))
            loss = tf.reduce_mean(chosen * advantage)
        rules[0].apply(tape.gradient(loss, actor.trainable_weights), actor.trainable_weights)
    return held(actor, critic)


def policy_gradient(side: Side) -> Sequence[Any]:
    model = dense(units=3)
    optimizer = side.optimizer(O.SGD(0.05))
    for state, action in side.batches(numbers, classes):
        with tf.GradientTape() as tape:
            chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(action, model(state))
            loss = tf.reduce_mean(chosen * state[:, 0])
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return held(model)


def proximal(*, alike_by: str) -> Script:
    """PPO: rounds over a batch end if the policy has changed too much, which ranks find at different rounds."""

    def script(side: Side) -> Sequence[Any]:
        model = dense(units=3)
        optimizer = side.optimizer(O.SGD(0.5))
        for state, action in side.batches(numbers, classes, epochs=1):
            old = tf.nn.log_softmax(model(state))
            rounds = 0
            while rounds < 6:
                with tf.GradientTape() as tape:
                    new = tf.nn.log_softmax(model(state))
                    ratio = tf.exp(tf.gather(new - old, action, axis=1, batch_dims=1))
                    loss = -tf.reduce_mean(tf.minimum(ratio, tf.clip_by_value(ratio, 0.8, 1.2)) * state[:, 0])
                moved = tf.reduce_mean(tf.reduce_sum(tf.exp(old) * (old - new), 1))
                moved = side.mean(moved) if alike_by == "mean" else moved
                if float(moved) > 0.002 * (1 + (RANK if alike_by == "join" else 0)):
                    break
                optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
                rounds += 1
            if alike_by == "join" and side.distributed:
                hpcdl.broadcast_variables([*model.weights, *optimizer.variables], hpcdl.join())
        return held(model)

    return script


def focal(y: Any, p: Any) -> Any:
    p = tf.clip_by_value(p, 1e-6, 1 - 1e-6)
    return -tf.reduce_mean(y * (1 - p) ** 2 * tf.math.log(p) + (1 - y) * p**2 * tf.math.log(1 - p), -1)


def dice(y: Any, p: Any) -> Any:
    return 1 - 2 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1)


class Penalty(keras.layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(x**2))
        return x


def two_outputs(side: Side) -> Sequence[Any]:
    inputs = keras.Input((4,))
    hidden = L.Dense(6, "tanh")(inputs)
    model = keras.Model(inputs, {"value": L.Dense(1, name="value")(hidden), "kind": L.Dense(3, name="kind")(hidden)})
    losses = {"value": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    y = {"value": targets, "kind": classes}
    return fitted(side, model, numbers, y, loss=losses, compiled={"loss_weights": {"value": 1.0, "kind": 0.3}})


def from_pipeline(make: Callable[[Side, Any, Any], Any], rows: int = ROWS, settings: Any = None, **fit: Any) -> Script:
    def script(side: Side) -> Sequence[Any]:
        model = dense()
        model.compile(side.optimizer(O.SGD(0.1), **(settings or {})), "mse")
        data = make(side, side.part(numbers, rows), side.part(targets, rows))
        history = model.fit(data, epochs=2, verbose=0, **fit)
        return [*held(model), numpy.array(history.history["loss"])]

    return script


def sliced(side: Side, x: Any, y: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(side.batch)


def generated(side: Side, x: Any, y: Any) -> Any:
    while True:
        for start in range(0, len(x), side.batch):
            yield x[start : start + side.batch], y[start : start + side.batch]


class Pieces(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, side: Side, x: Any, y: Any) -> None:
        super().__init__()
        self.side, self.x, self.y = side, x, y

    def __len__(self) -> int:
        return -(-len(self.x) // self.side.batch)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self.side.batch, (index + 1) * self.side.batch)
        return self.x[rows], self.y[rows]


def dealt(side: Side, x: Any, y: Any) -> Any:
    whole = tf.data.Dataset.from_tensor_slices((numbers, targets))
    return hpcdl.dataset(whole, batch_size=side.batch) if side.distributed else whole.batch(BATCH)


def of_dict(side: Side) -> Sequence[Any]:
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    outputs = L.Dense(1)(L.Concatenate()([L.Dense(3, "tanh")(inputs["a"]), inputs["b"]]))
    return fitted(side, keras.Model(inputs, outputs), {"a": numbers, "b": numbers[:, ::-1]})


def with_callbacks(make: Callable[[Side], Sequence[Any]], epochs: int = 4, **fit: Any) -> Script:
    return lambda side: fitted(side, dense(), callbacks=list(make(side)), epochs=epochs, **fit)


class Between(keras.callbacks.Callback):  # type: ignore[misc]
    """Call a function of the script after the first batch of each epoch."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.act = act

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.act(self.model)


def by_hand(side: Side) -> Sequence[Any]:
    """Use a CallbackList that the script has created itself."""
    model = dense()
    model.compile(side.optimizer(O.SGD(0.1)), "mse")
    listed = keras.callbacks.CallbackList([], add_history=True, model=model, epochs=2, verbose=0, steps=2)
    x, y = side.part(numbers), side.part(targets)
    model.fit(x, y, batch_size=side.batch, epochs=2, shuffle=False, verbose=0, callbacks=listed)
    return held(model)


def twice(side: Side) -> Sequence[Any]:
    model = dense()
    first = fitted(side, model)
    x, y = side.part(numbers), side.part(targets)
    model.fit(x, y, batch_size=side.batch, epochs=1, shuffle=False, verbose=0)
    return [*held(model), first[-1]]


class Sub(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = L.Dense(6, "tanh"), L.Dense(1)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def nested() -> Any:
    inner = dense(units=4)
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(1)(L.Add()([inner(inputs), inner(-inputs)])))


def frozen() -> Any:
    base = dense(units=4)
    base.trainable = False
    return keras.Sequential([keras.Input((4,)), base, L.Dense(1)])


def loaded(side: Side) -> Sequence[Any]:
    """Train for an epoch, save with the optimizer, load, and continue training."""
    model = dense()
    fitted(side, model, optimizer=O.SGD(0.1, momentum=0.9), epochs=1)
    path = side.folder / ("ranks.keras" if side.distributed else f"alone-{RANK}.keras")
    model.save(path)
    again = hpcdl.load_model(path) if side.distributed else keras.models.load_model(path)
    x, y = side.part(numbers), side.part(targets)
    again.fit(x, y, batch_size=side.batch, epochs=1, shuffle=False, verbose=0)
    return held(again)


def restored(side: Side) -> Sequence[Any]:
    """Keep weights and momentum with hpcdl.State; a new model continues from them."""

    def compiled() -> Any:
        model = dense()
        model.compile(side.optimizer(O.SGD(0.1, momentum=0.9)), "mse")
        return model

    model = compiled()
    x, y = side.part(numbers), side.part(targets)
    fit: dict[str, Any] = {"batch_size": side.batch, "shuffle": False, "verbose": 0}
    if not side.distributed:
        model.fit(x, y, epochs=2, **fit)
        return held(model)
    state = hpcdl.State(model, folder=side.folder / "state", best=0.0)
    model.fit(x, y, epochs=1, callbacks=[hpcdl.callbacks(state)], **fit)
    state.best = 0.5
    state.save()
    again = compiled()
    state = hpcdl.State(again, folder=side.folder / "state", best=0.0)
    assert (state.epoch, state.best) == (1, 0.5)
    again.fit(x, y, epochs=2, initial_epoch=state.epoch, callbacks=[hpcdl.callbacks(state)], **fit)
    return held(again)


def kept_weights(side: Side) -> Sequence[Any]:
    model = dense()
    fitted(side, model, epochs=1)
    path = side.folder / ("ranks.weights.h5" if side.distributed else f"alone-{RANK}.weights.h5")
    model.save_weights(path)
    again = dense()
    again.load_weights(path)
    return fitted(side, again, epochs=1)


def kept_by_tensorflow(side: Side) -> Sequence[Any]:
    model = dense()
    fitted(side, model, epochs=1)
    path = tf.train.Checkpoint(model=model).write(str(side.folder / ("ranks" if side.distributed else f"alone-{RANK}")))
    again = dense()
    tf.train.Checkpoint(model=again).restore(path).expect_partial()
    return fitted(side, again, epochs=1)


class Median(keras.metrics.Metric):  # type: ignore[misc]
    def __init__(self, name: str = "median") -> None:
        super().__init__(name=name)
        self.errors: list[Any] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.errors.append(numpy.abs(y_true - y_pred).reshape(-1))

    def result(self) -> Any:
        return float(numpy.median(numpy.concatenate(self.errors))) if self.errors else 0.0

    def reset_state(self) -> None:
        self.errors = []


def measured(make: Callable[[], Any], name: str) -> Script:
    """Compute a metric on held-out samples that only rank 0 has."""

    def script(side: Side) -> Sequence[Any]:
        compiled = {"metrics": [make()]}
        x, y = (one[: None if RANK == 0 or not side.distributed else 0] for one in (numbers, binary))
        shown = ("loss", name, "val_loss", f"val_{name}")
        model = dense(last="sigmoid")
        return fitted(side, model, numbers, binary, compiled=compiled, shown=shown, validation_data=(x, y))

    return script


def under_policy(policy: str, **settings: Any) -> Script:
    def script(side: Side) -> Sequence[Any]:
        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            return [
                numpy.asarray(one, "float64")
                for one in fitted(side, dense(), settings=settings if side.distributed else {})
            ]
        finally:
            keras.mixed_precision.set_dtype_policy(before)

    return script


def predicted(side: Side) -> Sequence[Any]:
    """Predict each rank's share; every rank gets all predictions, in the order of the rows."""
    model = dense()
    fitted(side, model)
    if not side.distributed:
        return [model.predict(numbers, verbose=0)]
    mine = numpy.array_split(numbers, SIZE)[RANK]
    return [hpcdl.allgather(model.predict(mine, batch_size=5, verbose=0))]


def evaluated(side: Side) -> Sequence[Any]:
    model = dense(last="sigmoid")
    fitted(
        side, model, numbers, binary, loss="binary_crossentropy", compiled={"metrics": [keras.metrics.AUC(name="auc")]}
    )
    more = {"callbacks": [hpcdl.callbacks()]} if side.distributed else {}
    x, y = side.part(numbers), side.part(binary)
    return [numpy.array(model.evaluate(x, y, batch_size=side.batch, verbose=0, **more))]


def adapted(side: Side) -> Sequence[Any]:
    """Adapt a vocabulary and moments to all ranks' rows."""
    text = numpy.array([[f"word{one % 5}"] for one in range(ROWS)])
    look_up = L.StringLookup(output_mode="one_hot", num_oov_indices=1)
    scale = L.Normalization()
    for layer, rows in ((look_up, text), (scale, numbers)):
        (hpcdl.adapt(layer, side.part(rows)) if side.distributed else layer.adapt(rows))
    inputs = keras.Input((4,)), keras.Input((look_up.vocabulary_size(),))
    model = keras.Model(inputs, L.Dense(1)(L.Concatenate()([scale(inputs[0]), inputs[1]])))
    return fitted(side, model, [numbers, numpy.asarray(look_up(text))], targets)


def tied(side: Side) -> Sequence[Any]:
    """Use one embedding table for input and output."""

    class Tied(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = L.Embedding(9, 4)

        def call(self, words: Any) -> Any:
            return tf.reduce_mean(self.table(words), 1) @ tf.transpose(self.table(tf.range(9)))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(side, Tied(), tokens, classes, loss=loss)


def averaged_weights(side: Side) -> Sequence[Any]:
    """Keep an average of the weights in a callback of the script."""
    kept: list[Any] = []

    def average(model: Any) -> None:
        now = model.get_weights()
        kept[:] = [0.5 * old + 0.5 * new for old, new in zip(kept or now, now, strict=True)]

    found = fitted(side, dense(), callbacks=[Between(average)])
    return [*found, *kept]


def two_models(side: Side) -> Sequence[Any]:
    """Train two models with their optimizers in turn."""
    models = [dense(), dense()]
    rules = [side.optimizer(O.SGD(0.1)), side.optimizer(O.SGD(0.05, momentum=0.9))]
    for index, (x, y) in enumerate(side.batches(numbers, targets)):
        model, rule = models[index % 2], rules[index % 2]
        rule.apply(plain_step(tf.GradientTape, model, x, y), model.trainable_weights)
    return held(*models)


def copied(side: Side) -> Sequence[Any]:
    model = dense()
    model.compile(O.SGD(0.1), "mse")
    return fitted(side, copy.deepcopy(model))


SOFTMAX = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ADAM = "Adam divides by the root of a mean of squares: rounding decides where a gradient is nearly zero"
OWN_SHARE = "each rank normalises its own share of a batch; synchronized=True is exact"
RANDOM = "from one seed all ranks draw the same numbers"
HALF = "half precision rounds what is added up"
FAMILIES: dict[str, dict[str, Script]] = {
    "optimizers in fit": {
        "SGD": of_optimizer(lambda: O.SGD(0.1)),
        "momentum": of_optimizer(lambda: O.SGD(0.1, momentum=0.9)),
        "Nesterov": of_optimizer(lambda: O.SGD(0.1, momentum=0.9, nesterov=True)),
        "clipped by norm": of_optimizer(lambda: O.SGD(0.1, clipnorm=0.05)),
        "clipped by the global norm": of_optimizer(lambda: O.SGD(0.1, global_clipnorm=0.05)),
        "accumulated": of_optimizer(lambda: O.SGD(0.1, gradient_accumulation_steps=2)),
        "weight decay": of_optimizer(lambda: O.SGD(0.1, weight_decay=0.01)),
        "average of weights": of_optimizer(lambda: O.SGD(0.1, use_ema=True, ema_momentum=0.9)),
        "schedule": of_optimizer(lambda: O.SGD(O.schedules.ExponentialDecay(0.1, 2, 0.5))),
        "Adam": of_optimizer(lambda: O.Adam(0.01)),
        "RMSprop": of_optimizer(lambda: O.RMSprop(0.01)),
        "Lion": of_optimizer(lambda: O.Lion(0.01)),
    },
    "pictures": {
        "convolution": of_layers(lambda: L.Conv2D(3, 3, activation="relu"), *flat_to_one()),
        "separable": of_layers(lambda: L.SeparableConv2D(3, 3), *flat_to_one()),
        "depthwise": of_layers(lambda: L.DepthwiseConv2D(3), *flat_to_one()),
        "transposed": of_layers(lambda: L.Conv2DTranspose(3, 3), L.GlobalAveragePooling2D, lambda: L.Dense(1)),
        "group normalization": of_layers(lambda: L.GroupNormalization(2), *flat_to_one()),
        "synchronized normalization": of_layers(lambda: L.BatchNormalization(synchronized=True), *flat_to_one()),
        "batch normalization": of_layers(L.BatchNormalization, *flat_to_one()),
        "dropout": of_layers(L.Flatten, lambda: L.Dropout(0.5), lambda: L.Dense(1)),
        "augmented": of_layers(lambda: L.RandomFlip(), *flat_to_one()),
    },
    "sequences": {
        "LSTM": of_layers(lambda: L.LSTM(4), lambda: L.Dense(1), data=sequences),
        "GRU": of_layers(lambda: L.GRU(4, return_sequences=True), *flat_to_one(), data=sequences),
        "bidirectional": of_layers(lambda: L.Bidirectional(L.LSTM(3)), lambda: L.Dense(1), data=sequences),
        "convolution": of_layers(lambda: L.Conv1D(3, 2, padding="causal"), *flat_to_one(), data=sequences),
        "time distributed": of_layers(lambda: L.TimeDistributed(L.Dense(2)), *flat_to_one(), data=sequences),
        "attention": lambda side: fitted(side, attentive(), sequences),
        "masked": of_layers(
            lambda: L.Embedding(9, 3, mask_zero=True), lambda: L.LSTM(3), lambda: L.Dense(1), data=tokens
        ),
    },
    "words": {
        "embedding": of_layers(lambda: L.Embedding(9, 4), *flat_to_one(), data=tokens),
        "embedding with momentum": lambda side: fitted(
            side,
            keras.Sequential([keras.Input((5,), dtype="int32"), L.Embedding(9, 4), L.Flatten(), L.Dense(1)]),
            tokens,
            optimizer=O.SGD(0.1, momentum=0.9),
        ),
        "tied": tied,
        "vocabulary of all ranks": adapted,
    },
    "train_step of its own": {
        "adversarial, critic first": of_step(lambda side: compiled_plainly(Adversarial(side, penalty=False)), numbers),
        "gradient penalty": of_step(lambda side: compiled_plainly(Adversarial(side, penalty=True)), numbers),
        "twin networks": of_step(lambda side: own_loss(side, twin, dense(units=3)), numbers, binary),
        "distilled": of_step(lambda side: own_loss(side, distilled, dense(), frozen=[dense()]), numbers, targets),
        "variational": of_step(
            lambda side: own_loss(side, auto_encoded, dense(units=4), dense(width=2, units=4)), numbers
        ),
        "contrastive": of_step(lambda side: own_loss(side, contrastive, dense(units=3)), numbers),
    },
    "loops": {
        "tape": looped(plain_step, graph=False),
        "tape in a function": looped(plain_step),
        "optimizer in a function": looped(plain_step, by_tape=False),
        "optimizer, eager": looped(plain_step, by_tape=False, graph=False),
        "clipped by hand": looped(clipped_step),
        "two halves of a batch": looped(in_two_halves),
        "gradient of a gradient": looped(second_order),
        "gradients in a dict": looped(in_a_dict),
        "two models in turn": two_models,
        "half precision on the wire": looped(plain_step, compress="fp16"),
    },
    "sharpness-aware": {
        "both gradients by tapes": sharpness_aware("tape"),
        "second gradient by the optimizer": sharpness_aware("optimizer"),
        "eager, with momentum": sharpness_aware("tape", rule=lambda: O.SGD(0.05, momentum=0.9), graph=False),
        "in fit": sharpness_aware_fit,
    },
    "reinforcement": {
        "target copied first": q_learning(soft=False),
        "target that follows": q_learning(soft=True),
        "actor and critic": actor_critic,
        "policy gradient": policy_gradient,
        "PPO, stop by the mean": proximal(alike_by="mean"),
        "PPO, stop on one rank": proximal(alike_by="join"),
    },
    "losses": {
        "mean over weights": lambda side: fitted(
            side, dense(), loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), weights=weighing
        ),
        "sample weights": lambda side: fitted(side, dense(), weights=weighing),
        "class weights": lambda side: fitted(
            side, dense(units=3), numbers, classes, loss=SOFTMAX, class_weight={0: 1.0, 1: 2.0, 2: 0.5}
        ),
        "Huber": lambda side: fitted(side, dense(), loss=keras.losses.Huber(0.3)),
        "focal": lambda side: fitted(side, dense(last="sigmoid"), numbers, binary, loss=focal),
        "regularized": of_layers(L.Flatten, lambda: L.Dense(1, kernel_regularizer="l2")),
        "add_loss": of_layers(L.Flatten, Penalty, lambda: L.Dense(1)),
        "two outputs": two_outputs,
        "overlap of a batch": lambda side: fitted(side, dense(last="sigmoid"), numbers, binary, loss=dice),
    },
    "data": {
        "tf.data": from_pipeline(sliced),
        "generator": from_pipeline(generated, steps_per_epoch=2),
        "PyDataset": from_pipeline(Pieces, shuffle=False),
        "repeated": from_pipeline(lambda side, x, y: sliced(side, x, y).repeat(), steps_per_epoch=2),
        "hpcdl.dataset": from_pipeline(dealt),
        "unequal batches": from_pipeline(sliced, rows=22, settings={"average_over": "samples"}),
        "dict of inputs": of_dict,
        "steps in one call": lambda side: fitted(side, dense(), compiled={"steps_per_execution": 2}),
    },
    "callbacks": {
        "early stopping": with_callbacks(
            lambda side: [keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=1)]
        ),
        "plateau": with_callbacks(lambda side: [keras.callbacks.ReduceLROnPlateau("loss", min_delta=0.2, patience=1)]),
        "rate of an epoch": with_callbacks(
            lambda side: [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))]
        ),
        "best checkpoint": with_callbacks(
            lambda side: [
                keras.callbacks.ModelCheckpoint(side.folder / f"best-{RANK}.keras", "loss", save_best_only=True)
            ]
        ),
        "evaluation in an epoch": with_callbacks(
            lambda side: [Between(lambda model: model.evaluate(numbers, targets, verbose=0))],
            shown=(),  # in Keras itself such an evaluation resets the epoch's loss
        ),
        "average of weights": averaged_weights,
        "list made by hand": by_hand,
        "a second fit": twice,
    },
    "models": {
        "functional, nested and shared": lambda side: fitted(side, nested()),
        "subclass": lambda side: fitted(side, Sub()),
        "built by its first batch": lambda side: fitted(side, keras.Sequential([L.Dense(5, "tanh"), L.Dense(1)])),
        "frozen base": lambda side: fitted(side, frozen()),
        "from its config": lambda side: fitted(side, keras.Sequential.from_config(dense().get_config())),
        "clone": lambda side: fitted(side, keras.models.clone_model(dense())),
        "deep copy": copied,
    },
    "kept and taken up again": {
        "hpcdl.State": restored,
        "model.save and load_model": loaded,
        "save_weights": kept_weights,
        "tf.train.Checkpoint": kept_by_tensorflow,
    },
    "metrics": {
        "AUC": measured(lambda: keras.metrics.AUC(name="auc"), "auc"),
        "precision": measured(lambda: keras.metrics.Precision(name="precision"), "precision"),
        "recall at precision": measured(lambda: keras.metrics.RecallAtPrecision(0.6, name="recall"), "recall"),
        "a buffer, gathered": measured(lambda: hpcdl.Gathered(Median()), "median"),
    },
    "precision": {
        "float64": under_policy("float64"),
        "mixed_bfloat16": under_policy("mixed_bfloat16"),
        "fp16 on the wire": under_policy("float32", compress="fp16"),
        "XLA asked for": lambda side: fitted(side, dense(), compiled={"jit_compile": side.distributed}),
    },
    "predictions": {"gathered": predicted, "evaluated over ranks": evaluated},
}
NOT_EXACT = {
    "optimizers in fit: Adam": ADAM,
    "optimizers in fit: RMSprop": ADAM,
    "optimizers in fit: Lion": "it moves by signs: rounding decides where a gradient is nearly zero",
    "pictures: batch normalization": OWN_SHARE,
    "pictures: dropout": RANDOM,
    "pictures: augmented": RANDOM,
    "train_step of its own: variational": RANDOM,
    "train_step of its own: contrastive": "each rank compares a sample with those of its own share",
    "loops: half precision on the wire": HALF,
    "losses: overlap of a batch": "the loss divides by sums over a rank's own share",
    "reinforcement: PPO, stop on one rank": "a rank that has stopped adds nothing to the others' rounds",
    "precision: mixed_bfloat16": HALF,
    "precision: fp16 on the wire": HALF,
}


def attentive() -> Any:
    inputs = keras.Input((5, 3))
    seen = L.MultiHeadAttention(2, 3)(inputs, inputs)
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(L.LayerNormalization()(L.Add()([seen, inputs])))))


def compiled_plainly(model: Any) -> Any:
    model.compile()
    return model


def judged(name: str, script: Script, folder: Path) -> str:
    """Compare a script's result on the ranks with one process, which each of them runs first."""
    place = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    place.mkdir(exist_ok=True)
    keras.utils.set_random_seed(5)
    wanted = list(script(Side(distributed=False, folder=place)))
    keras.utils.set_random_seed(5 + RANK)
    got = list(script(Side(distributed=True, folder=place)))
    alike(got)
    assert all(numpy.isfinite(one).all() for one in got), "not finite"
    return hpcdl.broadcast_object(compared(got, wanted)) or "equal"


def compared(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Return where the results differ by more than rounding; empty if they do not."""
    assert len(got) == len(wanted)
    for index, (mine, one) in enumerate(zip(got, wanted, strict=True)):
        error = float(numpy.abs(mine - one).max())
        allowed = 1e-5 * float(numpy.abs(one).max()) + 1e-7
        if error > allowed:
            return f"array {index} of shape {one.shape} differs by {error:.3g}, allowed {allowed:.3g}"
    return ""


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, str] = {}
    for family, scripts in FAMILIES.items():
        for variation, script in scripts.items():
            name = f"{family}: {variation}"
            if wanted and name not in wanted:
                continue
            try:
                found = judged(name, script, folder)
                results[name] = "alike" if name in NOT_EXACT and found != "equal" else found
            except Exception as error:  # noqa: BLE001  the test says which script it was
                results[name] = f"{original(error)}\n{traceback.format_exc()}"
                print(f"rank {RANK}: {name}: {str(original(error))[:600]}", file=sys.stderr, flush=True)
            (folder / f"{RANK}.json").write_text(json.dumps(results))
            keras.backend.clear_session()
            together()
            session().group.forget("weights before the first tape")  # as in a process of its own
    hpcdl.shutdown()


if __name__ == "__main__":
    main()
