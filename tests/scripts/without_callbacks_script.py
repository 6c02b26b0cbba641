"""A fit whose script uses only hpcdl.DistributedOptimizer, and files that every rank saves."""

import hpcdl

hpcdl.init(60)
from pathlib import Path

import keras
import numpy
import tensorflow as tf

rank = hpcdl.rank()
keras.utils.set_random_seed(rank)
x = numpy.random.default_rng(rank).normal(size=(64, 6)).astype("float32")
y = (x.sum(1) > 0).astype("float32")
model = keras.Sequential(
    [
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(5, trainable=False),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
optimizer = hpcdl.DistributedOptimizer("adam")
model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], jit_compile=True)
few = 32 + 8 * rank
history = model.fit(
    x[:few],
    y[:few],
    batch_size=8,
    epochs=2,
    verbose=0,
    validation_data=(x, y),
    callbacks=[keras.callbacks.ModelCheckpoint("check.keras"), keras.callbacks.CSVLogger("log.csv")],
)
weights = b"".join(one.numpy().tobytes() for one in model.weights).hex()
assert len(set(hpcdl.allgather_object(weights))) == 1, "batch normalisation's and frozen ones too"
assert len(set(map(str, hpcdl.allgather_object(history.history)))) == 1

for _ in range(4):  # every rank saves, and reads the file at once
    model.layers[0].bias.assign(model.layers[0].bias + 1)
    hpcdl.barrier()
    model.save("all.keras")
    model.save_weights("all.weights.h5")
    read = keras.models.load_model("all.keras")
    assert numpy.array_equal(read.layers[0].bias, model.layers[0].bias)
    model.load_weights("all.weights.h5")
hpcdl.barrier()
if rank == 0:
    Path("all.keras").unlink()
hpcdl.barrier()
model.save("all.keras")
assert Path("all.keras").is_file(), "removed, and saved again"
model.save(f"own-{rank}.keras")
assert Path(f"own-{rank}.keras").is_file()


class OwnStep(keras.Model):
    """Report metrics by the names that Keras's own guide gives them, and a number of this rank."""

    def train_step(self, data):
        inputs, targets = data
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(self.compute_loss(y=targets, y_pred=self(inputs)))
            else:
                metric.update_state(targets, self(inputs))
        return {**{metric.name: metric.result() for metric in self.metrics}, "rank": keras.ops.cast(rank, "float32")}


inputs = keras.Input((6,))
own = OwnStep(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
own.compile(hpcdl.DistributedOptimizer("sgd"), "mse", metrics=["mae"])
logs = own.fit(x[:few], y[:few], batch_size=8, verbose=0).history
sums = hpcdl.allgather_object([float(abs(x[:few].sum(1) - y[:few]).sum()), few])
assert abs(logs["mae"][0] - sum(one for one, _ in sums) / sum(many for _, many in sums)) < 1e-5, "of all samples"
assert logs["rank"] == [0.5], "the mean over the ranks"

try:
    again = keras.models.clone_model(model)
    again.compile(hpcdl.DistributedOptimizer("sgd"), "binary_crossentropy", jit_compile=True)
    again.train_on_batch(x, y)
    word = "XLA was not refused"
except Exception as error:  # noqa: BLE001  Keras puts its own words around it
    word = str(error)
assert "leave jit_compile=True out" in word, word
try:
    with tf.distribute.MirroredStrategy().scope():
        mirrored = keras.models.clone_model(model)
        mirrored.compile(hpcdl.DistributedOptimizer("sgd"), "binary_crossentropy")
    mirrored.fit(x, y, verbose=0)
    word = "a strategy of TensorFlow's was not refused"
except Exception as error:  # noqa: BLE001
    word = str(error)
assert "leave `with strategy.scope()` out" in word, word
print("as it should be", sorted(path.name for path in Path().iterdir() if path.name.startswith(".")), flush=True)
