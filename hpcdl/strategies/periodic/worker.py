"""A worker that updates its weights with its own optimizer, and exchanges with the others every `--period` steps.

A step is that of `single`; a step that ends with an exchange has an all-reduce after it, in the same graph. Evaluation,
checkpoints and the saved model use the shared weights of the last exchange. Each worker keeps its own weights and its
own optimizer's state (momentum, Adam's moments), which no exchange changes; checkpoints hold both. Moving statistics of
batch normalisation are averaged at each exchange.

`--period auto`: the shortest period whose exchanges cost a tenth of the time, found in the run's first steps.

In the first steps each worker times its own steps. Then all workers time an exchange, and the slowest worker's numbers
count. A deterministic run measures nothing, because its choice could differ between runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.config.settings import AUTO
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import counted, format_seconds
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.graph import FiniteGuard, call_python, seconds_after, timestamp
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.elastic.flat import assign_pieces, one_buffer, unpacked
from hpcdl.strategies.periodic.methods import METHODS
from hpcdl.strategies.periodic.shared import PREFIX, SharedWeights
from hpcdl.strategies.periodic.streaming import StreamedWeights

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


LONGEST_SHARE = 10
"""A period longer than an epoch divided by this causes a warning, and is not chosen."""
SHARE = 0.1
"""The fraction of time that exchanges may take."""
WARMUP, TIMED = 3, 9
"""Uncounted steps (the first one traces the graph), and counted steps."""
_CHOSEN = "periodic/chosen"


def period_for(step_s: float, exchange_s: float, epoch: int, multiple: int = 1) -> int:
    """Return the period for steps of `step_s` seconds and exchanges of `exchange_s`, up to a tenth of an `epoch`.

    `epoch` is in steps; 0 means no limit. The result is a multiple of `multiple`, which may make it exceed the limit.
    """
    steps = math.ceil(exchange_s * (1 - SHARE) / SHARE / step_s)  # exchange / (exchange + n step) <= SHARE, for n
    if epoch:
        steps = min(steps, epoch // LONGEST_SHARE)
    # Nodes exchange at every `multiple`-th step, so other periods would not end with them.
    return max(1, math.ceil(steps / multiple)) * multiple


def is_long(period: int, epoch: int) -> bool:
    """Whether a period is so long compared with an `epoch` (steps, 0: unknown) that it causes a warning."""
    return epoch > 0 and period * LONGEST_SHARE > epoch


class PeriodChoosing:
    """The progress of the choice; `period` is 0 until it is made."""

    def __init__(self, context: Context) -> None:
        self.period = 0
        self._default = context.info.features.default_period
        self._epoch = context.steps_per_epoch
        self._within = context.elastic.period_within or 1
        self._deterministic = context.deterministic
        self._seconds: list[float] = []
        self._began_s, self._counts = 0.0, False
        self._by: tuple[float, float] | None = None

    def began(self, *, all_meet: bool) -> None:
        """Note that a step begins; it counts unless it ends with an exchange of all workers."""
        self._began_s, self._counts = time.perf_counter(), not all_meet

    def timed_enough(self) -> bool:
        """Note that a step is over. Return whether the choice can be made; the same on every worker."""
        if self.period:
            return False
        if self._counts:
            self._seconds.append(time.perf_counter() - self._began_s)
        return self._deterministic or len(self._seconds) == WARMUP + TIMED

    def choose(self, shared: SharedWeights) -> str:
        """Choose the period, and return a message with the reason. Collective."""
        if self._deterministic:
            self.period = math.ceil(min(self._default, self._longest()) / self._within) * self._within
            return f"--period auto: {counted(self.period, 'step')} (not measured, because of --deterministic)"
        own_seconds = [statistics.median(self._seconds[WARMUP:]), shared.exchange_seconds()]
        # Of the slowest worker: all wait for it, and all must choose the same period.
        step_s, exchange_s = numpy.max(shared.group.allgather_json(own_seconds), axis=0).tolist()
        self._by = step_s, exchange_s
        self.period = period_for(step_s, exchange_s, self._epoch, self._within)
        cost = exchange_s / (exchange_s + self.period * step_s)
        text = (
            f"--period auto: {counted(self.period, 'step')}; a step takes {format_seconds(step_s)}, an exchange "
            f"{format_seconds(exchange_s)}, so exchanges are {cost:.1%} of the time"
        )
        if cost > SHARE:
            text += f"; a longer period would be more than a tenth of an epoch ({self._epoch} steps)"
        return text

    def state(self) -> dict[str, Array]:
        """Return the state for a checkpoint: the choice, once it is made."""
        if not self.period:
            return {}
        return {_CHOSEN: numpy.array([self.period, *(self._by or ())], numpy.float64)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore an earlier choice."""
        if _CHOSEN in arrays:
            period, *by = arrays[_CHOSEN].tolist()
            self.period, self._by = int(period), (by[0], by[1]) if by else None

    def details(self) -> dict[str, Any]:
        """Return the choice for the record; empty if the run was too short for one."""
        if not self.period:
            return {}
        seconds = dict(zip(("step_seconds", "exchange_seconds"), self._by or (), strict=False))
        return {"period": {"steps": self.period, **seconds}}

    def _longest(self) -> int:
        return max(1, self._epoch // LONGEST_SHARE) if self._epoch else self._default


_OWN = f"{PREFIX}own/"


class Periodic:
    """Every method of methods.py as a strategy of the same name."""

    def worker(self, context: Context) -> Worker:
        """Return the worker: all ranks are workers."""
        return PeriodicWorker(context)

    def server(self, context: Context) -> Server:
        """Fail: there are no servers."""
        raise AssertionError("periodic averaging has no servers")


class PeriodicWorker(Worker):
    """Applies its own gradients; at each exchange takes the weights that all workers share."""

    moves_first = True

    def __init__(self, context: Context) -> None:
        self._shared = shared_weights(context)
        self.exchanges_between_steps = METHODS[context.info.name].streaming is not None
        self._guard = FiniteGuard(self._shared.group.rank)
        self._name = context.info.name
        self._variables: Sequence[Any] = ()
        self._trainable: list[Any] = []
        self._restored: list[Array] = []
        self.warnings = [*_warnings(context), *_warnings_of_nodes(context, self._shared)]
        with tf.device("CPU"):  # it selects the branch of the graph
            self._exchanges = tf.Variable(False, trainable=False)
        self._exchanging = False
        self._alone = False
        self._averaged: list[Any] = []
        self._ended: list[Any] = []
        self._choosing = PeriodChoosing(context) if context.elastic.period == AUTO else None
        self._news = ""

    def start(self, variables: Sequence[Any]) -> None:
        """Broadcast rank 0's weights, which become the shared ones; a resumed worker then restores its own."""
        broadcast_variables(self._shared.group, variables)
        self._variables = variables
        self._trainable = [variable for variable in variables if variable.trainable]
        self._check_types(self._trainable)
        values = [numpy.array(variable) for variable in self._trainable]
        self._shared.variables = [(item.path, value.size) for item, value in zip(self._trainable, values, strict=True)]
        self._shared.start(numpy.concatenate([value.reshape(-1) for value in values]))
        if self._restored:
            for variable, value in zip(variables, self._restored, strict=True):
                variable.assign(value)
            self._restored = []

    def before_step(self, step: int) -> None:
        """Tell the graph whether this step ends with an exchange; store the step for error messages."""
        self._guard.step = step
        exchanging = self._shared.before_step(step, self.learning_rate) and not self._alone
        if self._choosing is not None:
            self._choosing.began(all_meet=exchanging and self._shared.all_meet)
        if exchanging != self._exchanging:
            self._exchanges.assign(exchanging)
            self._exchanging = exchanging

    def after_step(self, step: int) -> None:
        """Choose the period if it is `auto` and enough steps are timed. Collective then."""
        if self._choosing is not None and self._choosing.timed_enough():
            self._news = self._choosing.choose(self._shared)
            self._shared.period = self._choosing.period

    def news(self) -> str:
        """Return the chosen period with the reason, once."""
        text, self._news = self._news, ""
        return text

    def leaves_early(self, gradients: Sequence[Any]) -> bool:
        """Return False: gradients are not sent."""
        return False

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Apply the local gradients; then, in a step that ends with an exchange, take the shared weights."""
        if [id(variable) for variable in variables] != [id(variable) for variable in self._trainable]:
            raise HpcdlError("the model's trainable variables changed after the start; freeze layers before training")
        names = [variable.path for variable in variables]
        fine = [self._guard.before_exchange(gradients, names)] if self.checks_finite else gradients
        with tf.control_dependencies(fine):
            began = timestamp()
        with tf.control_dependencies([began]):
            optimizer.apply(gradients, variables)
            exchanging = self._exchanges.read_value()
        averaged = [*variables, *self._statistics(optimizer)]
        self._check_types(averaged)
        self._shared.lay_out([(extra.path, int(numpy.prod(extra.shape))) for extra in averaged[len(variables) :]])
        ended = momenta_that_end(self._name, optimizer)
        self._averaged, self._ended = averaged, ended
        took_s = tf.cond(
            exchanging, lambda: take_shared(averaged, ended, self._exchanged), lambda: tf.zeros([], tf.float64)
        )
        # The update precedes the exchange but is timed as if it followed: the parts of a step are sums.
        return seconds_after(began, took_s)

    def center(self) -> list[Array] | None:
        """Return the shared weights, variable by variable; None before the start."""
        if not self._trainable:
            return None
        return unpacked(self._shared.weights, [tuple(variable.shape) for variable in self._trainable])

    def state(self) -> dict[str, Array]:
        """Return this worker's weights and optimizer state, the outer momentum, and the rates of the steps so far."""
        own_arrays = {f"{_OWN}{index}": numpy.array(variable) for index, variable in enumerate(self._variables)}
        chosen = {} if self._choosing is None else self._choosing.state()
        return {**own_arrays, **self._shared.state(), **chosen}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the state; do nothing with a checkpoint of another strategy."""
        count = sum(name.startswith(_OWN) for name in arrays)
        if count:
            self._restored = [arrays[f"{_OWN}{index}"] for index in range(count)]
            self._shared.restore(arrays)
            if self._choosing is not None:
                self._choosing.restore(arrays)
                self._shared.period = self._choosing.period
                self._news = (
                    f"--period auto: {counted(self._choosing.period, 'step')}, as before"
                    if self._choosing.period
                    else ""
                )

    def level(self, group: Communicator, done: int, take_steps: Callable[[int], None]) -> None:
        """Catch up with the most advanced survivor and with the latest exchange that any of them completed. Collective.

        No worker is past an exchange that another has not reached, so at most one is missing. If no survivor completed
        it, they repeat it once all have reached it. A worker's own steps stay; it takes the missing ones.
        """
        shared = self._shared
        shared.regroup(group)
        # A worker that has begun no step is at the common start, where no exchange can be missing.
        own_last = done if shared.last_exchange is None else shared.last_exchange
        answers = group.allgather_json((done, own_last))
        furthest, last = (max(numbers) for numbers in zip(*answers, strict=True))
        missed = own_last < last
        if any(each < last for _, each in answers):
            shared.take_missed([each for _, each in answers].index(last), missed=missed)
        if missed:  # its moving statistics stay its own until the next exchange
            self._move(self.center() or [])
        self._alone = True  # a worker that is behind completes its round without exchanges
        take_steps(furthest - done)
        if last < furthest and shared.ends_round(furthest):
            self._meet(furthest)

    def _meet(self, done: int) -> None:
        """Repeat the broken exchange after `done` steps among the survivors."""
        flat = numpy.concatenate([numpy.array(variable).reshape(-1) for variable in self._averaged])
        flat = self._shared.repeat(flat, done)
        self._move(unpacked(flat, [tuple(variable.shape) for variable in self._averaged]))

    def _move(self, values: Sequence[Array]) -> None:
        # `center` has trainable variables only, which are the first of `_averaged`.
        for variable, value in zip(self._averaged, values, strict=False):
            variable.assign(value)
        for variable in self._ended:
            variable.assign(tf.zeros_like(variable))

    def details(self) -> dict[str, Any]:
        """Return this worker's details for the record."""
        chosen = {} if self._choosing is None else self._choosing.details()
        return {**self._shared.details(), **chosen}

    def finish(self, *, early: bool = False) -> None:
        """Free the buffers."""
        self._shared.close()

    def _statistics(self, optimizer: Any) -> list[Any]:
        """Return the model's weights that have no gradient."""
        ids_with_gradient = {id(variable) for variable in (*self._trainable, *optimizer.variables)}
        return [variable for variable in self._variables if id(variable) not in ids_with_gradient]

    def _check_types(self, variables: Sequence[Any]) -> None:
        odd_types = {str(variable.dtype) for variable in variables} - {"float32"}
        if odd_types:
            raise UsageError(
                f"strategy {self._name!r} keeps its weights in float32, the model has {', '.join(sorted(odd_types))} "
                "ones; use --strategy ring"
            )

    def _exchanged(self, weights: Array) -> tuple[Array, bool]:
        return self._shared.exchange(weights), self._shared.all_meet


def shared_weights(context: Context) -> SharedWeights:
    """Return the shared weights of the method that `context` names, in fragments if the method has them."""
    return (SharedWeights if METHODS[context.info.name].streaming is None else StreamedWeights)(context)


def momenta_that_end(name: str, optimizer: Any) -> list[Any]:
    """Return SGD's velocities for methods that reset them at exchanges. Adam's moments are tied to its step count."""
    if not METHODS[name].resets_momentum:
        return []
    # LossScaleOptimizer holds the optimizer that has them; SGD without momentum has none.
    return list(getattr(getattr(optimizer, "inner_optimizer", optimizer), "momentums", None) or [])


def take_shared(averaged: Sequence[Any], ended: Sequence[Any], exchange: Callable[[Array], tuple[Array, bool]]) -> Any:
    """Traced into the graph: `averaged` become the flat result of `exchange`, and `ended` zero.

    `exchange` also returns whether all workers took part. Returns its seconds, float64.
    """

    def timed(local: Array) -> tuple[Array, Any, Any]:
        began_s = time.monotonic()
        weights, all_met = exchange(local)
        return weights, numpy.float64(time.monotonic() - began_s), numpy.bool_(all_met)

    weights, took_s, all_met = call_python(timed, [one_buffer(averaged)], [tf.float32, tf.float64, tf.bool])
    assign_pieces(averaged, weights)
    for variable in ended:
        # A mean over one node's workers is no exchange of the method, so it does not reset the momentum.
        variable.assign(tf.where(tf.ensure_shape(all_met, []), tf.zeros_like(variable), variable))
    return tf.ensure_shape(took_s, [])


def _warnings(context: Context) -> list[str]:
    """Warn of a period so long that workers drift apart, and that evaluation uses old weights."""
    period, epoch = context.elastic.period_steps, context.steps_per_epoch
    if not is_long(period, epoch):
        return []
    return [
        f"--period {period} is more than a tenth of an epoch ({epoch} steps): workers drift apart, and an epoch's "
        "evaluation shows weights of the last exchange; compare its accuracy with a shorter --period"
    ]


def _warnings_of_nodes(context: Context, shared: SharedWeights) -> list[str]:
    """Warn if exchanges inside a node save nothing, or do not occur."""
    within, num_workers, num_nodes = context.elastic.period_within, context.num_workers, shared.num_nodes
    if within is None:
        return []
    if num_nodes == 1:
        return [f"--period-within {within}: all {num_workers} workers are on one node, so all of them take each mean"]
    if num_nodes == num_workers:
        return [f"--period-within {within}: every node has one worker, so nothing is exchanged inside a node"]
    return []
