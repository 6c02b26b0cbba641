"""A fit with hpcdl.State, which sends itself a SIGTERM at the end of its third epoch if its argument says so."""

import os
import signal
import sys

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(0).normal(size=(64, 6)).astype("float32")[hpcdl.rank() :: hpcdl.size()]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.001 * hpcdl.size())), loss="mse")
kept = {"best": float("inf"), "names": {0: "cat"}}  # JSON can represent neither
state = hpcdl.State(model, folder="elsewhere" if "terminate" in sys.argv else None, **kept)
assert {name: getattr(state, name) for name in kept} == kept
print("begins at epoch", state.epoch, flush=True)


class Terminate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch} ends at a rate of {float(self.model.optimizer.learning_rate):.6f}", flush=True)
        if epoch == 2 and "terminate" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)


callbacks = [Terminate(), hpcdl.callbacks(state), hpcdl.learning_rate_warmup(5)]
model.fit(x, x.sum(1), batch_size=8, epochs=6, initial_epoch=state.epoch, verbose=0, callbacks=callbacks)
print("ends at epoch", state.epoch)
