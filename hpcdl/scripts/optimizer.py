"""`hpcdl.DistributedOptimizer` and `DistributedGradientTape`: combine gradients over the ranks before they are used.

The optimizer is changed in place, not copied. Its class, state, schedules and config stay, and it is saved as plain
Keras. Gradients are exchanged just before Keras clips them: after a loss scale has been removed, and once per update if
gradients are accumulated over several batches.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import keras
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.models.saved import check_saved
from hpcdl.node.engine import slow_precision
from hpcdl.scripts.callbacks import follow_fits
from hpcdl.scripts.collectives.arrays import unconverted
from hpcdl.scripts.collectives.primitives import ProcessSet, group_of
from hpcdl.scripts.collectives.tensors import check_no_strategy, turn_begins, turn_ends
from hpcdl.scripts.exchange import (
    ExchangeSettings,
    GradientExchange,
    keeps_rest,
    key_of,
    make_alike,
    moves_own_weights,
    note_sums,
    scaled_by,
)
from hpcdl.scripts.existing import existing_alike
from hpcdl.scripts.fit.learning_rate import look_at_schedule
from hpcdl.scripts.fit.model import LATE_SCALE, leaves_of, scales, set_own
from hpcdl.scripts.fit.settings import warn_of_other_settings
from hpcdl.scripts.own_weights import CenterExchange
from hpcdl.scripts.periodic import PeriodicExchange
from hpcdl.scripts.process.group import ScriptGroup
from hpcdl.scripts.process.measure import use_kernels_of_launch
from hpcdl.scripts.process.session import session, warn_once
from hpcdl.scripts.process.undistributed import in_fit, note_distributed
from hpcdl.step.keras_internals import CLIP, UPDATE, accumulators_of, trained_by
from hpcdl.strategies.base.graph import call_python
from hpcdl.supervision.runtime import device_in_use

_OLD_KERAS = ("tf_keras.", "tensorflow.python.keras.", "keras.src.legacy.optimizers")
"""Prefixes of the modules that hold the optimizers of Keras 2."""
_OF_TENSORS = (
    "hpcdl.DistributedGradientTape averages gradients of tensors, such as a batch's inputs, over the ranks, whose "
    "samples differ; take those of adversarial examples or of a gradient penalty with a plain tf.GradientTape"
)
_TAPE_ALONE = (
    "this fit takes gradients by hpcdl.DistributedGradientTape, but its optimizer is plain Keras: metrics, files and "
    "the end of an epoch are each rank's own; give it callbacks=[hpcdl.callbacks()] on every rank"
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
    servers: int | None = None,
    elasticity: float | None = None,
    moving_rate: float | None = None,
    period: int | None = None,
    outer_rate: float | None = None,
    outer_momentum: float | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Make a Keras optimizer (an object, a name or a config) combine gradients over the ranks. Collective.

    `exchange.ExchangeSettings` describes the settings. `backward_passes_per_step` is Horovod's name for Keras's
    `gradient_accumulation_steps`, summed unless `average_aggregated_gradients`. Under the policy mixed_float16 the
    result scales the loss, equally on all ranks. Before the first update all ranks get rank 0's weights and state. With
    `sync-easgd`, `local-sgd`, `slowmo` and `diloco` each rank moves its own weights, which are exchanged instead.
    Raises UsageError for settings that exclude each other.
    """
    check_no_strategy(tf.distribute.get_strategy())
    chosen = _optimizer_of(optimizer, name)
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
        servers=servers,
        elasticity=elasticity,
        moving_rate=moving_rate,
        period=period,
        outer_rate=outer_rate,
        outer_momentum=outer_momentum,
    )
    info, group = settings.checked(), group_of(process_set)
    use_kernels_of_launch()
    note_distributed()
    _begin_alike(chosen, group)
    _warn_if_slow(group)
    if moves_own_weights(info):
        return _with_own_weights(chosen, settings, group, backward_passes_per_step)
    factor = _accumulate(chosen, backward_passes_per_step, average_aggregated_gradients)
    return _combining(chosen, settings, group, factor)


