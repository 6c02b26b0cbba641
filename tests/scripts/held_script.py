# ruff: noqa: B905
"""Runs on both ranks of `hpcdl run`: models with and without a distributed optimizer; prints a line for each case."""

import copy
import sys
import tempfile

import hpcdl

hpcdl.init(120)
import keras
import numpy as np
import tensorflow as tf

from hpcdl.core.errors import UsageError


RANK = hpcdl.rank()
X, Y = np.random.default_rng(RANK).normal(RANK, 1, (16, 3)), np.random.default_rng(9 + RANK).normal(size=(16, 1))


class Trainers:
    def __init__(self, optimizer):
        self.main = optimizer


class Net(keras.Model):
    """A model with its optimizer in `place` of an attribute."""

    def __init__(self, place):
        super().__init__()
        self.bn, self.d = keras.layers.BatchNormalization(), keras.layers.Dense(1)
        self.loss_of = keras.metrics.Mean(name="loss")
        optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
        self.held = {"dict": {"d": optimizer}, "list": [1, [optimizer]], "object": Trainers(optimizer)}[place]
        self.one = lambda: optimizer

    @property
    def metrics(self):
        return [self.loss_of]

    def call(self, x, training=False):
        return self.d(self.bn(x, training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.one().apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        self.loss_of.update_state(loss)
        return {"loss": self.loss_of.result()}


def held_in(place):
    model = Net(place)
    model.compile()
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    return [history["loss"], model.bn.moving_mean.numpy().tolist()]


def network(optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def a_list_by_hand():
    model = network(hpcdl.DistributedOptimizer("sgd"))
    callbacks = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping("loss")], add_history=True)
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history["loss"]


def copied_callbacks():
    model = network(hpcdl.DistributedOptimizer("sgd"))
    return model.fit(X, Y, verbose=0, callbacks=copy.deepcopy([hpcdl.callbacks()])).history["loss"]


def a_clone():
    model = network(hpcdl.DistributedOptimizer("adam"))
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    clone.fit(X, Y, verbose=0)


def a_clone_after_a_fit_of_the_other():
    model = network(hpcdl.DistributedOptimizer("rmsprop"))
    model.fit(X, Y, verbose=0)
    copy.deepcopy(model).fit(X, Y, verbose=0)


def an_optimizer_from_its_config():
    model = network(keras.optimizers.SGD.from_config(hpcdl.DistributedOptimizer("sgd").get_config()))
    model.train_on_batch(X, Y)


def a_sum_of_numbers_before():
    hpcdl.allreduce(float(len(X)), hpcdl.Sum)
    network("nadam").fit(X, Y, verbose=0)


def a_loop():
    model, optimizer = network("sgd"), keras.optimizers.SGD()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))


def half_of_a_pair():
    for optimizer in (hpcdl.DistributedOptimizer("sgd"), keras.optimizers.Adamax()):
        weights = network("sgd").weights
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one**2) for one in weights])
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def a_tape():
    model, optimizer = network("sgd"), keras.optimizers.SGD()
    hpcdl.broadcast_variables(model.weights)
    with hpcdl.DistributedGradientTape() as tape:
        loss = tf.reduce_mean(model(X) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))
    return model.get_weights()[0].tolist()


def what_a_checkpoint_finds_best():
    """Rank 0 alone writes the best checkpoint, and every rank can read its loss from the callback."""
    with tempfile.TemporaryDirectory() as folder:
        best = keras.callbacks.ModelCheckpoint(f"{folder}/m.keras", monitor="loss", save_best_only=True)
        model = network(hpcdl.DistributedOptimizer("sgd"))
        losses = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[best]).history["loss"]
    assert best.best == min(losses), (best.best, losses)
    return best.best


