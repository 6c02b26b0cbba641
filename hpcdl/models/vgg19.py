"""VGG-19: sixteen convolutions of 3x3 and three dense layers, the first with 411 MB of weights in one tensor.

Source: Simonyan, Zisserman 2015, "Very deep convolutional networks for large-scale image recognition", table 1,
configuration E.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import convolution, hidden_dense, logits_layer
from hpcdl.models.table import check_input

_STAGES = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
"""Number of convolutions and filters of each stage; pooling by two follows each stage."""


def build(num_classes: int = 1000, input_shape: tuple[int, int, int] = (224, 224, 3)) -> keras.Model:
    """Build VGG-19: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("vgg19", num_classes, input_shape)
    images = x = keras.Input(input_shape, name="images")
    for stage, (convolutions, filters) in enumerate(_STAGES, start=1):
        for number in range(1, convolutions + 1):
            x = convolution(x, filters, 3, name=f"conv{stage}_{number}")
        x = layers.MaxPooling2D(2, name=f"pool{stage}")(x)
    x = layers.Flatten(name="flatten")(x)
    x = hidden_dense(x, 4096, dropout=0.5, name="dense6")
    x = hidden_dense(x, 4096, dropout=0.5, name="dense7")
    return keras.Model(images, logits_layer(num_classes)(x), name="vgg19")
