"""A worker's weights as one flat buffer, and its side of the exchange. No TensorFlow: flat.py puts it in a graph.

The equations of the EASGD family on flat weight buffers, and the moving rate that they use. No TensorFlow.

Sources: You, Buluc and Demmel 2017 (arXiv 1708.02983), equations (1) to (6); Zhang, Choromanska and LeCun 2015 (arXiv
1412.6651). Notation there: W worker's weights, W~ center, dW gradient, eta learning rate, rho elasticity, mu momentum,
alpha = eta rho moving rate. All elastic terms use the weights before the update.

All functions work in place, block by block, so that intermediate results stay in the cache.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.arithmetic import all_finite, not_finite
from hpcdl.config.schema import ElasticConfig
from hpcdl.core.protocols import Communicator
from hpcdl.core.statistics import Sample
from hpcdl.strategies.base.strategy import Context

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.strategies.base.salvage import Center, CenterPart


BLOCK_ELEMENTS = 1 << 15
"""128 KiB of float32: a few such blocks fit in a core's second-level cache."""
DEFAULT_TOTAL_RATE = 0.9
"""Default of workers x alpha: the value of Zhang et al. 2015 (section 5), because SC17 gives none."""

Rate = Callable[[float], float]
"""The moving rate alpha at a learning rate."""


def moving_rate(elastic: ElasticConfig, num_workers: int) -> Rate:
    """Return alpha as a function of the learning rate: eta x rho, or constant."""
    if elastic.elasticity is not None:
        elasticity = elastic.elasticity
        return lambda learning_rate: learning_rate * elasticity
    constant = DEFAULT_TOTAL_RATE / num_workers if elastic.moving_rate is None else elastic.moving_rate
    return lambda learning_rate: constant


def descend(weights: Array, gradient: Array, learning_rate: float) -> None:
    """W <- W - eta dW."""
    for part, change in _with_scratch(weights.size):
        numpy.multiply(gradient[part], learning_rate, out=change)
        weights[part] -= change


def descend_and_reply(center: Array, gradient: Array, reply: Array, learning_rate: float) -> None:
    """W~ <- W~ - eta dW; `reply`, which may be the gradient's memory, becomes the updated center."""
    for part, change in _with_scratch(center.size):
        numpy.multiply(gradient[part], learning_rate, out=change)
        numpy.subtract(center[part], change, out=reply[part])
        center[part] = reply[part]


def descend_with_momentum(
    weights: Array, velocity: Array, gradient: Array, learning_rate: float, momentum: float
) -> None:
    """V <- mu V - eta dW; W <- W + V. Equations (3) and (4)."""
    for part in blocks(weights.size):
        velocity[part] *= momentum
        velocity[part] -= learning_rate * gradient[part]
        weights[part] += velocity[part]


def elastic_step(weights: Array, center: Array, gradient: Array, learning_rate: float, alpha: float) -> None:
    """W <- W - eta dW - alpha (W - W~). Equation (1)."""
    change: Array = numpy.empty(min(weights.size, BLOCK_ELEMENTS), numpy.float32)
    for part, pull in _with_scratch(weights.size):
        numpy.subtract(weights[part], center[part], out=pull)
        pull *= alpha
        pull += numpy.multiply(gradient[part], learning_rate, out=change[: pull.size])
        weights[part] -= pull


def elastic_momentum_step(
    weights: Array,
    velocity: Array,
    center: Array,
    gradient: Array,
    learning_rate: float,
    alpha: float,
    momentum: float,
) -> None:
    """V <- mu V - eta dW; W <- W + V - alpha (W - W~). Equations (5) and (6)."""
    for part in blocks(weights.size):
        # Before the update: both equations use the weights of the step before.
        pull = weights[part] - center[part]
        pull *= alpha
        velocity[part] *= momentum
        velocity[part] -= learning_rate * gradient[part]
        weights[part] += velocity[part] - pull


def attract_center(center: Array, total: Array, num_workers: int, alpha: float) -> None:
    """W~ <- W~ + alpha sum_i (W_i - W~), where `total` is the sum of the workers' weights. Equation (2)."""
    for part in blocks(center.size):
        center[part] += alpha * (total[part] - num_workers * center[part])


def attract_center_by(center: Array, differences: Array, alpha: float) -> None:
    """Apply equation (2), given `differences` = sum_i (W_i - W~)."""
    for part in blocks(center.size):
        center[part] += alpha * differences[part]


def swap_elastic(center: Array, weights: Array, reply: Array, alpha: float) -> None:
    """Exchange with one worker: equation (2) for that worker alone.

    `reply`, which may be the weights' memory, becomes the center before the update.
    """
    for part, pull in _with_scratch(center.size):
        numpy.subtract(weights[part], center[part], out=pull)
        pull *= alpha
        reply[part] = center[part]  # only now: `pull` has been computed from the weights
        center[part] += pull


def distance(weights: Array, center: Array) -> float:
    """Return the Euclidean distance relative to the center's norm; infinite or NaN if weights have diverged."""
    squares = norm = 0.0
    with numpy.errstate(over="ignore", invalid="ignore"):
        for part in blocks(center.size):
            difference = weights[part] - center[part]
            squares += float(difference @ difference)
            norm += float(center[part] @ center[part])
    return float(numpy.sqrt(squares / norm)) if norm > 0 else float(numpy.sqrt(squares))


def _with_scratch(length: int) -> Iterator[tuple[slice, Array]]:
    """Yield the parts of a buffer, each with the same scratch memory: new memory costs more than the sum."""
    scratch: Array = numpy.empty(min(length, BLOCK_ELEMENTS), numpy.float32)
    for part in blocks(length):
        yield part, scratch[: part.stop - part.start]


