"""AlexNet in one tower, without groups: its many parameters make communication the bottleneck.

Source: Krizhevsky, Sutskever, Hinton 2012, "ImageNet classification with deep convolutional neural networks", for the
layers and their sizes; normalisation constants are those of Caffe's model, convolutions are ungrouped.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import across_channels, convolution, hidden_dense, logits_layer
from hpcdl.models.table import check_input


def build(num_classes: int = 1000, input_shape: tuple[int, int, int] = (227, 227, 3)) -> keras.Model:
    """Build AlexNet: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("alexnet", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    # (227 - 11) / 4 + 1 = 55 positions a side, as in the paper.
    x = convolution(images, 96, 11, stride=4, padding="valid", name="conv1")
    x = across_channels(x, size=5, alpha=1e-4)
    x = layers.MaxPooling2D(3, 2, name="pool1")(x)
    x = convolution(x, 256, 5, name="conv2")
    x = across_channels(x, size=5, alpha=1e-4)
    x = layers.MaxPooling2D(3, 2, name="pool2")(x)
    x = convolution(x, 384, 3, name="conv3")
    x = convolution(x, 384, 3, name="conv4")
    x = convolution(x, 256, 3, name="conv5")
    x = layers.MaxPooling2D(3, 2, name="pool5")(x)
    x = layers.Flatten(name="flatten")(x)
    x = hidden_dense(x, 4096, dropout=0.5, name="dense6")
    x = hidden_dense(x, 4096, dropout=0.5, name="dense7")
    return keras.Model(images, logits_layer(num_classes)(x), name="alexnet")
