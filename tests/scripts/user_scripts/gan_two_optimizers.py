"""A GAN with two optimizers."""

import hpcdl

hpcdl.init()
import keras
import numpy
import tensorflow as tf


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    def train_step(self, real):
        noise = tf.random.normal((tf.shape(real)[0], 3))
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([real, self.generator(noise)], 0))
            labels = tf.concat(
                [tf.ones_like(judged[: tf.shape(real)[0]]), tf.zeros_like(judged[tf.shape(real)[0] :])], 0
            )
            critic_loss = self.loss_of(labels, judged)
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            judged = self.critic(self.generator(noise))
            generator_loss = self.loss_of(tf.ones_like(judged), judged)
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, weights), weights, strict=True))
        return {"critic": critic_loss, "generator": generator_loss}


keras.utils.set_random_seed(hpcdl.rank())
model = Gan()
model.compile(hpcdl.DistributedOptimizer("adam"), hpcdl.DistributedOptimizer("adam"))
model.fit(
    numpy.random.default_rng(hpcdl.rank()).normal(size=(32, 4)).astype("float32"),
    batch_size=8,
    epochs=2,
    verbose=0,
    callbacks=[hpcdl.callbacks()],
)
