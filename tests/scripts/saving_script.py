"""Runs on two ranks: every way to save writes one whole file, from one rank, without an `if` in the script."""

import zipfile
from pathlib import Path

import hpcdl

hpcdl.init(60)
import keras
import numpy as np
import tensorflow as tf
from keras.saving import save_model  # as scripts import it

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss="mse")
model.fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)
checkpoint = tf.train.Checkpoint(model=model)
manager = tf.train.CheckpointManager(checkpoint, "managed", max_to_keep=2)
for number in range(4):
    hpcdl.barrier()
    save_model(model, "function.keras")
    keras.saving.save_model(model, "attribute.keras")
    model.save("method.keras")
    model.save("legacy.h5")
    model.save_weights("some.weights.h5")
    for name in ("function.keras", "attribute.keras", "method.keras"):
        assert zipfile.ZipFile(name).testzip() is None, name
    path = checkpoint.save("own/ckpt")
    assert path.endswith(f"ckpt-{number + 1}") or number, path
    tf.train.Checkpoint(model=model).read(path).assert_existing_objects_matched()
    manager.save()
    known = [Path(path).name for path in manager.checkpoints]
    assert known[-1] == f"ckpt-{2 * number + 2}" and len(known) == min(number + 1, 2), (
        known
    )  # another rank may have written
hpcdl.barrier()
assert sorted(path.name for path in Path("managed").glob("*.index")) == ["ckpt-6.index", "ckpt-8.index"]
tf.saved_model.save(model, "exported")
assert tf.saved_model.load("exported") is not None
for name in ("function.keras", "attribute.keras", "method.keras", "legacy.h5"):
    again = keras.saving.load_model(name, compile=False)
    assert all(np.array_equal(*pair) for pair in zip(again.get_weights(), model.get_weights(), strict=True))
hpcdl.barrier()
left = [str(one) for one in Path().rglob("*") if "temp" in one.name.lower() or one.name.startswith(".")]
print(f"as it should be {left}", flush=True)
hpcdl.shutdown()