def a_loss_scale_around():
    """A loss scale around a distributed optimizer is refused, both when it is created and when a fit finds it."""
    try:
        keras.optimizers.LossScaleOptimizer(hpcdl.DistributedOptimizer("sgd"))
    except UsageError as error:
        first = str(error)
    inner = keras.optimizers.SGD()
    model = network(keras.optimizers.LossScaleOptimizer(inner))
    hpcdl.DistributedOptimizer(inner)
    try:
        model.fit(X, Y, verbose=0)
    except UsageError as error:
        assert str(error) == first and "a loss scale wraps" in first
        return first
    raise AssertionError("a fit whose metrics are each rank's own")


def sums_of_gradients():
    """Sum the gradients of two batches in the script's own variables before the first update."""
    model, optimizer = network("sgd"), hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    hpcdl.broadcast_variables(model.weights)
    before = [one.numpy() for one in model.weights]
    sums = [tf.Variable(tf.zeros_like(one)) for one in model.weights]
    for half in (slice(8), slice(8, 16)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X[half]) - Y[half]) ** 2)
        for one, gradient in zip(sums, tape.gradient(loss, model.weights)):
            one.assign_add(gradient / 2)
    means = [hpcdl.allreduce(one.numpy()) for one in sums]
    optimizer.apply([one.read_value() for one in sums], model.weights)
    for one, start, mean in zip(model.weights, before, means):
        assert np.allclose(one.numpy(), start - 0.1 * mean, atol=1e-6), (one.numpy(), start - 0.1 * mean)
    return model.get_weights()[0].tolist()


def a_mean_of_weights():
    """Average weights that no update has made equal on all ranks yet; no layer holds the average either."""
    optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    keras.utils.set_random_seed(RANK)
    model = network("sgd")
    means = [tf.Variable(one.value) for one in model.weights]
    optimizer.apply([tf.ones_like(one) for one in model.weights], model.weights)
    for mean, one in zip(means, model.weights):
        mean.assign(0.9 * mean + 0.1 * one)
    return means[0].numpy().tolist()


def a_part_chosen_to_be_its_own():
    weights, own = network("sgd").weights, tf.Variable(1.0)
    hpcdl.combine(own, "own")
    hpcdl.DistributedOptimizer("sgd").apply([tf.ones_like(one) for one in weights], weights)
    keras.optimizers.Ftrl().apply([tf.constant(1.0)], [own])
    return weights[0].numpy().tolist()


def gradients_summed_by_hand():
    model, optimizer = network("sgd"), keras.optimizers.SGD()
    hpcdl.broadcast_variables(model.weights)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X) ** 2)
    gradients = hpcdl.grouped_allreduce(tape.gradient(loss, model.trainable_weights))
    optimizer.apply_gradients(zip(gradients, model.trainable_weights))
    return model.get_weights()[0].tolist()


ALIKE = {
    "dict": lambda: held_in("dict"),
    "list": lambda: held_in("list"),
    "object": lambda: held_in("object"),
    "a list by hand": a_list_by_hand,
    "copied callbacks": copied_callbacks,
    "a tape": a_tape,
    "its own": a_part_chosen_to_be_its_own,
    "sums": sums_of_gradients,
    "mean of weights": a_mean_of_weights,
    "best": what_a_checkpoint_finds_best,
    "a loss scale around": a_loss_scale_around,
    "by hand": gradients_summed_by_hand,
}
WARNED = [
    a_loop,
    a_clone,
    a_clone_after_a_fit_of_the_other,
    an_optimizer_from_its_config,
    a_sum_of_numbers_before,
    half_of_a_pair,
]
# A loop counts as distributed because of exchanges since the last fit, so the cases with warnings come first.
for case in WARNED:
    print(f"begins {case.__name__}", file=sys.stderr, flush=True)
    case()
    print(f"ends {case.__name__}", file=sys.stderr, flush=True)
for name, case in ALIKE.items():
    rows = hpcdl.allgather_object(case())
    print(f"CASE {RANK} {name}: {'alike' if rows[0] == rows[1] else rows}", flush=True)
