"""Check that every rank has built the same network; this module loads Keras.

The weights begin as rank 0's everywhere, and gradients are averaged weight by weight. A function that draws at random,
or reads a file of its own node, would make the mean one of different networks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hpcdl.core.errors import UsageError, shown
from hpcdl.core.protocols import Communicator
from hpcdl.models.check import flat_layers

_OWN = ("name", "seed", "module", "registered_name", "shared_object_id")
"""Entries of a layer's configuration that may differ between processes: random numbers are each rank's own."""


def difference(model: keras.Model, spec: str, workers: Communicator) -> list[str]:
    """Return a line if a rank's network differs from rank 0's in the settings of its layers. Collective.

    Raises:
        UsageError: weights have other shapes or types, so that no mean of them exists.
    """
    if workers.size == 1:
        return []
    weights = [[weight.path, f"{tuple(weight.shape)} {weight.dtype}"] for weight in model.weights]
    layers = [[layer.name, type(layer).__name__, _settings(layer)] for layer in flat_layers(model)]
    # Names count how many layers of a kind a process has made, which may be more on one rank.
    nameless = [[row[1:] for row in rows] for rows in (weights, layers)]
    digests = workers.allgather_json(hashlib.sha256(json.dumps(nameless, sort_keys=True).encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return []
    forms = workers.allgather_json([weights, layers] if workers.rank in (0, odd) else None)
    (weights, layers), (own_weights, own_layers) = forms[0], forms[odd]
    where = f"model {spec!r} differs between rank 0 and rank {odd}"
    remedy = "build it from its arguments alone, and draw from a random generator with a seed of its own"
    if [row[1:] for row in own_weights] != [row[1:] for row in weights]:
        raise UsageError(f"{where}: {_weight_that_differs(weights, own_weights)}; {remedy}")
    return [f"{where}: {_layer_that_differs(layers, own_layers)}; {remedy}"]


def _weight_that_differs(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if len(ours) != len(theirs):
        return f"it has {len(ours)} and {len(theirs)} weights"
    pairs = ((path, form, other) for (path, form), (_, other) in zip(ours, theirs, strict=True) if form != other)
    path, form, other = next(pairs)
    return f"{path} is {form} and {other}"


def _layer_that_differs(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if len(ours) != len(theirs):
        return f"it has {len(ours)} and {len(theirs)} layers"
    for (name, kind, settings), (_, other_kind, other_settings) in zip(ours, theirs, strict=True):
        if kind != other_kind:
            return f"layer {name} is {kind} and {other_kind}"
        if settings != other_settings:
            key, value, other = _entry_that_differs(settings, other_settings)
            return f"{key} of layer {name} is {shown(value)} and {shown(other)}"
    raise AssertionError("the layers are alike")


def _entry_that_differs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return the key and both values of the first difference; of a layer inside another as `layer.config.units`."""
    pairs = ((key, ours.get(key, "absent"), theirs.get(key, "absent")) for key in sorted({*ours, *theirs}))
    key, value, other = next(pair for pair in pairs if pair[1] != pair[2])
    if not isinstance(value, dict) or not isinstance(other, dict):
        return key, value, other
    inner, value, other = _entry_that_differs(value, other)
    return f"{key}.{inner}", value, other


def _settings(layer: Any) -> Any:
    """Return the settings of a layer as JSON; none of a layer of the user's that cannot tell them."""
    try:
        return json.loads(json.dumps(_shared(layer.get_config()), default=_plain))
    except Exception:  # noqa: BLE001  whatever the user's own get_config raises: saving reports it
        return {}


def _shared(value: Any) -> Any:
    """Return a configuration without the entries in `_OWN`, at any depth."""
    if isinstance(value, dict):
        return {str(key): _shared(entry) for key, entry in value.items() if key not in _OWN}
    if isinstance(value, list | tuple):
        return [_shared(entry) for entry in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) or keras.ops.is_tensor(value):
        return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    # Not repr: it may hold an address, which differs in every process.
    return type(value).__name__
