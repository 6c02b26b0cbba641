"""A variational autoencoder with a train_step of its own."""

import hpcdl

hpcdl.init()
import keras
import numpy
import tensorflow as tf


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(data), 2, axis=1)
            sample = mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))
            divergence = -0.5 * tf.reduce_mean(1 + log_variance - mean**2 - tf.exp(log_variance))
            loss = tf.reduce_mean((self.decoder(sample) - data) ** 2) + divergence
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        self.total.update_state(loss)
        return {"loss": self.total.result()}


keras.utils.set_random_seed(hpcdl.rank())
model = Autoencoder()
model.compile(optimizer=hpcdl.DistributedOptimizer("adam"))
model.fit(
    numpy.random.default_rng(hpcdl.rank()).normal(size=(32, 6)).astype("float32"),
    batch_size=8,
    epochs=2,
    verbose=0,
    callbacks=[hpcdl.callbacks()],
)
