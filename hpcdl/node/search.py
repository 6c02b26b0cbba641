"""Finds the fastest candidate with few samples: a balanced start, then a race that a surrogate model steers.

Candidates are asked for, measured by the caller, and told. The race is top-two Thompson sampling (Russo 2016) on the
surrogate's joint belief: half of the samples go to what may be best, half to what may yet beat it, so those that are
clearly beaten get no more. It ends when the expected loss of stopping is small, or the budget is used up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.node.design import Indices, balanced_start, beside, chances_of_success
from hpcdl.node.factors import Floats, factors_of
from hpcdl.node.surrogate import Surrogate

MAX_FINALISTS = 192
MAX_FIT_ROWS = 160
FIT_GROWTH = 1.35
NUM_DRAWS = 256
RIVAL_DRAWS = 4
CHALLENGE_SHARE = 0.5
DOUBT = 3.0
LEAST_SHARE = 0.8
"""Of a given number of samples, how many are used even if the model is convinced earlier."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best so far. `images_per_second` is the model's estimate with its 95 % half width in `ci95`; `expected_loss`
    is what stopping now loses on average against the true best, relative; `probability_best` that nothing beats it.
    """

    index: int
    images_per_second: float
    ci95: float
    n: int
    expected_loss: float
    probability_best: float


class Search:
    """`ask` which candidates to measure, `tell` what was measured. Earlier trials of a log are simply told first."""

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
        self.samples: dict[int, list[float]] = {}
        self.failures: dict[int, int] = {}
        self._random = np.random.default_rng(seed)
        self._factors = factors_of(candidates)
        self._surrogate = Surrogate(self._factors, self.num_candidates)
        self._max_samples = max_samples
        self._tolerance = tolerance
        self._precision = precision
        self._num_fitted = 0
        self._stale = True
        self._choice: Choice | None = None
        self._offset = 0.0
        self._mean = self._std = np.zeros(self.num_candidates)
        budget = max_samples or self.num_candidates
        self._start = balanced_start(
            self._factors, self.num_candidates, anchors=anchors, budget=budget, dice=self._random
        )
        self._least = (
            2 * len(self._start) if max_samples is None else max(len(self._start), int(LEAST_SHARE * max_samples))
        )

    @property
    def num_samples(self) -> int:
        """Samples told, failures included."""
        return sum(map(len, self.samples.values())) + sum(self.failures.values())

    @property
    def num_trials(self) -> int:
        """Candidates told at least once."""
        return len(self.samples.keys() | self.failures.keys())

    def tell(self, index: int, images_per_second: float | None) -> None:
        """One sample of a candidate; None if its trial failed."""
        if images_per_second is None or not (math.isfinite(images_per_second) and images_per_second > 0):
            self.failures[index] = self.failures.get(index, 0) + 1
        else:
            self.samples.setdefault(index, []).append(math.log(images_per_second))
        self._stale = True

    def ask(self, num: int = 1) -> list[int]:
        """Up to `num` candidates to measure next; one may come more than once. Empty: nothing can be gained."""
        if self._max_samples is not None:
            num = min(num, self._max_samples - self.num_samples)
        if num <= 0:
            return []
        known = self.samples.keys() | self.failures.keys()
        fresh = [index for index in self._start if self._unseen(index)][:num]
        if fresh:
            return fresh
        if self._convinced():
            return self._doubts(num)
        if not self.samples:
            rest = [index for index in range(self.num_candidates) if index not in known]
            return [int(index) for index in self._random.permutation(rest)[:num]]
        return self._race(num)

    def best(self) -> Choice | None:
        """The measured candidate that the model believes fastest; None while nothing was measured with success."""
        measured = np.array([index for index in sorted(self.samples) if self._sound(index)], dtype=np.int64)
        if len(measured) == 0:
            return None
        self._learn()
        if self._choice is None:
            place = int(np.argmax(self._mean[measured]))
            self._choice = self._judged(int(measured[place]))
        return self._choice

    def _judged(self, index: int) -> Choice:
        draws, columns = self._draws(NUM_DRAWS, include=index)
        gain = draws.max(axis=1) - draws[:, int(np.flatnonzero(columns == index)[0])]
        value = math.exp(self._mean[index] + self._offset)
        return Choice(
            index=index,
            images_per_second=value,
            ci95=value * math.expm1(1.96 * self._std[index]),
            n=len(self.samples[index]),
            expected_loss=float(np.mean(-np.expm1(-gain))),
            probability_best=float(np.mean(gain <= 0)),
        )

    def _convinced(self) -> bool:
        """Whether the model expects to gain less than the tolerance from more samples."""
        choice = self.best()
        return choice is not None and choice.n > 1 and choice.expected_loss < self._tolerance

    def _doubts(self, num: int) -> list[int]:
        """What may yet prove a convinced model wrong: candidates beside the best, then the most hopeful ones; the best
        itself while its estimate is too wide. Empty: nothing is left to ask.
        """
        beside = self._unseen_neighbours()
        if beside:
            return beside[:num]
        if self.num_samples < self._least:
            return self._hopeful(num) or self._race(num)
        return self._imprecise()

    def _hopeful(self, num: int) -> list[int]:
        """The unmeasured candidates that may be fastest if the model is far too sure of itself."""
        unseen = np.array([index for index in range(self.num_candidates) if self._unseen(index)], dtype=np.int64)
        hope = (self._mean + DOUBT * self._std)[unseen] + np.log(self._chances_of_success(unseen))
        return [int(index) for index in unseen[np.argsort(-hope)[:num]]]

    def _unseen(self, index: int) -> bool:
        return index not in self.samples and index not in self.failures

    def _unseen_neighbours(self) -> list[int]:
        """Unmeasured candidates beside the best: cliffs hide there from a smooth model."""
        choice = self.best()
        if choice is None:
            return []
        near = beside(self._factors, choice.index, self.num_candidates)
        return [int(index) for index in near if self._unseen(int(index))]

    def _imprecise(self) -> list[int]:
        """The best candidate, while its estimate is wider than asked for."""
        choice = self.best()
        if choice is None or self._precision is None or choice.ci95 <= self._precision * choice.images_per_second:
            return []
        return [choice.index]

    def _sound(self, index: int) -> bool:
        return self.failures.get(index, 0) < max(len(self.samples.get(index, ())), 1)

    def _learn(self) -> None:
        """Bring the surrogate up to date; its hyperparameters move when the data has grown by a third."""
        if not self._stale:
            return
        rows = np.array(sorted(self.samples), dtype=np.int64)
        counts = np.array([len(self.samples[index]) for index in rows], dtype=float)
        raw = np.array([np.mean(self.samples[index]) for index in rows])
        self._offset = float(np.mean(raw))
        values = raw - self._offset
        if len(rows) > 2 and self.num_samples >= FIT_GROWTH * self._num_fitted:
            within = sum(float(np.var(items)) * len(items) for items in self.samples.values())
            keep = np.arange(len(rows))
            if len(rows) > MAX_FIT_ROWS:
                top = np.argsort(-values)[: MAX_FIT_ROWS // 2]
                others = self._random.permutation(np.setdiff1d(keep, top))[: MAX_FIT_ROWS - len(top)]
                keep = np.sort(np.concatenate([top, others]))
            iterations = 40 if self._num_fitted == 0 else 15
            degrees = int(counts.sum()) - len(rows)
            self._surrogate.fit(rows[keep], values[keep], counts[keep], (within, degrees), iterations)
            self._num_fitted = self.num_samples
        self._surrogate.condition(rows, values, counts)
        self._mean, self._std = self._surrogate.marginals()
        self._choice = None
        self._stale = False

    def _race(self, num: int) -> list[int]:
        """Top-two Thompson sampling; what was never measured is asked for once at a time."""
        draws, columns = self._draws(RIVAL_DRAWS * num)
        alive = self._random.random(draws.shape) < self._chances_of_success(columns)
        draws = np.where(alive, draws, -np.inf)
        unseen = np.array([self._unseen(int(index)) for index in columns])
        asked: list[int] = []
        for turn in range(num):
            block = draws[RIVAL_DRAWS * turn : RIVAL_DRAWS * (turn + 1)]
            first = int(np.argmax(block[0]))
            pick = first
            if self._random.random() < CHALLENGE_SHARE:
                rivals = np.argmax(block[1:], axis=1)
                others = rivals[rivals != first]
                pick = int(others[0]) if len(others) else int(np.argsort(-block[0])[:2][-1])
            asked.append(int(columns[pick]))
            if unseen[pick]:
                draws[:, pick] = -np.inf
        return asked

    def _draws(self, num: int, include: int | None = None) -> tuple[Floats, Indices]:
        """`num` joint draws of the log speeds of the most promising candidates, and which candidates those are."""
        self._learn()
        alive = np.array([index for index in range(self.num_candidates) if self._sound(index)], dtype=np.int64)
        if len(alive) > MAX_FINALISTS:
            alive = alive[np.argsort(-(self._mean[alive] + 2.5 * self._std[alive]))[:MAX_FINALISTS]]
        columns = np.unique(np.append(alive, [] if include is None else [include]).astype(np.int64))
        posterior = self._surrogate.joint(columns)
        values, vectors = np.linalg.eigh(posterior.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws: Floats = posterior.mean + self._random.standard_normal((num, len(columns))) @ root.T
        return draws, columns

    def _chances_of_success(self, columns: Indices) -> Floats:
        if not self.failures:
            return np.ones(len(columns))
        told = np.array(sorted(self.samples.keys() | self.failures.keys()), dtype=np.int64)
        failed = np.array([not self._sound(int(index)) for index in told], dtype=float)
        return chances_of_success(self._factors, columns, told, failed)
