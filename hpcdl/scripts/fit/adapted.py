"""Layers that learn from data outside the gradient steps, over all ranks: vocabularies and normalization."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.core.units import listed
from hpcdl.scripts.collectives import tensors
from hpcdl.scripts.collectives.arrays import gather_arrays
from hpcdl.scripts.collectives.primitives import group_of
from hpcdl.scripts.process.session import session, warn_once
from hpcdl.step.keras_internals import layers_in, replace_moments
from hpcdl.supervision.control import digest_of

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup


def synchronize_normalization() -> None:
    """Make Keras's synchronized batch normalization work over the ranks. Call it once, before any step is traced."""

    def over_ranks(plain: Callable[..., Any]) -> Callable[..., Any]:
        def moments(self: Any, inputs: Any, mask: Any) -> Any:
            if not self.synchronized:
                return plain(self, inputs, mask)
            if mask is not None:
                raise UsageError(f"{self.name}: synchronized=True with a mask is not supported; leave one of them out")
            return moments_over_ranks(inputs, self._reduction_axes)

        return moments

    replace_moments(over_ranks)


def moments_over_ranks(inputs: Any, axes: Any) -> tuple[Any, Any]:
    """Return mean and variance of `inputs` over `axes` and all ranks, with gradients. Batch sizes may differ."""
    # Sums of half precision overflow, and round at every rank.
    values = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    count = tf.cast(tf.size(values) / tf.size(tf.reduce_sum(values, axes)), values.dtype)
    sums = tf.concat([tf.reduce_sum(values, axes), [count]], 0)
    total = _total(sums)
    mean = total[:-1] / total[-1]
    shape = [1 if axis in axes else values.shape[axis] for axis in range(len(values.shape))]
    # About the common mean: a difference of two large sums would lose digits, or become negative.
    squares = _total(tf.reduce_sum(tf.math.squared_difference(values, tf.reshape(mean, shape)), axes))
    return tf.cast(mean, inputs.dtype), tf.cast(squares / total[-1], inputs.dtype)


def _total(values: Any) -> Any:
    """Return the sum over the ranks. hpcdl.allreduce is unsuitable, because it marks a step as distributed."""
    return tensors.allreduce(group_of(None), [values], "sum")[0]


_ROWS = 4096
"""Number of rows of an array that ranks exchange at once."""


def adapt(layer: Any, data: Any) -> None:
    """Run `layer.adapt(data)` over the data of all ranks: each gives its own part, and all get the same layer.

    `data`: an array, or a tf.data.Dataset of batches. Normalization exchanges only its moments; layers with
    vocabularies and Discretization see the rows of every rank. Collective.
    """
    group = session().group
    if not callable(getattr(layer, "adapt", None)):
        raise UsageError(f"hpcdl.adapt takes a layer with an adapt method, not {type(layer).__name__}")
    group.agree("hpcdl.adapt", [type(layer).__name__])
    if group.size == 1:
        layer.adapt(data)
    elif isinstance(layer, keras.layers.Normalization):
        _adapt_moments(layer, data, group)
    elif all(callable(getattr(layer, name, None)) for name in ("reset_state", "update_state", "finalize_state")):
        layer.reset_state()
        for rows in _of_all_ranks(_batches(data), group):
            layer.update_state(rows)
        layer.finalize_state()
    else:
        raise UsageError(
            f"{type(layer).__name__} has no update_state: hpcdl.adapt does not know how it learns; call its own adapt "
            "on every rank with the data of all ranks, before hpcdl.dataset"
        )


def _adapt_moments(layer: Any, data: Any, group: ScriptGroup) -> None:
    """Compute mean and variance of all rows from each rank's moments and row count (Chan et al., 1979)."""
    layer.adapt(data)
    mean, variance = (numpy.asarray(moment, numpy.float64) for moment in (layer.adapt_mean, layer.adapt_variance))
    count = sum(rows.size for rows in _batches(data)) / mean.size
    by_rank = group.messages.allgather_json([count, mean.tolist(), variance.tolist()])
    counts = numpy.array([row[0] for row in by_rank])
    means, variances = (numpy.array([row[index] for row in by_rank]) for index in (1, 2))
    if not counts.sum():
        raise UsageError("hpcdl.adapt: no rank has a row of data")
    weights = (counts / counts.sum()).reshape(-1, *[1] * mean.ndim)
    total = (weights * means).sum(0)
    layer.adapt_mean.assign(total)
    layer.adapt_variance.assign((weights * (variances + (means - total) ** 2)).sum(0))
    layer.finalize_state()


