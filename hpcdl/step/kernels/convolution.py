"""Convolutions and enlargements that another kernel of TensorFlow's does faster."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def pointwise_convolution(inputs: Any, kernel: Any) -> Any:
    """A 1 x 1 convolution of `inputs` (B, H, W, C) by `kernel` (1, 1, C, F) as one matrix product: (B, H, W, F)."""
    channels, filters = kernel.shape[2:]
    product = tf.matmul(tf.reshape(inputs, (-1, channels)), tf.reshape(kernel, (channels, filters)))
    return tf.reshape(product, tf.concat([tf.shape(inputs)[:-1], [filters]], 0))


def nearest_enlarged(inputs: Any, factors: tuple[int, int]) -> Any:
    """Each pixel of `inputs` (B, H, W, C) repeated `factors` times along height and width."""
    size = tf.shape(inputs)[1:3] * tf.constant(factors)
    enlarged = tf.raw_ops.ResizeNearestNeighbor(images=inputs, size=size)
    batch, height, width, channels = inputs.shape
    grown = [None if side is None else side * factor for side, factor in zip((height, width), factors, strict=True)]
    enlarged.set_shape((batch, *grown, channels))
    return enlarged
