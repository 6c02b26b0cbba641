"""Runs on every rank: each case trains with hpcdl on parts of the batches and plainly on whole batches, and compares.

Every rank starts from another seed, so that results are equal only if all ranks start from rank 0's weights. Results go
to FOLDER/<rank>.json, a line of what is wrong for each case.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()

import keras  # noqa: E402
import numpy  # noqa: E402
import tensorflow as tf  # noqa: E402

from hpcdl.core.errors import HpcdlError, original, originals  # noqa: E402
from hpcdl.strategies.base.strategy import StrategyInfo  # noqa: E402
from hpcdl.strategies.table import listed_strategies  # noqa: E402

RANK, SIZE = hpcdl.rank(), hpcdl.size()
BATCH, STEPS = 12, 3
Weights = list[Any]
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def data(seed: int = 0, width: int = 4) -> tuple[Any, Any]:
    generator = numpy.random.default_rng(seed)
    inputs = generator.normal(size=(BATCH * STEPS, width)).astype("float32")
    return inputs, (inputs @ numpy.arange(1.0, width + 1)[:, None] / 4 + 1).astype("float32")


def words(seed: int = 0) -> tuple[Any, Any]:
    generator = numpy.random.default_rng(seed)
    return generator.integers(0, 10, (BATCH * STEPS, 3)), generator.normal(size=(BATCH * STEPS, 1)).astype("float32")


def part(array: Any) -> Any:
    """Return this rank's share of every batch."""
    batches = array.reshape(STEPS, SIZE, BATCH // SIZE, *array.shape[1:])
    return batches[:, RANK].reshape(-1, *array.shape[1:])


def mlp(**layer: Any) -> Any:
    return keras.Sequential(
        [keras.layers.Dense(8, activation="tanh", **layer), keras.layers.Dense(1, use_bias=True, **layer)]
    )


def with_embedding() -> Any:
    return keras.Sequential([keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(1)])


def train(
    model: Any, optimizer: Any, inputs: Any, targets: Any, batch: int, epochs: int = 1, compile: Any = None, **fit: Any
) -> Weights:
    model.compile(optimizer=optimizer, loss="mean_squared_error", **(compile or {}))
    model.fit(inputs, targets, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **fit)
    return [one.numpy() for one in model.weights]


def both(
    make: Callable[[], Any],
    network: Callable[[], Any] = mlp,
    samples: Callable[[], tuple[Any, Any]] = data,
    distributed: Any = None,
    weights: Any = None,
    tolerance: float = 1e-5,
    compile: Any = None,
    class_weight: Any = None,
    build: bool = False,
    eager: bool = True,
    callbacks: bool = False,
) -> None:
    """Check that `make`'s optimizer, plain on whole batches and distributed on parts, ends at the same weights."""
    inputs, targets = samples()
    keras.utils.set_random_seed(5)
    extra: dict[str, Any] = {} if class_weight is None else {"class_weight": class_weight}
    whole = extra if weights is None else {"sample_weight": weights}
    expected = train(network(), make(), inputs, targets, BATCH, compile={"run_eagerly": eager}, **whole)
    keras.utils.set_random_seed(5 + RANK)
    shares = extra if weights is None else {"sample_weight": part(weights)}
    model = network()
    if build:
        model.build((None, inputs.shape[1]))
    optimizer = hpcdl.DistributedOptimizer(make(), **(distributed or {}))
    shares |= {"callbacks": [hpcdl.callbacks()]} if callbacks else {}
    got = train(model, optimizer, part(inputs), part(targets), BATCH // SIZE, compile=compile, **shares)
    equal(got, expected, tolerance)


def equal(got: Weights, expected: Weights, tolerance: float = 1e-5) -> None:
    alike(got)
    assert len(got) == len(expected)
    for index, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        error = float(numpy.abs(mine - wanted).max())
        allowed = tolerance * float(numpy.abs(wanted).max()) + 1e-7
        assert error <= allowed, (
            f"weight {index} of shape {wanted.shape}: differs by {error:.3g}, allowed {allowed:.3g}"
        )


def alike(got: Weights) -> None:
    """Check that values are bitwise equal on all ranks."""
    digests = hpcdl.allgather_object([hashlib.sha256(one.tobytes()).hexdigest() for one in got])
    assert all(row == digests[0] for row in digests), "the ranks end with different weights"


@contextlib.contextmanager
def refused(*texts: str) -> Iterator[None]:
    try:
        with originals():
            yield
    except HpcdlError as error:
        for text in texts:
            assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError("nobody noticed")


O = keras.optimizers  # noqa: E741

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda **more: O.SGD(0.05, momentum=0.9, nesterov=True, **more),
    "RMSprop": lambda **more: O.RMSprop(0.01, momentum=0.5, centered=True, **more),
    "Adam": lambda **more: O.Adam(0.01, amsgrad=True, **more),
    "AdamW": lambda **more: O.AdamW(0.01, weight_decay=0.02, **more),
    "Adadelta": lambda **more: O.Adadelta(1.0, **more),
    "Adagrad": lambda **more: O.Adagrad(0.05, **more),
    "Adamax": lambda **more: O.Adamax(0.01, **more),
    "Adafactor": lambda **more: O.Adafactor(0.01, **more),
    "Nadam": lambda **more: O.Nadam(0.01, **more),
    "Ftrl": lambda **more: O.Ftrl(0.05, l1_regularization_strength=0.001, **more),
    "Lion": lambda **more: O.Lion(0.01, **more),
    "Lamb": lambda **more: O.Lamb(0.01, **more),
    "Muon": lambda **more: O.Muon(0.01, **more),
    "ScheduleFreeAdamW": lambda **more: O.ScheduleFreeAdamW(0.01, **more),
    "LossScaleOptimizer": lambda: O.LossScaleOptimizer(O.SGD(0.05, momentum=0.9)),
    "MultiOptimizer": lambda: O.MultiOptimizer(O.OptimizerMap(O.SGD(0.05), {".*dense.*/kernel": O.Adam(0.01)})),
}
"""Every optimizer that any supported Keras has."""
NO_OPTIMIZERS = {"Optimizer", "OptimizerMap"}


def optimizers_here() -> set[str]:
    """Return the optimizers that this Keras has."""
    return {name for name, kind in vars(O).items() if isinstance(kind, type) and name not in NO_OPTIMIZERS}


@case
def every_optimizer_of_keras_has_a_case() -> None:
    assert optimizers_here() <= set(OPTIMIZERS)


for _name in [name for name in OPTIMIZERS if name in optimizers_here()]:
    # The first state of this one copies the weights, which Keras loses if a graph builds it: both run eagerly.
    _eager = _name != "ScheduleFreeAdamW"
    CASES[f"optimizer_{_name}"] = lambda name=_name, eager=_eager: both(OPTIMIZERS[name], eager=eager)

SETTINGS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "weight_decay": {"weight_decay": 0.05},
    "loss_scale_factor": {"loss_scale_factor": 128.0},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
}
for _name, _more in SETTINGS.items():
    CASES[f"adam_with_{_name}"] = lambda more=_more: both(lambda: OPTIMIZERS["Adam"](**more))
    if _name != "loss_scale_factor":  # Keras itself cannot remove it from sparse gradients
        CASES[f"sparse_sgd_with_{_name}"] = lambda more=_more: both(lambda: O.SGD(0.1, **more), with_embedding, words)
