"""CaffeNet: AlexNet with convolutions 2, 4 and 5 in two groups, and pooling before normalisation.

Source: Caffe, models/bvlc_reference_caffenet; Jia et al. 2014, "Caffe: convolutional architecture for fast feature
embedding".
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import across_channels, convolution, hidden_dense, logits_layer, two_group_convolution
from hpcdl.models.table import check_input


def build(num_classes: int = 1000, input_shape: tuple[int, int, int] = (227, 227, 3)) -> keras.Model:
    """Build CaffeNet: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("caffenet", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    x = convolution(images, 96, 11, stride=4, padding="valid", name="conv1")
    x = layers.MaxPooling2D(3, 2, name="pool1")(x)
    x = across_channels(x, size=5, alpha=1e-4)
    x = two_group_convolution(x, 256, 5, name="conv2")
    x = layers.MaxPooling2D(3, 2, name="pool2")(x)
    x = across_channels(x, size=5, alpha=1e-4)
    x = convolution(x, 384, 3, name="conv3")
    x = two_group_convolution(x, 384, 3, name="conv4")
    x = two_group_convolution(x, 256, 3, name="conv5")
    x = layers.MaxPooling2D(3, 2, name="pool5")(x)
    x = layers.Flatten(name="flatten")(x)
    x = hidden_dense(x, 4096, dropout=0.5, name="dense6")
    x = hidden_dense(x, 4096, dropout=0.5, name="dense7")
    return keras.Model(images, logits_layer(num_classes)(x), name="caffenet")
