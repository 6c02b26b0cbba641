"""Runs on two ranks, eagerly: a first forward pass with each rank's own weights, and one after a broadcast."""

import sys

import hpcdl

hpcdl.init(60)
import keras
import numpy as np
import tensorflow as tf

for broadcast in (False, True):
    print(f"broadcast {broadcast}", file=sys.stderr, flush=True)
    keras.utils.set_random_seed(hpcdl.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if broadcast:
        hpcdl.broadcast_variables(model.variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(np.ones((2, 3))) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True))
    hpcdl.barrier()
hpcdl.shutdown()
