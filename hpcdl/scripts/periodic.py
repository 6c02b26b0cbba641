"""Strategies in scripts whose ranks take many steps alone and meet periodically: local SGD, SlowMo, DiLoCo.

A step is the optimizer's own and exchanges nothing. At the end of a period an exchange follows the update, in the same
graph. The weights, equations and their state are those of strategies/periodic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.comm.observed import for_exchange
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives.arrays import unconverted
from hpcdl.scripts.collectives.tensors import check_traceable, turn_begins, turn_ends
from hpcdl.scripts.exchange import (
    ExchangeSettings,
    compares_after,
    held,
    key_of,
    name_of,
    note_updates,
)
from hpcdl.scripts.fit.files import save_once
from hpcdl.scripts.fit.model import scales
from hpcdl.scripts.own_weights import OwnWeights
from hpcdl.scripts.process.session import note_settings, note_strategy
from hpcdl.scripts.process.undistributed import note_exchange
from hpcdl.step.keras_internals import rate_variable
from hpcdl.strategies.base.graph import FiniteGuard, call_python
from hpcdl.strategies.base.strategy import Context, StrategyInfo
from hpcdl.strategies.elastic.flat import one_buffer
from hpcdl.strategies.periodic.worker import is_long, momenta_that_end, shared_weights, take_shared

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

_OF, _UPDATES, _OWN = "strategy", "updates", "weights"
"""Names of this rank's state in a checkpoint, beside those of the strategy."""


