"""What a distributed fit asks of a model and of the optimizers that it has, and how it weighs their losses.

A loss may be a mean over something else than samples: each rank's counts as much as its denominator does. A rank's
loss is S_r / D_r, with D_r the sum of its sample weights or the number of its values that no mask hides. One process
with the whole batch has sum(S_r) / sum(D_r), which is the mean over the ranks of S_r / D_r * w_r with
w_r = D_r * size / sum(D_r). Loss and gradients are multiplied with w_r, loss by loss.

Networks that their first batch would build, built before it: a state puts weights back that have to exist.
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
from hpcdl.step.keras_internals import losses_weighed

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup


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


@contextlib.contextmanager
def weighed_over_ranks(group: ScriptGroup) -> Iterator[None]:
    """Inside, a training step is traced: its losses that have a denominator of their own are weighed by it."""

    def weigh(loss: Any, denominator: Any) -> Any:
        mine = tf.stop_gradient(tf.cast(denominator, tf.float64))
        (total,) = tensors.allreduce(group, [mine], "sum")
        weight = tf.math.divide_no_nan(mine * group.size, tf.stop_gradient(total))
        return loss * tf.cast(weight, loss.dtype)

    with losses_weighed(weigh):
        yield


LATE_SCALE = (
    "a loss scale stands around hpcdl.DistributedOptimizer, so that ranks would skip different steps; set the "
    "policy mixed_float16 before it is made, or write "
    "hpcdl.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))"
)


_DEEPEST, _LONGEST = 5, 1000
"""How deep optimizers are looked for in what a model holds, and in how many members of one container."""
_LIBRARIES = {"builtins", "functools", "hpcdl", "keras", "numpy", "tensorflow", "threading", "types", "weakref"}


def scales(optimizer: Any) -> bool:
    """Whether it is a loss scale around another optimizer."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def leaves_of(optimizer: Any) -> list[Any]:
    """The optimizers that move weights themselves: one, or those that a MultiOptimizer has."""
    if scales(optimizer):
        return leaves_of(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    return [optimizer] if inner is None else list(inner)


def set_own(thing: Any, name: str, value: Any) -> None:
    """Give one object an attribute of its own, past Keras's tracking of attributes."""
    object.__setattr__(thing, name, value)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer that a model was compiled with, and all that it holds for a train_step of its own.

    They may lie in dicts, lists, inner models and plain objects of the script's, which are looked through.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    # What was found last is looked at next; the model's own optimizer comes first.
    waiting = [(one, 0) for one in (*reversed(vars(model).values()), getattr(model, "optimizer", None))]
    while waiting:
        thing, depth = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        role = _role_of(thing.__class__)
        if role == "optimizer":
            found[id(thing)] = thing
        elif depth < _DEEPEST:
            held = _held_by(thing, role)
            # Most members are numbers and names: every fit looks through hundreds, several times.
            waiting += [(one, depth + 1) for one in reversed(held) if _role_of(one.__class__) != "data"]
    return list(found.values())


def _held_by(thing: Any, role: str) -> list[Any]:
    """What a container, a layer or an object of the script's own holds; nothing for what is data."""
    if role == "mapping":
        held = list(thing.values())
    elif role == "sequence":
        held = list(thing)
    elif role == "object" and hasattr(thing, "__dict__"):
        held = list(vars(thing).values())
    else:
        return []
    # Long ones hold samples, not optimizers.
    return held if len(held) <= _LONGEST else []


@functools.lru_cache(maxsize=1024)
def _role_of(kind: type) -> Literal["optimizer", "mapping", "sequence", "object", "data"]:
    """What objects of a class are in the search for optimizers; those of the stack's libraries are data."""
    if issubclass(kind, keras.optimizers.Optimizer):
        return "optimizer"
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, list | tuple | set | frozenset):
        return "sequence"
    own = not issubclass(kind, type | ModuleType) and kind.__module__.partition(".")[0] not in _LIBRARIES
    return "object" if own or issubclass(kind, keras.layers.Layer) else "data"


def group_of_fit(model: Any) -> ScriptGroup | None:
    """The ranks that a model's optimizers exchange gradients with; None where none of them does."""
    found = optimizers_of(model)
    # One that stands inside another is looked at too: its fit must end alike, or be refused.
    found += [leaf for one in found for leaf in leaves_of(one) if leaf is not one]
    groups: list[ScriptGroup] = [one.exchanges() for one in found if hasattr(one, "exchanges")]
    return groups[0] if groups else None


def center_of(optimizer: Any) -> Any:
    """What moves weights of a rank's own for an optimizer (OwnWeights), where something does; else None."""
    return getattr(optimizer, "center_exchange", None)


def exchange_of(optimizer: Any) -> Any:
    """What exchanges an optimizer's weights or gradients, with `state` and `restore`; None where nothing does."""
    return center_of(optimizer) or getattr(optimizer, "gradient_exchange", None)


@contextlib.contextmanager
def center_in_place(*optimizers: Any) -> Iterator[None]:
    """Inside, the weights that `optimizers` move are those that all ranks share (`sync-easgd`, `diloco` and its like).

    Afterwards they are this rank's own again. Others are left as they are. Every rank has them: one of them alone may
    look. `fit`, and a model's `save`, `save_weights` and `export`, do it by themselves.
    """
    exchanges = [exchange for exchange in map(center_of, optimizers) if exchange is not None]
    changed = [exchange for exchange in exchanges if exchange.to_center()]
    try:
        yield
    finally:
        for exchange in changed:
            exchange.to_own()


def prepare_model(model: Any) -> None:
    """What a distributed fit needs of `model`, before its step is traced: no XLA, and what its optimizer counts on."""
    group = group_of_fit(model)
    if group is None:
        return
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
        if group.rank == 0:
            sys.stderr.write("hpcdl: XLA cannot compile the exchange of gradients: jit_compile is off\n")
    leaves = leaves_of(model.optimizer) if hasattr(model.optimizer, "exchanges") else []
    counters = [leaf for leaf in leaves if leaf.counts_samples]
    if counters and not getattr(model.train_step, "counts_samples", False):
        set_own(model, "train_step", _counting(model.train_step, counters))
        model.train_function = None
    own_step = type(model).train_step is not keras.Model.train_step
    if group.size > 1 and not own_step and not getattr(model.train_step, "shares_loss", False):
        set_own(model, "train_step", _sharing(model, model.train_step, group))
        model.train_function = None


def _sharing(model: Any, train_step: Callable[[Any], Any], group: ScriptGroup) -> Callable[[Any], Any]:
    @functools.wraps(train_step)
    def sharing(data: Any) -> Any:
        averages = getattr(model.optimizer, "averages_ranks", False)
        with (
            weighed_over_ranks(group) if averages else contextlib.nullcontext(),
            getattr(model.optimizer, "sharing_loss", contextlib.nullcontext)(),
        ):
            return train_step(data)

    vars(sharing)["shares_loss"] = True
    return sharing


def _counting(train_step: Callable[[Any], Any], counters: Sequence[Any]) -> Callable[[Any], Any]:
    @functools.wraps(train_step)
    def counting(data: Any) -> Any:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        first = next(one for one in tf.nest.flatten(inputs) if one is not None)
        for counter in counters:
            counter.count_samples(tf.shape(first)[0])
        return train_step(data)

    vars(counting)["counts_samples"] = True
    return counting
