"""Keras optimizers from settings, with one TensorFlow operation for each variable; and LARS.

Keras uses one operation per product and sum, each of which reads and writes the whole variable, mostly into new memory.
Weight decay excludes biases and normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpcdl.config.schema import OptimizerConfig


class FusedSGD(keras.optimizers.SGD):
    """Keras's SGD with bitwise equal results; for dense gradients."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        rate, gradient = tf.cast(learning_rate, variable.dtype), tf.cast(gradient, variable.dtype)
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        velocity = self.momentums[self._get_variable_index(variable)]
        # Its velocity holds steps (rate times gradient), as in Keras; that of ApplyMomentum holds gradients.
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=velocity.value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )


class FusedAdam(keras.optimizers.Adam):
    """Keras's Adam (Kingma and Ba 2014, end of section 2), equal up to rounding; for dense gradients."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
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


class Lars(keras.optimizers.Optimizer):
    """LARS as a Keras optimizer; `decay` is the weight decay inside the trust ratio, not Keras's decoupled one."""

    def __init__(self, learning_rate: float, *, momentum: float, trust: float, decay: float) -> None:
        super().__init__(learning_rate=learning_rate, name="lars")
        self.momentum = momentum
        self.trust = trust
        self.decay = decay

    def build(self, variables: Any) -> None:
        """Create one velocity per variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(variable, name="velocity") for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable and its velocity with one TensorFlow operation."""
        kind = variable.dtype
        rate, gradient = tf.cast(learning_rate, kind), tf.cast(gradient, kind)
        if len(variable.shape) > 1:
            weight_norm, gradient_norm = _norm(variable), _norm(gradient)
            # You, Gitman and Ginsburg 2017 (arXiv 1708.03888), algorithm 1: the local rate of a layer.
            local = self.trust * weight_norm / (gradient_norm + self.decay * weight_norm)
            # Weights of zeros would get the rate 0 and stay; a zero gradient without decay would divide by zero.
            usable = tf.logical_and(weight_norm > 0, gradient_norm > 0)
            rate = rate * tf.where(usable, local, tf.ones_like(local))
            if self.decay:
                gradient = gradient + self.decay * variable
        velocity = self.velocities[self._get_variable_index(variable)]
        tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle,
            accum=velocity.value.handle,
            lr=tf.ones([], kind),  # the paper has the rate inside the velocity, this operation outside
            grad=rate * gradient,
            momentum=tf.cast(self.momentum, kind),
        )

    def get_config(self) -> dict[str, Any]:
        """Return the settings, for Keras."""
        own_settings = {"momentum": self.momentum, "trust": self.trust, "decay": self.decay}
        return {**super().get_config(), **own_settings}


def _norm(tensor: Any) -> Any:
    """Return the Euclidean norm, in one pass that stores no squares."""
    return tf.sqrt(2 * tf.nn.l2_loss(tensor))


def _momentum(config: OptimizerConfig, *, nesterov: bool) -> Any:
    return FusedSGD(config.learning_rate, momentum=config.momentum, nesterov=nesterov, weight_decay=_decay(config))


def _decay(config: OptimizerConfig) -> float | None:
    return config.weight_decay or None


_OPTIMIZERS: dict[str, Callable[[OptimizerConfig], Any]] = {
    "sgd": lambda config: FusedSGD(config.learning_rate, weight_decay=_decay(config)),
    "momentum": lambda config: _momentum(config, nesterov=False),
    "nesterov": lambda config: _momentum(config, nesterov=True),
    "adam": lambda config: FusedAdam(config.learning_rate, weight_decay=_decay(config)),
    "lars": lambda config: Lars(
        config.learning_rate, momentum=config.momentum, trust=config.lars_trust, decay=config.weight_decay
    ),
}


def build_optimizer(config: OptimizerConfig, variables: Sequence[Any], *, loss_scaling: bool = False) -> Any:
    """Return the Keras optimizer that `config` names, built for `variables`.

    Keras's weight decay is decoupled: each step also moves w by -rate x decay x w. Vectors (biases, normalisation) are
    excluded. With `loss_scaling` the optimizer scales the loss and skips steps whose gradients overflowed.
    """
    optimizer = _OPTIMIZERS[config.optimizer](config)
    if getattr(optimizer, "weight_decay", None):
        # Keras refuses this once the optimizer is built.
        optimizer.exclude_from_weight_decay(var_list=[variable for variable in variables if len(variable.shape) <= 1])
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return optimizer