def _warn_if_slow(group: ScriptGroup) -> None:
    slow = slow_precision(keras.mixed_precision.global_policy().name)
    if slow and not device_in_use().name:
        warn_once(group, "slow precision", slow)


def _combining(chosen: Any, settings: ExchangeSettings, group: ScriptGroup, factor: float) -> Any:
    """Make `chosen` combine gradients before it uses them. Under mixed_float16 it is wrapped in a loss scale."""
    if keras.mixed_precision.global_policy().name == "mixed_float16" and not scales(chosen):
        chosen = keras.optimizers.LossScaleOptimizer(chosen)
    if scales(chosen) and keeps_rest(settings.compress):
        raise UsageError(
            f"compress={settings.compress!r}: a loss scale changes, and what is left over of gradients would not "
            "follow; use the policy mixed_bfloat16, or compress='fp16'"
        )
    exchange = GradientExchange(group, settings, lambda: shared_variables(chosen))
    if group.size > 1:
        _note_clips()
    set_own(chosen, "gradient_exchange", exchange)
    for leaf in leaves_of(chosen):
        # In each inner optimizer, because a loss scale or a MultiOptimizer only passes gradients on.
        _exchange_in(leaf, exchange, factor, scaled=scales(chosen))
    _start_alike(chosen, group)
    if scales(chosen):
        # One rank's overflow must be a skipped step on all, or weights part.
        _agree_on_finite(chosen, exchange)
    if not hasattr(getattr(chosen, "inner_optimizer", chosen), "optimizers"):
        _share_loss(chosen, exchange)
    set_own(chosen, "averages_ranks", exchange.loss_share is not None)
    set_own(chosen, "exchanges", lambda: exchange.group)
    follow_fits()
    return chosen


def _with_own_weights(optimizer: Any, settings: ExchangeSettings, group: ScriptGroup, passes: int) -> Any:
    """Make `optimizer` move this rank's own weights. On one rank a strategy with a center leaves it unchanged."""
    if passes != 1:
        raise UsageError(
            f"backward_passes_per_step={passes}: strategy {settings.strategy!r} does not have it; leave it out, or use "
            "strategy='ring'"
        )
    if settings.checked().features.elastic:
        center = CenterExchange(group, settings, optimizer)
        _start_alike(optimizer, group)
        if group.size > 1:
            set_own(optimizer, UPDATE, unconverted(center.update))
            set_own(optimizer, "center_exchange", center)
    else:
        periodic = PeriodicExchange(group, settings, optimizer)
        set_own(optimizer, "apply", periodic.around(optimizer.apply))
        _start_alike(optimizer, group)
        set_own(optimizer, "center_exchange", periodic)
    set_own(optimizer, "counts_samples", False)
    set_own(optimizer, "exchanges", lambda: group)
    follow_fits()
    return optimizer