for _name in ("SGD", "Adam", "Adagrad", "RMSprop", "Ftrl"):
    CASES[f"sparse_{_name}"] = lambda name=_name: both(OPTIMIZERS[name], with_embedding, words)

DISTRIBUTED: dict[str, dict[str, Any]] = {
    "predivide_factor": {"gradient_predivide_factor": 4.0},
    "two_groups": {"groups": 2},
    "small_buckets": {"bucket_size": 16},
    "sparse_as_dense": {"sparse_as_dense": True},
    "samples": {"average_over": "samples"},
    "two_servers": {"strategy": "ps", "servers": 2, "bucket_size": 100},
}
for _name, _more in DISTRIBUTED.items():
    CASES[f"exchange_{_name}"] = lambda more=_more: (
        both(OPTIMIZERS["SGD"], with_embedding, words, distributed=more)
        if more.get("average_over") != "samples"
        else unequal_batches()
    )
for _name in ("fp16", "bf16"):
    CASES[f"exchange_{_name}"] = lambda name=_name: both(
        OPTIMIZERS["SGD"], distributed={"compress": name}, tolerance=0.02
    )


def by_strategy(info: StrategyInfo) -> None:
    """Check that strategies for scripts equal one process or `hpcdl train`, and that others are refused with reason."""
    if info.features.keras_fit:
        if info.features.elastic:
            as_train_does(info)
        else:
            both(OPTIMIZERS["SGD"], with_embedding, words, distributed={"strategy": info.name})
        return
    own = "lets every rank change the center" if info.features.lock_free else "has its center on servers"
    reason = REASONS.get(info.family, own)
    with refused(f"strategy={info.name!r} is not for scripts", reason):
        hpcdl.DistributedOptimizer("sgd", strategy=info.name)
    with refused(reason), hpcdl.DistributedGradientTape(strategy=info.name) as tape:
        variable = tf.Variable(1.0)
        square = variable * variable
        tape.gradient(square, variable)


REASONS = {
    "sequential": "is one process without an exchange",
    "TensorFlow's own": "runs on TensorFlow's own servers",
}
"""Reasons by family; families with a center have their own."""


def flat(model: Any) -> Any:
    return numpy.concatenate([one.numpy().reshape(-1) for one in model.trainable_variables])


class Steps(keras.callbacks.Callback):
    """This rank's weights after each step, and the center."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Weights = []
        self.center: Weights = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.own.append(flat(self.model))
        with hpcdl.center_in_place(self.model.optimizer):
            self.center.append(flat(self.model))


def with_center(model: Any, epochs: int = 1, optimizer: Any = None, share: Any = None, **fit: Any) -> Steps:
    """Train on this rank's part, with sync-easgd if no optimizer is given."""
    steps = Steps()
    optimizer = optimizer or hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="sync-easgd")
    inputs, targets = share or map(part, data())
    callbacks = [steps, *fit.pop("callbacks", [])]
    train(model, optimizer, inputs, targets, BATCH // SIZE, epochs, callbacks=callbacks, **fit)
    alike(steps.center)
    return steps


class Squares:
    """The mean squared error in the form of the training loop's objectives."""

    names: tuple[str, ...] = ()

    def loss(self, labels: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.square(outputs - labels))

    def sums(self, labels: Any, outputs: Any) -> Any:
        return tf.zeros([0], tf.float64)


def as_train_does(info: StrategyInfo) -> None:
    """Check that the weights of each rank and the center equal those of `hpcdl train` after every step."""
    from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
    from hpcdl.scripts.process.session import communicator
    from hpcdl.step.step import build_step
    from hpcdl.strategies.base.strategy import Context
    from hpcdl.strategies.table import load_strategy

    inputs, targets = map(part, data())
    chosen: tuple[tuple[str, dict[str, Any]], ...] = (
        ("none", {}), ("none", {"period": 2, "elasticity": 3.0}), ("bf16", {"period": 2}),
    )  # fmt: skip
    for compress, elastic in chosen:
        context = Context(
            info=info, communicator=communicator(), num_workers=SIZE, num_servers=0,
            exchange=ExchangeConfig(strategy=info.name, compress=compress), optimizer=OptimizerConfig(optimizer="sgd"),
            elastic=ElasticConfig(**elastic),
        )  # fmt: skip
        keras.utils.set_random_seed(5 + RANK)
        model, worker = mlp(), load_strategy(info).worker(context)
        model.build((None, 4))
        step = build_step(model, O.SGD(0.05), worker, Squares())
        worker.start(model.weights)
        own, center = [], []
        for number, batch in enumerate(zip(numpy.split(inputs, STEPS), numpy.split(targets, STEPS), strict=True)):
            worker.learning_rate = 0.05
            worker.before_step(number)
            step(*map(tf.constant, batch))
            own.append(flat(model))
            center.append(numpy.concatenate([one.reshape(-1) for one in worker.center()]))
        keras.utils.set_random_seed(5 + RANK)
        optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), strategy=info.name, compress=compress, **elastic)
        again = mlp()
        steps = with_center(again, optimizer=optimizer)
        equal(steps.center, center)
        for mine, wanted in zip(steps.own, own, strict=True):
            assert numpy.abs(mine - wanted).max() <= 1e-5 * numpy.abs(wanted).max()
        assert numpy.array_equal(flat(again), steps.center[-1]), "a fit leaves the center"


