"""`hpcdl.DistributedOptimizer`: any Keras optimizer, with gradients combined over the ranks before it uses them.

The optimizer itself is changed, not copied: its class, state, schedules and config stay what they are, and it is saved
as plain Keras. Gradients are exchanged where Keras is about to clip them: after a loss scale has been taken off, and
once for each update where batches are accumulated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.strategies.graph import call_python
from hpcdl.training.keras.exchange import ExchangeSettings, GradientExchange, scaled_by
from hpcdl.training.keras.process_set import ProcessSet, group_of
from hpcdl.training.keras.tensors import turn_begins, turn_ends

LATE_SCALE = (
    "Keras has put a loss scale around hpcdl.DistributedOptimizer, so that ranks would skip different steps; set the "
    "policy mixed_float16 before it is made, or write "
    "hpcdl.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(...))"
)


def DistributedOptimizer(  # noqa: N802  as Keras names
    optimizer: Any,
    name: str | None = None,
    *,
    strategy: str = "ring",
    op: str = "mean",
    compress: str = "none",
    bucket_size: int | str = "25MiB",
    process_set: ProcessSet | None = None,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    average_over: str = "ranks",
    groups: int | Sequence[Sequence[Any]] | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """`optimizer`, a Keras optimizer, its name or its config, made to combine gradients over the ranks. Collective.

    `exchange.ExchangeSettings` says what the settings mean. `backward_passes_per_step` is Horovod's word for Keras's
    `gradient_accumulation_steps`, summed up unless `average_aggregated_gradients`. Under the policy mixed_float16 the
    result scales the loss, on all ranks alike. Before its first update all ranks get rank 0's weights and state.
    """
    chosen = _optimizer_of(optimizer)
    if getattr(chosen, "exchanges", False):
        raise UsageError("this optimizer is distributed already: make it so once, and use it for one model")
    settings = ExchangeSettings(
        strategy=strategy,
        op=op,
        compress=compress,
        bucket_size=bucket_size,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        average_over=average_over,
        groups=groups,
    )
    settings.checked()
    if name is not None:
        chosen.name = name
    factor = _accumulate(chosen, backward_passes_per_step, average_aggregated_gradients)
    if keras.mixed_precision.global_policy().name == "mixed_float16" and not _scales(chosen):
        chosen = keras.optimizers.LossScaleOptimizer(chosen)
    group = group_of(process_set)
    exchange = GradientExchange(group, settings, lambda: shared_variables(chosen))
    for leaf in _leaves(chosen):
        _exchange_in(leaf, exchange, factor, scaled=_scales(chosen))
    _start_alike(chosen, exchange)
    if _scales(chosen):
        _agree_on_finite(chosen, exchange)
    _set(chosen, "exchanges", True)
    return chosen


def load_model(path: Any, custom_objects: Any = None, **settings: Any) -> Any:
    """A saved Keras model, compiled as it was, its optimizer made distributed with its state; every rank reads it.

    `settings` are DistributedOptimizer's.
    """
    model = keras.saving.load_model(path, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise UsageError(f"{path} holds no optimizer; compile the loaded model with hpcdl.DistributedOptimizer(...)")
    model.optimizer = DistributedOptimizer(model.optimizer, **settings)
    return model


def shared_variables(optimizer: Any) -> list[Any]:
    """The weights that an optimizer moves and its own variables, as far as they are the same on all ranks.

    What gradient accumulation has summed up before its exchange is each rank's own.
    """
    own = {id(one) for leaf in _leaves(optimizer) for one in getattr(leaf, "_accumulated_gradients", None) or ()}
    return [*optimizer._trainable_variables, *(one for one in optimizer.variables if id(one) not in own)]


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer that a model was compiled with, and those that it holds for a train_step of its own."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    return list({id(one): one for one in held if isinstance(one, keras.optimizers.Optimizer)}.values())


def prepare_model(model: Any) -> None:
    """What a distributed fit needs of `model`, before its step is traced: no XLA, and samples that are counted."""
    if not getattr(model.optimizer, "exchanges", False):
        return
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
        if group_of(None).rank == 0:
            sys.stderr.write("hpcdl: XLA cannot compile the exchange of gradients: jit_compile is off\n")
    counters = [leaf for leaf in _leaves(model.optimizer) if leaf.counts_samples]
    if counters and not getattr(model.train_step, "counts_samples", False):
        _set(model, "train_step", _counting(model.train_step, counters))
        model.train_function = None


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


def _optimizer_of(given: Any) -> Any:
    try:
        return keras.optimizers.get(given)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"DistributedOptimizer({given!r}): give a Keras 3 optimizer, its name or its config "
            f"({str(error).splitlines()[0]})"
        ) from error


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Set up accumulation in Horovod's words; what Keras's mean over the passes is multiplied with."""
    if passes < 1:
        raise UsageError(f"backward_passes_per_step={passes}: give 1 or more")
    if passes == 1:
        return 1.0
    (leaf, *more) = _leaves(optimizer)
    if more or leaf.built or leaf.gradient_accumulation_steps:
        raise UsageError("backward_passes_per_step: set gradient_accumulation_steps on the Keras optimizer instead")
    leaf.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _leaves(optimizer: Any) -> list[Any]:
    """The optimizers that move weights themselves: one, or those that a MultiOptimizer has."""
    if _scales(optimizer):
        return _leaves(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    return [optimizer] if inner is None else list(inner)


def _set(thing: Any, name: str, value: Any) -> None:
    """Give one object an attribute of its own, past Keras's tracking of attributes."""
    object.__setattr__(thing, name, value)


def _start_alike(optimizer: Any, exchange: GradientExchange) -> None:
    """Before the first update all ranks get rank 0's weights and optimizer variables; when the step is traced."""
    plain, build = optimizer.apply, optimizer.build

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables is not None and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
                optimizer.built = True
        exchange.make_alike([*(variables or ()), *optimizer.variables])
        return plain(grads, variables)

    def build_all(variables: Any) -> None:
        build(variables)
        for leaf in _leaves(optimizer):  # a MultiOptimizer may make its own only now
            if not hasattr(leaf, "counts_samples"):
                raise UsageError(
                    "MultiOptimizer with a function: give it a keras.optimizers.OptimizerMap, whose optimizers are "
                    "known before the first step"
                )

    _set(optimizer, "apply", apply)
    if hasattr(optimizer, "optimizers"):
        _set(optimizer, "build", build_all)


def _exchange_in(optimizer: Any, exchange: GradientExchange, factor: float, *, scaled: bool) -> None:
    """Let one optimizer combine its gradients where Keras clips them."""
    plain, clip = optimizer.apply, optimizer._clip_gradients
    step: dict[str, Any] = {"variables": (), "there": (), "num_samples": None}
    counts = exchange.settings.average_over == "samples"
    if counts and optimizer.gradient_accumulation_steps:
        raise UsageError("average_over='samples' does not go with gradient_accumulation_steps; leave one of them out")

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        if keras.mixed_precision.global_policy().name == "mixed_float16" and not scaled:
            raise UsageError(LATE_SCALE)
        gradients = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise UsageError("float8 variables take gradients for values, which are not exchanged; use another policy")
        step["variables"] = variables
        step["there"] = [gradient is not None for gradient in gradients]
        return plain(gradients, trainable_variables)

    def clip_gradients(grads: Any) -> Any:
        remaining = iter(grads)  # Keras has left out what was None
        gradients = [next(remaining) if there else None for there in step["there"]]
        combined = exchange.combine(gradients, step["variables"], step["num_samples"])
        step["num_samples"] = None
        return clip([scaled_by(factor, one) for one in combined if one is not None])

    def count_samples(num_samples: Any) -> None:
        step["num_samples"] = num_samples

    for name, value in (("apply", apply), ("_clip_gradients", clip_gradients), ("count_samples", count_samples)):
        _set(optimizer, name, value)
    _set(optimizer, "counts_samples", counts)


def _agree_on_finite(optimizer: Any, exchange: GradientExchange) -> None:
    """A loss scale skips a step on all ranks where gradients of one of them are not finite."""
    check = optimizer.check_finite

    def check_finite(grads: Any) -> Any:
        finite = check(grads)
        if exchange.group.size == 1:
            return finite

        def agree(mine: Any) -> bool:
            return exchange.group.agree("a look for overflowing gradients", weight=float(not mine)) == 0

        with tf.control_dependencies(turn_begins()):
            return turn_ends([tf.ensure_shape(call_python(agree, [finite], tf.bool), [])])[0]

    _set(optimizer, "check_finite", check_finite)