class PeriodicExchange(OwnWeights):
    """Exchanges weights after every `period`-th update of one optimizer. Creating one is collective in the group."""

    SHARED = "the shared"

    def __init__(self, group: ScriptGroup, settings: ExchangeSettings, optimizer: Any) -> None:
        info = settings.checked()
        _check(info, optimizer)
        super().__init__(group, info, optimizer)
        group.agree("an exchange of weights now and then that begins", [repr(settings)])
        self.period = settings.period or info.features.default_period
        elastic = ElasticConfig(
            period=self.period, outer_rate=settings.outer_rate, outer_momentum=settings.outer_momentum
        )  # fmt: skip
        context = Context(
            info=info,
            communicator=for_exchange(group.messages),
            num_workers=group.size,
            num_servers=0,
            exchange=ExchangeConfig(strategy=info.name, compress=settings.compress),
            optimizer=OptimizerConfig(),
            elastic=elastic,
        )
        self._weights = shared_weights(context)
        self._guard = FiniteGuard(group.rank)
        self._num_exchanges = 0
        self._rate = 0.0
        note_strategy(info.name)
        chosen = {name: getattr(elastic, name) for name in ("period", "outer_rate", "outer_momentum")}
        note_settings({name: value for name, value in chosen.items() if value is not None})
        save_once()

    def shared(self) -> Array:
        """Return the weights that the last exchange produced."""
        return self._weights.weights

    def own_variables(self) -> list[Any]:
        """Return all variables but the update count and the learning rate: momenta and the like are never exchanged."""
        common = {id(self._optimizer.iterations), id(rate_variable(self._optimizer))}
        return [variable for variable in self._optimizer.variables if id(variable) not in common]

    def around(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the optimizer's `apply`: an exchange follows each update that ends a period."""

        @unconverted
        def update(grads: Any, trainable_variables: Any = None) -> Any:
            gradients = list(grads)
            variables = self._variables if trainable_variables is None else list(trainable_variables)
            if self._optimizer.gradient_accumulation_steps:
                raise UsageError(_accumulates(self._info, self._optimizer.gradient_accumulation_steps))
            check_traceable()
            note_exchange(variables)
            moved = [held(variable) for variable in self._variables]
            self._check_types(moved)
            exchanges = self._announced(gradients, variables, moved)
            with tf.control_dependencies([exchanges]):
                result = apply(gradients, variables)
            ended = [held(variable) for variable in momenta_that_end(self._info.name, self._optimizer)]
            took_s = tf.cond(
                exchanges, lambda: take_shared(moved, ended, self._exchange), lambda: tf.zeros([], tf.float64)
            )
            turn_ends([took_s])
            return result

        return update

    def _announced(self, gradients: Sequence[Any], variables: Sequence[Any], moved: Sequence[Any]) -> Any:
        """Return whether this update ends with an exchange, traced into the graph. The update waits for the answer."""
        pairs = [
            (name_of(variable), grad) for variable, grad in zip(variables, gradients, strict=True) if grad is not None
        ]
        values = [tf.convert_to_tensor(getattr(grad, "values", grad)) for _, grad in pairs]
        # A step whose data has ended has no gradient. It must not begin an exchange that it cannot take part in.
        fine = self._guard.before_exchange(values, [name for name, _ in pairs]) if values else tf.constant(True)
        rate = tf.cast(self._optimizer.learning_rate, tf.float64)
        with tf.control_dependencies([*turn_begins(), fine]):
            starts, announced = call_python(self._announce, [rate], [tf.bool, tf.bool])
        starts, announced = tf.ensure_shape(starts, []), tf.ensure_shape(announced, [])

        def start() -> Any:
            first = one_buffer([variable.read_value() for variable in moved])
            return tf.ensure_shape(call_python(self._start, [first, rate], tf.bool), [])

        return tf.cond(starts, start, lambda: announced)

    def _announce(self, rate: Array) -> tuple[Any, Any]:
        """Begin an update. Return whether it is the first one, and whether it ends with an exchange."""
        if self._own is not None:  # a custom loop continues from the shared weights that `fit` has left
            self._own, self._began = None, False
        return numpy.bool_(not self._began), numpy.bool_(self._began and self._step(float(rate)))

    def _start(self, weights: Array, rate: Array) -> Any:
        """Start all ranks with rank 0's weights, which become the shared ones. Collective."""
        self._meet(starts=True)
        self._start_with(weights)
        return numpy.bool_(self._step(float(rate)))

    def _start_with(self, weights: Array) -> None:
        first = weights.copy()
        self.group.messages.broadcast(first, 0)
        self._lay_out()
        self._weights.start(first)
        self._began, self._num_updates = True, 0

    def _meet(self, *, starts: bool) -> None:
        """Wait for all ranks at the start or at an exchange. Raises UsageError on all if some are at the other.

        Both use one agreement, because a rank that joins before the first exchange has to know it.
        """
        begun = self.group.agree(
            "an exchange of weights", self._forms, names=["", *self._names], weight=float(starts)
        )  # fmt: skip
        self.group.when_joined(self._follow)
        if begun not in (0, self.group.size - self.group.num_joined):
            raise UsageError(
                f"{begun:g} of {self.group.size} ranks begin with weights of their own, where others exchange them: "
                "let every rank make the same calls"
            )

    def _lay_out(self) -> None:
        self._weights.variables = list(zip(self._names, self._lengths, strict=True))

    def _step(self, rate: float) -> bool:
        self._guard.step, self._rate = self._num_updates, rate
        exchanges = self._weights.before_step(self._num_updates, rate)
        self._num_updates += 1
        note_updates(self._num_updates, self._name)
        return exchanges

    def _exchange(self, weights: Array) -> tuple[Array, bool]:
        """Return this rank's weights after an exchange, and whether all ranks met. Collective."""
        self._meet(starts=False)
        if not self.group.num_joined:
            self.group.keep("looked for the same samples", lambda: self._look(weights))
        weights = self._weights.exchange(weights)
        self._num_exchanges += 1
        if self.group.num_joined:
            self._level(joined=False)
        elif compares_after(self._num_exchanges, self.group):
            self._compare()
        return weights, self._weights.all_meet

    def _follow(self) -> None:
        """Take part in an exchange of the others after this rank has joined, with its weights as they are.

        If this rank has not begun because it has no data, the others are at the start.
        """
        if not self._began:
            self._start_with(self._flat())
            return
        # Steps that this rank does not take are counted up to the exchange that the others are in.
        while not self._weights.before_step(self._num_updates, self._rate):
            self._num_updates += 1
        self._num_updates += 1
        self._num_exchanges += 1
        self._take(self._weights.exchange(self._flat()))
        self._level(joined=True)

    def _level(self, *, joined: bool) -> None:
        """Copy the shared state of a rank that continues: ranks that have joined used other rates. Collective."""
        going_on = self.group.messages.allgather_json(not joined)
        self._weights.level(self.group.messages, going_on.index(True))

    def _take(self, weights: Array) -> None:
        self._assign(weights)
        if self._weights.all_meet:
            for momentum in momenta_that_end(self._info.name, self._optimizer):
                momentum.assign(numpy.zeros(momentum.shape, numpy.float32))

    def end_steps(self, last: int, *, unequal: bool, over: bool) -> None:
        """At the end of a fit let all ranks meet once more: its last step ends with an exchange, as a run's does."""
        self.to_center()
        if not self._began:
            return
        # Ranks with fewer steps count on as the others do, so that the next exchange finds all at one update.
        self._num_updates = max(self.group.messages.allgather_json(self._num_updates))
        if unequal:
            self._weights.level(self.group.messages, last)
        if over and self._own is not None:
            self.group.agree("the last exchange of weights of a fit", self._forms, names=["", *self._names])
            weights = self._weights.meet(self._own, self._num_updates).copy()
            self._take(weights)
            self._own = weights
            self._assign(self.shared())

    def report_period(self, steps: int | None, epochs: int | None) -> None:
        """Warn once of a period that is long compared with an epoch of a fit."""
        if is_long(self.period, steps or 0) and self.group.rank == 0:
            self.group.keep((self._name, "said that the period is long"), lambda: self._report_long_period(steps))

    def _report_long_period(self, steps: int | None) -> bool:
        sys.stderr.write(
            f"hpcdl: warning: period={self.period} is more than a tenth of an epoch ({steps} steps): ranks drift "
            "apart, and an epoch's evaluation shows weights of the last exchange; compare its accuracy with a shorter "
            "period\n"
        )
        return True

    def state(self) -> dict[str, Array]:
        """Return this rank's state for a checkpoint, beyond the shared weights."""
        if not self._began:
            return {}
        weights = self._flat() if self._own is None else self._own
        return {
            _OWN: weights.copy(),
            _UPDATES: numpy.array(self._num_updates),
            _OF: numpy.frombuffer(self._info.name.encode(), numpy.uint8),
            **self._weights.state(),
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore what `state` returned. The variables hold the shared weights before, and this rank's after."""
        self._own, self._began = None, bool(_OWN in arrays and self._variables)
        if not self._began:
            return
        saved = arrays[_OF].tobytes().decode() if _OF in arrays else "sync-easgd"
        if saved != self._info.name:
            raise UsageError(
                f"strategy={self._info.name!r}: the checkpoint is of {saved!r}, whose state means something else; "
                "keep the strategy, or begin in another folder"
            )
        self._lay_out()
        self._weights.restore(arrays)
        self._weights.start(self._flat())
        self._num_updates = int(arrays[_UPDATES])
        self._assign(arrays[_OWN])
        self._meet(starts=False)  # a rank whose data ends before the next exchange has to know it
        self.group.started.update(map(key_of, [*self._variables, *self._optimizer.variables]))


def _check(info: StrategyInfo, optimizer: Any) -> None:
    """Raise UsageError if an update of the optimizer is not one step of the exchanged weights."""
    name = type(optimizer).__name__
    if scales(optimizer) or keras.mixed_precision.global_policy().name == "mixed_float16":
        raise UsageError(
            f"strategy={info.name!r} has no loss scaling, by which ranks would skip different steps; use the policy "
            "mixed_bfloat16"
        )
    if hasattr(optimizer, "optimizers") or name == "ScheduleFreeAdamW":
        what = "one optimizer for all weights" if hasattr(optimizer, "optimizers") else "no second copy of the weights"
        raise UsageError(f"strategy={info.name!r} takes {what}, not {name}; use another optimizer, or strategy='ring'")
    if optimizer.use_ema:
        raise UsageError(
            f"strategy={info.name!r} does not have use_ema: at the end of a fit each rank's average would take the "
            "place of the shared weights; leave it out"
        )
    if optimizer.gradient_accumulation_steps:
        raise UsageError(_accumulates(info, optimizer.gradient_accumulation_steps))


def _accumulates(info: StrategyInfo, steps: int) -> str:
    return (
        f"gradient_accumulation_steps={steps}: strategy {info.name!r} has a period in updates, not in batches; leave "
        "it out, or use strategy='ring'"
    )
