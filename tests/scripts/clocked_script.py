"""A fit with slow steps, which creates the file named by its argument in the middle."""

import sys
import time
from pathlib import Path

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(0).normal(size=(64, 6)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss="mse")


class InTheMiddle(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 3:
            Path(sys.argv[1]).touch()


model.fit(x, x.sum(1), batch_size=8, epochs=8, verbose=0, callbacks=[InTheMiddle(), hpcdl.callbacks()])
