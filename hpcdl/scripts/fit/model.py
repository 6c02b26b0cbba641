"""Prepare a model and its optimizers for a distributed fit, and weight their losses.

A loss may be a mean over something other than samples, and then each rank counts in proportion to its denominator. A
rank's loss is S_r / D_r, with D_r the sum of its sample weights or the number of its unmasked values. One process with
the whole batch has sum(S_r) / sum(D_r), which is the mean over the ranks of S_r / D_r * w_r with w_r = D_r * size /
sum(D_r). Loss and gradients are multiplied by w_r, loss by loss. A loss that is a sum over samples is multiplied by the
number of ranks.

Networks that build themselves on their first batch are built earlier, because a state restores existing weights only.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives import tensors
from hpcdl.scripts.fit.batch_losses import batch_losses_checked
from hpcdl.scripts.fit.batch_mixes import EXACT, has_rows
from hpcdl.scripts.fit.batch_sums import batch_sums_checked, has_variables
from hpcdl.scripts.fit.samples import note_samples
from hpcdl.step.keras_internals import losses_weighed

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup


def build_for(model: Any, data: Any) -> None:
    """Create the weights of `model` for what `fit` gets as x, without computing anything. Do nothing if it has them.

    `data`: arrays or tensors, nested as the model takes them, a tf.data.Dataset or a keras.utils.PyDataset. Raises
    UsageError if it does not say what a batch looks like, or if the model cannot be called on that.
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
    """Return objects with the shape and type of a batch's inputs; None if that needs a batch of the data."""
    if isinstance(data, tf.data.Dataset):
        return _first(data.element_spec)
    if isinstance(data, keras.utils.PyDataset):
        return _first(data[0])
    if isinstance(data, list | tuple | Mapping) or hasattr(data, "shape"):
        return data
    return None


def _first(batch: Any) -> Any:
    """Return the inputs of a batch with targets and weights."""
    return batch[0] if isinstance(batch, tuple) else batch


def _symbol_of(value: Any) -> Any:
    array = value if hasattr(value, "shape") else numpy.asarray(value)
    dtype = array.dtype.name if hasattr(array.dtype, "name") else str(array.dtype)
    return keras.KerasTensor((None, *array.shape[1:]), dtype=keras.backend.standardize_dtype(dtype))


@contextlib.contextmanager
def weighed_over_ranks(group: ScriptGroup) -> Iterator[None]:
    """Trace a training step inside this context: losses with their own denominator are weighted by it."""

    def weigh(loss: Any, denominator: Any) -> Any:
        if denominator is None:
            return tf.identity(loss * group.size, EXACT)
        own_denominator = tf.stop_gradient(tf.cast(denominator, tf.float64))
        (total,) = tensors.allreduce(group, [own_denominator], "sum")
        weight = tf.math.divide_no_nan(own_denominator * group.size, tf.stop_gradient(total))
        return tf.identity(loss * tf.cast(weight, loss.dtype), EXACT)

    with losses_weighed(weigh):
        yield


LATE_SCALE = (
    "a loss scale wraps hpcdl.DistributedOptimizer, so that ranks would skip different steps; set the "
    "policy mixed_float16 before it is made, or write "
    "hpcdl.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))"
)


_DEEPEST, _LONGEST = 5, 1000
"""Limits of the search for optimizers in a model's members: its depth, and the length of one container."""
_LIBRARIES = {"builtins", "functools", "hpcdl", "keras", "numpy", "tensorflow", "threading", "types", "weakref"}


def scales(optimizer: Any) -> bool:
    """Return whether it is a loss scale around another optimizer."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def leaves_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that move weights themselves: one, or those of a MultiOptimizer."""
    if scales(optimizer):
        return leaves_of(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    return [optimizer] if inner is None else list(inner)


def set_own(thing: Any, name: str, value: Any) -> None:
    """Set an attribute of one object, bypassing Keras's tracking of attributes."""
    object.__setattr__(thing, name, value)


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer that a model was compiled with, and all that it holds for a custom train_step.

    The search covers dicts, lists, inner models and plain objects of the script.
    """
    optimizers: dict[int, Any] = {}
    seen_ids: set[int] = set()
    # The search is depth-first; the model's own optimizer comes first.
    waiting = [(member, 0) for member in (*reversed(vars(model).values()), getattr(model, "optimizer", None))]
    while waiting:
        thing, depth = waiting.pop()
        if id(thing) in seen_ids:
            continue
        seen_ids.add(id(thing))
        role = _role_of(thing.__class__)
        if role == "optimizer":
            optimizers[id(thing)] = thing
        elif depth < _DEEPEST:
            members = _held_by(thing, role)
            # Most members are numbers and names: every fit visits hundreds of them several times.
            waiting += [(member, depth + 1) for member in reversed(members) if _role_of(member.__class__) != "data"]
    return list(optimizers.values())


def _held_by(thing: Any, role: str) -> list[Any]:
    """Return the members of a container, a layer or a script's object; none for data."""
    if role == "mapping":
        members = list(thing.values())
    elif role == "sequence":
        members = list(thing)
    elif role == "object" and hasattr(thing, "__dict__"):
        members = list(vars(thing).values())
    else:
        return []
    # Long containers hold samples, not optimizers.
    return members if len(members) <= _LONGEST else []


@functools.lru_cache(maxsize=1024)
def _role_of(kind: type) -> Literal["optimizer", "mapping", "sequence", "object", "data"]:
    """Return the role of a class's objects in the search for optimizers. Objects of the libraries are data."""
    if issubclass(kind, keras.optimizers.Optimizer):
        return "optimizer"
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, list | tuple | set | frozenset):
        return "sequence"
    from_script = not issubclass(kind, type | ModuleType) and kind.__module__.partition(".")[0] not in _LIBRARIES
    return "object" if from_script or issubclass(kind, keras.layers.Layer) else "data"


