"""A benchmark of steps on made-up data, with a tape and variables sent after the first step."""

import timeit

import keras
import numpy
import tensorflow as tf

import hpcdl as hvd

hvd.init()
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4)])
optimizer = keras.optimizers.SGD(0.01)
data = tf.random.uniform([8, 6])
target = tf.random.uniform([8], minval=0, maxval=3, dtype=tf.int64)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(first):
    with tf.GradientTape() as tape:
        loss = loss_of(target, model(data, training=True))
    tape = hvd.DistributedGradientTape(tape, compress="fp16")
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)


step(True)
seconds = timeit.timeit(lambda: step(False), number=3)
rates = hvd.allreduce(numpy.array(8 * 3 / seconds), op=hvd.Sum)
assert rates > 0
