"""LeNet on the digits with model.fit; keras_fit_after.py is the same on many ranks. Run it where `shards/` is."""

import glob
import os

import h5py
import keras
import numpy


def load(split):
    """Images in 0..1 and labels of all shards of a split."""
    files = [h5py.File(path) for path in sorted(glob.glob(f"shards/{split}/*.h5"))]
    return [numpy.concatenate([file[name][:] for file in files]) for name in ("images", "labels")]


keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(20, 5, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(50, 5, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(500, activation="relu"),
        keras.layers.Dense(10),
    ]
)
images, labels = load("train")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.9), loss=loss, metrics=["accuracy"])
model.fit(images, labels, batch_size=64, epochs=int(os.environ.get("EPOCHS", "15")), shuffle=False, verbose=2)
print("held out:", model.evaluate(*load("val"), verbose=0)[1])
model.save(os.environ.get("MODEL", "digits.keras"))
