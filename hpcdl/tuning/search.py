"""Finds the fastest candidate with few samples: an initial design, then a race that a surrogate model steers.

The caller asks for candidates, measures them, and tells the results. The race is top-two Thompson sampling (Russo 2016)
on the surrogate's joint posterior: half of the samples go to the probable best, half to its possible rivals, so clearly
inferior candidates get none. It ends when the expected loss of stopping is small, or when the budget is used up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from hpcdl.tuning.space import beside, factors_of, initial_design
from hpcdl.tuning.surrogate import Posterior, Samples

NUM_DRAWS = 256
RIVAL_DRAWS = 4  # joint draws for each sample: one for the leader, the others in search of a rival
CHALLENGE_SHARE = 0.5  # Russo's beta: with 1/2 a search needs at most twice the samples of the best share
NEIGHBOUR_SHARE = 0.2
"""Share of the race's samples for unmeasured neighbors of the leaders."""
NUM_LEADERS = 4
DOUBT = 3.0  # standard deviations of the model
LEAST_SHARE = 0.8
"""Minimum share of a given number of samples to use, even if the model is convinced earlier."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best so far. `images_per_second` is the model's estimate with its 95 % half width `ci95`. `expected_loss` is
    the mean relative loss against the true best if stopped here; `probability_best` is that nothing is better.
    """

    index: int
    images_per_second: float
    ci95: float
    n: int
    expected_loss: float
    probability_best: float


