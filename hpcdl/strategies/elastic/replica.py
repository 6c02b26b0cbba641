"""A worker's weights as one flat buffer, and its side of the exchange. No TensorFlow: flat.py puts it in a graph.

The equations of the EASGD family on flat weight buffers, and the moving rate that they use. No TensorFlow.

Sources: You, Buluc and Demmel 2017 (arXiv 1708.02983), equations (1) to (6); Zhang, Choromanska and LeCun 2015 (arXiv
1412.6651). Notation there: W worker's weights, W~ center, dW gradient, eta learning rate, rho elasticity,
alpha = eta rho moving rate, mu momentum. All elastic terms use the weights before the update.

Everything works in place, block by block, so that intermediate results stay in the cache.
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
"""Default of workers x alpha; the value that Zhang et al. 2015 (section 5) use, where SC17 names none."""

Rate = Callable[[float], float]
"""The moving rate alpha at a learning rate."""


def moving_rate(elastic: ElasticConfig, num_workers: int) -> Rate:
    """Alpha as a function of the learning rate: eta x rho, or constant."""
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
    """The same on the center; `reply`, which may be the gradient's memory, becomes the center when it is done."""
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
    """The same, where `differences` is sum_i (W_i - W~)."""
    for part in blocks(center.size):
        center[part] += alpha * differences[part]


def swap_elastic(center: Array, weights: Array, reply: Array, alpha: float) -> None:
    """One worker's exchange: equation (2) for that worker alone.

    `reply`, which may be the weights' memory, becomes the center before it.
    """
    for part, pull in _with_scratch(center.size):
        numpy.subtract(weights[part], center[part], out=pull)
        pull *= alpha
        reply[part] = center[part]
        center[part] += pull


def distance(weights: Array, center: Array) -> float:
    """Euclidean distance, relative to the center's norm; infinite or NaN where weights have diverged."""
    squares = norm = 0.0
    with numpy.errstate(over="ignore", invalid="ignore"):
        for part in blocks(center.size):
            difference = weights[part] - center[part]
            squares += float(difference @ difference)
            norm += float(center[part] @ center[part])
    return float(numpy.sqrt(squares / norm)) if norm > 0 else float(numpy.sqrt(squares))


def _with_scratch(length: int) -> Iterator[tuple[slice, Array]]:
    """The parts of a buffer, each with the same memory for what is in between: fresh memory costs more than the sum."""
    scratch: Array = numpy.empty(min(length, BLOCK_ELEMENTS), numpy.float32)
    for part in blocks(length):
        yield part, scratch[: part.stop - part.start]


def blocks(length: int) -> Iterator[slice]:
    """Parts of a buffer that stay in the cache, one after another."""
    for start in range(0, length, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, length))


DISTANCE_EVERY = 10
"""The distance to the center is measured at every so many exchanges: it costs a pass over the weights."""


class Replica:
    """What the methods share. `weights`: float32, all trainable variables one after another.

    `count` are the updates of the center so far, over all workers, as far as this one knows; `stopped` says that the
    center takes no more of them. `group` holds the workers alone; `num_lost` of them have died when this one has left.
    For messages: `step_now`, and the name and length of each of the `variables` in `weights`.
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
        self.warnings: Sequence[str] = ()
        self._restored: dict[str, Array] = {}
        self._distances = Sample(1)
        self._last_distance = 0.0
        self._num_exchanges = 0

    def start(self, weights: Array, sizes: Sequence[int]) -> None:
        """Begin at `weights`, equal on every worker; `sizes` are the lengths of the variables in it. Collective."""
        raise NotImplementedError

    def before_step(self, step: int) -> None:
        """An exchange that needs no gradient may begin."""

    def step(self, gradient: Array) -> tuple[Array, float]:
        """Exchange, then move the weights; returns them and the Unix time at which the exchange was over."""
        raise NotImplementedError

    def center(self) -> Array:
        """The center now. Collective where the strategy is synchronous."""
        raise NotImplementedError

    def state(self) -> dict[str, Array]:
        """What a checkpoint must keep of this worker beside the center; before the start what it will start from."""
        return {"replica/weights": self.weights.copy()} if self.weights.size else self._restored

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take back what `state` gave; called before `start`."""
        self._restored = {name: array for name, array in arrays.items() if name.startswith("replica/")}

    def leave(self, *, stop: bool = False) -> None:
        """No more exchanges of this worker; returns when every worker has left. `stop` ends the run for all."""

    def abandon(self) -> None:
        """Its groups are revoked: nothing that it has begun goes on."""

    def kept(self) -> dict[str, Array]:
        """Of `state` what this worker has by itself."""
        return self.state()

    def part(self) -> CenterPart | None:
        """Its copy of a center that servers hold; None where nobody does, and where none has come yet."""
        return None

    def take_center(self, center: Center) -> None:
        """Servers have been lost, or workers: what is left of the center; called before `start`."""

    def finish(self, *, early: bool = False) -> None:
        """Give everything back."""

    def details(self) -> dict[str, Any]:
        """What the record keeps about this worker."""
        if not self._distances.count:
            return {}
        found = self._distances
        return {"distance_to_center": {"mean": found.mean, "max": found.largest, "last": self._last_distance}}

    def check_finite(self, values: Array, what: str) -> None:
        """NotFiniteError where `values`, as long as the weights, hold NaN or infinity: they must not reach weights."""
        if all_finite(values):
            return
        ends = itertools.accumulate(length for _, length in self.variables)
        places = [(name, slice(end - length, end)) for (name, length), end in zip(self.variables, ends, strict=True)]
        bad = [name for name, place in places if not all_finite(values[place])]
        raise not_finite(bad, what, self.step_now, self.group.rank)

    def exchanges_at(self, step: int) -> bool:
        """Whether `step` is one of every `period`."""
        return step % self.elastic.period_steps == 0

    def measure_distance(self, center: Array) -> None:
        """Note how far this worker is from `center`, now and then."""
        if self._num_exchanges % DISTANCE_EVERY == 0:
            found = distance(self.weights, center)
            if math.isfinite(found):  # JSON has no other numbers
                self._distances.add(found)
                self._last_distance = found
        self._num_exchanges += 1

    def start_weights(self, weights: Array) -> None:
        """Take `weights`, or this worker's own of a checkpoint."""
        self.weights = self._restored.get("replica/weights", weights).astype(numpy.float32).copy()


class Background:
    """Runs one exchange at a time beside the step and hands its error on to who waits."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._running: concurrent.futures.Future[None] | None = None

    def start(self, exchange: Callable[[], None]) -> None:
        """Begin `exchange`."""
        self._running = self._pool.submit(exchange)

    def wait(self) -> None:
        """Return when it is over."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def close(self) -> None:
        """Wait, and let the thread end."""
        self._pool.shutdown()
