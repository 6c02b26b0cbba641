"""LARS: a learning rate for each layer, by the ratio of its weights' norm to its gradient's.

You, Gitman, Ginsburg 2017 (arXiv 1708.03888), algorithm 1: local = trust ||w|| / (||g|| + decay ||w||);
v <- momentum v + rate local (g + decay w); w <- w - v. Biases and normalisation (vectors) take local = 1 and no decay.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


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
        """Move one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        velocity = self.velocities[self._get_variable_index(variable)]
        if len(variable.shape) > 1:
            weight_norm = ops.norm(ops.reshape(variable, [-1]))
            gradient_norm = ops.norm(ops.reshape(gradient, [-1]))
            local = self.trust * weight_norm / (gradient_norm + self.decay * weight_norm)
            usable = ops.logical_and(weight_norm > 0, gradient_norm > 0)
            rate = rate * ops.where(usable, local, 1.0)
            gradient = gradient + self.decay * variable
        moved = self.momentum * velocity + rate * gradient
        self.assign(velocity, moved)
        self.assign_sub(variable, moved)

    def get_config(self) -> dict[str, Any]:
        """The settings, for Keras."""
        own = {"momentum": self.momentum, "trust": self.trust, "decay": self.decay}
        return {**super().get_config(), **own}
