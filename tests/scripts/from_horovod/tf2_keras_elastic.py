"""Elastic: a state that callbacks keep, a function that begins again, a rate set after a change of ranks."""

import numpy
import tensorflow as tf

import hpcdl as hvd

hvd.init()
digits = numpy.random.default_rng(hvd.rank())
images, labels = digits.normal(size=(64, 3)).astype("float32"), digits.integers(0, 10, 64)
model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size()))
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(loss=loss, optimizer=optimizer)


def on_state_reset():
    model.optimizer.learning_rate = 0.001 * hvd.size()


state = hvd.State(model, batch=0, epoch=0)
callbacks = [
    hvd.callbacks(state),
]


def train(state):
    model.fit(images, labels, batch_size=16, epochs=6 - state.epoch, callbacks=callbacks, verbose=0)


train(state)
