"""A worker's weights as one flat buffer, and its side of the exchange. No TensorFlow: flat.py puts it in a graph."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.comm.arithmetic import all_finite, not_finite
from hpcdl.core.protocols import Communicator
from hpcdl.core.statistics import Sample
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.equations import distance, moving_rate

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.strategies.base.salvage import Center, CenterPart

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
