"""A small transformer encoder of vectors: four blocks of width 256 with 8 heads, normalisation before each part.

Source: Vaswani et al. 2017, "Attention is all you need", section 3; normalisation first as Xiong et al. 2020 have it.
The numbers are those of the other files here that build it.
"""

from __future__ import annotations

import keras
from keras import layers

BLOCKS, WIDTH, HEADS, LENGTH, CLASSES = 4, 256, 8, 64, 10


def build() -> keras.Model:
    """Vectors (N, 64, 256) to logits (N, 10)."""
    vectors = x = keras.Input((LENGTH, WIDTH), name="vectors")
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(vectors, layers.Dense(CLASSES)(x), name="transformer")
