"""Networks for hpcdl that it has not by name; networks.py and pytorch_networks.py have the same for the peers."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

BLOCKS, WIDTH, HEADS, LENGTH, CLASSES = 4, 256, 8, 64, 10


def transformer() -> keras.Model:
    """Vectors (N, 64, 256) to logits (N, 10): a small encoder of four blocks, normalised before each part.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3; normalisation first as Xiong et al. 2020.
    """
    vectors = x = keras.Input((LENGTH, WIDTH), name="vectors")
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(vectors, layers.Dense(CLASSES)(x), name="transformer")


def lstm() -> keras.Model:
    """Vectors (N, 64, 128) to logits (N, 10) by two LSTM layers of 256 (Hochreiter and Schmidhuber 1997)."""
    vectors = keras.Input((64, 128), name="vectors")
    x = layers.LSTM(256)(layers.LSTM(256, return_sequences=True)(vectors))
    return keras.Model(vectors, layers.Dense(CLASSES)(x), name="lstm")


def unet() -> keras.Model:
    """Images (N, 96, 96, 3) to logits (N, 10): three levels down and up (Ronneberger et al. 2015), then a mean."""
    images = x = keras.Input((96, 96, 3), name="images")
    kept = []
    for filters in (16, 32, 64):
        x = _two_convolutions(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = _two_convolutions(x, 128)
    for filters, skip in zip((64, 32, 16), reversed(kept), strict=True):
        x = _two_convolutions(layers.Concatenate()([layers.UpSampling2D()(x), skip]), filters)
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1)(x))
    return keras.Model(images, layers.Dense(CLASSES)(x), name="unet")


def _two_convolutions(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x