def load_model(path: Any, custom_objects: Any = None, **settings: Any) -> Any:
    """Load a compiled Keras model and make its optimizer, with its state, distributed. Every rank reads the file.

    `settings` are those of DistributedOptimizer. Raises UsageError if the file would unpack to more than is allowed.
    """
    if Path(path).is_file():
        try:
            check_saved(Path(path), code=False)  # the script and Keras decide whether code in the file may run
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
    model = keras.saving.load_model(path, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise UsageError(f"{path} holds no optimizer; compile the loaded model with hpcdl.DistributedOptimizer(...)")
    model.optimizer = DistributedOptimizer(model.optimizer, **settings)
    return model


def shared_variables(optimizer: Any) -> list[Any]:
    """Return the weights that an optimizer moves and its own variables, if they are the same on all ranks.

    Gradients accumulated before their exchange differ between ranks, and are not included.
    """
    own_ids = {id(variable) for leaf in leaves_of(optimizer) for variable in accumulators_of(leaf)}
    return [*trained_by(optimizer), *(variable for variable in optimizer.variables if id(variable) not in own_ids)]


def _optimizer_of(given: Any, name: str | None) -> Any:
    """Return the Keras optimizer that `given` means, with `name` if it is not None."""
    if type(given).__module__.startswith(_OLD_KERAS):
        kind = type(given).__name__
        raise UsageError(
            f"DistributedOptimizer({kind}(...)) of {type(given).__module__.partition('.')[0]}, which is Keras 2: hpcdl "
            f"trains with Keras 3; write keras.optimizers.{kind}, make the model with keras too, and leave "
            "TF_USE_LEGACY_KERAS unset"
        )
    try:
        chosen = keras.optimizers.get(given)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"DistributedOptimizer({given!r}): give a Keras 3 optimizer, its name or its config "
            f"({str(error).splitlines()[0]})"
        ) from error
    if name is not None:
        chosen.name = name
    return chosen


def _begin_alike(optimizer: Any, group: ScriptGroup) -> None:
    """Give all ranks the same weights. Warn of settings that differ and of the script's own `apply`. Collective."""
    settings: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a script's own class may raise anything
        settings = dict(optimizer.get_config())
    warn_of_other_settings(group, type(optimizer).__name__, settings)
    existing_alike(group)
    _warn_of_own_apply(optimizer, group)
    for leaf in leaves_of(optimizer):
        look_at_schedule(leaf, session().last_looks, group.size)


def _warn_of_own_apply(optimizer: Any, group: ScriptGroup) -> None:
    """Warn if an optimizer of the script may change gradients before the ranks have averaged them."""
    for kind in {type(leaf) for leaf in leaves_of(optimizer)}:
        own = [name for name in ("apply", "apply_gradients") if getattr(kind, name).__module__.split(".")[0] != "keras"]
        if own and group.size > 1:
            warn_once(
                group,
                f"own apply of {kind.__name__}",
                f"{kind.__name__} has its own {own[0]}, which sees a rank's gradients before they are averaged; where "
                "it clips or otherwise changes them, use hpcdl.DistributedGradientTape with the plain optimizer",
            )


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Set up accumulation as Horovod means it. Return the factor for Keras's mean over the passes."""
    if passes < 1:
        raise UsageError(f"backward_passes_per_step={passes}: give 1 or more")
    if passes == 1:
        return 1.0
    (leaf, *more) = leaves_of(optimizer)
    if more or leaf.built or leaf.gradient_accumulation_steps:
        raise UsageError("backward_passes_per_step: set gradient_accumulation_steps on the Keras optimizer instead")
    leaf.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


def _start_alike(optimizer: Any, group: ScriptGroup) -> None:
    """Give all ranks rank 0's weights and optimizer variables before the first update, when the step is traced."""
    plain, build = optimizer.apply, optimizer.build

    @unconverted
    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables is not None and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
                optimizer.built = True
        make_alike(group, [*(variables or ()), *optimizer.variables])
        return plain(grads, variables)

    def build_all(variables: Any) -> None:
        build(variables)
        for leaf in leaves_of(optimizer):  # a MultiOptimizer may create its optimizers only here
            if not hasattr(leaf, "counts_samples"):
                raise UsageError(
                    "MultiOptimizer with a function: give it a keras.optimizers.OptimizerMap, whose optimizers are "
                    "known before the first step"
                )

    set_own(optimizer, "apply", apply)
    if hasattr(optimizer, "optimizers"):
        set_own(optimizer, "build", build_all)