for _info in listed_strategies():
    if _info.features.periodic:  # in periodic_cases.py
        continue
    CASES[f"strategy_{_info.name}"] = lambda info=_info: by_strategy(info)


@case
def a_center_is_what_is_seen_and_kept() -> None:
    """Validation, files and callbacks at an epoch's end use the center; the next fit continues without a break."""
    inputs, targets = map(part, data())
    keras.utils.set_random_seed(5)
    whole = with_center(mlp(), epochs=2)
    keras.utils.set_random_seed(5)
    model, seen = mlp(), []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((flat(model), logs["val_loss"])))
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="sync-easgd")
    path = str(hpcdl.broadcast_object(tempfile.mkdtemp())) + "/{batch}.weights.h5"
    files = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    trees: list[Any] = []  # of what OrbaxCheckpoint saves
    saved = {"value_format": "numpy_array"}
    tree = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: trees.append(model.get_state_tree(**saved))
    )
    parts = [with_center(model, 1, optimizer, validation_data=(inputs, targets), callbacks=[note, files, tree])]
    again = with_center(model, 1, model.optimizer)
    equal([*parts[0].own[:0], *parts[0].center, *again.center], whole.center, tolerance=0.0)
    assert numpy.array_equal(seen[0][0], parts[0].center[-1])
    assert not numpy.array_equal(again.own[-1], again.center[-1])
    loaded = keras.models.clone_model(model)
    loaded.load_weights(path.format(batch=2))
    assert numpy.array_equal(flat(loaded), parts[0].center[1]), "in the middle of an epoch too"
    in_tree = numpy.concatenate([numpy.ravel(one) for one in tf.nest.flatten(trees[1]["trainable_variables"])])
    assert numpy.array_equal(numpy.sort(in_tree), numpy.sort(parts[0].center[1]))
    loaded.set_weights([numpy.zeros_like(one) for one in loaded.get_weights()])
    model.set_weights(loaded.get_weights())
    again = with_center(model, 1, model.optimizer)
    keras.utils.set_random_seed(5)
    zeros = mlp()
    zeros.build((None, 4))
    zeros.set_weights(loaded.get_weights())
    equal(again.center, with_center(zeros).center, tolerance=0.0)


@case
def a_center_with_unequal_steps() -> None:
    """A rank without data takes part with its weights; all ranks end at one center."""
    inputs, targets = map(part, data())
    few = (1 + RANK) * BATCH // SIZE
    for period in (1, 2):
        model = mlp()
        optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="sync-easgd", period=period)
        with contextlib.redirect_stderr(io.StringIO()):
            train(model, optimizer, inputs[:few], targets[:few], BATCH // SIZE, epochs=3)
        alike([one.numpy() for one in model.weights])


@case
def a_period_that_is_long_for_a_fit() -> None:
    """The model after a fit is the center, which has hardly moved: `fit` says so, once."""
    inputs, targets = map(part, data())
    for period, expected in ((40, 1), (2, 0)):
        optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="sync-easgd", period=period)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            train(mlp(), optimizer, inputs, targets, BATCH // SIZE, epochs=3)
        assert said.getvalue().count(f"period={period} is long for ") == expected * (RANK == 0), said.getvalue()


def wide() -> Any:
    return keras.Sequential([keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)])


