"""A Sequential that is built at its first batch."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).normal(size=(32, 5)).astype("float32")
model = keras.Sequential([keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer("sgd"), loss="mse")
model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
