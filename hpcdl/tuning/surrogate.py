"""A Gaussian process over candidates: main effects, interactions, quirks and noise; and its posterior.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): regression section 2.2, evidence and its
gradient section 5.4.1, Matern 3/2 equation 4.17. Values are logarithms of images/s, so effects multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

from hpcdl.tuning.space import Factor, Floats, Indices

MAX_FINALISTS = 192
MAX_FIT_ROWS = 160
REACH = 0.3
"""Distance over which a failure makes its neighbors suspect."""
FIRST_ITERATIONS, LATER_ITERATIONS = 40, 15
FIT_GROWTH, SURPRISED_GROWTH = 1.35, 1.08
"""Growth of the samples after which hyperparameters are refitted: usually, and after surprises."""


class Samples:
    """Logarithms of images/s by candidate."""

    def __init__(self, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        self.known: dict[int, list[float]] = {}
        self.failures: dict[int, int] = {}

    @property
    def num_observed(self) -> int:
        """Number of samples told, including failures."""
        return sum(map(len, self.known.values())) + sum(self.failures.values())

    @property
    def candidates_observed(self) -> set[int]:
        """Candidates with a sample or a failure."""
        return self.known.keys() | self.failures.keys()

    def add(self, index: int, images_per_second: float | None) -> None:
        """Add one sample of a candidate; None, or a value that cannot be a speed, if its trial failed."""
        if images_per_second is None or not (math.isfinite(images_per_second) and images_per_second > 0):
            self.failures[index] = self.failures.get(index, 0) + 1
        else:
            self.known.setdefault(index, []).append(math.log(images_per_second))

    def unseen(self, index: int) -> bool:
        """Return whether a candidate has neither samples nor failures."""
        return index not in self.known and index not in self.failures

    def sound(self, index: int) -> bool:
        """Return whether a candidate ran at least as often as it failed."""
        return self.failures.get(index, 0) < max(len(self.known.get(index, ())), 1)

    def all_unseen(self) -> Indices:
        """Return the candidates without samples or failures, in order."""
        return self._those(self.unseen, range(self.num_candidates))

    def all_sound(self) -> Indices:
        """Return the candidates that did not mostly fail, measured or not, in order."""
        return self._those(self.sound, range(self.num_candidates))

    def measured(self) -> Indices:
        """Return the sound candidates that were measured, in order."""
        return self._those(self.sound, sorted(self.known))

    def summary(self) -> tuple[Indices, Floats, Floats, float]:
        """Return candidates, their means, the samples of each mean, and the sum of squares inside candidates."""
        rows = np.array(sorted(self.known), dtype=np.int64)
        items = [self.known[int(index)] for index in rows]
        means = np.array([np.mean(samples) for samples in items])
        counts = np.array([len(samples) for samples in items], dtype=float)
        return rows, means, counts, sum(float(np.var(samples)) * len(samples) for samples in items)

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
        """Update the surrogate. Its hyperparameters are refitted when the data have grown by a third."""
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
        return self._samples.num_observed >= factor * self._num_fitted

    def _fit(self, rows: Indices, values: Floats, counts: Floats, within: float) -> None:
        """Refit the hyperparameters. Of many candidates, the best half and a random choice of others are enough."""
        keep = np.arange(len(rows))
        if len(rows) > MAX_FIT_ROWS:
            top = np.argsort(-values)[: MAX_FIT_ROWS // 2]
            sampled = self._dice.permutation(np.setdiff1d(keep, top))[: MAX_FIT_ROWS - len(top)]
            keep = np.sort(np.concatenate([top, sampled]))
        iterations = FIRST_ITERATIONS if self._num_fitted == 0 else LATER_ITERATIONS
        degrees = int(counts.sum()) - len(rows)
        self._surrogate.fit(rows[keep], values[keep], counts[keep], (within, degrees), iterations)
        self._num_fitted = self._samples.num_observed

    def draws(self, num: int, include: int | None = None) -> tuple[Floats, Indices]:
        """Return `num` joint draws of the log speeds of the most promising candidates, and their indices."""
        alive = self._samples.all_sound()
        if len(alive) > MAX_FINALISTS:
            alive = alive[np.argsort(-(self.mean[alive] + 2.5 * self.std[alive]))[:MAX_FINALISTS]]
        columns = np.unique(np.append(alive, [] if include is None else [include]).astype(np.int64))
        mean, covariance = self._surrogate.joint(columns)
        # A posterior's covariance may be singular up to rounding, on which Cholesky fails.
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws: Floats = mean + self._dice.standard_normal((num, len(columns))) @ root.T
        return draws, columns

    def most_hopeful(self, columns: Indices, doubt: float) -> Indices:
        """Return `columns`, ordered by possible speed if the model is too certain by `doubt` deviations."""
        hope = (self.mean + doubt * self.std)[columns] + np.log(self.chances_of_success(columns))
        return columns[np.argsort(-hope)]

    def chances_of_success(self, columns: Indices) -> Floats:
        """Return the probability that each of `columns` runs at all."""
        if not self._samples.failures:
            return np.ones(len(columns))
        tried = np.array(sorted(self._samples.candidates_observed), dtype=np.int64)
        failed = np.array([not self._samples.sound(int(index)) for index in tried], dtype=float)
        return _chances_of_success(self._factors, columns, tried, failed)


def _chances_of_success(factors: Sequence[Factor], columns: Indices, tried: Indices, failed: Floats) -> Floats:
    """Return the probability that each of `columns` runs, from nearby candidates that failed (1 in `failed`) or ran."""
    distance = np.zeros((len(columns), len(tried)))
    for factor in factors:
        distance += factor.distances[np.ix_(factor.levels[columns], factor.levels[tried])]
    weight = np.exp(-distance / REACH)
    # Far from all that was tried, 5 % are expected to fail.
    chances: Floats = 1.0 - (weight @ failed + 0.01) / (weight.sum(axis=1) + 0.2)
    return chances


_JITTER = 1e-9  # keeps the matrix positive definite despite rounding
_PRIOR_OFFSET_VARIANCE = 4.0  # of the overall level: e^2 times faster or slower
_LENGTH, _MAIN, _JOINT, _QUIRK, _NOISE = (
    (np.log(0.8), 0.8), (np.log(0.05), 1.5), (np.log(0.05), 1.5), (np.log(2e-4), 1.2), (np.log(0.05**2), 1.2),
)  # fmt: skip
"""Mean and standard deviation of the logarithm of each hyperparameter, before data."""
SURPRISE = 3.5
"""Standard deviations from the prediction by all others beyond which a candidate's own values are trusted."""
MAX_SURPRISE_ROUNDS = 3


