"""The state of a training run as arrays, and back: weights, optimizer, random state, position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy

from hpcdl.core.errors import UsageError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator


def copy_of(variables: Sequence[Any], prefix: str) -> dict[str, Array]:
    """Copies of the variables' values, named by prefix and position."""
    return {f"{prefix}/{index}": numpy.asarray(variable.numpy()).copy() for index, variable in enumerate(variables)}


def assign(variables: Sequence[Any], arrays: Mapping[str, Array], prefix: str) -> None:
    """Put the arrays of `copy_of` back; UsageError names the first variable that does not fit."""
    mine = {name: array for name, array in arrays.items() if name.startswith(f"{prefix}/")}
    if len(mine) != len(variables):
        raise UsageError(
            f"the checkpoint has {len(mine)} {prefix} variables, this model {len(variables)}; "
            "resume with the model and optimizer that the run began with"
        )
    for index, variable in enumerate(variables):
        value = mine[f"{prefix}/{index}"]
        if value.shape != tuple(variable.shape):
            raise UsageError(f"{variable.path} has shape {tuple(variable.shape)}, the checkpoint {value.shape}")
        variable.assign(value)


def seed_variables(model: keras.Model) -> list[Any]:
    """The random states of the model's layers (dropout and its like): each rank has its own."""
    known = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in known]


def average_moving_statistics(model: keras.Model, group: Communicator) -> None:
    """Batch normalisation's running means and variances become the mean over the ranks; collective."""
    if group.size == 1:
        return
    trainable = {id(variable) for variable in model.trainable_weights}
    for variable in model.weights:
        if id(variable) not in trainable:
            value = numpy.asarray(variable.numpy(), numpy.float64).copy()
            group.allreduce(value)
            variable.assign((value / group.size).astype(variable.dtype))


def load_weights(model: keras.Model, path: Any) -> str:
    """Start from the weights of a saved model: each layer takes those of the layer of the same name and shapes.

    Returns a sentence about what was taken, so that a new last layer (fine-tuning) does not go unseen.
    """
    try:
        source = keras.saving.load_model(path, compile=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--init-weights {path}: {str(error).splitlines()[0]}") from error
    offered = {layer.name: layer for layer in source.layers}
    taken, left = 0, []
    for layer in model.layers:
        if not layer.weights:
            continue
        twin = offered.get(layer.name)
        if twin is not None and [w.shape for w in twin.weights] == [w.shape for w in layer.weights]:
            layer.set_weights(twin.get_weights())
            taken += 1
        else:
            left.append(layer.name)
    if not taken:
        raise UsageError(f"--init-weights {path}: no layer of it fits this model; save it from the same network")
    fresh = f"; fresh: {', '.join(left)}" if left else ""
    return f"weights of {taken} layers from {path}{fresh}"
