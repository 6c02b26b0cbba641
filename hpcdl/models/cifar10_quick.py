"""The quick ConvNet for CIFAR-10: three convolutions of 5x5, each pooled by two, and two dense layers.

Source: Caffe, examples/cifar10, the "quick" network (after Krizhevsky's cuda-convnet); it rectifies the first
convolution after pooling and has no rectifier between the dense layers.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import HIDDEN, convolution, logits_layer
from hpcdl.models.table import check_input


def build(num_classes: int = 10, input_shape: tuple[int, int, int] = (32, 32, 3)) -> keras.Model:
    """Build cifar10-quick: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("cifar10-quick", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    x = layers.Conv2D(32, 5, padding="same", kernel_initializer=HIDDEN, name="conv1")(images)
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool1")(x)
    x = layers.ReLU(name="relu1")(x)
    x = convolution(x, 32, 5, name="conv2")
    x = layers.AveragePooling2D(3, 2, padding="same", name="pool2")(x)
    x = convolution(x, 64, 5, name="conv3")
    x = layers.AveragePooling2D(3, 2, padding="same", name="pool3")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(64, name="dense1")(x)
    return keras.Model(images, logits_layer(num_classes)(x), name="cifar10_quick")
