"""Text with embeddings, whose gradients are sparse."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).integers(0, 50, size=(32, 10))
y = (x[:, 0] > 25).astype("float32")
model = keras.Sequential(
    [
        keras.Input((10,), dtype="int32"),
        keras.layers.Embedding(50, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss="binary_crossentropy", metrics=[keras.metrics.AUC()])
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
