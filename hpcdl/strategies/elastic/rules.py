"""What a worker's request does to the center: equation (2), or a gradient step; and how stale requests were. Numpy."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from hpcdl.strategies.elastic.equations import descend_and_reply, descend_with_momentum, swap_elastic

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Rule(Protocol):
    """How a request changes the center."""

    velocity: Array | None

    def begin(self, num_elements: int) -> None:
        """Get ready for a center of that length."""

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """Change `center` by `payload`, and fill `reply`, which may be the same memory."""


class Attraction:
    """Equation (2) for one worker: the request holds its weights, the reply the center before the update."""

    velocity: Array | None = None

    def begin(self, num_elements: int) -> None:
        """Nothing to keep."""

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """Move the center towards the worker's weights."""
        swap_elastic(center, payload, reply, rate)


class Descent:
    """A gradient step on the center: the request holds a gradient, the reply the center after the update."""

    velocity: Array | None = None

    def begin(self, num_elements: int) -> None:
        """Nothing to keep."""

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """W~ <- W~ - eta dW."""
        descend_and_reply(center, payload, reply, rate)


class MomentumDescent:
    """A gradient step with momentum, whose velocity is the center's own."""

    def __init__(self, momentum: float) -> None:
        self.velocity: Array | None = None
        self._momentum = momentum

    def begin(self, num_elements: int) -> None:
        """The velocity starts at zero."""
        self.velocity = numpy.zeros(num_elements, numpy.float32)

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """V <- mu V - eta dW; W~ <- W~ + V."""
        assert self.velocity is not None
        descend_with_momentum(center, self.velocity, payload, rate, self._momentum)
        reply[:] = center


RULES: dict[str, Callable[[float], Rule]] = {
    "attraction": lambda momentum: Attraction(),
    "descent": lambda momentum: Descent(),
    "momentum descent": MomentumDescent,
}
"""From the momentum to a rule, by the names that methods.py uses."""


class Staleness:
    """Counts how many writes of others the center saw between a worker's read and its next write."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, staleness: int) -> None:
        """Count one write."""
        self._counts[staleness] += 1

    def as_json(self) -> dict[str, int]:
        """Number of writes by staleness."""
        return {str(staleness): number for staleness, number in sorted(self._counts.items())}


def summary_of(counts: list[dict[str, Any]]) -> tuple[float | None, float | None, dict[str, int]]:
    """Mean, maximum and histogram of what several ranks have counted; None and empty where nobody has."""
    total: collections.Counter[int] = collections.Counter()
    for one in counts:
        total.update({int(staleness): int(number) for staleness, number in one.items()})
    num_writes = sum(total.values())
    if not num_writes:
        return None, None, {}
    mean = sum(staleness * number for staleness, number in total.items()) / num_writes
    histogram = {str(staleness): number for staleness, number in sorted(total.items())}
    return mean, float(max(total)), histogram
