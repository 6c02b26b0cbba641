"""LeNet for handwritten digits, as Caffe's MNIST example defines it.

Source: LeCun, Bottou, Bengio, Haffner 1998, "Gradient-based learning applied to document recognition"; Caffe's variant
has more filters, max pooling without weights, and one rectifier, after the first dense layer.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import logits_layer
from hpcdl.models.table import check_input

_START = "lecun_normal"
"""LeCun's initializer: keeps variances equal from layer to layer if convolutions have no rectifier."""


def build(num_classes: int = 10, input_shape: tuple[int, int, int] = (28, 28, 1)) -> keras.Model:
    """Build LeNet: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("lenet", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    x = layers.Conv2D(20, 5, kernel_initializer=_START, name="conv1")(images)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = layers.Conv2D(50, 5, kernel_initializer=_START, name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(500, activation="relu", kernel_initializer=_START, name="dense1")(x)
    return keras.Model(images, logits_layer(num_classes, start="glorot_uniform")(x), name="lenet")
