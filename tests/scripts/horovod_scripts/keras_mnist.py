"""A Keras script as Horovod's users write it: a compiled model, a scaled rate, checkpoints on rank 0."""

import os

import horovod.keras as hvd
import keras
import numpy
import tensorflow as tf
from keras import backend

hvd.init()
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
backend.set_session(tf.Session(config=config))
digits = numpy.random.default_rng(hvd.rank())
images, labels = digits.normal(size=(64, 8, 8, 1)).astype("float32"), digits.integers(0, 10, 64)

model = keras.Sequential(
    [
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adadelta(lr=1.0 * hvd.size()))
model.compile(loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.environ["OUT"] + "/keras-{epoch}.keras"))
model.fit(
    images,
    keras.utils.to_categorical(labels, 10),
    batch_size=16,
    epochs=2,
    callbacks=callbacks,
    verbose=0,
)
