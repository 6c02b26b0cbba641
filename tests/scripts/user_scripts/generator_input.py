"""Input from a PyDataset whose length differs from rank to rank."""

import hpcdl

hpcdl.init()
import keras
import numpy


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4 + hpcdl.rank()

    def __getitem__(self, index):
        x = numpy.random.default_rng(index).normal(size=(8, 5)).astype("float32")
        return x, x.sum(1)


keras.utils.set_random_seed(hpcdl.rank())
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), loss="mse")
model.fit(Batches(), epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
