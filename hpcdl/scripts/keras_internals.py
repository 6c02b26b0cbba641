"""Every name inside Keras that hpcdl leans on and Keras does not promise, in one place.

`INTERNALS` is what tests/scripts/test_keras_internals.py holds against the Keras that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from hpcdl.core.errors import UsageError

TESTED = ("3.5", "3.15")
"""The oldest and the newest Keras whose internals these are."""
INTERNALS: dict[str, tuple[Any, str]] = {
    "optimizers clip gradients here: the exchange comes before": (keras.optimizers.Optimizer, "_clip_gradients"),
    "an optimizer's update": (keras.optimizers.Optimizer, "_backend_update_step"),
    "a loss scale looks for gradients that are not finite": (keras.optimizers.LossScaleOptimizer, "check_finite"),
    "an optimizer's scale of the loss": (keras.optimizers.Optimizer, "scale_loss"),
    "the logs of an epoch or evaluation": (keras.Model, "_get_metrics_result_or_logs"),
    "the loss of a training step": (keras.Model, "_compute_loss"),
    "mean and variance of batch normalisation": (keras.layers.BatchNormalization, "_moments"),
    "a list of callbacks gets its model": (keras.callbacks.CallbackList, "set_model"),
    "all layers of a model": (keras.layers.Layer, "_flatten_layers"),
}
"""What for, with the class and the name."""
RESULTS, CLIP, UPDATE = "_get_metrics_result_or_logs", "_clip_gradients", "_backend_update_step"
"""What Keras's fit and evaluate ask for their logs when the last batch is done; steps of an optimizer."""


def check_internals() -> None:
    """UsageError where this Keras lacks one of them."""
    missing = [f"{owner.__name__}.{name}" for owner, name in INTERNALS.values() if not hasattr(owner, name)]
    if missing:
        raise UsageError(
            f"Keras {keras.__version__} has no {', '.join(missing)}; use Keras {TESTED[0]} to {TESTED[1]} with hpcdl"
        )


def trained_by(optimizer: Any) -> list[Any]:
    """The weights that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def accumulators_of(optimizer: Any) -> list[Any]:
    """The gradients that an optimizer sums up before its update; none where it does not."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or ())


def declared_fixed(model: Any) -> Iterator[tuple[Any, Any]]:
    """Every layer's variables that were made with trainable=False, with the layer; not those that were frozen later."""
    for layer in layers_in(model):
        for variable in layer._non_trainable_variables:
            yield layer, variable


def layers_in(model: Any) -> list[Any]:
    """All layers of a model, and of those inside it."""
    return list(model._flatten_layers())


def rate_variable(optimizer: Any) -> Any:
    """What an optimizer holds as its learning rate: a variable, or a schedule."""
    return optimizer._learning_rate


def replace_moments(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `make(plain)` in the place of batch normalisation's mean and variance; once."""
    layer = keras.layers.BatchNormalization
    if not hasattr(layer._moments, "over_ranks"):
        new = make(layer._moments)
        vars(new)["over_ranks"] = True
        layer._moments = new