def group_of_fit(model: Any) -> ScriptGroup | None:
    """Return the group in which a model's optimizers exchange gradients; None if none of them does."""
    optimizers = optimizers_of(model)
    # Check inner optimizers too: their fit must also end on all ranks alike, or be refused.
    optimizers += [leaf for optimizer in optimizers for leaf in leaves_of(optimizer) if leaf is not optimizer]
    groups: list[ScriptGroup] = [optimizer.exchanges() for optimizer in optimizers if hasattr(optimizer, "exchanges")]
    return groups[0] if groups else None


def center_of(optimizer: Any) -> Any:
    """Return what moves a rank's own weights for an optimizer (OwnWeights), or None."""
    return getattr(optimizer, "center_exchange", None)


def exchange_of(optimizer: Any) -> Any:
    """Return what exchanges an optimizer's weights or gradients, with `state` and `restore`, or None."""
    return center_of(optimizer) or getattr(optimizer, "gradient_exchange", None)


@contextlib.contextmanager
def center_in_place(*optimizers: Any) -> Iterator[None]:
    """Set the weights that `optimizers` move to the shared ones inside this context (`sync-easgd`, `diloco`, ...).

    Afterwards they are this rank's own again. Other weights stay. Any single rank may do it, since all have the shared
    weights. `fit`, and a model's `save`, `save_weights` and `export`, do it by themselves.
    """
    exchanges = [exchange for exchange in map(center_of, optimizers) if exchange is not None]
    changed = [exchange for exchange in exchanges if exchange.to_center()]
    try:
        yield
    finally:
        for exchange in changed:
            exchange.to_own()


def prepare_model(model: Any) -> None:
    """Prepare `model` for a distributed fit before its step is traced: turn XLA off, and count samples if needed."""
    group = group_of_fit(model)
    if group is None:
        return
    if model.jit_compile:
        # Keras keeps a traced step: with the function dropped it traces one without XLA.
        model.jit_compile = False
        model.train_function = None
        if group.rank == 0:
            sys.stderr.write("hpcdl: XLA cannot compile the exchange of gradients: jit_compile is off\n")
    leaves = leaves_of(model.optimizer) if hasattr(model.optimizer, "exchanges") else []
    counters = [leaf for leaf in leaves if leaf.counts_samples]
    if counters and not getattr(model.train_step, "counts_samples", False):
        set_own(model, "train_step", _counting(model.train_step, counters))
        model.train_function = None
    if group.size > 1 and not getattr(model.train_step, "known_to_ranks", False):
        own_step = type(model).train_step is not keras.Model.train_step
        known = (_summing if own_step else _sharing)(model, model.train_step, group)
        set_own(model, "train_step", known)
        model.train_function = None


def _sharing(model: Any, train_step: Callable[[Any], Any], group: ScriptGroup) -> Callable[[Any], Any]:
    own = "compute_loss" if type(model).compute_loss is not keras.Model.compute_loss else ""

    def sharing(data: Any) -> Any:
        averages = getattr(model.optimizer, "averages_ranks", False)
        with (
            weighed_over_ranks(group) if averages else contextlib.nullcontext(),
            _rows_added(group) if averages and not own else contextlib.nullcontext(),
            batch_losses_checked(group) if averages else contextlib.nullcontext(),
            batch_sums_checked(group, rows_of_batch, own) if averages else contextlib.nullcontext(),
            getattr(model.optimizer, "sharing_loss", contextlib.nullcontext)(),
        ):
            return train_step(data)

    return _of_batch(model, functools.wraps(train_step)(sharing))


