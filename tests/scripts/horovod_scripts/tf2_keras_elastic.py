"""Elastic: a state that callbacks keep, a function that begins anew, a rate set after a change of ranks."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size()))
model.compile(loss="mse", optimizer=optimizer, experimental_run_tf_function=False)


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
    model.fit(tf.ones((8, 3)), tf.ones((8, 10)), epochs=3 - state.epoch, callbacks=callbacks)


train(state)
