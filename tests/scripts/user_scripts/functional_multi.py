"""A functional model with two inputs and two outputs."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
random = numpy.random.default_rng(hpcdl.rank())
left, right = (random.normal(size=(32, 4)).astype("float32") for _ in range(2))
first, second = keras.Input((4,), name="left"), keras.Input((4,), name="right")
joined = keras.layers.Concatenate()([keras.layers.Dense(5)(first), keras.layers.Dense(5)(second)])
outputs = {
    "total": keras.layers.Dense(1, name="total")(joined),
    "sign": keras.layers.Dense(1, activation="sigmoid", name="sign")(joined),
}
model = keras.Model({"left": first, "right": second}, outputs)
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss={"total": "mse", "sign": "binary_crossentropy"},
              loss_weights={"total": 1.0, "sign": 0.2}, metrics={"sign": ["accuracy"]})  # fmt: skip
targets = {"total": left.sum(1), "sign": (right.sum(1) > 0).astype("float32")}
model.fit({"left": left, "right": right}, targets, batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
