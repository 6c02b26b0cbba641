"""Runs on every rank: scripts whose ranks take many steps by themselves, against plain numpy and `hpcdl train`.

Every rank starts from another seed, so that results are equal only if all ranks start from rank 0's weights.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf
from optimizer_cases import (
    BATCH,
    RANK,
    SIZE,
    STEPS,
    O,
    Squares,
    Steps,
    Weights,
    alike,
    data,
    equal,
    flat,
    loop,
    main,
    mlp,
    mlp_of_seed,
    part,
    plain_gradients,
    refused,
    sent,
    train,
    with_embedding,
    words,
)

import hpcdl
from hpcdl.comm.observed import EXCHANGE
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.scripts.process.session import communicator
from hpcdl.step.step import build_step
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.periodic.methods import METHODS
from hpcdl.strategies.table import find_strategy, load_strategy

CASES: dict[str, Callable[[], None]] = {}
OUTER: dict[str, dict[str, float]] = {
    "local-sgd": {},
    "slowmo": {"outer_rate": 0.75, "outer_momentum": 0.5},
    "diloco": {"outer_rate": 0.75, "outer_momentum": 0.875},
}
RATE = 0.0625
EXTENT = 9
"""Elements of a weight."""


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def aim(rank: int) -> Any:
    return numpy.random.default_rng(rank).standard_normal(EXTENT).astype(numpy.float32)


def by_the_paper(name: str, steps: int, period: int) -> Any:
    """Run the algorithm as it is printed, one worker after the other, in float32."""
    single = numpy.float32
    x, v = numpy.ones(EXTENT, single), numpy.zeros(EXTENT, single)
    alpha, beta = (single(OUTER[name].get(key, 0)) for key in ("outer_rate", "outer_momentum"))
    own = [x.copy() for _ in range(SIZE)]
    for step in range(steps):
        own = [one - single(RATE) * (one - aim(rank)) for rank, one in enumerate(own)]
        if (step + 1) % period:
            continue
        change = sum(x - one for one in own) / single(SIZE)
        if name == "local-sgd":
            x = x - change
        elif name == "slowmo":
            v = beta * v + change / single(RATE)
            x = x - alpha * single(RATE) * v
        else:
            v = beta * v + change
            x = x - alpha * (change + beta * v)
        own = [x.copy() for _ in range(SIZE)]
    return x


def bits_of_the_paper(name: str) -> None:
    """Train one weight in a loop of the script, with a gradient that numpy computes bit for bit."""
    keras.utils.set_random_seed(RANK)
    weight = keras.Variable(numpy.full(EXTENT, 1.0 + RANK, numpy.float32), name="weight")
    optimizer = hpcdl.DistributedOptimizer(O.SGD(RATE), strategy=name, period=4, **OUTER[name])
    target = tf.constant(aim(RANK))

    @tf.function
    def step() -> None:
        optimizer.apply([weight.value - target], [weight])

    for _ in range(14):
        step()
    own = weight.numpy().tolist()
    assert len({str(one) for one in hpcdl.allgather_object(own)}) == SIZE, "each rank has its own"
    with hpcdl.center_in_place(optimizer):
        assert weight.numpy().tobytes() == by_the_paper(name, 12, 4).tobytes()
    assert weight.numpy().tolist() == own


def as_train_does(name: str, compress: str = "none") -> None:
    """Epochs of a fit equal a run of `hpcdl train` with as many steps; the last step ends with an exchange."""
    inputs, targets = map(part, data())
    info, epochs = find_strategy(name), 3
    context = Context(
        info=info, communicator=communicator(), num_workers=SIZE, num_servers=0,
        exchange=ExchangeConfig(compress=compress), optimizer=OptimizerConfig(), elastic=ElasticConfig(period=4),
        num_steps=epochs * STEPS,
    )  # fmt: skip
    keras.utils.set_random_seed(5 + RANK)
    model, optimizer, worker = mlp(), O.SGD(RATE, momentum=0.5), load_strategy(info).worker(context)
    model.build((None, 4))
    optimizer.build(model.trainable_variables)
    step = build_step(model, optimizer, worker, Squares())
    worker.start([*model.weights, *optimizer.variables])
    batches = list(zip(numpy.split(inputs, STEPS), numpy.split(targets, STEPS), strict=True))
    own = []
    for number in range(epochs * STEPS):
        worker.learning_rate = RATE
        worker.before_step(number)
        step(*map(tf.constant, batches[number % STEPS]))
        worker.after_step(number)
        own.append(flat(model))
    center = numpy.concatenate([one.reshape(-1) for one in worker.center()])
    worker.finish()
    keras.utils.set_random_seed(5 + RANK)
    again, steps = mlp(), Steps()
    distributed = hpcdl.DistributedOptimizer(O.SGD(RATE, momentum=0.5), strategy=name, period=4, compress=compress)
    with contextlib.redirect_stderr(io.StringIO()):
        train(again, distributed, inputs, targets, BATCH // SIZE, epochs, callbacks=[steps])
    alike(steps.center)
    for mine, wanted in zip(steps.own[:-1], own[:-1], strict=True):  # the last ones precede the exchange
        assert numpy.array_equal(mine, wanted), abs(mine - wanted).max()
    assert numpy.array_equal(flat(again), center), abs(flat(again) - center).max()


for _name in METHODS:
    CASES[f"{_name} as train does"] = lambda name=_name: as_train_does(name)
CASES["streaming-diloco in fp4 as train does"] = lambda: as_train_does("streaming-diloco", "fp4")
for _name in OUTER:
    CASES[f"{_name} by the paper"] = lambda name=_name: bits_of_the_paper(name)


@case
def a_period_of_one_is_synchronous_sgd() -> None:
    found: list[Weights] = []
    for settings in ({"strategy": "local-sgd", "period": 1}, {}):
        keras.utils.set_random_seed(5 + RANK)
        optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), **settings)
        found.append(train(mlp(), optimizer, *map(part, data()), BATCH // SIZE, epochs=2))
    equal(*found)


@case
def steps_of_a_ranks_own_send_nothing() -> None:
    """Only steps that end with an exchange send anything."""
    seen = communicator().monitor
    sizes: list[int] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: sizes.append(sent()))
    optimizer = hpcdl.DistributedOptimizer(O.Adam(0.01), strategy="diloco", period=2)
    inputs, targets = (numpy.concatenate([part(one)] * 2) for one in data())
    before = seen.traffic(EXCHANGE).bytes_sent
    with contextlib.redirect_stderr(io.StringIO()):
        got = train(mlp(), optimizer, inputs, targets, BATCH // SIZE, callbacks=[note])
    per_exchange = 2 * (SIZE - 1) / SIZE * 4 * sum(one.size for one in got)
    moved = numpy.diff(sizes)
    assert not moved[1::2].any() and (moved[::2] > 0).all(), sizes
    exchanged = seen.traffic(EXCHANGE).bytes_sent - before
    assert 3 * per_exchange <= exchanged <= 3.6 * per_exchange, (exchanged, per_exchange)


@case
def what_is_seen_and_kept_is_shared() -> None:
    """Validation, files and callbacks see shared weights; momenta stay each rank's own; the next fit continues."""
    inputs, targets = map(part, data())
    keras.utils.set_random_seed(5)
    model, seen, steps = mlp(), [], Steps()
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((flat(model), logs["val_loss"])))
    optimizer = hpcdl.DistributedOptimizer(O.Adam(0.05), strategy="diloco", period=2)
    path = str(hpcdl.broadcast_object(tempfile.mkdtemp())) + "/{batch}.weights.h5"
    files = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        train(
            model, optimizer, inputs, targets, BATCH // SIZE, 2, validation_data=(inputs, targets),
            callbacks=[note, files, steps],
        )  # fmt: skip
    assert ("period=2 is more than a tenth of an epoch (3 steps)" in err.getvalue()) == (RANK == 0)
    assert numpy.array_equal(seen[0][0], steps.center[STEPS - 1]) and seen[0][1] != seen[1][1]
    assert not numpy.array_equal(steps.own[STEPS - 1], steps.center[STEPS - 1])
    alike([seen[0][0], seen[1][0], flat(model)])
    momenta = [one.numpy().tolist() for one in optimizer.variables[2:]]
    assert len({str(one) for one in hpcdl.allgather_object(momenta)}) == SIZE
    loaded = keras.models.clone_model(model)
    loaded.load_weights(path.format(batch=2))
    assert numpy.array_equal(flat(loaded), steps.center[1]), "in the middle of an epoch too"
    model.set_weights(mlp_of_seed(9).get_weights())  # a script sets weights: all ranks start from these
    with contextlib.redirect_stderr(io.StringIO()):
        model.fit(inputs[:4], targets[:4], batch_size=4, verbose=0)
        first = flat(model)
    assert abs(first - flat(mlp_of_seed(9))).max() < 0.06, "one step of Adam from there"
    alike([first])


