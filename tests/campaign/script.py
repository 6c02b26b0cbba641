"""A fit that keeps its state and evaluates, for `hpcdl run`: small steps, many epochs."""

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()
import keras  # noqa: E402
import numpy  # noqa: E402

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(0).normal(size=(256, 6)).astype("float32")[hpcdl.rank() :: hpcdl.size()]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.001)), loss="mse")
state = hpcdl.State(model)
given = {"batch_size": 8, "epochs": 16, "initial_epoch": state.epoch, "verbose": 0, "validation_data": (x, x.sum(1))}
model.fit(x, x.sum(1), callbacks=[hpcdl.callbacks(state)], **given)
