"""Workers that exchange with a center through any link: messages, or shared or remote memory."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.processes.wall import WALL
from hpcdl.strategies.base.salvage import CenterPart
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.link import Link
from hpcdl.strategies.elastic.replica import (
    Background,
    Replica,
    descend,
    descend_with_momentum,
    elastic_momentum_step,
    elastic_step,
)

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.strategies.base.salvage import Center


class CenterReplica(Replica):
    """Common part of both kinds of replicas. Non-finite gradients and weights are not sent to the center."""

    def __init__(self, context: Context, link: Link) -> None:
        super().__init__(context)
        self._link = link
        self.group = link.group
        self.warnings = [*self.warnings, *link.warnings]
        self._buffer: Array = self.weights
        self._left = False
        self._quickest_s = math.inf
        self._given: Center | None = None
        self._known = 0
        """Number of center updates included in this worker's copy of the center."""

    def start(self, weights: Array, sizes: Sequence[int]) -> None:
        """Initialise the center with worker 0's `weights`."""
        self.start_weights(weights)
        self._buffer, self._known = weights.copy(), self.count
        # Only worker 0's checkpoint has it (`PullingReplica.state`).
        velocity = self._restored.get("replica/center_velocity") if self.group.rank == 0 else None
        # What the survivors had is newer than the checkpoint.
        if self._given is not None:
            velocity = self._given.velocity
        self._link.start(weights, sizes, count=self.count, total=self.total, velocity=velocity)
        self._given = None  # not earlier: if ranks are lost again, this may be the only copy
        self._note()

    def part(self) -> CenterPart | None:
        """Return the center as last received, or as taken over."""
        if self._given is not None:
            return CenterPart(
                start=0, values=self._given.values, velocity=self._given.velocity, count=self._given.count
            )
        return CenterPart(start=0, values=self._copy(), count=self._known) if self.weights.size else None

    def take_center(self, center: Center) -> None:
        """Take the center; the first worker gives it to the remaining servers."""
        self._given, self.count = center, center.count

    def center(self) -> Array:
        """Return the current center; if servers work in rank order every worker must ask."""
        center = numpy.empty_like(self.weights)
        if self._left:
            # Servers do not answer a worker that has left: this is the last center it received.
            center[:] = self._buffer
        else:
            self._link.fetch(center)
            self._note()
        return center

    def leave(self, *, stop: bool = False) -> None:
        """Leave; receive the last center."""
        if not self._left:
            self._link.leave(self._buffer, stop=stop)
            self._left = True
            self._note()

    def finish(self, *, early: bool = False) -> None:
        """Leave, and let the servers end."""
        self.leave()
        self._link.finish(early=early)

    def details(self) -> dict[str, Any]:
        """Return the distances to the center, and the link's counts."""
        return {**super().details(), **self._link.details()}

    def _ask(self, sent: Array, reply: Array, rate: float, steps: int) -> None:
        """Exchange `sent` for `reply`."""
        began = time.perf_counter()
        self._link.exchange(sent, reply, rate, steps)
        took = time.perf_counter() - began
        # After the reply is complete: recovery prefers the copy with the most updates.
        self._known = self._link.count
        self._quickest_s = min(self._quickest_s, took)
        # The time beyond the fastest exchange was spent waiting for other workers' exchanges.
        self.waited_s = took - self._quickest_s

    def _copy(self) -> Array:
        """Return the last completely received center."""
        return self._buffer

    def _note(self) -> None:
        self.count, self.stopped, self.num_lost = self._link.count, self._link.stopped, self._link.num_lost


