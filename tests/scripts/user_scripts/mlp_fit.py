"""An MLP with fit and a validation split."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(0).normal(size=(96, 8)).astype("float32")[hpcdl.rank() :: hpcdl.size()]
y = (x.sum(1) > 0).astype("int32")
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss=loss, metrics=["accuracy"])
model.fit(x, y, batch_size=8, epochs=2, validation_split=0.25, verbose=0, callbacks=[hpcdl.callbacks()])
