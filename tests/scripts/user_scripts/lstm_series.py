"""A time series with an LSTM and a checkpoint of the best."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
series = numpy.sin(numpy.arange(200) / 5).astype("float32")[:, None]
data = keras.utils.timeseries_dataset_from_array(series[:-10], series[10:], sequence_length=10, batch_size=8)
model = keras.Sequential([keras.Input((10, 1)), keras.layers.LSTM(6), keras.layers.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"), loss="mse")
saved = keras.callbacks.ModelCheckpoint(
    "series.weights.h5", monitor="loss", save_weights_only=True, save_best_only=True
)
model.fit(
    hpcdl.dataset(data),
    epochs=2,
    verbose=0,
    callbacks=[keras.callbacks.EarlyStopping(monitor="loss"), saved, hpcdl.callbacks()],
)
