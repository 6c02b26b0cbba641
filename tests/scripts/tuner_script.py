"""Runs on every rank: KerasTuner from start to end, each trial on all ranks; prints this rank's result."""

import contextlib
import io
import json
import sys
from pathlib import Path

import hpcdl

hpcdl.init()
import keras
import keras_tuner
import numpy

folder = Path(sys.argv[1])
generator = numpy.random.default_rng(0)
x = generator.normal(size=(48, 4)).astype("float32")
y = x.sum(1, keepdims=True).astype("float32")
mine = slice(hpcdl.rank(), None, hpcdl.size())


def build(hp):
    keras.utils.set_random_seed(hpcdl.rank())
    units = hp.Int("units", 2, 8)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    rate = hp.Float("rate", 0.001, 0.3, sampling="log")
    model.compile(hpcdl.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
    return model


tuner = keras_tuner.RandomSearch(
    build,
    objective="val_loss",
    max_trials=3,
    seed=7,
    directory=folder / ("all" if hpcdl.rank() == 0 else f"rank-{hpcdl.rank()}"),
    overwrite=True,
)
with contextlib.redirect_stdout(io.StringIO()):
    tuner.search(x[mine], y[mine], batch_size=8, epochs=2, validation_data=(x[mine], y[mine]), verbose=0)
best = tuner.get_best_models(1)[0]
trials = sorted((trial.score, trial.hyperparameters.values) for trial in tuner.oracle.trials.values())
weights = [weight.tolist() for weight in best.get_weights()]
print("found " + json.dumps([hpcdl.rank(), trials, weights]), flush=True)
hpcdl.shutdown()
