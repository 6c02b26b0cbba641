"""All private names of Keras on which hpcdl depends, in one place.

tests/step/test_keras_internals.py checks `INTERNALS` against the installed Keras.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import keras

from hpcdl.core.errors import UsageError
from hpcdl.models.saved import variable_class

TESTED = ("3.5", "3.15")
"""The oldest and the newest Keras with these internals."""
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
"""The class and name of each internal, by its purpose."""
VARIABLE: type[Any] = variable_class()
REDUCTION = "keras.src.losses.loss.reduce_weighted_values"
"""The function that sums and divides a loss."""
RESULTS, CLIP, UPDATE = "_get_metrics_result_or_logs", "_clip_gradients", "_backend_update_step"
"""Methods that Keras's fit and evaluate call for their logs after the last batch; methods of an optimizer's step."""


def check_internals() -> None:
    """Raise UsageError if this Keras lacks one of the internals."""
    module, _, name = REDUCTION.rpartition(".")
    reduction = [] if hasattr(sys.modules.get(module), name) else [REDUCTION]
    missing = reduction + [f"{owner.__name__}.{name}" for owner, name in INTERNALS.values() if not hasattr(owner, name)]
    if missing:
        raise UsageError(
            f"Keras {keras.__version__} has no {', '.join(missing)}; use Keras {TESTED[0]} to {TESTED[1]} with hpcdl"
        )


def trained_by(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def metrics_inside(metric: Any) -> list[Any]:
    """Return the metrics that a metric holds, whose variables are among its own."""
    return list(getattr(metric, "_metrics", ()))


def accumulators_of(optimizer: Any) -> list[Any]:
    """Return the gradients that an optimizer accumulates before its update; none if it does not accumulate."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or ())


def declared_fixed(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each layer with its variables made with trainable=False; variables that were frozen later are excluded."""
    for layer in layers_in(model):
        for variable in layer._non_trainable_variables:
            yield layer, variable


_SAVING = ("saving.saving_lib", "legacy.saving.legacy_h5_format")
_weighing: list[Callable[[Any, Any], Any]] = []
"""Functions applied to losses while a training step is traced; only the last one applies."""


@contextlib.contextmanager
def losses_weighed(weigh: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Inside, Keras's losses that are means over weights or unmasked values become `weigh(loss, denominator)`.

    Sums over samples become `weigh(loss, None)`. A loss that its own function has reduced already stays as it is.
    """
    module = sys.modules[REDUCTION.rpartition(".")[0]]
    if not hasattr(module.reduce_weighted_values, "weighed"):
        plain = module.reduce_weighted_values

        # Keras's loss classes look the function up in this module, so it is replaced there.
        @functools.wraps(plain)
        def reduce_weighted_values(
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: Any = "sum_over_batch_size",
            **rest: Any,
        ) -> Any:
            loss = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, **rest)
            if not _weighing:
                return loss
            denominator = _denominator(module, sample_weight, mask, reduction)
            is_sum = reduction == "sum" and len(keras.ops.shape(values)) > 0
            return loss if denominator is None and not is_sum else _weighing[-1](loss, denominator)

        vars(reduce_weighted_values)["weighed"] = True
        vars(module)["reduce_weighted_values"] = reduce_weighted_values
    _weighing.append(weigh)
    try:
        yield
    finally:
        _weighing.pop()


def _denominator(module: ModuleType, sample_weight: Any, mask: Any, reduction: Any) -> Any:
    """Return the divisor of a sum of losses in Keras; None if it is the number of values, or there is no division."""
    reduction = module.standardize_reduction(reduction)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        return keras.ops.sum(module.apply_mask(sample_weight, mask, dtype="float32", reduction=reduction))
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        return keras.ops.sum(keras.ops.cast(mask, "float32"))
    return None


def saving_functions() -> list[tuple[ModuleType, str]]:
    """Return the functions that every way to save a model in Keras calls, whatever names a program imported."""
    lib, legacy = (importlib.import_module(f"keras.src.{name}") for name in _SAVING)
    return [(lib, "save_model"), (lib, "save_weights_only"), (legacy, "save_model_to_hdf5")]


def layers_in(model: Any) -> list[Any]:
    """Return all layers of a model, including those of nested models."""
    return list(model._flatten_layers())


def operations_between(layers: list[Any]) -> list[Any]:
    """Return the operations of keras.ops between layers, in those of `layers` that are models."""
    return [operation for layer in layers for operation in getattr(layer, "operations", ()) if operation not in layers]


def rate_variable(optimizer: Any) -> Any:
    """Return an optimizer's learning rate: a variable, or a schedule."""
    return optimizer._learning_rate


def _backend_nn() -> ModuleType:
    """Return the module that implements Keras's activations and attention for TensorFlow."""
    return importlib.import_module("keras.src.backend.tensorflow.nn")


_FUNCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "batch normalisation of a layer's inputs": (lambda: keras.layers.BatchNormalization, "call"),
    "layer normalisation of a layer's inputs": (lambda: keras.layers.LayerNormalization, "call"),
    "the convolution of a layer": (lambda: keras.layers.Conv2D, "convolution_op"),
    "the activation gelu": (_backend_nn, "gelu"),
    "the activation silu": (_backend_nn, "silu"),
    "the activation hard silu": (_backend_nn, "hard_silu"),
    "scaled dot-product attention": (_backend_nn, "dot_product_attention"),
    "the steps of an LSTM": (lambda: keras.layers.LSTM, "inner_loop"),
}
"""Functions of Keras that step/kernels replaces: their owners and names."""
_CALL = "current_call_ctx"
"""Keras's attribute for the state of the layer being called."""


def function_behind(where: str) -> Callable[..., Any] | None:
    """Return Keras's own function of that name, even if it is replaced; None if this Keras has none."""
    owner, name = _FUNCTIONS[where]
    function: Callable[..., Any] | None = getattr(owner(), name, None)
    return getattr(function, "in_place_of", function)


def replacement_of(where: str) -> Callable[..., Any] | None:
    """Return the function that replaces Keras's own; None if none does."""
    owner, name = _FUNCTIONS[where]
    function: Callable[..., Any] | None = getattr(owner(), name, None)
    return function if hasattr(function, "in_place_of") else None


def replace_function(where: str, function: Callable[..., Any]) -> None:
    """Replace Keras's own function by `function`, or restore Keras's own."""
    owner, name = _FUNCTIONS[where]
    plain = function_behind(where)
    if function is not plain:
        vars(function)["in_place_of"] = plain
    setattr(owner(), name, function)


def is_training() -> bool:
    """Whether a layer is being called with training=True; False outside of layers."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    return getattr(state.get_global_attribute(_CALL), "training", None) is True


def passes_training() -> bool:
    """Whether this Keras keeps the training state where `is_training` reads it."""
    training_states = []

    class Asking(keras.layers.Layer):
        def call(self, value: Any, training: Any = None) -> Any:
            training_states.append(is_training())
            return value

    layer = Asking(name="trial_of_a_fast_kernel")  # an explicit name: Keras numbers layers without one
    for training in (True, False):
        layer(keras.ops.zeros(1), training=training)
    return training_states == [True, False]


def onednn_in_use() -> bool:
    """Whether TensorFlow uses oneDNN in this process."""
    port = importlib.import_module("tensorflow.python.util._pywrap_util_port")
    return bool(port.IsMklEnabled())


def replace_moments(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the mean and variance of batch normalisation by `make(plain)`; only once."""
    layer = keras.layers.BatchNormalization
    if not hasattr(layer._moments, "over_ranks"):
        new = make(layer._moments)
        vars(new)["over_ranks"] = True
        layer._moments = new
