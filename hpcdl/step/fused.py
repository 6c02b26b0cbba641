"""Keras's optimizers with one operation of TensorFlow's for each variable.

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


class FusedAdam(keras.optimizers.Adam):
    """Keras's Adam (Kingma and Ba 2014, end of section 2), the same numbers to rounding; gradients are dense."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable."""
        kind = variable.dtype
        index = self._get_variable_index(variable)
        step = tf.cast(self.iterations.value + 1, kind)
        beta_1, beta_2 = tf.cast(self.beta_1, kind), tf.cast(self.beta_2, kind)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=tf.pow(beta_1, step),
            beta2_power=tf.pow(beta_2, step),
            lr=tf.cast(learning_rate, kind),
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.cast(self.epsilon, kind),
            grad=tf.cast(gradient, kind),
        )
