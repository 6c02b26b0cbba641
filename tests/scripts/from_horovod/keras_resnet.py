"""A residual network from its config, half precision on the wire, stages of the rate, a resumed epoch, a score."""

import argparse
import os
from pathlib import Path

import keras
import numpy

import hpcdl as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", default=True)
parser.add_argument("--checkpoint-format", default="resnet-{epoch}.keras")
parser.add_argument("--base-rate", type=float, default=0.01)
parser.add_argument("--weight-decay", type=float, default=0.00005)
arguments = parser.parse_args([])

hvd.init()
first_epoch = 0
for epoch in range(4, 0, -1):
    if Path(arguments.checkpoint_format.format(epoch=epoch)).exists():
        first_epoch = epoch
        break
first_epoch = hvd.broadcast_object(first_epoch, 0)
pictures = numpy.random.default_rng(hvd.rank())
images, labels = pictures.normal(size=(32, 8, 8, 3)).astype("float32"), pictures.integers(0, 10, 32)
classes = keras.utils.to_categorical(labels, 10)


def residual(inputs):
    features = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    features = keras.layers.BatchNormalization()(features)
    return keras.layers.Activation("relu")(keras.layers.Add()([features, inputs]))


inputs = keras.Input((8, 8, 3))
features = residual(residual(keras.layers.Conv2D(4, 1)(inputs)))
outputs = keras.layers.Dense(10, activation="softmax")(keras.layers.GlobalAveragePooling2D()(features))
config = keras.Model(inputs, outputs).get_config()
for layer in config["layers"]:
    if layer["class_name"] == "Conv2D":
        regularizer = keras.regularizers.L2(arguments.weight_decay)
        layer["config"]["kernel_regularizer"] = keras.regularizers.serialize(regularizer)
model = keras.Model.from_config(config)

compression = "fp16" if arguments.fp16_allreduce else "none"
initial_rate = arguments.base_rate * hvd.size()
optimizer = keras.optimizers.SGD(learning_rate=initial_rate, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, compress=compression)
model.compile(
    loss="categorical_crossentropy",
    optimizer=optimizer,
    metrics=["accuracy", "top_k_categorical_accuracy"],
)
callbacks = [
    hvd.learning_rate_warmup(1, initial_rate=initial_rate),
    hvd.learning_rate_schedule(
        lambda epochs: 1.0 if 1 <= epochs < 2 else 0.1 if epochs >= 2 else 1.0, initial_rate=initial_rate
    ),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.environ["OUT"] + "/" + arguments.checkpoint_format))
model.fit(
    images,
    classes,
    batch_size=8,
    epochs=3,
    callbacks=callbacks,
    initial_epoch=first_epoch,
    verbose=0,
)
score = hvd.allreduce(numpy.array(model.evaluate(images, classes, verbose=0)))
assert numpy.isfinite(score).all() and len(score) == 3
