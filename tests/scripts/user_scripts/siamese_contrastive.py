"""Two towers of shared weights with a contrastive loss."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
random = numpy.random.default_rng(hpcdl.rank())
pairs = [random.normal(size=(32, 6)).astype("float32") for _ in range(2)]
tower = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh")])
left, right = keras.Input((6,)), keras.Input((6,))
distance = keras.layers.Lambda(
    lambda two: keras.ops.sqrt(keras.ops.sum((two[0] - two[1]) ** 2, 1, keepdims=True) + 1e-6), output_shape=(1,)
)
model = keras.Model([left, right], distance([tower(left), tower(right)]))


def contrastive(labels, distances):
    return keras.ops.mean((1 - labels) * distances**2 + labels * keras.ops.maximum(1 - distances, 0) ** 2)


model.compile(optimizer=hpcdl.DistributedOptimizer("rmsprop"), loss=contrastive)
model.fit(
    pairs,
    random.integers(0, 2, size=(32, 1)).astype("float32"),
    batch_size=8,
    epochs=2,
    verbose=0,
    callbacks=[hpcdl.callbacks()],
)
