"""What a search was told: every candidate's samples and failures, and what is left to ask about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hpcdl.tuning.factors import Floats
from hpcdl.tuning.initial_design import Indices


class Samples:
    """Logarithms of images/s by candidate. `num_recorded`: how many samples of each there are, None for no end."""

    def __init__(self, num_candidates: int, num_recorded: Sequence[int] | None) -> None:
        self.num_candidates = num_candidates
        self.num_recorded = num_recorded
        self.known: dict[int, list[float]] = {}
        self.failures: dict[int, int] = {}

    @property
    def num_told(self) -> int:
        """Samples told, failures included."""
        return sum(map(len, self.known.values())) + sum(self.failures.values())

    @property
    def candidates_told(self) -> set[int]:
        """Candidates with a sample or a failure."""
        return self.known.keys() | self.failures.keys()

    def add(self, index: int, images_per_second: float | None) -> None:
        """One sample of a candidate; None, or what is no speed, if its trial failed."""
        if images_per_second is None or not (math.isfinite(images_per_second) and images_per_second > 0):
            self.failures[index] = self.failures.get(index, 0) + 1
        else:
            self.known.setdefault(index, []).append(math.log(images_per_second))

    def unseen(self, index: int) -> bool:
        """Whether nothing was told of a candidate."""
        return index not in self.known and index not in self.failures

    def sound(self, index: int) -> bool:
        """Whether a candidate ran at least as often as it failed."""
        return self.failures.get(index, 0) < max(len(self.known.get(index, ())), 1)

    def all_unseen(self) -> Indices:
        """The candidates of which nothing was told, in order."""
        return self._those(self.unseen, range(self.num_candidates))

    def all_sound(self) -> Indices:
        """The candidates that did not mostly fail, measured or not, in order."""
        return self._those(self.sound, range(self.num_candidates))

    def measured(self) -> Indices:
        """The sound candidates that were measured, in order."""
        return self._those(self.sound, sorted(self.known))

    def num_left(self, index: int) -> float:
        """How many more samples of a candidate there are."""
        if self.num_recorded is None:
            return math.inf
        return self.num_recorded[index] - len(self.known.get(index, ()))

    def summary(self) -> tuple[Indices, Floats, Floats, float]:
        """Candidates, their means, how many samples each mean has, and the sum of squares inside candidates; a sample
        that was drawn again from a record counts once.
        """
        rows = np.array(sorted(self.known), dtype=np.int64)
        items = [self._different(int(index)) for index in rows]
        means = np.array([np.mean(own) for own in items])
        counts = np.array([len(own) for own in items], dtype=float)
        return rows, means, counts, sum(float(np.var(own)) * len(own) for own in items)

    def _different(self, index: int) -> list[float]:
        samples = self.known[index]
        return samples if self.num_recorded is None else samples[: self.num_recorded[index]]

    @staticmethod
    def _those(holds: Callable[[int], bool], indices: Sequence[int]) -> Indices:
        return np.array([index for index in indices if holds(index)], dtype=np.int64)
