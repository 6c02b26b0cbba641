"""Batch and layer normalisation by fewer passes over memory than Keras's element-wise operations take.

Keras computes moments, differences, products and their gradients one operation at a time. Batch normalisation
(Ioffe and Szegedy 2015, algorithm 1) is one kernel of TensorFlow's. Layer normalisation (Ba, Kiros and Hinton 2016,
equation 4) has none, so its gradient is written out here.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def batch_normalization(layer: Any, inputs: Any) -> Any:
    """What `layer` gives in training for float32 `inputs` (B, ..., C), normalised over all but the last axis.

    The layer's moving mean and variance follow, with the variance of the batch itself, as Keras has it.
    """
    channels = inputs.shape[-1]
    # One row a position: over (rows, 1, 1, C) oneDNN's kernel is up to twice as fast as over (B, H, W, C).
    rows = tf.reshape(inputs, (-1, 1, 1, channels))
    result = tf.raw_ops.FusedBatchNormV3(
        x=rows,
        scale=_float32(layer.gamma) if layer.scale else tf.ones([channels]),
        offset=_float32(layer.beta) if layer.center else tf.zeros([channels]),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        exponential_avg_factor=1.0,
        data_format="NHWC",
        is_training=True,
    )
    count = tf.cast(tf.shape(rows)[0], tf.float32)
    # The kernel divides by count - 1 (Bessel), and by 1 where there is a single row; Keras divides by count.
    variance = result.batch_variance * (tf.maximum(count - 1, 1) / count)
    for moving, found in ((layer.moving_mean, result.batch_mean), (layer.moving_variance, variance)):
        moving.assign(_float32(moving) * layer.momentum + found * (1 - layer.momentum))
    return tf.reshape(result.y, tf.shape(inputs))


def _float32(variable: Any) -> Any:
    """A layer whose policy is half precision alone keeps its weights in it, and Keras computes in float32."""
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def layer_normalization(layer: Any, inputs: Any) -> Any:
    """What `layer` gives for float32 `inputs` (..., C): normalised over the last axis, times gamma, plus beta."""

    @tf.custom_gradient
    def normalized(values: Any, scale: Any, offset: Any) -> Any:
        mean = tf.reduce_mean(values, -1, keepdims=True)
        apart = values - mean
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(apart), -1, keepdims=True) + layer.epsilon)
        unit = apart * inverse

        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            product = upstream * unit
            rows, product_rows = (tf.reshape(one, (-1, values.shape[-1])) for one in (upstream, product))
            share = scale / values.shape[-1]
            along = tf.reshape(tf.linalg.matvec(rows, share), tf.shape(mean))
            along_unit = tf.reshape(tf.linalg.matvec(product_rows, share), tf.shape(mean))
            moved = inverse * (upstream * scale - along - unit * along_unit)
            return moved, tf.reduce_sum(product_rows, 0), tf.reduce_sum(rows, 0)

        return unit * scale + offset, gradient

    return normalized(inputs, _float32(layer.gamma), _float32(layer.beta))