def _batches(data: Any) -> Iterator[Array]:
    """Yield arrays of rows, split as the layers' own adapt does it."""
    if isinstance(data, tf.data.Dataset):
        for batch in data:
            yield numpy.asarray(batch[0] if isinstance(batch, tuple) else batch)
        return
    if isinstance(data, Iterable) and not (hasattr(data, "shape") or isinstance(data, list | tuple)):
        raise UsageError(f"hpcdl.adapt takes an array or a tf.data.Dataset, not {type(data).__name__}")
    rows = numpy.asarray(data)
    rows = rows.reshape(-1, 1) if rows.ndim == 1 else rows
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]


def _of_all_ranks(batches: Iterator[Array], group: ScriptGroup) -> Iterator[Any]:
    """Yield every rank's rows, batch by batch in rank order, until no rank has any left."""
    while True:
        batch = next(batches, None)
        text = batch is not None and batch.dtype.kind in "OSU"
        form = None if batch is None else ["text" if text else batch.dtype.name, list(batch.shape[1:])]
        # What rows are like is known to ranks that have some, and all need it to take part.
        forms = [one for one in group.messages.allgather_json(form) if one is not None]
        if not forms:
            return
        if any(one != forms[0] for one in forms):
            raise UsageError(f"hpcdl.adapt: ranks give rows of different kinds, {json.dumps(forms)}")
        kind, shape = forms[0]
        if kind == "text":
            rows = [] if batch is None else [_as_text(one) for one in batch.reshape(-1)]
            by_rank = [row for part in group.messages.allgather_json(rows) for row in part]
            yield tf.reshape(tf.constant([row.encode("utf-8", "surrogateescape") for row in by_rank]), [-1, *shape])
        else:
            # A rank without rows left takes part with none, or the others would wait.
            yield gather_arrays(group, [numpy.zeros((0, *shape), kind) if batch is None else batch])[0]


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def check_adapted(model: Any, group: ScriptGroup) -> None:
    """Raise UsageError on every rank if a layer of `model` was adapted differently on another rank. Collective."""
    own_digests = [(layer.name, digest) for layer in layers_in(model) if (digest := _digest(layer))]
    rows = group.messages.allgather_json([digest for _, digest in own_digests])
    for (name, _), *digests in zip(own_digests, *rows, strict=False):
        if len(set(digests)) > 1:
            raise UsageError(
                f"layer {name} was adapted to other data on each rank; write hpcdl.adapt(layer, data) in the place of "
                "layer.adapt(data), or adapt it to the same data on every rank"
            )


def report_adapted(layers: Iterable[Any], group: ScriptGroup) -> None:
    """Warn once if layers of the same name learned different values on the ranks. Collective: every rank must call it.

    `layers` are those of the whole script: layers that preprocess data belong to no model.
    """
    known = [(layer.name, digest) for layer in layers if (digest := _digest(layer))]
    times = collections.Counter(name for name, _ in known)
    rows = group.messages.allgather_json({name: digest for name, digest in known if times[name] == 1})
    common = [name for name in rows[0] if all(name in row for row in rows)]
    odd = sorted(name for name in common if len({row[name] for row in rows}) > 1)
    if odd:
        warn_once(
            group,
            "layers adapted differently",
            f"{listed(odd)}: adapted to other data on each rank, so that one model gets numbers of different meaning; "
            "write hpcdl.adapt(layer, data) in the place of layer.adapt(data)",
        )


def _digest(layer: Any) -> str:
    """Return a digest of what a layer has learned by adapt; empty for all other layers."""
    if isinstance(layer, keras.layers.Normalization):
        return "".join(map(digest_of, layer.weights))
    if isinstance(layer, keras.layers.Discretization):
        return repr(layer.bin_boundaries)
    if callable(getattr(layer, "get_vocabulary", None)):
        return digest_of(numpy.array(json.dumps([str(token) for token in layer.get_vocabulary()])))
    return ""
