"""A custom training loop with a distributed tape."""

import hpcdl

hpcdl.init()
import keras
import numpy
import tensorflow as tf

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(0).normal(size=(64, 5)).astype("float32")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)
hpcdl.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)


@tf.function
def step(batch, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(batch, training=True) - targets) ** 2)
    tape = hpcdl.DistributedGradientTape(tape)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
for _ in range(2):
    for batch, targets in hpcdl.dataset(data, batch_size=8):
        step(batch, targets)