def compressed_as_train_does(compress: str) -> None:
    """Compression errors of a step are added to the next step's gradients, as in `hpcdl train`."""
    from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
    from hpcdl.scripts.process.session import communicator
    from hpcdl.step.step import build_step
    from hpcdl.strategies.base.strategy import Context
    from hpcdl.strategies.table import find_strategy, load_strategy

    inputs, targets = map(part, data(width=32))
    info = find_strategy("ring")
    context = Context(
        info=info, communicator=communicator(), num_workers=SIZE, num_servers=0, optimizer=OptimizerConfig(),
        exchange=ExchangeConfig(strategy="ring", compress=compress),
    )  # fmt: skip
    keras.utils.set_random_seed(5 + RANK)
    model, optimizer, worker = wide(), O.SGD(0.05, momentum=0.9), load_strategy(info).worker(context)
    model.build((None, 32))
    optimizer.build(model.trainable_variables)
    step = build_step(model, optimizer, worker, Squares())
    worker.start([*model.weights, *optimizer.variables])
    for number, batch in enumerate(zip(numpy.split(inputs, STEPS), numpy.split(targets, STEPS), strict=True)):
        worker.before_step(number)
        step(*map(tf.constant, batch))
        worker.after_step(number)
    keras.utils.set_random_seed(5 + RANK)
    distributed = hpcdl.DistributedOptimizer(O.SGD(0.05, momentum=0.9), compress=compress)
    got = train(wide(), distributed, inputs, targets, BATCH // SIZE)
    equal(got, [one.numpy() for one in model.weights], tolerance=1e-6)
    mine, wanted = distributed.gradient_exchange.state(), worker.state()
    assert mine.keys() == wanted.keys() and len(mine) >= 1
    for name, rest in wanted.items():
        assert abs(mine[name] - rest).max() <= 1e-5 * abs(rest).max(), name
    worker.finish()


for _name in ("int8", "topk:5%", "powersgd:2"):
    CASES[f"compressed by {_name}"] = lambda name=_name: compressed_as_train_does(name)


@case
def what_compression_leaves_over_is_saved_and_resumed() -> None:
    inputs, targets = map(part, data(width=32))
    for compress in ("int8", "powersgd:2"):
        folder, ends = str(hpcdl.broadcast_object(tempfile.mkdtemp())), []
        for parts in ([3], [1, 3]):
            for epochs in parts:
                keras.utils.set_random_seed(5)
                model = wide()
                model.build((None, 32))
                model.compile(hpcdl.DistributedOptimizer(O.SGD(0.05), compress=compress), "mean_squared_error")
                state = hpcdl.State(model, folder=f"{folder}/{len(parts)}")
                model.fit(
                    inputs, targets, BATCH // SIZE, epochs, 0, [hpcdl.callbacks(state)], shuffle=False,
                    initial_epoch=state.epoch,
                )  # fmt: skip
                state.save()
            ends.append([one.numpy() for one in model.weights])
        equal(*ends, tolerance=0.0)
    with refused("compress='int8': a loss scale changes"):
        hpcdl.DistributedOptimizer(O.LossScaleOptimizer(O.SGD(0.1)), compress="int8")
    with refused("compress='int8': nobody keeps what it leaves over of a tape's gradients"):
        hpcdl.DistributedGradientTape(compress="int8")
    with refused("compress='powersgd:90': no gradient of this model gets smaller by it"):
        train(mlp(), hpcdl.DistributedOptimizer("sgd", compress="powersgd:90"), *map(part, data()), BATCH // SIZE)


@case
def two_optimizers_keep_a_rest_each() -> None:
    """Two optimizers keep separate compression errors, by variable, also if one updates half of the weights in turn."""
    inputs, targets = map(part, data(width=32))
    ends = []
    for halves in (False, True):
        keras.utils.set_random_seed(5)
        model, twin = wide(), wide()
        for one in (model, twin):
            one.build((None, 32))
        twin.set_weights(model.get_weights())
        first, second = (hpcdl.DistributedOptimizer(O.SGD(0.05), compress="topk:5%") for _ in range(2))
        first.build(model.trainable_variables)
        second.build(twin.trainable_variables)
        for x, y in zip(numpy.split(inputs, STEPS), numpy.split(targets, STEPS), strict=True):
            grads = plain_gradients(model, x, y)
            pairs = list(zip(grads, model.trainable_variables, strict=True))
            for chosen in [pairs[2:], pairs[:2]] if halves else [pairs]:
                first.apply_gradients(chosen)
            second.apply_gradients(zip([one * 2 for one in grads], twin.trainable_variables, strict=True))
        ends.append([one.numpy() for one in model.weights])
    equal(*ends, tolerance=1e-6)


@case
def a_center_in_a_loop_of_its_own() -> None:
    inputs, targets = words()
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="sync-easgd", elasticity=2.0)
    model = with_embedding()
    own = loop(model, plain_gradients, optimizer, part(inputs), part(targets))
    digests = hpcdl.allgather_object([one.tolist() for one in own])
    assert digests[0] != digests[1], "each rank has its own"
    with hpcdl.center_in_place(optimizer):
        alike([one.numpy() for one in model.weights])
    assert all(numpy.array_equal(one.numpy(), mine) for one, mine in zip(model.weights, own, strict=True))


@case
def another_model_may_be_deleted() -> None:
    """A deleted model, trained by a plain optimizer or not at all, does not affect the next traced step."""
    inputs, targets = (tf.constant(part(one)[: BATCH // SIZE]) for one in data())
    others, new = [mlp_of_seed(1), mlp_of_seed(2)], mlp_of_seed(3)
    others[0].compile(O.SGD(0.05), "mean_squared_error")
    others[0].fit(inputs, targets, verbose=0)
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05))

    @tf.function
    def step(x: Any, y: Any) -> None:
        optimizer.apply_gradients(zip(plain_gradients(new, x, y), new.trainable_variables, strict=True))

    @tf.function
    def two_steps(x: Any, y: Any) -> None:
        step(x, y)
        step(x, y)

    step(inputs, targets)
    others.clear()
    gc.collect()
    two_steps(inputs, targets)
    alike([one.numpy() for one in new.weights])


@case
def a_center_is_saved_and_resumed() -> None:
    inputs, targets = map(part, data())
    folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
    keras.utils.set_random_seed(5)
    whole = with_center(mlp(), epochs=3)
    for epochs in (1, 3):
        keras.utils.set_random_seed(5 + RANK)
        model = mlp()
        model.build((None, 4))
        model.compile(hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="sync-easgd"), "mean_squared_error")
        state, steps = hpcdl.State(model, folder=folder), Steps()
        if epochs == 1:
            model.set_weights(mlp_of_seed(5).get_weights())
        model.fit(
            inputs, targets, BATCH // SIZE, epochs, 0, [hpcdl.callbacks(state), steps], shuffle=False,
            initial_epoch=state.epoch,
        )  # fmt: skip
        state.save()
    equal([*steps.center], whole.center[-2 * STEPS :], tolerance=0.0)


def mlp_of_seed(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = mlp()
    model.build((None, 4))
    return model


@case
def what_a_center_does_not_have_is_refused() -> None:
    center: dict[str, Any] = {"strategy": "sync-easgd"}
    for optimizer in (O.Adam(0.1), O.SGD(0.1, momentum=0.9), O.LossScaleOptimizer(O.SGD(0.1))):
        with refused("moves weights by its own equations (sgd)", "keras.optimizers.SGD(rate) without momentum"):
            hpcdl.DistributedOptimizer(optimizer, **center)
    with refused("without use_ema; leave it out"):
        hpcdl.DistributedOptimizer(O.SGD(0.1, use_ema=True), **center)
    for setting in ({"op": "sum"}, {"average_over": "samples"}, {"groups": 2}):
        with refused("exchanges weights, not gradients"):
            hpcdl.DistributedOptimizer("sgd", **center, **setting)
    with refused("period=2: strategy 'ring' does not have it", "or sync-easgd"):
        hpcdl.DistributedOptimizer("sgd", period=2)
    with refused("is unstable whatever the learning rate", f"2 / (workers + 1) = {2 / (SIZE + 1):g}"):
        hpcdl.DistributedOptimizer("sgd", **center, moving_rate=0.9)
    doubles = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="float64")])
    with refused("keeps its weights in float32, the model has float64 ones"):
        train(doubles, hpcdl.DistributedOptimizer("sgd", **center), *map(part, data()), BATCH // SIZE)
    with refused("is not for tapes"), hpcdl.DistributedGradientTape(**center) as tape:
        variable = tf.Variable(1.0)
        tape.gradient(variable * variable, variable)


@case
def not_a_number_stays_away_from_a_center() -> None:
    inputs, targets = words()
    mine = part(targets).copy()
    mine[:] = numpy.nan
    with refused("the gradient of", "is not finite on rank"):
        train(
            with_embedding(),
            hpcdl.DistributedOptimizer("sgd", strategy="sync-easgd"),
            part(inputs),
            mine,
            BATCH // SIZE,
        )
    hpcdl.barrier()


def unequal_batches() -> None:
    """With a shorter last batch on rank 0, the mean over samples equals that of one process."""
    inputs, targets = data()
    inputs, targets = inputs[: BATCH + 7], targets[: BATCH + 7]
    keras.utils.set_random_seed(5)
    expected = train(mlp(), O.SGD(0.05), inputs, targets, BATCH)
    first = [array[:BATCH].reshape(SIZE, -1, *array.shape[1:])[RANK] for array in (inputs, targets)]
    last = [numpy.array_split(array[BATCH:], [1] if SIZE == 2 else [1, 3])[RANK] for array in (inputs, targets)]
    own = [numpy.concatenate(pair) for pair in zip(first, last, strict=True)]
    keras.utils.set_random_seed(5 + RANK)
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), average_over="samples")
    got = train(mlp(), optimizer, *own, BATCH // SIZE, callbacks=[hpcdl.callbacks()])
    equal(got, expected)


@case
def sample_weights() -> None:
    weights = numpy.random.default_rng(1).uniform(0.1, 3, BATCH * STEPS).astype("float32")
    both(OPTIMIZERS["Adam"], weights=weights)


@case
def class_weights() -> None:
    def samples() -> tuple[Any, Any]:
        inputs, targets = data()
        return inputs, (targets[:, 0] > 1).astype("int32")

    def network() -> Any:
        return keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])

    both(OPTIMIZERS["SGD"], network, samples, class_weight={0: 1.0, 1: 5.0})


