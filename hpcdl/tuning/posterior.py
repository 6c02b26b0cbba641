"""What a search was told of every candidate, and the posterior that the surrogate gives: means, deviations, draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hpcdl.tuning.factors import Factor, Floats, Indices
from hpcdl.tuning.surrogate import Surrogate

MAX_FINALISTS = 192
MAX_FIT_ROWS = 160
REACH = 0.3
"""Distance over which a failure makes its neighbours suspect."""
FIRST_ITERATIONS, LATER_ITERATIONS = 40, 15
FIT_GROWTH, SURPRISED_GROWTH = 1.35, 1.08
"""By which factor the samples have grown when the hyperparameters move: usually, and where some were a surprise."""


class Samples:
    """Logarithms of images/s by candidate."""

    def __init__(self, num_candidates: int) -> None:
        self.num_candidates = num_candidates
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

    def summary(self) -> tuple[Indices, Floats, Floats, float]:
        """Candidates, their means, how many samples each mean has, and the sum of squares inside candidates."""
        rows = np.array(sorted(self.known), dtype=np.int64)
        items = [self.known[int(index)] for index in rows]
        means = np.array([np.mean(own) for own in items])
        counts = np.array([len(own) for own in items], dtype=float)
        return rows, means, counts, sum(float(np.var(own)) * len(own) for own in items)

    @staticmethod
    def _those(holds: Callable[[int], bool], indices: Sequence[int]) -> Indices:
        return np.array([index for index in indices if holds(index)], dtype=np.int64)


class Posterior:
    """Means and standard deviations of all candidates' log images/s, relative to `offset`, as of the last `learn`."""

    def __init__(self, samples: Samples, factors: Sequence[Factor], dice: np.random.Generator) -> None:
        self.offset = 0.0
        self.mean = self.std = np.zeros(samples.num_candidates)
        self._samples = samples
        self._factors = factors
        self._dice = dice
        self._surrogate = Surrogate(factors, samples.num_candidates)
        self._num_fitted = 0

    def learn(self) -> None:
        """Bring the surrogate up to date; its hyperparameters move when the data has grown by a third."""
        rows, means, counts, within = self._samples.summary()
        self.offset = float(np.mean(means))
        values = means - self.offset
        if len(rows) > 2 and self._grown(FIT_GROWTH):
            self._fit(rows, values, counts, within)
        self._surrogate.condition(rows, values, counts)
        if self._surrogate.num_surprises and self._grown(SURPRISED_GROWTH):
            self._fit(rows, values, counts, within)
            self._surrogate.condition(rows, values, counts)
        self.mean, self.std = self._surrogate.marginals()

    def _grown(self, factor: float) -> bool:
        return self._samples.num_told >= factor * self._num_fitted

    def _fit(self, rows: Indices, values: Floats, counts: Floats, within: float) -> None:
        """Move the hyperparameters; of many candidates, the best half and others by lot are enough for that."""
        keep = np.arange(len(rows))
        if len(rows) > MAX_FIT_ROWS:
            top = np.argsort(-values)[: MAX_FIT_ROWS // 2]
            others = self._dice.permutation(np.setdiff1d(keep, top))[: MAX_FIT_ROWS - len(top)]
            keep = np.sort(np.concatenate([top, others]))
        iterations = FIRST_ITERATIONS if self._num_fitted == 0 else LATER_ITERATIONS
        degrees = int(counts.sum()) - len(rows)
        self._surrogate.fit(rows[keep], values[keep], counts[keep], (within, degrees), iterations)
        self._num_fitted = self._samples.num_told

    def draws(self, num: int, include: int | None = None) -> tuple[Floats, Indices]:
        """`num` joint draws of the log speeds of the most promising candidates, and which candidates those are."""
        alive = self._samples.all_sound()
        if len(alive) > MAX_FINALISTS:
            alive = alive[np.argsort(-(self.mean[alive] + 2.5 * self.std[alive]))[:MAX_FINALISTS]]
        columns = np.unique(np.append(alive, [] if include is None else [include]).astype(np.int64))
        mean, covariance = self._surrogate.joint(columns)
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws: Floats = mean + self._dice.standard_normal((num, len(columns))) @ root.T
        return draws, columns

    def most_hopeful(self, columns: Indices, doubt: float) -> Indices:
        """`columns`, first those that would be fastest if the model is too sure of itself by `doubt` deviations."""
        hope = (self.mean + doubt * self.std)[columns] + np.log(self.chances_of_success(columns))
        return columns[np.argsort(-hope)]

    def chances_of_success(self, columns: Indices) -> Floats:
        """How likely each of `columns` runs at all."""
        if not self._samples.failures:
            return np.ones(len(columns))
        tried = np.array(sorted(self._samples.candidates_told), dtype=np.int64)
        failed = np.array([not self._samples.sound(int(index)) for index in tried], dtype=float)
        return _chances_of_success(self._factors, columns, tried, failed)


def _chances_of_success(factors: Sequence[Factor], columns: Indices, tried: Indices, failed: Floats) -> Floats:
    """How likely each of `columns` runs at all, from those near it that failed (1 in `failed`) or ran."""
    distance = np.zeros((len(columns), len(tried)))
    for factor in factors:
        distance += factor.distances[np.ix_(factor.levels[columns], factor.levels[tried])]
    weight = np.exp(-distance / REACH)
    chances: Floats = 1.0 - (weight @ failed + 0.01) / (weight.sum(axis=1) + 0.2)
    return chances
