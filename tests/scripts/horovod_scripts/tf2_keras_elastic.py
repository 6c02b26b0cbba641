"""Elastic: a state that callbacks keep, a function that begins again, a rate set after a change of ranks."""

import horovod.tensorflow.keras as hvd
import numpy
import tensorflow as tf

hvd.init()
digits = numpy.random.default_rng(hvd.rank())
images, labels = digits.normal(size=(64, 3)).astype("float32"), digits.integers(0, 10, 64)
model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size()))
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(loss=loss, optimizer=optimizer, experimental_run_tf_function=False)


def on_state_reset():
    tf.keras.backend.set_value(model.optimizer.lr, 0.001 * hvd.size())


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]


@hvd.elastic.run
def train(state):
    model.fit(images, labels, batch_size=16, epochs=6 - state.epoch, callbacks=callbacks, verbose=0)


train(state)
