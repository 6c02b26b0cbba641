"""A script with hpcdl.State that saves after each of three epochs."""

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()
import keras  # noqa: E402
import numpy  # noqa: E402

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
state = hpcdl.State(model)
print("begins at epoch", state.epoch, flush=True)
x = numpy.ones((8, 2), "float32")
model.fit(x, x.sum(1), epochs=3, initial_epoch=state.epoch, verbose=0, callbacks=[hpcdl.callbacks(state)])
