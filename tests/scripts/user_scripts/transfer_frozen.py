"""Transfer learning: frozen layers with batch normalization, then all of them."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).normal(size=(32, 6)).astype("float32")
base = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU()]
)
inputs = keras.Input((6,))
model = keras.Model(inputs, keras.layers.Dense(1)(base(inputs, training=False)))
for trainable in (False, True):
    base.trainable = trainable
    model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")
    model.fit(x, x.sum(1), batch_size=8, epochs=1, verbose=0, callbacks=[hpcdl.callbacks()])
