"""Metrics, stops, files and unequal steps of a distributed fit, against one process with all samples."""

import json
from pathlib import Path

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init(30)
runtime.import_tensorflow()
import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError

rank, size = hpcdl.rank(), hpcdl.size()
rng = numpy.random.default_rng(0)
x = rng.normal(size=(64, 6)).astype("float32")
y = (x.sum(1) > 0.3).astype("float32")[:, None]
found = {}


def model_of(norm=False):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh")]
    if norm:
        layers.append(keras.layers.BatchNormalization(synchronized=True))
    return keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])


def digest(model):
    return [w.tolist() for w in model.get_weights()]


class Orbax(keras.callbacks.OrbaxCheckpoint):
    """Keras's own, but for the package orbax, which is not installed: each save leaves a file that names its rank."""

    def __init__(self):
        super(keras.callbacks.OrbaxCheckpoint, self).__init__("loss")
        self.save_freq, self.save_best_only = "epoch", False

    def _save_checkpoint(self, step, logs=None):
        Path(f"orbax-{size}-{rank}-{step}").touch()

    def on_train_end(self, logs=None):
        pass


# exact metrics and a stop on all ranks, in any order of callbacks
model = model_of(norm=True)
model.compile(
    optimizer=hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    loss="binary_crossentropy",
    metrics=[
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.F1Score(threshold=0.5, name="f1", average=None),
    ],
)
stop = keras.callbacks.EarlyStopping(monitor="val_auc", mode="max", patience=0, min_delta=10)
history = model.fit(
    x[rank::size],
    y[rank::size],
    batch_size=16 // size,
    epochs=6,
    shuffle=False,
    verbose=0,
    validation_data=(x[rank::size], y[rank::size]),
    callbacks=[
        stop,
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1),
        keras.callbacks.CSVLogger("log.csv"),
        hpcdl.callbacks(),
        keras.callbacks.ModelCheckpoint("best.keras"),
        Orbax(),
        keras.callbacks.BackupAndRestore("backup"),
    ],
)
found["history"] = {
    name: [numpy.asarray(value).tolist() for value in values] for name, values in history.history.items()
}
found["norm"] = digest(model)


# generators of unequal length
def batches():
    for index in range(4 + 2 * rank):
        yield x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]


model = model_of()
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="binary_crossentropy")
data = tf.data.Dataset.from_generator(batches, output_signature=(tf.TensorSpec((4, 6)), tf.TensorSpec((4, 1))))
model.fit(data, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
found["unequal"] = digest(model)


# rates that depend on the part of an epoch, with unequal steps and another callback that changes the rate
class Rates(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch < 4:
            found["rates"].append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.1 * float(self.model.optimizer.learning_rate)


found["rates"] = []
model = model_of()
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.SGD(9.0)), loss="mse")
few = 16 + 8 * rank
factors = [
    hpcdl.learning_rate_warmup(1, initial_rate=0.4),
    hpcdl.learning_rate_schedule(lambda passed: 0.5 ** int(passed), initial_rate=0.4),
]
model.fit(
    x[:few], y[:few], batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[*factors, Rates(), hpcdl.callbacks()]
)
found["rates model"] = digest(model)


# a stop on one rank alone, in the middle of an epoch and at its end
class Stop(keras.callbacks.Callback):
    def __init__(self, at_batch):
        super().__init__()
        self.at_batch = at_batch

    def on_train_batch_end(self, batch, logs=None):
        if self.at_batch and rank == 1 and batch == 1:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if not self.at_batch and rank == size - 1 and epoch == 1:
            self.model.stop_training = True


for at_batch in (True, False):
    model = model_of()
    model.compile(optimizer=hpcdl.DistributedOptimizer("sgd"), loss="mse")
    history = model.fit(
        x[rank::size], y[rank::size], batch_size=4, epochs=4, verbose=0, callbacks=[hpcdl.callbacks(), Stop(at_batch)]
    )
    found[f"stop {at_batch}"] = [history.epoch, digest(model)]
whole = tf.data.Dataset.from_tensor_slices((x, y)).take(63)
found["dataset"] = [
    int(hpcdl.dataset(whole, batch_size=8).cardinality()),
    len(list(hpcdl.dataset(whole, batch_size=8))),
]
try:
    model = model_of()
    model.compile(optimizer="sgd", loss="mse")
    model.fit(x, y, verbose=0, callbacks=[hpcdl.callbacks()])
except UsageError as error:
    found["refused"] = f"{type(error).__name__}: {error}"
with Path(f"found-{size}-{rank}.json").open("w") as file:
    json.dump(found, file)
