"""Gradient descent with or without momentum, each variable moved by one operation of TensorFlow's.

Keras makes an operation of each product and sum, and each of those goes through all of the variable's bytes once more,
most of them into fresh memory.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class FusedSGD(keras.optimizers.SGD):
    """Keras's SGD, the same numbers bit for bit; gradients are dense."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable."""
        rate, gradient = tf.cast(learning_rate, variable.dtype), tf.cast(gradient, variable.dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        velocity = self.momentums[self._get_variable_index(variable)]
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=velocity.value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )
