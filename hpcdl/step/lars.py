"""LARS: a learning rate for each layer, by the ratio of its weights' norm to its gradient's.

You, Gitman, Ginsburg 2017 (arXiv 1708.03888), algorithm 1: local = trust ||w|| / (||g|| + decay ||w||);
v <- momentum v + rate local (g + decay w); w <- w - v. Biases and normalisation (vectors) take local = 1 and no decay.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class Lars(keras.optimizers.Optimizer):
    """A Keras optimizer; `decay` is the weight decay inside the trust ratio, not Keras's decoupled one."""

    def __init__(self, learning_rate: float, *, momentum: float, trust: float, decay: float) -> None:
        super().__init__(learning_rate=learning_rate, name="lars")
        self.momentum = momentum
        self.trust = trust
        self.decay = decay

    def build(self, variables: Any) -> None:
        """Make one velocity per variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(variable, name="velocity") for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable; the velocity and the variable by one operation of TensorFlow's."""
        kind = variable.dtype
        rate, gradient = tf.cast(learning_rate, kind), tf.cast(gradient, kind)
        if len(variable.shape) > 1:
            weight_norm, gradient_norm = _norm(variable), _norm(gradient)
            local = self.trust * weight_norm / (gradient_norm + self.decay * weight_norm)
            usable = tf.logical_and(weight_norm > 0, gradient_norm > 0)
            rate = rate * tf.where(usable, local, tf.ones_like(local))
            if self.decay:
                gradient = gradient + self.decay * variable
        velocity = self.velocities[self._get_variable_index(variable)]
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=velocity.value.handle,
            lr=tf.ones([], kind),
            grad=rate * gradient,
            momentum=tf.cast(self.momentum, kind),
        )

    def get_config(self) -> dict[str, Any]:
        """The settings, for Keras."""
        own = {"momentum": self.momentum, "trust": self.trust, "decay": self.decay}
        return {**super().get_config(), **own}


def _norm(tensor: Any) -> Any:
    """The Euclidean norm, in one pass that keeps no squares."""
    return tf.sqrt(2 * tf.nn.l2_loss(tensor))
