"""tf.keras with a data set that repeats, steps divided by the ranks, and the rate warmed up."""

import numpy
import tensorflow as tf

import hpcdl as hvd

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
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
scaled_rate = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(scaled_rate), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=tf.keras.losses.SparseCategoricalCrossentropy(),
    optimizer=optimizer,
    metrics=["accuracy"],
)
callbacks = [
    hvd.learning_rate_warmup(3, initial_rate=scaled_rate),
]
model.fit(dataset, steps_per_epoch=8 // hvd.size(), callbacks=callbacks, epochs=3, verbose=0)