@contextlib.contextmanager
def _rows_added(group: ScriptGroup) -> Iterator[None]:
    """Inside, a loss with a number for each sample (reduction="none") is the sum over the samples of all ranks.

    A tape adds up what it derives.
    """
    plain = tf.GradientTape.gradient

    @functools.wraps(plain)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, **rest: Any) -> Any:
        batch = rows_of_batch()
        if batch and output_gradients is None and has_variables(sources) and _by_row(target, batch[0].shape[0]):
            output_gradients = tf.fill(tf.shape(target), tf.cast(group.size, target.dtype))
        return plain(self, target, sources, output_gradients, **rest)

    vars(gradient)["autograph_info__"] = {}  # TensorFlow's mark of functions that AutoGraph does not convert
    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = plain


def _by_row(loss: Any, number: int | None) -> bool:
    """Return whether `loss` has a number for each sample of a batch of `number`; None: not known in tracing."""
    if not tf.is_tensor(loss) or not loss.shape.rank:
        return False
    return bool(loss.shape[0] == number) if tf.executing_eagerly() else has_rows(loss, number)


def _summing(model: Any, train_step: Callable[[Any], Any], group: ScriptGroup) -> Callable[[Any], Any]:
    def summing(data: Any) -> Any:
        averages = any(getattr(optimizer, "averages_ranks", False) for optimizer in optimizers_of(model))
        with batch_sums_checked(group, rows_of_batch, "train_step") if averages else contextlib.nullcontext():
            return train_step(data)

    return _of_batch(model, functools.wraps(train_step)(summing))


def _of_batch(model: Any, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`train_step` of `model`, whose batch the exchanges inside it may look at."""

    @functools.wraps(train_step)
    def stepping(data: Any) -> Any:
        with _batch_under_way(data):
            note_samples(model, rows_of_batch)
            return train_step(data)

    vars(stepping)["known_to_ranks"] = True
    return stepping


_batches: list[Any] = []
"""What the train_step that is being traced was given; a step within a step has its own."""


@contextlib.contextmanager
def _batch_under_way(data: Any) -> Iterator[None]:
    _batches.append(data)
    try:
        yield
    finally:
        _batches.pop()


def rows_of_batch(most: int | None = None) -> list[Any]:
    """Return the first `most` rows, or all, of every tensor of a fit's current batch; empty in a custom loop."""
    return _rows_in(_batches[-1:], most)


def _rows_in(data: Any, most: int | None = None) -> list[Any]:
    given = tf.nest.flatten(data, expand_composites=True)
    rows = [tensor if most is None else tensor[:most] for tensor in given if tf.is_tensor(tensor) and tensor.shape.rank]
    # Texts differ in length; their hashes are compared as all other values are.
    texts = [tf.strings.to_hash_bucket_fast(tensor, 1 << 62) for tensor in rows if tensor.dtype == tf.string]
    return texts + [
        tensor for tensor in rows if tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    ]


_called: list[Any] = []
"""The inputs of the script's last call of a model."""


def note_calls() -> None:
    """Patch models to keep the inputs of their last call, which in a custom loop are the samples of a step."""
    plain = keras.Model.__call__
    if hasattr(plain, "noted"):
        return

    @functools.wraps(plain)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = plain(model, *args, **kwargs)
        _called[:] = args[:1]  # only now, so that those of inner models do not stay
        return outputs

    vars(call).update(noted=True, autograph_info__={})  # the second is TensorFlow's mark: AutoGraph leaves it alone
    keras.Model.__call__ = call


def rows_of_call() -> list[Any]:
    """Return the rows of the last call's inputs, once; none in a fit's step, or if they belong to another graph."""
    given = [] if _batches else tf.nest.flatten(_called, expand_composites=True)
    _called.clear()
    if tf.executing_eagerly():
        given = [tf.convert_to_tensor(array) if isinstance(array, numpy.ndarray) else array for array in given]
        return _rows_in([tensor for tensor in given if isinstance(tensor, tf.__internal__.EagerTensor)])
    graph = tf.compat.v1.get_default_graph()
    return _rows_in([tensor for tensor in given if getattr(tensor, "graph", None) is graph])


def batch_of_loop() -> Any:
    """Return a tensor with the batch of a loop (its last call's inputs) or an eager fit's step; None if unknown."""
    eager = tf.executing_eagerly()
    graph = None if eager else tf.compat.v1.get_default_graph()
    if _batches and not eager:
        return None
    given = tf.nest.flatten(_batches[-1:] or _called, expand_composites=True)
    if eager:  # the last call may have been in a graph
        given = [one for one in given if isinstance(one, numpy.ndarray | tf.__internal__.EagerTensor)]
    return next(
        (one for one in given if getattr(one, "ndim", 0) and (eager or getattr(one, "graph", 0) is graph)), None
    )


def _counting(train_step: Callable[[Any], Any], counters: Sequence[Any]) -> Callable[[Any], Any]:
    @functools.wraps(train_step)
    def counting(data: Any) -> Any:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        first = next(array for array in tf.nest.flatten(inputs) if array is not None)
        for counter in counters:
            counter.count_samples(tf.shape(first)[0])
        return train_step(data)

    vars(counting)["counts_samples"] = True
    return counting
