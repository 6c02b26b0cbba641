"""Activations that XLA compiles: one pass over memory forward and one back, where TensorFlow takes one an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Activation = Callable[[Any], Any]


def compiled(activation: Activation) -> Activation:
    """`activation` and its gradient, each as one operation; float32 of any shape.

    The way back computes from the inputs again: that takes less time than fetching what the way forward knew.
    """
    flat = tf.TensorSpec([None], tf.float32)  # one trace for all shapes; XLA compiles it for each number of elements

    @tf.function(input_signature=[flat], jit_compile=True, autograph=False)
    def forward(values: Any) -> Any:
        return activation(values)

    @tf.function(input_signature=[flat, flat], jit_compile=True, autograph=False)
    def backward(values: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = activation(values)
        return tape.gradient(outputs, values, output_gradients=upstream)

    @tf.custom_gradient
    def shaped(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return _as(values, backward(_flat(values), _flat(upstream)))

        return _as(values, forward(_flat(values))), gradient

    activated: Activation = shaped
    return activated


def _flat(values: Any) -> Any:
    return tf.reshape(values, [-1])


def _as(like: Any, values: Any) -> Any:
    return tf.ensure_shape(tf.reshape(values, tf.shape(like)), like.shape)
