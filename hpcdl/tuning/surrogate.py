"""A Gaussian process over candidates: main effects, their interactions, a quirk of each candidate, and noise.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): regression section 2.2, evidence and its
gradient section 5.4.1, Matern 3/2 equation 4.17. Values are logarithms of images/s, so effects multiply.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

from hpcdl.tuning.factors import Factor, Floats, Indices

_JITTER = 1e-9
_PRIOR_OFFSET_VARIANCE = 4.0
_LENGTH, _MAIN, _JOINT, _QUIRK, _NOISE = (
    (np.log(0.8), 0.8), (np.log(0.05), 1.5), (np.log(0.05), 1.5), (np.log(2e-4), 1.2), (np.log(0.05**2), 1.2),
)  # fmt: skip
"""Mean and standard deviation of the logarithm of each hyperparameter, before data."""
SURPRISE = 3.5
"""Standard deviations by which a candidate may differ from what all others say, before it is taken at its own word."""
MAX_SURPRISE_ROUNDS = 3


class Surrogate:
    """Learns from (candidate, mean of n samples); predicts any candidate."""

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
        """Kernel without quirk and noise."""
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
        """Move the hyperparameters towards the most probable ones, from where they are.

        `values` are means of `counts` samples, centred; `within` is the sum of squares inside candidates and its
        degrees of freedom.
        """
        squares, degrees = within

        def objective(theta: Floats) -> tuple[float, Floats]:
            return self._negative_evidence(theta, rows, values, counts, squares, degrees)

        bounds = list(
            zip(self._prior_mean - 4 * self._prior_spread, self._prior_mean + 4 * self._prior_spread, strict=True)
        )
        found = minimize(
            objective, self.theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": iterations}
        )
        if np.all(np.isfinite(found.x)):
            self.theta = found.x
            self._kept.clear()

    def _negative_evidence(
        self, theta: Floats, rows: Indices, values: Floats, counts: Floats, squares: float, degrees: int
    ) -> tuple[float, Floats]:
        quirk, noise = np.exp(theta[-2]), np.exp(theta[-1])
        joint = self._kernel(theta, rows, rows)
        matrix = joint + np.diag(quirk + noise / counts + _JITTER)
        factor = cho_factor(matrix, lower=True)
        weights = cho_solve(factor, values)
        slope = 0.5 * (cho_solve(factor, np.eye(len(rows))) - np.outer(weights, weights))
        evidence = 0.5 * values @ weights + np.log(np.diag(factor[0])).sum()
        evidence += 0.5 * (squares / noise + degrees * theta[-1])
        gradient = np.empty_like(theta)
        self._kernel_gradient(theta, rows, slope, gradient)
        diagonal = np.diag(slope)
        gradient[-2] = quirk * diagonal.sum()
        gradient[-1] = noise * np.sum(diagonal / counts) + 0.5 * (degrees - squares / noise)
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
            own = scaled**2 * np.exp(-scaled)
            variance = np.exp(theta[num + index])
            singles.append(single[pairs])
            shares.append((own / single)[pairs])
            gradient[num + index] = variance * np.sum(slope * singles[-1])
            gradient[index] = variance * np.sum(slope * own[pairs])
            joint = joint * singles[-1]
        for index, share in enumerate(shares):
            gradient[index] += np.sum(joint * share)
        gradient[2 * num] = np.sum(joint)

    def condition(self, rows: Indices, values: Floats, counts: Floats) -> None:
        """Learn the data under the present hyperparameters; `rows` are distinct candidates.

        A candidate that all others together did not foresee (leave-one-out residual, Rasmussen and Williams, equation
        5.12) gets a quirk as large as its residual: a cliff counts where it was seen, and a hiccup of one sample
        does not bend its surroundings. `num_surprises` counts them.
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
            precision = np.einsum("ij,ij->j", inverse, inverse)
            surprising = np.abs(self._weights) > SURPRISE * np.sqrt(precision)
            if not surprising.any():
                break
            residuals = (self._weights / precision)[surprising]
            self._quirks[rows[surprising]] += residuals**2
        self.num_surprises = int(np.sum(self._quirks[rows] > foreseen))

    def _against_all(self, rows: Indices) -> Floats:
        """Kernel of `rows` against every candidate; rows are kept until the hyperparameters move."""
        fresh = np.array([row for row in rows if int(row) not in self._kept], dtype=np.int64)
        if len(fresh):
            every = np.arange(self._num_candidates)
            self._kept.update(zip(map(int, fresh), self._kernel(self.theta, fresh, every), strict=True))
        return np.stack([self._kept[int(row)] for row in rows])

    def marginals(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of every candidate."""
        cross = self._cross(np.arange(self._num_candidates))
        solved = solve_triangular(self._lower, cross, lower=True)
        prior = _PRIOR_OFFSET_VARIANCE + np.exp(self.theta[self._num : 2 * self._num + 1]).sum() + self._quirks
        variance = prior - np.einsum("ij,ij->j", solved, solved)
        return cross.T @ self._weights, np.sqrt(np.maximum(variance, 1e-12))

    def joint(self, columns: Indices) -> tuple[Floats, Floats]:
        """Mean and covariance of the log images/s of `columns` together, quirks included, noise not."""
        cross = self._cross(columns)
        solved = solve_triangular(self._lower, cross, lower=True)
        prior = self._kernel(self.theta, columns, columns) + np.diag(self._quirks[columns])
        return cross.T @ self._weights, prior - solved.T @ solved

    def _cross(self, columns: Indices) -> Floats:
        same: Floats = (self._rows[:, None] == columns[None, :]).astype(np.float64)
        cross: Floats = self._cross_all[:, columns] + self._quirks[columns] * same
        return cross