def blocks(length: int) -> Iterator[slice]:
    """Yield consecutive parts of a buffer that stay in the cache."""
    for start in range(0, length, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, length))


DISTANCE_EVERY = 10
"""The distance to the center is measured once per this many exchanges: it costs a pass over the weights."""


_FEW_MOVES = 3
"""A center that moves less often is hardly trained."""


class Replica:
    """The common part of all methods. `weights`: float32, all trainable variables concatenated.

    `count` is the number of center updates by all workers, as far as this worker knows; `stopped` means that the center
    takes no more updates. `group` has the workers alone; `num_lost` of them have died when this worker has left. For
    messages: `step_now`, and the name and length of each of the `variables` in `weights`.
    """

    group: Communicator

    def __init__(self, context: Context) -> None:
        self.context = context
        self.elastic = context.elastic
        self.momentum = context.optimizer.momentum
        self.learning_rate = context.optimizer.learning_rate
        self.alpha = moving_rate(context.elastic, context.num_workers)
        self.weights: Array = numpy.zeros(0, numpy.float32)
        self.step_now: int | None = None
        self.variables: Sequence[tuple[str, int]] = ()
        self.count = 0
        self.total = 0
        self.stopped = False
        self.num_lost = 0
        self.waited_s = 0.0
        self.warnings: Sequence[str] = _warnings(context)
        self._restored: dict[str, Array] = {}
        self._distances = Sample(1)
        self._last_distance = 0.0
        self._num_exchanges = 0

    def start(self, weights: Array, sizes: Sequence[int]) -> None:
        """Begin with `weights`, equal on every worker; `sizes` are the lengths of its variables. Collective."""
        raise NotImplementedError

    def before_step(self, step: int) -> None:
        """Begin an exchange that needs no gradient, if there is one."""

    def step(self, gradient: Array) -> tuple[Array, float]:
        """Exchange, then update the weights; return them and the Unix time at the end of the exchange."""
        raise NotImplementedError

    def center(self) -> Array:
        """Return the current center. Collective if the strategy is synchronous."""
        raise NotImplementedError

    def state(self) -> dict[str, Array]:
        """Return this worker's state for a checkpoint, besides the center; before the start the state to start from."""
        return {"replica/weights": self.weights.copy()} if self.weights.size else self._restored

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the result of `state`; called before `start`."""
        self._restored = {name: array for name, array in arrays.items() if name.startswith("replica/")}

    def leave(self, *, stop: bool = False) -> None:
        """End this worker's exchanges; return when every worker has left. `stop` ends the run for all."""

    def abandon(self) -> None:
        """Abandon operations in progress: the groups are revoked."""

    def kept(self) -> dict[str, Array]:
        """Return the part of `state` that this worker has without communication."""
        return self.state()

    def part(self) -> CenterPart | None:
        """Return its copy of a center that servers hold; None if there is no such center, or none received yet."""
        return None

    def take_center(self, center: Center) -> None:
        """Take the center recovered after ranks were lost; called before `start`."""

    def finish(self, *, early: bool = False) -> None:
        """Free all resources."""

    def details(self) -> dict[str, Any]:
        """Return this worker's details for the record."""
        if not self._distances.count:
            return {}
        distances = self._distances
        return {"distance_to_center": {"mean": distances.mean, "max": distances.largest, "last": self._last_distance}}

    def check_finite(self, values: Array, what: str) -> None:
        """Raise NotFiniteError if `values`, as long as the weights, hold NaN or infinity: weights must not get them."""
        if all_finite(values):
            return
        ends = itertools.accumulate(length for _, length in self.variables)
        spans = [(name, slice(end - length, end)) for (name, length), end in zip(self.variables, ends, strict=True)]
        bad = [name for name, span in spans if not all_finite(values[span])]
        raise not_finite(bad, what, self.step_now, self.group.rank)

    def exchanges_at(self, step: int) -> bool:
        """Whether `step` exchanges: one in every `period`."""
        return step % self.elastic.period_steps == 0

    def measure_distance(self, center: Array) -> None:
        """Record this worker's distance from `center`, at some of the exchanges."""
        if self._num_exchanges % DISTANCE_EVERY == 0:
            this_distance = distance(self.weights, center)
            if math.isfinite(this_distance):  # JSON cannot hold non-finite numbers
                self._distances.add(this_distance)
                self._last_distance = this_distance
        self._num_exchanges += 1

    def start_weights(self, weights: Array) -> None:
        """Take `weights`, or this worker's own from a checkpoint."""
        self.weights = self._restored.get("replica/weights", weights).astype(numpy.float32).copy()


def hardly_moves(period: int, num_steps: int) -> bool:
    """Return whether a run of so many steps, 0 if unknown, ends before the center has moved a few times.

    In the first exchange the workers have only what all began with.
    """
    return period > 1 and 0 < num_steps <= _FEW_MOVES * period


def _warnings(context: Context) -> list[str]:
    period = context.elastic.period_steps
    if not hardly_moves(period, context.num_steps):
        return []
    return [
        f"--period {period} is long for a run of {context.num_steps} steps: the center, which is evaluated and saved, "
        "hardly moves; give a shorter period"
    ]


class Background:
    """Runs one exchange at a time in a thread; `wait` re-raises its error."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._running: concurrent.futures.Future[None] | None = None

    def start(self, exchange: Callable[[], None]) -> None:
        """Begin `exchange`."""
        self._running = self._pool.submit(exchange)

    def wait(self) -> None:
        """Return when the exchange is complete."""
        if self._running is not None:
            running, self._running = self._running, None  # first: its error is raised only once
            running.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        self._pool.shutdown()
