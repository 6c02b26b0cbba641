"""A transformer block over tokens."""

import hpcdl

hpcdl.init()
import keras
import numpy

keras.utils.set_random_seed(hpcdl.rank())
x = numpy.random.default_rng(hpcdl.rank()).integers(0, 20, size=(32, 6))
tokens = keras.Input((6,), dtype="int32")
embedded = keras.layers.Embedding(20, 8)(tokens)
mixed = keras.layers.LayerNormalization()(embedded + keras.layers.MultiHeadAttention(2, 4)(embedded, embedded))
model = keras.Model(tokens, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(mixed)))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0)), loss=loss)
model.fit(x, x[:, 0] % 2, batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