class Surrogate:
    """Learns from (candidate, mean of n samples) and predicts any candidate."""

    def __init__(self, factors: Sequence[Factor], num_candidates: int) -> None:
        self._factors = tuple(factors)
        self._num_candidates = num_candidates
        self._kept: dict[int, Floats] = {}
        self.num_surprises = 0
        num = len(factors)
        means = [_LENGTH[0]] * num + [_MAIN[0]] * num + [_JOINT[0], _QUIRK[0], _NOISE[0]]
        spreads = [_LENGTH[1]] * num + [_MAIN[1]] * num + [_JOINT[1], _QUIRK[1], _NOISE[1]]
        self._prior_mean, self._prior_spread = np.array(means), np.array(spreads)
        self.theta = self._prior_mean.copy()
        self._num = num

    def _kernel(self, theta: Floats, rows: Indices, columns: Indices) -> Floats:
        """Return the kernel without quirk and noise."""
        main = np.full((len(rows), len(columns)), _PRIOR_OFFSET_VARIANCE)
        joint = np.full((len(rows), len(columns)), np.exp(theta[2 * self._num]))
        for index, factor in enumerate(self._factors):
            scaled = np.sqrt(3.0) * factor.distances / np.exp(theta[index])
            single = ((1.0 + scaled) * np.exp(-scaled))[np.ix_(factor.levels[rows], factor.levels[columns])]
            main += np.exp(theta[self._num + index]) * single
            joint *= single
        total: Floats = main + joint
        return total

    def fit(self, rows: Indices, values: Floats, counts: Floats, within: tuple[float, int], iterations: int) -> None:
        """Move the hyperparameters from their present values towards the most probable ones.

        `values` are means of `counts` samples, centered; `within` is the sum of squares inside candidates and its
        degrees of freedom.
        """
        squares, degrees = within

        def objective(theta: Floats) -> tuple[float, Floats]:
            return self._negative_evidence(theta, rows, values, counts, squares, degrees)

        bounds = list(
            zip(self._prior_mean - 4 * self._prior_spread, self._prior_mean + 4 * self._prior_spread, strict=True)
        )
        minimum = minimize(
            objective, self.theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": iterations}
        )
        if np.all(np.isfinite(minimum.x)):
            self.theta = minimum.x
            self._kept.clear()

    def _negative_evidence(
        self, theta: Floats, rows: Indices, values: Floats, counts: Floats, squares: float, degrees: int
    ) -> tuple[float, Floats]:
        quirk, noise = np.exp(theta[-2]), np.exp(theta[-1])
        joint = self._kernel(theta, rows, rows)
        matrix = joint + np.diag(quirk + noise / counts + _JITTER)
        factor = cho_factor(matrix, lower=True)
        weights = cho_solve(factor, values)
        # Half of the matrix of equation 5.9, with the sign of the negative evidence.
        slope = 0.5 * (cho_solve(factor, np.eye(len(rows))) - np.outer(weights, weights))
        evidence = 0.5 * values @ weights + np.log(np.diag(factor[0])).sum()
        # The scatter inside candidates depends on the noise alone.
        evidence += 0.5 * (squares / noise + degrees * theta[-1])
        gradient = np.empty_like(theta)
        self._kernel_gradient(theta, rows, slope, gradient)
        diagonal = np.diag(slope)
        gradient[-2] = quirk * diagonal.sum()
        gradient[-1] = noise * np.sum(diagonal / counts) + 0.5 * (degrees - squares / noise)
        # The priors keep hyperparameters in place that few samples do not determine.
        pull = (theta - self._prior_mean) / self._prior_spread
        return float(evidence + 0.5 * pull @ pull), gradient + pull / self._prior_spread

    def _kernel_gradient(self, theta: Floats, rows: Indices, slope: Floats, gradient: Floats) -> None:
        """Fill in the derivatives by lengths, main variances and joint variance; d k / d log l = s^2 exp(-s)."""
        num = self._num
        singles, shares = [], []
        joint = np.exp(theta[2 * num]) * slope
        for index, factor in enumerate(self._factors):
            pairs = np.ix_(factor.levels[rows], factor.levels[rows])
            scaled = np.sqrt(3.0) * factor.distances / np.exp(theta[index])
            single = (1.0 + scaled) * np.exp(-scaled)
            derivative = scaled**2 * np.exp(-scaled)
            variance = np.exp(theta[num + index])
            singles.append(single[pairs])
            shares.append((derivative / single)[pairs])
            gradient[num + index] = variance * np.sum(slope * singles[-1])
            gradient[index] = variance * np.sum(slope * derivative[pairs])
            joint = joint * singles[-1]
        for index, share in enumerate(shares):
            gradient[index] += np.sum(joint * share)
        gradient[2 * num] = np.sum(joint)

    def condition(self, rows: Indices, values: Floats, counts: Floats) -> None:
        """Learn the data under the present hyperparameters. `rows` are distinct candidates.

        A candidate that all others together did not predict (leave-one-out residual, Rasmussen and Williams, equation
        5.12) gets a quirk as large as its residual: a jump counts only where it was seen, and an outlier of one sample
        does not affect its surroundings. `num_surprises` counts them.
        """
        self._rows = rows
        self._cross_all = self._against_all(rows)
        quirk, noise = np.exp(self.theta[-2]), np.exp(self.theta[-1])
        self._quirks = np.full(self._num_candidates, quirk)
        foreseen = self._quirks[rows]
        kernel = self._cross_all[:, rows] + np.diag(noise / counts + _JITTER)
        for _ in range(MAX_SURPRISE_ROUNDS):
            self._lower = cholesky(kernel + np.diag(self._quirks[rows]), lower=True)
            self._weights = cho_solve((self._lower, True), values)
            inverse = solve_triangular(self._lower, np.eye(len(rows)), lower=True)
            # The inverse's diagonal: left out, a candidate has variance 1/precision, residual weight/precision.
            precision = np.einsum("ij,ij->j", inverse, inverse)
            surprising = np.abs(self._weights) > SURPRISE * np.sqrt(precision)
            if not surprising.any():
                break
            residuals = (self._weights / precision)[surprising]
            self._quirks[rows[surprising]] += residuals**2
        self.num_surprises = int(np.sum(self._quirks[rows] > foreseen))

    def _against_all(self, rows: Indices) -> Floats:
        """Return the kernel of `rows` against every candidate. Rows are cached until the hyperparameters change."""
        fresh = np.array([row for row in rows if int(row) not in self._kept], dtype=np.int64)
        if len(fresh):
            every = np.arange(self._num_candidates)
            self._kept.update(zip(map(int, fresh), self._kernel(self.theta, fresh, every), strict=True))
        return np.stack([self._kept[int(row)] for row in rows])

    def marginals(self) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of every candidate."""
        cross = self._cross(np.arange(self._num_candidates))
        solved = solve_triangular(self._lower, cross, lower=True)
        # The kernel of a candidate with itself: every correlation is 1.
        prior = _PRIOR_OFFSET_VARIANCE + np.exp(self.theta[self._num : 2 * self._num + 1]).sum() + self._quirks
        variance = prior - np.einsum("ij,ij->j", solved, solved)
        return cross.T @ self._weights, np.sqrt(np.maximum(variance, 1e-12))

    def joint(self, columns: Indices) -> tuple[Floats, Floats]:
        """Return joint mean and covariance of the log images/s of `columns`, with quirks, without noise."""
        cross = self._cross(columns)
        solved = solve_triangular(self._lower, cross, lower=True)
        prior = self._kernel(self.theta, columns, columns) + np.diag(self._quirks[columns])
        return cross.T @ self._weights, prior - solved.T @ solved

    def _cross(self, columns: Indices) -> Floats:
        same: Floats = (self._rows[:, None] == columns[None, :]).astype(np.float64)
        cross: Floats = self._cross_all[:, columns] + self._quirks[columns] * same
        return cross
