"""HEP-CNN: signal or background in images of a particle detector; few parameters, many operations for each.

Source: Kurth et al. 2017, "Deep learning at 15PF"; Mathuriya et al. 2017 train it on Cori. Five convolutions of 128
filters, four of them followed by pooling and dropout, then the mean over the image.
"""

from __future__ import annotations

import keras
from keras import layers

from hpcdl.models.layers import convolution, logits_layer
from hpcdl.models.table import check_input


def build(num_classes: int = 2, input_shape: tuple[int, int, int] = (224, 224, 3)) -> keras.Model:
    """Build HEP-CNN: images (N,H,W,C) to logits (N, num_classes)."""
    check_input("hepcnn", num_classes, input_shape)
    images = x = keras.Input(input_shape, name="images")
    for number in range(1, 5):
        x = convolution(x, 128, 3, name=f"conv{number}")
        x = layers.MaxPooling2D(2, name=f"pool{number}")(x)
        x = layers.Dropout(0.5, name=f"dropout{number}")(x)
    x = convolution(x, 128, 3, name="conv5")
    x = layers.GlobalAveragePooling2D(name="pool5")(x)
    return keras.Model(images, logits_layer(num_classes)(x), name="hepcnn")
