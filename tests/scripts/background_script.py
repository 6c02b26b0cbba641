"""A fit with hpcdl.State and callbacks that run in the background, piece by piece; prints what they received."""

import threading

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(0).normal(size=(128, 6)).astype("float32")[hpcdl.rank() :: hpcdl.size()]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
state = hpcdl.State(model)
losses, pieces, threads = [], [], set()


class Telling(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        losses.append((epoch, round(logs["loss"], 6)))
        threads.add(threading.current_thread() is threading.main_thread())

    def on_train_end(self, logs=None):
        assert len(losses) == 6, losses


class InPieces(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for piece in range(3):
            pieces.append((epoch, piece))
            yield


callbacks = [hpcdl.background(Telling()), hpcdl.background(InPieces()), hpcdl.callbacks(state)]
model.fit(x, x.sum(1), batch_size=8, epochs=6, verbose=0, callbacks=callbacks)
assert pieces == [(epoch, piece) for epoch in range(6) for piece in range(3)], pieces
print("losses", losses)
print("in the main thread", threads)
