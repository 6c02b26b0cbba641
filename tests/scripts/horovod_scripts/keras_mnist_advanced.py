"""Augmented batches from a generator, a warm-up, a plateau, validation, and rank 0's checkpoints."""

import argparse
import os

import horovod.keras as hvd
import keras
import numpy

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=1.0)
arguments = parser.parse_args([])

hvd.init()
digits = numpy.random.default_rng(hvd.rank())
images, labels = digits.normal(size=(64, 8, 8, 1)).astype("float32"), digits.integers(0, 10, 64)
classes = keras.utils.to_categorical(labels, 10)


def flow(seed):
    noise = numpy.random.default_rng(seed)
    while True:
        chosen = noise.integers(0, 64, arguments.batch_size)
        yield images[chosen] + noise.normal(0, 0.05, (arguments.batch_size, 8, 8, 1)), classes[chosen]


model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_rate = arguments.lr * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adadelta(lr=scaled_rate))
model.compile(loss=keras.losses.CategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(scaled_rate, warmup_epochs=2, verbose=1),
    keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.environ["OUT"] + "/advanced-{epoch}.keras"))
model.fit_generator(
    flow(hvd.rank()),
    workers=4,
    steps_per_epoch=8 // hvd.size(),
    callbacks=callbacks,
    epochs=arguments.epochs,
    validation_data=(images, classes),
    verbose=0,
)