@case
def accumulated_gradients_are_exchanged_once() -> None:
    """Three batches of each rank make one update, with one exchange."""
    inputs, targets = data()
    keras.utils.set_random_seed(5)
    expected = train(mlp(), O.Adam(0.01, clipnorm=0.1), inputs, targets, BATCH * STEPS)
    keras.utils.set_random_seed(5 + RANK)
    optimizer = hpcdl.DistributedOptimizer(O.Adam(0.01, clipnorm=0.1, gradient_accumulation_steps=STEPS))
    exchanges: list[Any] = []
    plain = type(optimizer)._clip_gradients  # Keras's own, which hpcdl's replaces
    assert optimizer._clip_gradients is not plain
    before = sent()
    got = train(mlp(), optimizer, part(inputs), part(targets), BATCH // SIZE)
    exchanges.append(sent() - before)
    equal(got, expected)
    per_exchange = 2 * (SIZE - 1) / SIZE * 4 * sum(one.size for one in got)
    assert exchanges[0] <= 1.2 * per_exchange + 64, f"{exchanges[0]} bytes sent, one exchange is {per_exchange:.0f}"


def sent() -> int:
    """Return the bytes that this rank has sent in exchanges."""
    from hpcdl.comm.observed import CONTROL, EXCHANGE
    from hpcdl.scripts.process.session import communicator

    seen = communicator().monitor
    return seen.traffic(EXCHANGE).bytes_sent + seen.traffic(CONTROL).bytes_sent


@case
def backward_passes_as_horovod_says() -> None:
    inputs, targets = data()
    for average in (True, False):
        keras.utils.set_random_seed(5)
        rate = 0.05 if average else 0.05 * STEPS
        expected = train(mlp(), O.SGD(rate), inputs, targets, BATCH * STEPS)
        keras.utils.set_random_seed(5 + RANK)
        optimizer = hpcdl.DistributedOptimizer(
            O.SGD(0.05), backward_passes_per_step=STEPS, average_aggregated_gradients=average
        )
        equal(train(mlp(), optimizer, part(inputs), part(targets), BATCH // SIZE), expected)


@case
def a_sum_instead_of_a_mean() -> None:
    inputs, targets = data()
    keras.utils.set_random_seed(5)
    expected = train(mlp(), O.SGD(0.01 * SIZE), inputs, targets, BATCH)
    keras.utils.set_random_seed(5 + RANK)
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.01), op=hpcdl.Sum)
    equal(train(mlp(), optimizer, part(inputs), part(targets), BATCH // SIZE), expected)


@case
def groups_of_variables() -> None:
    inputs, targets = data()
    keras.utils.set_random_seed(5)
    expected = train(mlp(), O.SGD(0.05), inputs, targets, BATCH)
    keras.utils.set_random_seed(5 + RANK)
    model = mlp()
    model.build((None, 4))
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), groups=[model.layers[0].trainable_weights])
    equal(train(model, optimizer, part(inputs), part(targets), BATCH // SIZE), expected)


@case
def names_and_configs() -> None:
    both(lambda: "adam")
    both(lambda: {"class_name": "SGD", "config": {"learning_rate": 0.05, "momentum": 0.5}})
    with refused("give a Keras 3 optimizer"):
        hpcdl.DistributedOptimizer("adan")


@case
def a_schedule() -> None:
    both(lambda: O.SGD(O.schedules.ExponentialDecay(0.1, 2, 0.5)))


@case
def double_beside_single_precision() -> None:
    def network() -> Any:
        inputs = keras.Input((4,))
        wide = keras.layers.Dense(8, activation="tanh", dtype="float64")(inputs)
        return keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(wide))

    both(OPTIMIZERS["Adam"], network)


@case
def frozen_layers_and_batch_normalisation_in_inference() -> None:
    def network() -> Any:
        model = mlp()
        model.add(keras.layers.BatchNormalization(trainable=False))
        model.build((None, 4))
        model.layers[0].trainable = False
        return model

    both(OPTIMIZERS["SGD"], network, callbacks=True)


@case
def a_subclassed_model() -> None:
    @keras.saving.register_keras_serializable(f"cases{RANK}")
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.second(self.first(inputs))

    both(OPTIMIZERS["Adam"], Twice)


@case
def eagerly() -> None:
    both(OPTIMIZERS["Adam"], compile={"run_eagerly": True}, build=True, callbacks=True)


@case
def several_steps_per_execution() -> None:
    both(OPTIMIZERS["Adam"], compile={"steps_per_execution": 2})


@case
def xla_is_off_and_said_once() -> None:
    inputs, targets = data()
    model, reported = mlp(), io.StringIO()
    with contextlib.redirect_stderr(reported):
        train(
            model, hpcdl.DistributedOptimizer("sgd"), part(inputs), part(targets), BATCH // SIZE, epochs=2,
            compile={"jit_compile": True}, callbacks=[hpcdl.callbacks()],
        )  # fmt: skip
    assert reported.getvalue().count("jit_compile is off") == (RANK == 0), reported.getvalue()
    alike([one.numpy() for one in model.weights])


@case
def a_loaded_model_with_its_state() -> None:
    """Rank 0 loads a trained model, the others a fresh one: all continue with rank 0's weights and optimizer state."""
    inputs, targets = data()
    keras.utils.set_random_seed(5)
    model = mlp()
    train(model, O.Adam(0.01), inputs, targets, BATCH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        expected = train_again(model, inputs, targets, BATCH)
        if RANK:
            keras.utils.set_random_seed(77)
            other = mlp()
            train(other, O.Adam(0.01), inputs, targets, BATCH)
            other.save(path)
        loaded = hpcdl.load_model(path)
    equal(train_again(loaded, part(inputs), part(targets), BATCH // SIZE), expected)
    assert type(loaded.optimizer) is O.Adam and int(loaded.optimizer.iterations) == 2 * STEPS


def train_again(model: Any, inputs: Any, targets: Any, batch: int) -> Weights:
    model.fit(inputs, targets, batch_size=batch, shuffle=False, verbose=0)
    return [one.numpy() for one in model.weights]


def loop(model: Any, gradients: Callable[[Any, Any, Any], Any], optimizer: Any, inputs: Any, targets: Any) -> Weights:
    @tf.function
    def step(x: Any, y: Any) -> None:
        grads = gradients(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    for x, y in zip(numpy.split(inputs, STEPS), numpy.split(targets, STEPS), strict=True):
        step(tf.constant(x), tf.constant(y))
    return [one.numpy() for one in model.weights]


def plain_gradients(model: Any, x: Any, y: Any, tape: Any = None) -> Any:
    with tape or tf.GradientTape() as recorded:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return recorded.gradient(loss, model.trainable_variables)


@case
def a_loop_of_its_own_with_a_tape() -> None:
    for network, samples in ((mlp, data), (with_embedding, words)):
        inputs, targets = samples()
        keras.utils.set_random_seed(5)
        expected = loop(network(), plain_gradients, O.Adam(0.01), inputs, targets)
        keras.utils.set_random_seed(5 + RANK)
        got = loop(
            network(),
            lambda model, x, y: plain_gradients(model, x, y, hpcdl.DistributedGradientTape(tf.GradientTape())),
            O.Adam(0.01), part(inputs), part(targets),
        )  # fmt: skip
        equal(got, expected)


@case
def a_loop_of_its_own_with_an_optimizer() -> None:
    inputs, targets = words()
    keras.utils.set_random_seed(5)
    expected = loop(with_embedding(), plain_gradients, O.Adam(0.01), inputs, targets)
    keras.utils.set_random_seed(5 + RANK)
    optimizer = hpcdl.DistributedOptimizer(O.Adam(0.01))
    equal(loop(with_embedding(), plain_gradients, optimizer, part(inputs), part(targets)), expected)


@case
def a_tape_used_step_by_step_without_a_graph() -> None:
    inputs, targets = data()

    def run(make_tape: Callable[[], Any], x: Any, y: Any) -> Weights:
        model, optimizer = mlp(), O.SGD(0.05)
        model.build((None, 4))
        for inputs_, targets_ in zip(numpy.split(x, STEPS), numpy.split(y, STEPS), strict=True):
            with make_tape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs_) - targets_))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return [one.numpy() for one in model.weights]

    keras.utils.set_random_seed(5)
    expected = run(tf.GradientTape, inputs, targets)
    keras.utils.set_random_seed(5)  # an eager loop computes its first update from weights of its own
    got = run(hpcdl.DistributedGradientTape, part(inputs), part(targets))
    equal(got, expected)


@case
def a_tape_weighs_by_samples() -> None:
    x = tf.Variable(2.0)
    with hpcdl.DistributedGradientTape(average_over="samples") as tape:
        loss = x * float(RANK)
    got = float(tape.gradient(loss, x, num_samples=RANK + 1))
    assert abs(got - sum(r * (r + 1) for r in range(SIZE)) / sum(range(1, SIZE + 1))) < 1e-6


class Clipping(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([keras.ops.clip(grad, -1, 1) for grad in grads], trainable_variables)


@case
def an_own_apply_is_warned_of_once() -> None:
    reported = io.StringIO()
    with contextlib.redirect_stderr(reported):
        for kind in (keras.optimizers.SGD, Clipping, Clipping):
            hpcdl.DistributedOptimizer(kind(0.1))
    assert reported.getvalue().count("Clipping has its own apply, which sees a rank's gradients") == (RANK == 0)
    assert reported.getvalue().count("warning") == (RANK == 0), reported.getvalue()


@case
def variables_without_a_gradient() -> None:
    inputs, targets = data()
    keras.utils.set_random_seed(5 + RANK)
    model = mlp()
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05))

    def gradients(model: Any, x: Any, y: Any) -> Any:
        grads = plain_gradients(model, x, y)
        return [*grads[:-1], None]

    model.build((None, 4))
    with contextlib.redirect_stderr(io.StringIO()):
        got = loop(model, gradients, optimizer, part(inputs), part(targets))
    alike(got)
    assert not got[-1].any()


class Gan(keras.Model):
    """Two networks and two optimizers in one step, of which neither waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.judge, self.forger = mlp(), mlp()

    def compile(self, judge: Any, forger: Any) -> None:
        super().compile()
        self.judge_optimizer, self.forger_optimizer = judge, forger

    def train_step(self, data: Any) -> Any:
        x, y = data
        for network, optimizer in ((self.judge, self.judge_optimizer), (self.forger, self.forger_optimizer)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(network(x) - y))
            grads = tape.gradient(loss, network.trainable_variables)
            optimizer.apply_gradients(zip(grads, network.trainable_variables, strict=True))
        return {"loss": loss}


@case
def two_networks_and_two_optimizers() -> None:
    inputs, targets = data()

    def run(wrap: Callable[[Any], Any], x: Any, y: Any, batch: int) -> Weights:
        model = Gan()
        model.compile(wrap(O.Adam(0.01)), wrap(O.SGD(0.05)))
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return [one.numpy() for one in (*model.judge.weights, *model.forger.weights)]

    keras.utils.set_random_seed(5)
    expected = run(lambda optimizer: optimizer, inputs, targets, BATCH)
    keras.utils.set_random_seed(5 + RANK)
    equal(run(hpcdl.DistributedOptimizer, part(inputs), part(targets), BATCH // SIZE), expected)


@case
def a_dynamic_loss_scale_skips_on_all_ranks() -> None:
    keras.utils.set_random_seed(5 + RANK)
    inputs, targets = data()
    mine = part(targets).copy()
    if RANK == 0:
        mine[BATCH // SIZE : 2 * BATCH // SIZE] = 1e36  # the second step overflows on this rank alone
    model = mlp()
    optimizer = hpcdl.DistributedOptimizer(O.LossScaleOptimizer(O.SGD(0.05)))
    got = train(model, optimizer, part(inputs), mine, BATCH // SIZE)
    alike(got)
    assert float(optimizer.dynamic_scale) == 2.0**14, float(optimizer.dynamic_scale)
    assert all(numpy.isfinite(one).all() for one in got)


@case
def a_dynamic_loss_scale_skips_the_steps_of_one_process() -> None:
    inputs, targets = numpy.ones((BATCH * STEPS, 1), "float32"), numpy.zeros((BATCH * STEPS, 1), "float32")
    targets[::BATCH] = 10  # its gradient fits into half precision in a whole batch, but not in a mean of fewer samples

    def run(optimizer: Any, share: Callable[[Any], Any], batch: int) -> Weights:
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
        return train(keras.Sequential([layer]), optimizer, share(inputs), share(targets), batch)

    alone = O.LossScaleOptimizer(O.SGD(0.05))
    expected = run(alone, lambda whole: whole, BATCH)
    optimizer = hpcdl.DistributedOptimizer(O.LossScaleOptimizer(O.SGD(0.05)))
    equal(run(optimizer, part, BATCH // SIZE), expected, tolerance=2e-3)  # half precision rounds what is added up
    assert float(optimizer.dynamic_scale) == float(alone.dynamic_scale), float(optimizer.dynamic_scale)


@case
def process_sets() -> None:
    """Each process set trains a model of its own."""
    sets = [hpcdl.ProcessSet([0]), hpcdl.ProcessSet(range(1, SIZE))]
    own = sets[RANK > 0]
    inputs, targets = data()
    keras.utils.set_random_seed(5 + RANK)
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), process_set=own)
    got = train(mlp(), optimizer, inputs, targets, BATCH)
    digests = hpcdl.allgather_object(hashlib.sha256(b"".join(one.tobytes() for one in got)).hexdigest())
    assert len(set(digests[1:])) == 1
    assert digests[0] != digests[1]


@case
def what_differs_between_ranks_is_told() -> None:
    x, y = tf.Variable(1.0), tf.Variable(tf.ones((4, 2)))
    y.path = "table"

    def ask(sources: Any, loss: Callable[[], Any]) -> None:
        with hpcdl.DistributedGradientTape() as tape:
            value = loss()
        tape.gradient(value, sources)

    with refused("no gradient", "a dense float32 gradient"):
        ask([x, y], lambda: x * 1.0 if RANK == 0 else x * tf.reduce_sum(y))
    with refused("a sparse float32 gradient", "a dense float32 gradient"):
        ask([x, y], lambda: x * tf.reduce_sum(tf.gather(y, [1]) if RANK == 0 else y))
    hpcdl.barrier()


@case
def weights_that_drift_apart_are_told() -> None:
    inputs, targets = data()
    model = mlp()
    model.build((None, 4))
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05))
    shift = tf.Variable(float(RANK), trainable=False)

    def gradients(model: Any, x: Any, y: Any) -> Any:
        model.layers[0].bias.assign_add(tf.fill([8], shift))
        return plain_gradients(model, x, y)

    with refused("weights differ over the ranks after 1 update", "bias"):
        loop(model, gradients, optimizer, part(inputs), part(targets))


@case
def not_a_number_ends_the_step() -> None:
    inputs, targets = words()
    mine = part(targets).copy()
    if RANK == 1:
        mine[:] = numpy.nan
    with refused("is not finite", "on rank 1"):
        train(with_embedding(), hpcdl.DistributedOptimizer("adam"), part(inputs), mine, BATCH // SIZE)
    hpcdl.barrier()


@case
def what_does_not_go_is_refused() -> None:
    with refused("did you mean 'ring'"):
        hpcdl.DistributedOptimizer("sgd", strategy="rings")
    with refused("servers=2: strategy 'ring' has none"):
        hpcdl.DistributedOptimizer("sgd", servers=2)
    with refused(f"servers=9: give 1 to {SIZE}"):
        hpcdl.DistributedOptimizer("sgd", strategy="ps", servers=9)
    with refused("compress='fp16': strategy 'ps' does not have it"):
        hpcdl.DistributedOptimizer("sgd", strategy="ps", compress="fp16")
    with refused("compress='fp8'"):
        hpcdl.DistributedOptimizer("sgd", compress="fp8")
    with refused("distributed already"):
        hpcdl.DistributedOptimizer(hpcdl.DistributedOptimizer("sgd"))
    with refused("(SGD(...)) of tf_keras, which is Keras 2", "write keras.optimizers.SGD"):
        hpcdl.DistributedOptimizer(type("SGD", (), {"__module__": "tf_keras.src.optimizers.sgd"})())
    with refused("needs to know this rank's number of samples"):
        model = mlp()
        model.build((None, 4))
        loop(model, plain_gradients, hpcdl.DistributedOptimizer("sgd", average_over="samples"), *map(part, data()))


@case
def saved_as_plain_keras() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = mlp()
        train(model, hpcdl.DistributedOptimizer(O.Adam(0.01)), *map(part, data()), BATCH // SIZE)
        model.save(Path(folder) / "model.keras")
        loaded = keras.saving.load_model(Path(folder) / "model.keras")
    assert type(loaded.optimizer) is O.Adam and not hasattr(loaded.optimizer, "exchanges")
    for mine, theirs in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        assert numpy.array_equal(mine.numpy(), theirs.numpy())


@case
def unequal_steps_with_join() -> None:
    """Ranks without further batches take part with zeros; all end alike once rank 0 has sent its weights."""
    inputs, targets = data()
    x, y = part(inputs), part(targets)
    model = mlp()
    model.build((None, 4))
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05))
    per_step = BATCH // SIZE
    for step in range(1 + RANK):
        grads = plain_gradients(model, x[step * per_step :][:per_step], y[step * per_step :][:per_step])
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    last = hpcdl.join()
    assert last == SIZE - 1
    hpcdl.broadcast_variables(model.variables, last)
    alike([one.numpy() for one in model.weights])


def twenty_steps(make: Callable[[], Any], whole: bool) -> tuple[Weights, Weights]:
    """Return weights after 20 steps: of ranks with hpcdl, and of one process on `whole` batches or on parts."""
    generator = numpy.random.default_rng(4)
    inputs = generator.normal(size=(BATCH, 4)).astype("float32")
    targets = generator.normal(size=(BATCH, 1)).astype("float32")
    ends = []
    for parts in ([slice(None)] if whole else [slice(rank, None, SIZE) for rank in range(SIZE)], None):
        keras.utils.set_random_seed(5)
        model, optimizer = mlp(), make()
        model.build((None, 4))
        optimizer = hpcdl.DistributedOptimizer(optimizer) if parts is None else optimizer
        for _ in range(20):
            shares = [slice(RANK, None, SIZE)] if parts is None else parts
            rows = [plain_gradients(model, inputs[mine], targets[mine]) for mine in shares]
            mean = [tf.add_n([one / len(rows) for one in column]) for column in zip(*rows, strict=True)]
            optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        ends.append([one.numpy() for one in model.weights])
    return ends[1], ends[0]


@case
def twenty_steps_of_sgd_and_momentum_equal_one_process() -> None:
    equal(*twenty_steps(lambda: O.SGD(0.05), whole=True))
    equal(*twenty_steps(lambda: O.SGD(0.05, momentum=0.9), whole=True))


@case
def twenty_steps_of_adam_equal_plain_tensorflow_on_the_same_parts() -> None:
    """Adam equals plain TensorFlow on the same parts, not on whole batches: rounding (docs/reference/scripts.md)."""
    equal(*twenty_steps(lambda: O.Adam(0.01), whole=False))


def together() -> None:
    """Bring all ranks to the next case, even if a failed case has left some of them behind."""
    while True:
        try:
            hpcdl.barrier()
        except Exception as error:  # noqa: BLE001  another rank was still in the case: come back
            assert "same collective" in str(error), error
        else:
            return


def main(cases: dict[str, Callable[[], None]]) -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    for name, run in cases.items():
        if wanted and name not in wanted:
            continue
        try:
            run()
            results[name] = ""
        except Exception as error:  # noqa: BLE001  the test says which case it was
            results[name] = f"{original(error)}\n{traceback.format_exc()}"
            print(f"rank {RANK}: {name}: {str(original(error))[:300]}", file=sys.stderr, flush=True)
        (folder / f"{RANK}.json").write_text(json.dumps(results))
        together()
    hpcdl.shutdown()


if __name__ == "__main__":
    main(CASES)
