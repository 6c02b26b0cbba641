"""Learning rates of a distributed fit: schedules, and warm-up to a rate that was multiplied by size()."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.process.session import session, size
from hpcdl.step.keras_internals import VARIABLE, rate_variable


@dataclass(kw_only=True)
class Rate:
    """The parts of an optimizer's learning rate: `initial` times the factors of all callbacks.

    `applied` is what these callbacks have set last. If the optimizer has another rate, something else has changed it
    (ReduceLROnPlateau, for example), and the change stays. hpcdl.State keeps both.
    """

    initial: float
    applied: float
    factors: dict[int, float] = field(default_factory=dict)

    def adopt(self, current: float) -> None:
        """Accept a change that something else has made."""
        if current != self.applied:
            self.initial = self.initial * current / self.applied if self.applied else current
            self.applied = current


def rate_of(optimizer: Any) -> Rate | None:
    """Return the parts of an optimizer's learning rate, if a callback or a checkpoint has set them."""
    return getattr(optimizer, "rate_over_ranks", None)


def set_rate(optimizer: Any, rate: Rate) -> None:
    """Set the parts of an optimizer's learning rate, bypassing Keras's tracking of attributes."""
    object.__setattr__(optimizer, "rate_over_ranks", rate)


def rates_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the parts of the optimizers' learning rates as JSON; None for one that no callback has set."""
    rates = [rate_of(optimizer) for optimizer in optimizers]
    return [None if rate is None else [rate.initial, rate.applied] for rate in rates]


def set_rates(optimizers: Iterable[Any], rates: Iterable[Any]) -> None:
    """Restore what `rates_of` returned. Factors belong to the callbacks."""
    for optimizer, pair in zip(optimizers, rates, strict=False):
        if pair is not None:
            rate = rate_of(optimizer)
            factors = {} if rate is None else rate.factors
            set_rate(optimizer, Rate(initial=pair[0], applied=pair[1], factors=factors))


def _current(optimizer: Any) -> float:
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def fixed_rate(optimizer: Any) -> float | None:
    """Return the learning rate of an optimizer without a schedule; None with one."""
    return _current(optimizer) if isinstance(rate_variable(optimizer), VARIABLE) else None


class LearningRate(keras.callbacks.Callback):
    """Before each step sets the initial learning rate times `factor` of the elapsed epochs (2.25, for example).

    With several such callbacks the rate is the initial one times all of their factors.
    """

    def __init__(self, factor: Callable[[float], float], initial_rate: float | None) -> None:
        super().__init__()
        self._factor, self._given = factor, initial_rate
        self._epoch = 0
        self._steps: int | None = None
        self._fit_begins = self._epoch_begins = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agree on the largest number of steps per epoch: the rate must be the same on all ranks."""
        optimizer = self.model.optimizer
        # A loss scale passes the learning rate on to what it wraps.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(inner, "optimizers") or not isinstance(rate_variable(inner), VARIABLE):
            raise UsageError(
                f"{type(inner).__name__} has a schedule of its own, or optimizers of its own: no callback sets its "
                "learning rate; give it a number, or leave hpcdl.learning_rate_warmup and learning_rate_schedule out"
            )
        here = session()
        here.group.agree("the steps of an epoch, for the learning rate")
        by_rank = here.communicator.allgather_json(self.params.get("steps"))
        self._steps = None if None in by_rank else max(by_rank)
        self._fit_begins = True
        if (rate := rate_of(optimizer)) is not None:
            rate.factors.clear()  # the factors of an earlier fit's callbacks

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from this epoch's first step."""
        self._epoch, self._epoch_begins = epoch, True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set this step's rate, or the epoch's if the number of steps per epoch is unknown."""
        optimizer = self.model.optimizer
        rate = self._rate(optimizer)
        # By callback, so that each replaces its own factor and leaves the others'.
        rate.factors[id(self)] = float(self._factor(self._epoch + (batch / self._steps if self._steps else 0.0)))
        wanted = math.prod([rate.initial, *rate.factors.values()])
        # The optimizer holds float32: compared exactly, every step would set the rate anew.
        if numpy.float32(wanted) != numpy.float32(rate.applied):
            optimizer.learning_rate = wanted
            rate.applied = _current(optimizer)

    def _rate(self, optimizer: Any) -> Rate:
        """Return the parts of the rate. At a fit's first step read them again: a checkpoint may have restored them."""
        rate = rate_of(optimizer)
        if rate is None:
            current = _current(optimizer)
            rate = Rate(initial=current, applied=current)
            set_rate(optimizer, rate)
        if self._fit_begins and self._given is not None:
            rate.initial, rate.applied = self._given, _current(optimizer)
        elif self._epoch_begins:
            rate.adopt(_current(optimizer))
        self._fit_begins = self._epoch_begins = False
        return rate


