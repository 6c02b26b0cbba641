"""A table with class weights."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).normal(size=(40, 7)).astype("float32")
y = (x[:, 0] > 1).astype("float32")
model = keras.Sequential(
    [keras.Input((7,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
)
counts = [keras.metrics.FalseNegatives(), keras.metrics.Precision(), keras.metrics.Recall()]
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss="binary_crossentropy", metrics=counts)
model.fit(x, y, batch_size=8, epochs=2, class_weight={0: 1.0, 1: 5.0}, verbose=0, callbacks=[hpcdl.callbacks()])
