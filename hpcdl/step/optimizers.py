"""Keras optimizers from settings; weight decay spares biases and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hpcdl.config.schema import OptimizerConfig
from hpcdl.step.fused import FusedAdam, FusedSGD
from hpcdl.step.lars import Lars


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
    """The Keras optimizer that `config` names, built for `variables`.

    Keras's weight decay is decoupled: each step also moves w by -rate x decay x w. Vectors (biases, normalisation)
    are left out. With `loss_scaling` the optimizer scales the loss and skips steps whose gradients overflowed.
    """
    optimizer = _OPTIMIZERS[config.optimizer](config)
    if getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_list=[item for item in variables if len(item.shape) <= 1])
    if loss_scaling:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(variables)
    return optimizer