class Search:
    """`ask` returns candidates to measure, `tell` takes results. Earlier trials of a log are told first."""

    def __init__(
        self,
        candidates: Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        anchors: Sequence[int] = (),
        max_samples: int | None = None,
        tolerance: float = 0.003,
        precision: float | None = None,
    ) -> None:
        self.num_candidates = len(candidates)
        self._samples = Samples(self.num_candidates)
        self._random = np.random.default_rng(seed)
        self._factors = factors_of(candidates)
        self._posterior = Posterior(self._samples, self._factors, self._random)
        self._max_samples = max_samples
        self._tolerance = tolerance
        self._precision = precision
        self._stale = True
        self._choice: Choice | None = None
        budget = max_samples or self.num_candidates
        self._start = initial_design(
            self._factors, self.num_candidates, anchors=anchors, budget=budget, dice=self._random
        )
        self._least = (
            2 * len(self._start) if max_samples is None else max(len(self._start), int(LEAST_SHARE * max_samples))
        )

    @property
    def num_samples(self) -> int:
        """Number of samples told, including failures."""
        return self._samples.num_observed

    @property
    def num_trials(self) -> int:
        """Number of candidates told at least once."""
        return len(self._samples.candidates_observed)

    @property
    def samples(self) -> Mapping[int, Sequence[float]]:
        """Logarithms of the images/s of each measured candidate."""
        return self._samples.known

    @property
    def failures(self) -> Mapping[int, int]:
        """Number of failed trials of each candidate."""
        return self._samples.failures

    def tell(self, index: int, images_per_second: float | None) -> None:
        """Take one sample of a candidate; None if its trial failed."""
        self._samples.add(index, images_per_second)
        self._stale = True

    def ask(self, num: int = 1) -> list[int]:
        """Return up to `num` candidates to measure next, possibly with repeats. Empty if nothing can be gained."""
        if self._max_samples is not None:
            num = min(num, self._max_samples - self.num_samples)
        if num <= 0:
            return []
        fresh = [index for index in self._start if self._samples.unseen(index)][:num]
        if fresh:
            return fresh
        with one_blas_thread():
            if self._convinced():
                return self._doubts(num)
            # Everything has failed so far: the model has no speed to learn from.
            if not self._samples.known:
                return [int(index) for index in self._random.permutation(self._samples.all_unseen())[:num]]
            # Drawn: on a single node `num` is 1, of which a fixed fifth would be 0.
            near = self._beside_leaders()[: int(self._random.binomial(num, NEIGHBOUR_SHARE))]
            return near + self._race(num - len(near))

    def best(self) -> Choice | None:
        """Return the measured candidate with the highest posterior mean; None before the first successful trial."""
        measured = self._samples.measured()
        if len(measured) == 0:
            return None
        with one_blas_thread():
            self._learn()
            # Once for each new sample: without one, other draws must not make another choice.
            if self._choice is None:
                top = int(np.argmax(self._posterior.mean[measured]))
                self._choice = self._judged(int(measured[top]))
        return self._choice

    def _judged(self, index: int) -> Choice:
        draws, columns = self._posterior.draws(NUM_DRAWS, include=index)
        # In each joint draw, by how much another candidate is faster.
        gain = draws.max(axis=1) - draws[:, int(np.flatnonzero(columns == index)[0])]
        value = math.exp(self._posterior.mean[index] + self._posterior.offset)
        return Choice(
            index=index,
            images_per_second=value,
            # On logarithms 1.96 standard deviations are the end of a 95 % interval.
            ci95=value * math.expm1(1.96 * self._posterior.std[index]),
            n=len(self._samples.known[index]),
            expected_loss=float(np.mean(-np.expm1(-gain))),
            probability_best=float(np.mean(gain <= 0)),
        )

    def _convinced(self) -> bool:
        """Return whether the model expects to gain less than the tolerance from more samples."""
        choice = self.best()
        if choice is None or choice.expected_loss >= self._tolerance:
            return False
        # A single sample may be the best by luck.
        return choice.n > 1

    def _doubts(self, num: int) -> list[int]:
        """Return candidates that may prove a convinced model wrong: neighbors of the best, then the most promising; the
        best itself while its estimate is too wide. Empty if there is nothing left to ask.
        """
        beside = self._unseen_neighbours()
        if beside:
            return beside[:num]
        if self.num_samples < self._least:
            return self._hopeful(num) or self._race(num)
        return self._imprecise()

    def _hopeful(self, num: int) -> list[int]:
        """Return the unmeasured candidates that may be fastest if the model is much too certain."""
        return list(map(int, self._posterior.most_hopeful(self._samples.all_unseen(), DOUBT)[:num]))

    def _unseen_neighbours(self) -> list[int]:
        """Return unmeasured neighbors of the best: a smooth model does not see sudden jumps there."""
        choice = self.best()
        if choice is None:
            return []
        neighbors = beside(self._factors, choice.index, self.num_candidates)
        return [int(index) for index in neighbors if self._samples.unseen(int(index))]

    def _beside_leaders(self) -> list[int]:
        """Return unmeasured neighbors of the leading candidates: a smooth model takes the values before a jump for a
        slope, and may also never be convinced.
        """
        self._learn()
        measured = self._samples.measured()
        leaders = measured[np.argsort(-self._posterior.mean[measured])[:NUM_LEADERS]]
        neighbors: dict[int, None] = {}
        for leader in leaders:
            near = beside(self._factors, int(leader), self.num_candidates)
            unseen = np.array([index for index in near if self._samples.unseen(int(index))], dtype=np.int64)
            neighbors |= dict.fromkeys(map(int, self._posterior.most_hopeful(unseen, DOUBT)))
        return list(neighbors)

    def _imprecise(self) -> list[int]:
        """Return the best candidate while its estimate is wider than requested."""
        choice = self.best()
        if choice is None or self._precision is None or choice.ci95 <= self._precision * choice.images_per_second:
            return []
        return [choice.index]

    def _learn(self) -> None:
        if self._stale:
            self._posterior.learn()
            self._choice = None
            self._stale = False

    def _race(self, num: int) -> list[int]:
        """Run top-two Thompson sampling. Unmeasured candidates are asked for only once per call."""
        self._learn()
        draws, columns = self._posterior.draws(RIVAL_DRAWS * num)
        # A candidate that may fail competes only in as many draws as it is likely to run.
        alive = self._random.random(draws.shape) < self._posterior.chances_of_success(columns)
        draws = np.where(alive, draws, -np.inf)
        unseen = np.array([self._samples.unseen(int(index)) for index in columns])
        asked: list[int] = []
        for turn in range(num):
            block = draws[RIVAL_DRAWS * turn : RIVAL_DRAWS * (turn + 1)]
            first = int(np.argmax(block[0]))
            pick = first
            if self._random.random() < CHALLENGE_SHARE:
                rivals = np.argmax(block[1:], axis=1)
                # Further draws until another one wins (top-two); if none does, the runner-up of the first draw.
                challengers = rivals[rivals != first]
                pick = int(challengers[0]) if len(challengers) else int(np.argsort(-block[0])[:2][-1])
            asked.append(int(columns[pick]))
            if unseen[pick]:
                draws[:, pick] = -np.inf
        return asked


@cache
def _thread_pools() -> ThreadpoolController:
    """Return the libraries loaded when the search begins. The surrogate has loaded those of numpy and scipy by then."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[object]:
    """Return a context in which linear algebra uses only the calling thread. Its end restores the number of threads.

    The search's matrices are small: several threads take longer for them than one, and much longer on busy cores,
    because OpenBLAS's threads wait for each other in busy loops.
    """
    limited: AbstractContextManager[object] = _thread_pools().limit(limits=1, user_api="blas")
    return limited
