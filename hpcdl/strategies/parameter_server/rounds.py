"""The messages of a quorum server: sums that grow, means that wait until the last worker has fetched them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Round:
    """One message of one step: its sum and, once `complete`, its mean."""

    def __init__(self, total: Array, num_workers: int) -> None:
        total[:] = 0
        self.total = total
        self.num_gradients = 0
        self.complete = False
        self.waiting: list[int] = []
        """Ranks that have asked for the mean before it was complete."""
        self.num_unserved = num_workers
        self.num_leaving = 0


class Rounds:
    """Rounds by step and number within the step; their buffers are used again."""

    def __init__(self, lengths: list[int], num_workers: int, num_needed: int) -> None:
        self.lengths = lengths
        self._num_workers, self._num_needed = num_workers, num_needed
        self._open: dict[tuple[int, int], Round] = {}
        self._pool: defaultdict[int, list[Array]] = defaultdict(list)
        self._num_complete: defaultdict[int, int] = defaultdict(int)
        self._num_closed: defaultdict[int, int] = defaultdict(int)

    def get(self, step: int, number: int) -> Round:
        """The round, opened where nobody has asked for it yet."""
        key = (step, number)
        if key not in self._open:
            length = self.lengths[number]
            total = self._pool[length].pop() if self._pool[length] else numpy.empty(length, numpy.float32)
            self._open[key] = Round(total, self._num_workers)
        return self._open[key]

    def add(self, step: int, number: int, gradient: Array) -> bool:
        """Add a gradient; whether it counts. The last one that is needed makes the sum a mean."""
        found = self.get(step, number)
        if found.complete:
            return False
        numpy.add(found.total, gradient, out=found.total)
        found.num_gradients += 1
        if found.num_gradients == self._num_needed:
            found.total *= numpy.float32(1 / self._num_needed)
            found.complete = True
            self._num_complete[step] += 1
        return True

    def step_complete(self, step: int) -> bool:
        """Whether every round of `step` has its mean."""
        return self._num_complete[step] == len(self.lengths)

    def sent(self, step: int, number: int) -> None:
        """A send of this round's mean is through; after the last worker's its buffer is free."""
        found = self._open[step, number]
        found.num_leaving -= 1
        if not found.num_unserved and not found.num_leaving:
            del self._open[step, number]
            self._pool[found.total.size].append(found.total)
            # Not when no round of the step is open: the next one may not have been opened yet.
            self._num_closed[step] += 1
            if self._num_closed[step] == len(self.lengths):
                del self._num_closed[step], self._num_complete[step]