class ElasticReplica(CenterReplica):
    """Keeps weights of its own: equation (1), or (5) and (6) with `momentum`.

    `overlapped`: the exchange runs during the gradient computation, on which it does not depend.
    """

    def __init__(self, context: Context, link: Link, *, momentum: bool = False, overlapped: bool = False) -> None:
        super().__init__(context, link)
        self._has_momentum = momentum
        self._background = Background() if overlapped else None
        self._velocity: Array = self.weights
        self._spare: Array = self.weights
        self._exchanging = False
        self._rate = 0.0
        self._uncounted = 0
        """Steps that the center has not been told of."""

    def start(self, weights: Array, sizes: Sequence[int]) -> None:
        """Start with velocity zero, or that of a checkpoint."""
        self._velocity = self._restored.get("replica/velocity", numpy.zeros_like(weights)).copy()
        super().start(weights, sizes)
        # An incomplete reply must not overwrite the last one, which recovery may need.
        self._spare = numpy.zeros_like(weights) if self.context.in_place else self._buffer

    def before_step(self, step: int) -> None:
        """Send the weights as they are before this step's update."""
        self._uncounted += 1
        self._exchanging = self.exchanges_at(step) or self._completes()
        if self._exchanging and self._background is not None:
            self._background.start(self._exchange)

    def step(self, gradient: Array) -> tuple[Array, float]:
        """Exchange, then equation (1), or (5) and (6); without an exchange the same without its elastic term."""
        if self._exchanging:
            if self._background is not None:
                self._background.wait()
            else:
                self._exchange()
            self._note()
        exchanged = WALL.now_s()
        self.check_finite(gradient, "the gradient")
        if self._exchanging:
            self.measure_distance(self._buffer)
            self._move_elastically(gradient)
        elif self._has_momentum:
            descend_with_momentum(self.weights, self._velocity, gradient, self.learning_rate, self.momentum)
        else:
            descend(self.weights, gradient, self.learning_rate)
        return self.weights, exchanged

    def state(self) -> dict[str, Array]:
        """Return the weights, and the velocity of the methods that have one."""
        arrays = super().state()
        return (
            {**arrays, "replica/velocity": self._velocity.copy()}
            if self._has_momentum and self.weights.size
            else arrays
        )

    def leave(self, *, stop: bool = False) -> None:
        """Wait for an exchange in progress, then leave."""
        if self._background is not None:
            self._background.wait()
        super().leave(stop=stop)

    def finish(self, *, early: bool = False) -> None:
        """Leave, and end the exchange thread."""
        super().finish(early=early)
        if self._background is not None:
            self._background.close()

    def abandon(self) -> None:
        """End the exchange thread."""
        if self._background is not None:
            self._background.close()

    def _exchange(self) -> None:
        self.check_finite(self.weights, "the value")
        # Worker and center move by the same alpha: otherwise the sum of center and workers' weights drifts.
        self._rate = self.alpha(self.learning_rate)
        steps, self._uncounted = self._uncounted, 0
        self._ask(self.weights, self._spare, self._rate, steps)
        self._buffer, self._spare = self._spare, self._buffer

    def _completes(self) -> bool:
        """Whether as many steps of every worker complete the run, which may be before the period ends."""
        missing = self.total - self.count
        return 0 < missing <= self._uncounted * self.context.num_workers

    def _move_elastically(self, gradient: Array) -> None:
        center, eta = self._buffer, self.learning_rate
        if self._has_momentum:
            elastic_momentum_step(self.weights, self._velocity, center, gradient, eta, self._rate, self.momentum)
        else:
            elastic_step(self.weights, center, gradient, eta, self._rate)


class PullingReplica(CenterReplica):
    """Keeps no weights of its own: sends its gradient, and continues with the returned center."""

    def step(self, gradient: Array) -> tuple[Array, float]:
        """Send the gradient, receive the center."""
        self.check_finite(gradient, "the gradient")
        self._ask(gradient, self._buffer, self.learning_rate, 1)
        self.weights, self._buffer = self._buffer, self.weights  # once the center is complete
        self._note()
        return self.weights, WALL.now_s()

    def kept(self) -> dict[str, Array]:
        """Return nothing: only the center remains, which is not this worker's own."""
        return {}

    def state(self) -> dict[str, Array]:
        """Return the center's velocity, which worker 0 saves for the servers."""
        # Servers do not answer a worker that has left.
        if self.group.rank != 0 or self._left:
            return {}
        velocity = numpy.empty_like(self.weights)
        self._link.fetch_velocity(velocity)
        # A rule without velocity answers zeros, and a checkpoint then needs no entry.
        return {"replica/center_velocity": velocity} if velocity.any() else {}

    def _copy(self) -> Array:
        return self._buffer if self._left else self.weights
