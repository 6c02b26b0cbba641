"""ResNet-50 v1: bottleneck blocks, the stride in a block's first convolution, convolutions without bias.

Source: He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", table 1.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import HIDDEN, Tensor, logits_layer
from hpcdl.models.table import check_input

_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Number of blocks and inner filters of each stage; a block has four times as many output channels."""


def build(num_classes: int = 1000, input_shape: tuple[int, int, int] = (224, 224, 3)) -> keras.Model:
    """Build ResNet-50: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("resnet50", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    x = _normalised_convolution(images, 64, 7, stride=2, name="conv1")
    x = layers.ReLU(name="conv1_relu")(x)
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool1")(x)
    for stage, (blocks, filters) in enumerate(_STAGES, start=2):
        for block in range(1, blocks + 1):
            # The pooling before stage 2 has halved the image for it.
            stride = 2 if stage > 2 and block == 1 else 1
            # A first block changes the number of channels, in stage 2 too: from 64 to 256.
            x = _bottleneck(x, filters, stride=stride, project=block == 1, name=f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D(name="pool5")(x)
    return keras.Model(images, logits_layer(num_classes)(x), name="resnet50")


def _bottleneck(x: Tensor, filters: int, *, stride: int, project: bool, name: str) -> Tensor:
    shortcut = x
    if project:
        shortcut = _normalised_convolution(x, 4 * filters, 1, stride=stride, name=f"{name}_projection")
    x = _normalised_convolution(x, filters, 1, stride=stride, name=f"{name}_conv1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _normalised_convolution(x, filters, 3, name=f"{name}_conv2")
    x = layers.ReLU(name=f"{name}_relu2")(x)
    x = _normalised_convolution(x, 4 * filters, 1, name=f"{name}_conv3")
    x = layers.Add(name=f"{name}_sum")([shortcut, x])
    return layers.ReLU(name=f"{name}_relu3")(x)


def _normalised_convolution(x: Tensor, filters: int, size: int, *, stride: int = 1, name: str) -> Tensor:
    x = layers.Conv2D(
        filters, size, strides=stride, padding="same", use_bias=False, kernel_initializer=HIDDEN, name=name
    )(x)
    # The constants of PyTorch's layer; Keras's own momentum of 0.99 follows the statistics ten times more slowly.
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
