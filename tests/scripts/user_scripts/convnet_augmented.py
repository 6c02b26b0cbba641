"""A convnet with augmentation layers and batch normalization."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).uniform(size=(32, 12, 12, 3)).astype("float32")
y = keras.utils.to_categorical(numpy.arange(32) % 4)
model = keras.Sequential(
    [keras.Input((12, 12, 3)), keras.layers.RandomFlip("horizontal"), keras.layers.RandomRotation(0.1), keras.layers.Conv2D(4, 3),
     keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(4, activation="softmax")]
)  # fmt: skip
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.RMSprop(0.01)), loss="categorical_crossentropy")
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
