"""Building blocks shared by several networks, made only of Keras' own layers and operations.

A saved model.keras therefore loads in any Keras 3, even if hpcdl is not installed.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

Tensor = Any
"""A symbolic tensor that connects layers."""
HIDDEN = "he_normal"
"""Initializer before a rectifier (He et al. 2015); deep networks without normalisation need it to learn."""

NEAR_ZERO = {"class_name": "RandomNormal", "config": {"stddev": 0.01}}
"""Start of a last layer: a new network finds all classes about equally likely (Krizhevsky et al. 2012, section 5)."""


def convolution(x: Tensor, filters: int, size: int, *, stride: int = 1, padding: str = "same", name: str) -> Tensor:
    """Apply a convolution with bias and rectifier."""
    layer = layers.Conv2D(
        filters, size, strides=stride, padding=padding, activation="relu", kernel_initializer=HIDDEN, name=name
    )
    return layer(x)


def two_group_convolution(x: Tensor, filters: int, size: int, *, name: str) -> Tensor:
    """Apply a convolution in two groups, each seeing half of the channels, with bias and rectifier.

    It consists of two convolutions side by side, because TensorFlow is far slower at `Conv2D(groups=2)` on a CPU.
    """
    halves = ops.split(x, 2, axis=-1)
    parts = [
        convolution(half, filters // 2, size, name=f"{name}_{group}") for half, group in zip(halves, "ab", strict=True)
    ]
    return layers.Concatenate(name=name)(parts)


def hidden_dense(x: Tensor, units: int, *, dropout: float = 0.0, name: str) -> Tensor:
    """Apply a dense layer with rectifier, then dropout with probability `dropout`."""
    x = layers.Dense(units, activation="relu", kernel_initializer=HIDDEN, name=name)(x)
    return layers.Dropout(dropout, name=f"{name}_dropout")(x) if dropout else x


def logits_layer(num_classes: int, *, name: str = "logits", start: Any = NEAR_ZERO) -> keras.layers.Layer:
    """Return the last layer: no softmax, float32 under every dtype policy; `start` initialises its weights."""
    return layers.Dense(num_classes, kernel_initializer=start, dtype="float32", name=name)


def across_channels(x: Tensor, *, size: int, alpha: float, k: float = 1.0) -> Tensor:
    """Local response normalisation: x / (k + alpha/size * sum of squares of the `size` nearest channels)^(3/4).

    The sum is a product with a matrix of ones near its diagonal, forward and in the gradient: on a CPU this is faster
    than adding shifted slices or pooling. Source: Krizhevsky et al. 2012, section 3.3; alpha as Caffe divides it.
    """
    squares = ops.square(x)
    # Derive the ones from the tensor: the matrix is then part of the graph and no weight, and fits an empty batch too.
    ones = ops.ones_like(ops.sum(squares[:1, 0, 0, :], axis=0))
    radius = min(size // 2, x.shape[-1] - 1)
    near = ops.triu(ops.tril(ops.outer(ones, ones), radius), -radius)
    return x * _inverse_three_quarters(k + alpha / size * ops.matmul(squares, near))


def within_channel(x: Tensor, *, size: int, alpha: float) -> Tensor:
    """Local response normalisation over a square of pixels: x / (1 + alpha * mean of squares)^(3/4).

    Pixels beyond the edge count as zeros. Source: Caffe, LRN layer with norm_region WITHIN_CHANNEL.
    """
    # Padded here, because `same` pooling divides by the pixels inside the image alone.
    squares = ops.pad(ops.square(x), ((0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
    mean = ops.average_pool(squares, size, strides=1, padding="valid")
    return x * _inverse_three_quarters(1.0 + alpha * mean)


def _inverse_three_quarters(x: Tensor) -> Tensor:
    root = ops.rsqrt(x)  # two square roots are much faster than a power
    return root * ops.sqrt(root)
