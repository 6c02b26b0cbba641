"""GoogLeNet (Inception v1), without batch normalisation, with or without its two auxiliary heads.

Source: Szegedy et al. 2015, "Going deeper with convolutions", table 1 and section 5. Normalisation across channels is
as in Caffe's model. The losses of the heads have weight 0.3 each, the main loss 1.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import Tensor, across_channels, convolution, hidden_dense, logits_layer
from hpcdl.models.table import check_input

_STAGES: tuple[tuple[tuple[str, tuple[int, int, int, int, int, int]], ...], ...] = (
    (("3a", (64, 96, 128, 16, 32, 32)), ("3b", (128, 128, 192, 32, 96, 64))),
    (
        ("4a", (192, 96, 208, 16, 48, 64)),
        ("4b", (160, 112, 224, 24, 64, 64)),
        ("4c", (128, 128, 256, 24, 64, 64)),
        ("4d", (112, 144, 288, 32, 64, 64)),
        ("4e", (256, 160, 320, 32, 128, 128)),
    ),
    (("5a", (256, 160, 320, 32, 128, 128)), ("5b", (384, 192, 384, 48, 128, 128))),
)
"""Filters of each inception block: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection."""
_HEADS_AFTER = ("4a", "4d")


def build(num_classes: int = 1000, input_shape: tuple[int, int, int] = (224, 224, 3)) -> keras.Model:
    """Build GoogLeNet: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("googlenet", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    main, _ = _trunk(images)
    return keras.Model(images, logits_layer(num_classes)(main), name="googlenet")


def build_with_auxiliary_heads(
    num_classes: int = 1000, input_shape: tuple[int, int, int] = (224, 224, 3)
) -> keras.Model:
    """Build GoogLeNet: images (N,H,W,C) to [main, first head's, second head's] logits, each (N, num_classes)."""
    check_input("googlenet-aux", num_classes, input_shape)
    images = keras.Input(input_shape, name="images")
    main, taps = _trunk(images)
    outputs = [logits_layer(num_classes)(main)]
    outputs += [_head(taps[block], num_classes, number) for number, block in enumerate(_HEADS_AFTER, start=1)]
    return keras.Model(images, outputs, name="googlenet_aux")


def _trunk(images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return features (N, 1024) before the last layer, and each inception block's output by name."""
    x = convolution(images, 64, 7, stride=2, name="conv1")
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool1")(x)
    x = across_channels(x, size=5, alpha=1e-4)
    x = convolution(x, 64, 1, name="conv2_reduce")
    x = convolution(x, 192, 3, name="conv2")
    x = across_channels(x, size=5, alpha=1e-4)
    outputs: dict[str, Tensor] = {}
    for number, stage in enumerate(_STAGES, start=2):
        x = layers.MaxPooling2D(3, 2, padding="same", name=f"pool{number}")(x)
        for block, filters in stage:
            x = outputs[block] = _inception(x, filters, f"inception_{block}")
    x = layers.GlobalAveragePooling2D(name="pool5")(x)
    return layers.Dropout(0.4, name="dropout")(x), outputs


def _inception(x: Tensor, filters: tuple[int, int, int, int, int, int], name: str) -> Tensor:
    direct, reduce3, three, reduce5, five, projection = filters
    pooled = layers.MaxPooling2D(3, 1, padding="same", name=f"{name}_pool")(x)
    branches = [
        convolution(x, direct, 1, name=f"{name}_1x1"),
        convolution(convolution(x, reduce3, 1, name=f"{name}_3x3_reduce"), three, 3, name=f"{name}_3x3"),
        convolution(convolution(x, reduce5, 1, name=f"{name}_5x5_reduce"), five, 5, name=f"{name}_5x5"),
        convolution(pooled, projection, 1, name=f"{name}_projection"),
    ]
    return layers.Concatenate(name=name)(branches)


def _head(x: Tensor, num_classes: int, number: int) -> Tensor:
    # Sizes and dropout of the heads: section 5.
    x = layers.AveragePooling2D(5, 3, name=f"head{number}_pool")(x)
    x = convolution(x, 128, 1, name=f"head{number}_conv")
    x = layers.Flatten(name=f"head{number}_flatten")(x)
    x = hidden_dense(x, 1024, dropout=0.7, name=f"head{number}_dense")
    return logits_layer(num_classes, name=f"head{number}_logits")(x)
