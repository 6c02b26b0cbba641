"""Runs on two ranks, eagerly: first forward passes with different weights on each rank, and with equal weights."""

import sys

import hpcdl

hpcdl.init(60)
import keras
import numpy as np
import tensorflow as tf


def model_of(seed):
    keras.utils.set_random_seed(seed + hpcdl.rank())
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def step(model, optimizer, target=None):
    with tf.GradientTape() as tape:
        wanted = 0 if target is None else target(np.ones((2, 3)))
        loss = tf.reduce_mean((model(np.ones((2, 3))) - wanted) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True))
    hpcdl.barrier()


def begins(what):
    if hpcdl.rank() == 0:
        print(f"begin {what}", file=sys.stderr, flush=True)


def optimizer():
    return hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1))


begins("a model made after the optimizer")
late = optimizer()
step(model_of(0), late)
begins("a model that was broadcast")
late, model = optimizer(), model_of(10)
hpcdl.broadcast_variables(model.variables)
step(model, late)
begins("a model made before the optimizer")
model = model_of(20)
step(model, optimizer())
begins("a target copied before the optimizer was made")
model = model_of(30)
target = keras.models.clone_model(model)
target.set_weights(model.get_weights())
step(model, optimizer(), target)
begins("a target copied after it")
late, model = optimizer(), model_of(40)
hpcdl.broadcast_variables(model.variables)
target = model_of(50)
step(model, late, target)
begins("a target in a function")
late, model, target = optimizer(), model_of(60), model_of(70)
tf.function(lambda: step(model, late, target))()
digests = hpcdl.allgather_object([weight.tolist() for one in (model, target) for weight in one.get_weights()])
begins(f"alike {digests[0] == digests[1]}")
begins("a model that this rank keeps")
late, model, kept = optimizer(), model_of(80), model_of(90)
hpcdl.combine(kept.weights, "own")
hpcdl.broadcast_variables(model.variables)
step(model, late, kept)
digests = hpcdl.allgather_object([weight.tolist() for weight in kept.get_weights()])
begins(f"kept {digests[0] != digests[1]}")
hpcdl.shutdown()
