"""Elastic, a loop of its own: a first step of each rank alone, batches that a state counts and commits now and then."""

import numpy
import tensorflow as tf

import hpcdl as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
digits = numpy.random.default_rng(hvd.rank())
images, labels = digits.normal(size=(64, 8, 8, 1)).astype("float32"), digits.integers(0, 10, 64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(100).batch(16)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(0.001 * hvd.size())


@tf.function
def training_step(batch, targets, allreduce=True):
    with tf.GradientTape() as tape:
        loss_value = loss(targets, model(batch, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss_value


# Weights and the optimizer's state exist from here on, so that the state can send them.
for batch, targets in dataset.take(1):
    training_step(batch, targets, allreduce=False)


def train(state):
    start_batch = state.batch
    for number, (batch, targets) in enumerate(dataset.skip(start_batch).take(40 // hvd.size() - start_batch)):
        state.batch = start_batch + number + 1
        training_step(batch, targets)
        if state.batch % 5 == 0:
            state.commit()


def on_state_reset():
    optimizer.learning_rate.assign(0.001 * hvd.size())


state = hvd.State(model, optimizer, batch=0)
train(state)
