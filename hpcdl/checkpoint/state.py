"""The state of a training run as arrays, and back: weights, optimizer, random state, position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError, cause
from hpcdl.core.units import counted
from hpcdl.models.emulated import LAYERS
from hpcdl.models.saved import OwnCode, check_saved, load_saved

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator


Reader = Callable[[], list["Array"]]
"""Returns views of the values of some variables, valid until the next step changes them."""


def reader(variables: Sequence[Any]) -> Reader:
    """Return a function that reads all `variables` in one call without a copy.

    Reading them one by one takes as long as copying them.
    """
    # Resource handles: reading them in the traced function gives the values at the time of each call.
    handles = [variable.value for variable in variables]
    read = tf.function(lambda: [handle.read_value() for handle in handles], autograph=False).get_concrete_function()
    read()  # the first call does the set-up for later calls
    return lambda: [_as_array(tensor) for tensor in read()]


def copy_of(values: Sequence[Array], prefix: str, memory: MutableMapping[str, Array] | None = None) -> dict[str, Array]:
    """Return copies of a reader's values, named by prefix and position.

    Arrays of an earlier call in `memory` are reused, and new ones are added to it: touching fresh memory costs several
    times as much as the copy itself.
    """
    memory = {} if memory is None else memory
    copies = {}
    for index, value in enumerate(values):
        name = f"{prefix}/{index}"
        if name not in memory or memory[name].shape != value.shape:
            memory[name] = numpy.empty_like(value)
        numpy.copyto(memory[name], value)
        copies[name] = memory[name]
    return copies


def _as_array(tensor: Any) -> Array:
    """Return a tensor as an array, without a copy unless it is a scalar."""
    return numpy.asarray(tensor if tensor.shape.rank else tensor.numpy())


def assign(variables: Sequence[Any], arrays: Mapping[str, Array], prefix: str) -> None:
    """Restore the arrays of `copy_of`; UsageError names the first variable that does not fit."""
    values = {name: array for name, array in arrays.items() if name.startswith(f"{prefix}/")}
    if len(values) != len(variables):
        raise UsageError(
            f"the checkpoint has {len(values)} {prefix} variables, this model {len(variables)}; "
            "resume with the model and optimizer that the run began with"
        )
    for index, variable in enumerate(variables):
        value = values[f"{prefix}/{index}"]
        if value.shape != tuple(variable.shape):
            raise UsageError(f"{variable.path} has shape {tuple(variable.shape)}, the checkpoint {value.shape}")
        variable.assign(value)


def seed_variables(model: keras.Model) -> list[Any]:
    """Return the random states of the model's layers (such as dropout); each rank has its own."""
    # By id: Keras variables have no hash, and == compares their elements. Keras counts seed states among a model's
    # `variables`, not among its `weights`.
    weight_ids = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weight_ids]


def moving_statistics(model: keras.Model) -> dict[int, Any]:
    """Return the weights without gradients (batch normalisation's means and variances), by position in `weights`."""
    trainable = {id(variable) for variable in model.trainable_weights}  # by id, as in seed_variables
    return {index: variable for index, variable in enumerate(model.weights) if id(variable) not in trainable}


def mean_statistics(statistics: Mapping[int, Array], group: Communicator) -> dict[int, Array]:
    """Return the means over the ranks of the values of `moving_statistics`. Collective, one message for all."""
    if not statistics:
        return {}
    values = statistics.values()
    total = numpy.concatenate([value.reshape(-1).astype(numpy.float64) for value in values])
    if group.size > 1:
        group.allreduce(total)
    parts = numpy.split(total / group.size, numpy.cumsum([value.size for value in values])[:-1])
    return {
        index: part.reshape(value.shape).astype(value.dtype)
        for index, part, value in zip(statistics, parts, values, strict=True)
    }


def own_statistics(statistics: Mapping[int, Array], means: Mapping[int, Array]) -> dict[str, Array]:
    """Return copies of the moving statistics that differ from `means` or have none: those saved per rank."""
    return {
        f"statistics/{index}": value.copy()
        for index, value in statistics.items()
        if index not in means or not numpy.array_equal(value, means[index])
    }


def assign_own_statistics(model: keras.Model, arrays: Mapping[str, Array]) -> None:
    """Restore the arrays of `own_statistics`."""
    for name, array in arrays.items():
        kind, _, index = name.partition("/")
        if kind == "statistics":
            model.weights[int(index)].assign(array)


def average_moving_statistics(model: keras.Model, group: Communicator) -> None:
    """Set batch normalisation's running means and variances to the mean over the ranks; collective."""
    if group.size > 1:
        own_values = {index: _as_array(variable.value.value()) for index, variable in moving_statistics(model).items()}
        for index, mean in mean_statistics(own_values, group).items():
            model.weights[index].assign(mean)


def load_weights(model: keras.Model, path: Any) -> str:
    """Load the weights of a saved model: each layer takes those of the layer with the same name and shapes.

    Returns a sentence about the weights taken, so that a new last layer (fine-tuning) does not go unnoticed.
    """
    try:
        source = load_saved(path, LAYERS)
    except OwnCode:
        return _load_whole(model, path)
    except ValueError as error:
        raise UsageError(f"--init-weights {path}: {error}") from error
    offered = {layer.name: layer for layer in source.layers}
    num_taken, fresh_names = 0, []
    for layer in model.layers:
        if not layer.weights:
            continue
        twin = offered.get(layer.name)
        if twin is not None and [w.shape for w in twin.weights] == [w.shape for w in layer.weights]:
            layer.set_weights(twin.get_weights())
            num_taken += 1
        else:
            fresh_names.append(layer.name)
    if not num_taken and not getattr(source, "inputs", None):  # a class: its layers have other names in each object
        return _load_whole(model, path)
    if not num_taken:
        raise UsageError(f"--init-weights {path}: no layer of it fits this model; save it from the same network")
    fresh = f"; fresh: {', '.join(fresh_names)}" if fresh_names else ""
    return f"weights of {counted(num_taken, 'layer')} from {path}{fresh}"


def _load_whole(model: keras.Model, path: Any) -> str:
    """Load the weights of a saved model with layers of the user's own: only those of the same network fit."""
    try:
        check_saved(path, code=False)
        model.load_weights(path)
    except ValueError as error:
        raise UsageError(
            f"--init-weights {path}: it has layers of your own, and its weights do not fit this model as a whole: "
            f"{cause(error)}"
        ) from error
    return f"weights of all layers from {path}"
