"""The networks as in hpcdl/models/, for TensorFlow 2.12 and Keras 2; hpcdl trains those that it does not know by
name.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

layers = tf.keras.layers


def lenet() -> Any:
    images = tf.keras.Input((28, 28, 1))
    x = layers.MaxPooling2D(2)(layers.Conv2D(20, 5)(images))
    x = layers.MaxPooling2D(2)(layers.Conv2D(50, 5)(x))
    x = layers.Dense(500, activation="relu")(layers.Flatten()(x))
    return tf.keras.Model(images, layers.Dense(10)(x))


def cifar10_quick() -> Any:
    images = tf.keras.Input((32, 32, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(layers.Conv2D(32, 5, padding="same")(images))
    x = _convolution(layers.ReLU()(x), 32, 5)
    x = _convolution(layers.AveragePooling2D(3, 2, padding="same")(x), 64, 5)
    x = layers.Flatten()(layers.AveragePooling2D(3, 2, padding="same")(x))
    return tf.keras.Model(images, layers.Dense(10)(layers.Dense(64)(x)))


def alexnet() -> Any:
    images = tf.keras.Input((227, 227, 3))
    x = _across_channels(layers.Conv2D(96, 11, 4, activation="relu")(images))
    x = _across_channels(_convolution(layers.MaxPooling2D(3, 2)(x), 256, 5))
    x = _convolution(layers.MaxPooling2D(3, 2)(x), 384, 3)
    x = _convolution(_convolution(x, 384, 3), 256, 3)
    x = layers.Flatten()(layers.MaxPooling2D(3, 2)(x))
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.Dense(4096, activation="relu")(x))
    return tf.keras.Model(images, layers.Dense(1000)(x))


def vgg19() -> Any:
    images = x = tf.keras.Input((224, 224, 3))
    for convolutions, filters in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(convolutions):
            x = _convolution(x, filters, 3)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.Dense(4096, activation="relu")(x))
    return tf.keras.Model(images, layers.Dense(1000)(x))


def googlenet() -> Any:
    stages = (
        ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
        (
            (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
        ),
        ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    )  # fmt: skip
    images = tf.keras.Input((224, 224, 3))
    x = layers.Conv2D(64, 7, 2, padding="same", activation="relu")(images)
    x = _across_channels(layers.MaxPooling2D(3, 2, padding="same")(x))
    x = _across_channels(_convolution(_convolution(x, 64, 1), 192, 3))
    for stage in stages:
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
        for direct, reduce3, three, reduce5, five, projection in stage:
            pooled = layers.MaxPooling2D(3, 1, padding="same")(x)
            x = layers.Concatenate()([
                _convolution(x, direct, 1), _convolution(_convolution(x, reduce3, 1), three, 3),
                _convolution(_convolution(x, reduce5, 1), five, 5), _convolution(pooled, projection, 1),
            ])  # fmt: skip
    x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
    return tf.keras.Model(images, layers.Dense(1000)(x))


def resnet50() -> Any:
    images = tf.keras.Input((224, 224, 3))
    x = layers.ReLU()(_normalised(images, 64, 7, stride=2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, (blocks, filters) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            shortcut = _normalised(x, 4 * filters, 1, stride=stride) if block == 0 else x
            x = layers.ReLU()(_normalised(x, filters, 1, stride=stride))
            x = layers.ReLU()(_normalised(x, filters, 3))
            x = layers.ReLU()(layers.Add()([shortcut, _normalised(x, 4 * filters, 1)]))
    return tf.keras.Model(images, layers.Dense(1000)(layers.GlobalAveragePooling2D()(x)))


def hepcnn() -> Any:
    images = x = tf.keras.Input((224, 224, 3))
    for _ in range(4):
        x = layers.Dropout(0.5)(layers.MaxPooling2D(2)(_convolution(x, 128, 3)))
    x = layers.GlobalAveragePooling2D()(_convolution(x, 128, 3))
    return tf.keras.Model(images, layers.Dense(2)(x))


def transformer() -> Any:
    """Vaswani et al. 2017, "Attention is all you need", section 3; normalisation first, as in Xiong et al. 2020."""
    vectors = x = tf.keras.Input((64, 256))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(8, 32)(y, y)])
        y = layers.Dense(1024, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(256)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return tf.keras.Model(vectors, layers.Dense(10)(x))


def lstm() -> Any:
    """Hochreiter and Schmidhuber 1997: two layers of 256."""
    vectors = tf.keras.Input((64, 128))
    x = layers.LSTM(256)(layers.LSTM(256, return_sequences=True)(vectors))
    return tf.keras.Model(vectors, layers.Dense(10)(x))


def unet() -> Any:
    """Ronneberger et al. 2015: three levels down and up, then a mean."""
    images = x = tf.keras.Input((96, 96, 3))
    kept = []
    for filters in (16, 32, 64):
        x = _two_convolutions(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = _two_convolutions(x, 128)
    for filters in (64, 32, 16):
        x = _two_convolutions(layers.Concatenate()([layers.UpSampling2D()(x), kept.pop()]), filters)
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1)(x))
    return tf.keras.Model(images, layers.Dense(10)(x))


NETWORKS = {
    "lenet": lenet, "cifar10-quick": cifar10_quick, "alexnet": alexnet, "vgg19": vgg19, "googlenet": googlenet,
    "resnet50": resnet50, "hepcnn": hepcnn, "transformer": transformer, "lstm": lstm, "unet": unet,
}  # fmt: skip


def _convolution(x: Any, filters: int, size: int) -> Any:
    return layers.Conv2D(filters, size, padding="same", activation="relu")(x)


def _normalised(x: Any, filters: int, size: int, *, stride: int = 1) -> Any:
    x = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def _two_convolutions(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x


def _across_channels(x: Any) -> Any:
    return layers.Lambda(lambda x: tf.nn.local_response_normalization(x, 2, 1.0, 2e-5, 0.75))(x)
