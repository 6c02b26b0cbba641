"""A loop of its own: a tape made distributed after it has recorded, variables sent after the first step."""

import numpy
import tensorflow as tf

import hpcdl as hvd

hvd.init()
for gpu in tf.config.list_physical_devices("GPU"):
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
loss = tf.keras.losses.SparseCategoricalCrossentropy()
optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())


@tf.function
def training_step(batch, targets, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(targets, model(batch, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss_value


for step, (batch, targets) in enumerate(dataset.take(12 // hvd.size())):
    training_step(batch, targets, step == 0)