def learning_rate_schedule(factor: Callable[[float], float], *, initial_rate: float | None = None) -> Any:
    """Return a callback that multiplies the learning rate by `factor(epochs)` on all ranks alike; epochs are
    fractional.

    `initial_rate`: the rate to multiply; by default the optimizer's before such a callback set it, which hpcdl.State
    keeps. With learning_rate_warmup both factors apply. Changes by other callbacks between epochs (ReduceLROnPlateau)
    stay, except that an `initial_rate` applies again when a fit begins.
    """
    return LearningRate(factor, initial_rate)


def learning_rate_warmup(epochs: float, *, initial_rate: float | None = None) -> Any:
    """Return a callback that raises the learning rate from 1 / size() of the initial one to all of it over `epochs`.

    It is for a rate that was multiplied by size() (Goyal et al., Accurate, Large Minibatch SGD, section 2.2).
    `initial_rate` is as in learning_rate_schedule.
    """
    if not epochs > 0:
        raise UsageError(f"learning_rate_warmup({epochs}): give a number of epochs above 0")
    first = 1 / size()
    return LearningRate(lambda passed: first + (1 - first) * min(passed / epochs, 1.0), initial_rate)


_END_WITH_TRAINING = (keras.optimizers.schedules.CosineDecay, keras.optimizers.schedules.PolynomialDecay)
"""Schedules that are made for all steps of a training."""
_MOST_OPTIMIZERS = 100
"""Optimizers of a script whose schedules are looked at."""
_AS_LONG = 0.1
"""Largest difference of the steps of all ranks and of a schedule: ranks drop the remainders of epochs."""


def look_at_schedule(optimizer: Any, looks: list[Callable[[], str]], num_ranks: int) -> None:
    """Have the steps of an optimizer's own schedule compared with those it has taken, when the script is over."""
    schedule = rate_variable(optimizer)
    is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    if num_ranks == 1 or not is_schedule or len(looks) >= _MOST_OPTIMIZERS:
        return
    iterations = optimizer.iterations  # not the optimizer, which would keep its variables in memory

    def look() -> str:
        taken = int(iterations.numpy())
        length = _length_of(schedule, taken, taken * num_ranks)
        if not math.isclose(taken * num_ranks, length, rel_tol=_AS_LONG):
            return ""
        return (
            f"{type(schedule).__name__} changes the learning rate over {length} steps, and each of {num_ranks} ranks "
            f"took {taken}: the rate stopped on its way; give it steps of a rank, those of one process divided by "
            "hpcdl.size()"
        )

    looks.append(look)


def _length_of(schedule: Any, taken: int, most: int) -> int:
    """Return after how many steps a schedule ends, about `most`; 0 if it does not end there.

    One of the script's own ends where its rate no longer changes, below the rate after the `taken` steps.
    """
    if isinstance(schedule, _END_WITH_TRAINING):
        return 0 if getattr(schedule, "cycle", False) else schedule.decay_steps + getattr(schedule, "warmup_steps", 0)
    if type(schedule).__module__.startswith("keras."):
        return 0

    def rate(step: float) -> float:
        return float(schedule(tf.constant(int(step), tf.int64)))

    with contextlib.suppress(Exception):  # a script's own class may raise anything
        before, after = (1 - _AS_LONG) * most, (1 + _AS_LONG) * most
        end = rate(after)
        if end == rate(2 * most) == rate(4 * most) and end < rate(taken) and end != rate(before):
            return most
    return 0