@case
def a_fit_that_stops_early_keeps_what_its_validation_has_seen() -> None:
    inputs, targets = map(part, data())
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=0, min_delta=100.0)
    model, steps, losses = mlp(), Steps(), []
    optimizer = hpcdl.DistributedOptimizer(O.SGD(0.05), strategy="local-sgd", period=2)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(logs["val_loss"]))
    with contextlib.redirect_stderr(io.StringIO()):
        train(
            model, optimizer, inputs, targets, BATCH // SIZE, 9, validation_data=(inputs, targets),
            callbacks=[stop, note, steps],
        )  # fmt: skip
    assert len(losses) == 2
    last = len(losses) * STEPS - 1
    assert numpy.array_equal(flat(model), steps.center[last])
    alike([flat(model)])


@case
def saved_and_resumed_exactly() -> None:
    inputs, targets = map(part, data())
    for name in ("slowmo", "streaming-diloco"):
        make = O.SGD if name == "slowmo" else O.Adam
        more = {"momentum": 0.5} if name == "slowmo" else {}
        folder = str(hpcdl.broadcast_object(tempfile.mkdtemp()))
        ends: list[Any] = []
        for parts in ([3], [1, 3]):
            for epochs in parts:
                keras.utils.set_random_seed(5 + RANK)
                model = mlp()
                model.build((None, 4))
                optimizer = hpcdl.DistributedOptimizer(make(0.05, **more), strategy=name, period=5)
                model.compile(optimizer, "mean_squared_error")
                model.set_weights(mlp_of_seed(5).get_weights())
                state, steps = hpcdl.State(model, folder=f"{folder}/{len(parts)}"), Steps()
                stop = keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs, n=epochs, model=model: setattr(
                        model, "stop_training", epoch + 1 == n
                    )
                )
                with contextlib.redirect_stderr(io.StringIO()):
                    model.fit(
                        inputs, targets, BATCH // SIZE, 3, 0, [hpcdl.callbacks(state), steps, stop], shuffle=False,
                        initial_epoch=state.epoch,
                    )  # fmt: skip
                state.save()
            ends.append([steps.own[-STEPS:], steps.center[-STEPS:], [one.numpy() for one in optimizer.variables]])
        for mine, wanted in zip(*ends, strict=True):
            assert all(numpy.array_equal(*pair) for pair in zip(mine, wanted, strict=True)), name
        other = hpcdl.DistributedOptimizer(make(0.05, **more), strategy="local-sgd", period=5)
        model.compile(other, "mean_squared_error")
        with refused(f"strategy='local-sgd': the checkpoint is of '{name}'"):
            hpcdl.State(model, folder=f"{folder}/2")


