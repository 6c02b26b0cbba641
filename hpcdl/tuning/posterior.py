"""What a search believes of every candidate: the surrogate kept up to date with the samples, and draws from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcdl.tuning.factors import Factor, Floats
from hpcdl.tuning.initial_design import Indices, chances_of_success
from hpcdl.tuning.samples import Samples
from hpcdl.tuning.surrogate import Surrogate

MAX_FINALISTS = 192
MAX_FIT_ROWS = 160
FIRST_ITERATIONS, LATER_ITERATIONS = 40, 15
FIT_GROWTH, SURPRISED_GROWTH = 1.35, 1.08
"""By which factor the samples have grown when the hyperparameters move: usually, and where some were a surprise."""


class Belief:
    """Means and standard deviations of all candidates' log images/s, relative to `offset`, as of the last `learn`."""

    def __init__(self, samples: Samples, factors: Sequence[Factor], dice: np.random.Generator) -> None:
        self.offset = 0.0
        self.mean = self.std = np.zeros(samples.num_candidates)
        self._samples = samples
        self._factors = factors
        self._dice = dice
        self._surrogate = Surrogate(factors, samples.num_candidates, samples.num_recorded)
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
        posterior = self._surrogate.joint(columns)
        values, vectors = np.linalg.eigh(posterior.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws: Floats = posterior.mean + self._dice.standard_normal((num, len(columns))) @ root.T
        return draws, columns

    def most_hopeful(self, columns: Indices, doubt: float) -> Indices:
        """`columns`, first those that would be fastest if the model is too sure of itself by `doubt` deviations."""
        hope = (self.mean + doubt * self.std)[columns] + np.log(self.chances_of_success(columns))
        return columns[np.argsort(-hope)]

    def chances_of_success(self, columns: Indices) -> Floats:
        """How likely each of `columns` runs at all."""
        if not self._samples.failures:
            return np.ones(len(columns))
        told = np.array(sorted(self._samples.candidates_told), dtype=np.int64)
        failed = np.array([not self._samples.sound(int(index)) for index in told], dtype=float)
        return chances_of_success(self._factors, columns, told, failed)
