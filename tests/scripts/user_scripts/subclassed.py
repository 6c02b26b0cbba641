"""A subclassed model."""

import hpcdl

hpcdl.init()
import keras
import numpy


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).normal(size=(32, 5)).astype("float32")
model = Net()
model.compile(optimizer=hpcdl.DistributedOptimizer("adamw"), loss="mse")
model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
