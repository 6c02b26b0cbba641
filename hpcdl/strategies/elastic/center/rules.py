"""What a server does to the center on a worker's request: equation (2), or a gradient step. In place, numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy

from hpcdl.strategies.elastic.equations import descend, descend_with_momentum, swap_elastic

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Rule(Protocol):
    """How a request changes the center."""

    velocity: Array | None

    def begin(self, num_elements: int) -> None:
        """Get ready for a center of that length."""

    def serve(self, center: Array, payload: Array, rate: float) -> None:
        """Change `center` by `payload`, which then holds the reply."""


class Attraction:
    """Equation (2) for one worker: the request holds its weights, the reply the center before the update."""

    velocity: Array | None = None

    def begin(self, num_elements: int) -> None:
        """Nothing to keep."""

    def serve(self, center: Array, payload: Array, rate: float) -> None:
        """Move the center towards the worker's weights."""
        swap_elastic(center, payload, rate)


class Descent:
    """A gradient step on the center: the request holds a gradient, the reply the center after the update."""

    velocity: Array | None = None

    def begin(self, num_elements: int) -> None:
        """Nothing to keep."""

    def serve(self, center: Array, payload: Array, rate: float) -> None:
        """W~ <- W~ - eta dW."""
        descend(center, payload, rate)
        payload[:] = center


class MomentumDescent:
    """A gradient step with momentum, whose velocity is the center's own."""

    def __init__(self, momentum: float) -> None:
        self.velocity: Array | None = None
        self._momentum = momentum

    def begin(self, num_elements: int) -> None:
        """The velocity starts at zero."""
        self.velocity = numpy.zeros(num_elements, numpy.float32)

    def serve(self, center: Array, payload: Array, rate: float) -> None:
        """V <- mu V - eta dW; W~ <- W~ + V."""
        assert self.velocity is not None
        descend_with_momentum(center, self.velocity, payload, rate, self._momentum)
        payload[:] = center