def _exchange_in(optimizer: Any, exchange: GradientExchange, factor: float, *, scaled: bool) -> None:
    """Make one optimizer combine its gradients just before Keras clips them."""
    plain, clip = optimizer.apply, getattr(optimizer, CLIP)
    step: dict[str, Any] = {"variables": (), "there": (), "num_samples": None}
    counts = exchange.settings.average_over == "samples"
    if counts and optimizer.gradient_accumulation_steps:
        raise UsageError("average_over='samples' does not go with gradient_accumulation_steps; leave one of them out")

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        if keras.mixed_precision.global_policy().name == "mixed_float16" and not scaled:
            raise UsageError(LATE_SCALE)
        gradients = list(grads)
        variables = trained_by(optimizer) if trainable_variables is None else list(trainable_variables)
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
            raise UsageError("float8 variables take gradients for values, which are not exchanged; use another policy")
        _warn_of_clipped(exchange, gradients)
        step["variables"] = variables
        step["there"] = [gradient is not None for gradient in gradients]
        return plain(gradients, trainable_variables)

    def clip_gradients(grads: Any) -> Any:
        remaining = iter(grads)  # Keras has removed the gradients that were None
        gradients = [next(remaining) if present else None for present in step["there"]]
        shared = getattr(optimizer, "shares_loss", bool)()
        combined = exchange.combine(gradients, step["variables"], step["num_samples"], shared=shared)
        step["num_samples"] = None
        return clip([scaled_by(factor, one) for one in combined if one is not None])

    def count_samples(num_samples: Any) -> None:
        step["num_samples"] = num_samples

    for name, value in (("apply", apply), (CLIP, clip_gradients), ("count_samples", count_samples)):
        set_own(optimizer, name, value)
    set_own(optimizer, "counts_samples", counts)


_clipped: list[weakref.ref[Any]] = []
"""What a function of TensorFlow has clipped last, outside graphs."""