@case
def unequal_steps() -> None:
    """A rank without data takes part with its weights and counts learning rates as the others do: all end alike."""
    inputs, targets = map(part, data())
    few = (1 + RANK) * BATCH // SIZE
    for name, period in (("slowmo", 2), ("diloco", 3), ("streaming-diloco", 4)):
        keras.utils.set_random_seed(5 + RANK)
        rate = O.schedules.ExponentialDecay(0.05, 1, 0.9)
        model, optimizer = mlp(), hpcdl.DistributedOptimizer(O.SGD(rate, momentum=0.5), strategy=name, period=period)
        with contextlib.redirect_stderr(io.StringIO()):
            train(model, optimizer, inputs[:few], targets[:few], BATCH // SIZE, epochs=5)
        alike([one.numpy() for one in model.weights])


@case
def a_loop_of_its_own_with_sparse_gradients() -> None:
    inputs, targets = words()
    for eager in (False, True):
        optimizer = hpcdl.DistributedOptimizer(O.Adam(0.01, clipnorm=0.5), strategy="local-sgd", period=2)
        model = with_embedding()
        with contextlib.redirect_stderr(io.StringIO()):
            if eager:
                for x, y in zip(numpy.split(part(inputs), STEPS), numpy.split(part(targets), STEPS), strict=True):
                    gradients = plain_gradients(model, x, y)
                    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            else:
                loop(model, plain_gradients, optimizer, part(inputs), part(targets))
        own = flat(model)
        assert len({str(one) for one in hpcdl.allgather_object(own.tolist())}) == SIZE
        with hpcdl.center_in_place(optimizer):
            alike([one.numpy() for one in model.weights])
        assert numpy.array_equal(flat(model), own)


@case
def not_a_number_stays_on_its_rank() -> None:
    inputs, targets = map(part, data())
    if RANK == 1:
        targets[:] = numpy.nan
    model = mlp()
    text = "the gradient of sequential" if RANK == 1 else "the ranks are not in the same collective"
    with refused(text), contextlib.redirect_stderr(io.StringIO()):
        train(model, hpcdl.DistributedOptimizer("sgd", strategy="local-sgd", period=1), inputs, targets, BATCH // SIZE)


@case
def what_does_not_go_is_refused() -> None:
    diloco: dict[str, Any] = {"strategy": "diloco"}
    for optimizer, text in (
        (O.LossScaleOptimizer(O.SGD(0.1)), "has no loss scaling"),
        (O.SGD(0.1, use_ema=True), "does not have use_ema"),
        (O.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps=2: strategy 'diloco' has a period"),
    ):
        with refused(text):
            hpcdl.DistributedOptimizer(optimizer, **diloco)
    for setting in ({"op": "sum"}, {"average_over": "samples"}, {"groups": 2}, {"sparse_as_dense": True}):
        with refused("exchanges weights, not gradients"):
            hpcdl.DistributedOptimizer("sgd", **diloco, **setting)
    with refused("backward_passes_per_step=2"):
        hpcdl.DistributedOptimizer("sgd", backward_passes_per_step=2, **diloco)
    with refused("period=2: strategy 'ring' does not have it; leave it out, or use local-sgd, slowmo, diloco"):
        hpcdl.DistributedOptimizer("sgd", period=2)
    for period in ("auto", 0, 2.5, True):
        with refused(f"period={period!r}: give the updates from one exchange to the next, 1 or more"):
            hpcdl.DistributedOptimizer("sgd", period=period, **diloco)
    with refused("outer_rate=0.5: strategy 'local-sgd' does not have it", "use slowmo, diloco or streaming-diloco"):
        hpcdl.DistributedOptimizer("sgd", strategy="local-sgd", outer_rate=0.5)
    for setting in ({"outer_rate": 0.0}, {"outer_momentum": 1.0}):
        with refused(": give a number"):
            hpcdl.DistributedOptimizer("sgd", **diloco, **setting)
    with refused("elasticity=2.0: strategy 'diloco' does not have it; leave it out, or use sync-easgd"):
        hpcdl.DistributedOptimizer("sgd", elasticity=2.0, **diloco)
    with refused("compress='fp16': strategy 'diloco' does not have it"):
        hpcdl.DistributedOptimizer("sgd", compress="fp16", **diloco)
    with refused("did you mean 'diloco'"):
        hpcdl.DistributedOptimizer("sgd", strategy="dilico")
    doubles = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="float64")])
    with refused("keeps its weights in float32, the model has float64 ones"):
        train(doubles, hpcdl.DistributedOptimizer("sgd", **diloco), *map(part, data()), BATCH // SIZE)
    with refused("is not for tapes"), hpcdl.DistributedGradientTape(**diloco) as tape:
        variable = tf.Variable(1.0)
        tape.gradient(variable * variable, variable)


if __name__ == "__main__":
    main(CASES)
