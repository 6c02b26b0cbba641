"""A network of your own, in a function: hpcdl train --model my_model.py:build --data DIR ..."""

import keras
from keras import layers


def build(num_classes=10, input_shape=(28, 28, 1)):
    """Give hpcdl a Keras model: float images in [0, 1] in, one logit per class out (no softmax)."""
    images = keras.Input(input_shape)
    x = layers.Conv2D(16, 3, strides=2, activation="relu")(images)
    x = layers.Conv2D(32, 3, strides=2, activation="relu")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(images, layers.Dense(num_classes)(x))