def _note_clips() -> None:
    """Patch TensorFlow's functions that clip to note their results, which outside graphs have no names."""

    def noting(plain: Any) -> Any:
        @unconverted
        @functools.wraps(plain)
        def clip(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if tf.executing_eagerly():
                clipped = result[0] if plain.__name__ == "clip_by_global_norm" else [result]
                _clipped[:] = [weakref.ref(one) for one in clipped if one is not None][-1:]
            return result

        vars(clip)["notes_clips"] = True
        return clip

    for name in ("clip_by_value", "clip_by_norm", "clip_by_global_norm"):
        if not hasattr(getattr(tf, name), "notes_clips"):
            setattr(tf, name, noting(getattr(tf, name)))


def _warn_of_clipped(exchange: GradientExchange, gradients: Sequence[Any]) -> None:
    """Warn if a step has clipped this rank's gradients before the ranks average them."""
    if exchange.group.size == 1:
        return
    names = {str(getattr(one, "name", "")) for one in gradients if not tf.executing_eagerly()}
    # TensorFlow's names of what clips. A gradient of a loss that clips, as PPO's, is named after its tape too.
    in_graph = any("clip_by_" in name and "gradient" not in name for name in names)
    if in_graph or any(one is reference() for reference in _clipped for one in gradients if one is not None):
        warn_once(
            exchange.group,
            "clipped gradients",
            "a step clips gradients before the ranks average them, so that results depend on the number of ranks: take "
            "them with hpcdl.DistributedGradientTape and give them to the plain optimizer, or let the optimizer clip "
            "(global_clipnorm=, clipnorm=, clipvalue=)",
        )


def _share_loss(optimizer: Any, exchange: GradientExchange) -> None:
    """Divide the loss by the number of ranks in Keras's own training step. This saves a pass over all gradients.

    It also keeps a loss scale that of one process: a sample's gradient in half precision is as large as there.
    """
    plain, share = optimizer.scale_loss, exchange.loss_share
    step = {"begun": False, "shared": False}

    @contextlib.contextmanager
    def sharing() -> Iterator[None]:
        step.update(begun=share is not None, shared=False)
        try:
            yield
        finally:
            step.update(begun=False, shared=False)

    def scale_loss(loss: Any) -> Any:
        scaled = plain(loss)
        step["shared"] = step["begun"]
        return scaled * tf.cast(share, scaled.dtype) if step["begun"] else scaled

    def shares() -> bool:
        return step["shared"]

    for name, value in (("sharing_loss", sharing), ("scale_loss", scale_loss)):
        set_own(optimizer, name, value)
    for leaf in leaves_of(optimizer):  # which ask before they combine
        set_own(leaf, "shares_loss", shares)


def _agree_on_finite(optimizer: Any, exchange: GradientExchange) -> None:
    """Make a loss scale skip a step on all ranks if the gradients of any rank are not finite."""
    check = optimizer.check_finite

    def check_finite(grads: Any) -> Any:
        finite = check(grads)
        if exchange.group.size == 1:
            return finite

        def agree(finite: Any) -> bool:
            # The header itself sums the answers, so that this costs no further message.
            return exchange.group.agree("a look for overflowing gradients", weight=float(not finite)) == 0

        with tf.control_dependencies(turn_begins()):
            return turn_ends([tf.ensure_shape(call_python(agree, [finite], tf.bool), [])])[0]

    set_own(optimizer, "check_finite", check_finite)


class DistributedGradientTape:
    """Wraps `tape`: `gradient` returns the mean over the ranks. The settings are those of DistributedOptimizer.

    Use it in place of the tape or around it, before or after recording. Variables whose gradient is asked for get rank
    0's values before the first step. They are compared over the ranks after the first step and at intervals.
    """

    def __init__(
        self,
        tape: Any = None,
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
        servers: int | None = None,
    ) -> None:
        self._tape = tf.GradientTape() if tape is None else tape
        self._group = group_of(process_set)
        use_kernels_of_launch()
        note_distributed()
        if tape is None and tf.executing_eagerly():  # else a forward pass is over, or no value is used yet
            self._group.keep("weights before the first tape", lambda: existing_alike(self._group))
        if keeps_rest(compress):
            raise UsageError(
                f"compress={compress!r}: nobody keeps what it leaves over of a tape's gradients; use "
                "hpcdl.DistributedOptimizer, or 'fp16' or 'bf16' here"
            )
        self._settings = ExchangeSettings(
            strategy=strategy,
            op=op,
            compress=compress,
            bucket_size=bucket_size,
            gradient_predivide_factor=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            average_over=average_over,
            groups=groups,
            servers=servers,
        )
        note_sums(self._group, self._settings)  # before the first gradient, which only then makes an exchange

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tape.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @unconverted
    def gradient(self, target: Any, sources: Any, *args: Any, num_samples: Any = None, **kwargs: Any) -> Any:
        """Return the combined gradients, structured as `sources`. `num_samples` is for `average_over="samples"`."""
        if in_fit() and not session().communicator.monitor.script_steps.counted:
            warn_once(self._group, "a fit with a tape alone", _TAPE_ALONE)
        flat = tf.nest.flatten(sources)
        gradients = self._tape.gradient(target, flat, *args, **kwargs)
        variables = [source for source in flat if hasattr(source, "assign")]
        if not variables and self._group.size > 1:
            warn_once(self._group, "gradients of tensors", _OF_TENSORS)
        exchange = self._exchange(variables)
        make_alike(self._group, variables)
        combined = exchange.combine(gradients, flat, num_samples)
        return tf.nest.pack_sequence_as(sources, combined) if tf.nest.is_nested(sources) else combined[0]

    def _exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """Return the exchange that all tapes with these variables share, step after step."""
        group, settings = self._group, self._settings
        keys = tuple(key_of(variable) for variable in variables)
        # Weak, because the group keeps the exchange, which must not keep a deleted model.
        weak_refs = [weakref.ref(variable) for variable in variables]

        def compared() -> list[Any]:
            return [variable for variable in (reference() for reference in weak_refs) if variable is not None]

        # Later traces use the exchange too: nothing of it may belong to the graph of this one.
        with tf.init_scope():
            return group.keep((repr(settings), keys), lambda: GradientExchange(group, settings, compared))
