"""Networks that their first batch would build, built before it: a state puts weights back that have to exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError


def build_for(model: Any, data: Any) -> None:
    """Give `model` its weights for what `fit` is given as x; nothing is computed. Nothing is done where it has them.

    `data`: arrays or tensors, nested as the model takes them, a tf.data.Dataset or a keras.utils.PyDataset. UsageError
    where it does not say what a batch looks like, or the model cannot be called on that.
    """
    if model.built:
        return
    cause: object = f"{type(data).__name__} does not say what a batch looks like"
    try:
        inputs = _inputs_of(data)
        if inputs is not None:
            model(tf.nest.map_structure(_symbol_of, inputs))
            return
    except Exception as error:  # noqa: BLE001  a model's own call may raise anything
        cause = (str(error).splitlines() or [type(error).__name__])[0]
    raise UsageError(
        f"hpcdl.State has weights to put back, and {model.name} has none before its first batch ({cause}); begin it "
        "with keras.Input(shape), or call it on a batch before fit"
    )


def _inputs_of(data: Any) -> Any:
    """Things with the shape and type of a batch's inputs; None where nobody can tell without taking one."""
    if isinstance(data, tf.data.Dataset):
        return _first(data.element_spec)
    if isinstance(data, keras.utils.PyDataset):
        return _first(data[0])
    if isinstance(data, list | tuple | Mapping) or hasattr(data, "shape"):
        return data
    return None


def _first(batch: Any) -> Any:
    """The inputs of a batch with targets and weights."""
    return batch[0] if isinstance(batch, tuple) else batch


def _symbol_of(one: Any) -> Any:
    found = one if hasattr(one, "shape") else numpy.asarray(one)
    dtype = found.dtype.name if hasattr(found.dtype, "name") else str(found.dtype)
    return keras.KerasTensor((None, *found.shape[1:]), dtype=keras.backend.standardize_dtype(dtype))
