"""Linear models of positive measurements with relative noise: coefficients with intervals, and the alpha-beta model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.core.fits import Parameter
from hpcdl.core.statistics import t_quantile

_ITERATIONS = 30


@dataclass(frozen=True, kw_only=True)
class LinearFit:
    """Coefficients with 95 % Student-t intervals; `r2` and `spread` are of relative residuals."""

    coefficients: tuple[Parameter, ...]
    r2: float | None
    spread: float | None
    num_runs: int


def fit_relative(design: Sequence[Sequence[float]], measured: Sequence[float]) -> LinearFit | None:
    """Fit measured = design . coefficients, errors proportional to the model (iteratively reweighted least squares).

    `design` is (runs, coefficients). None where the runs cannot tell the coefficients apart, or where the model is not
    positive at a run. The weights follow the model, not the measurement, which would bias the fit downwards.
    """
    import numpy

    matrix, values = numpy.asarray(design, dtype=float), numpy.asarray(measured, dtype=float)
    scale = numpy.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    if numpy.linalg.matrix_rank(scaled / numpy.abs(scaled).max(axis=1, keepdims=True)) < matrix.shape[1]:
        return None
    model = values
    for _ in range(_ITERATIONS):
        weighted = scaled / model[:, None]
        solution = numpy.linalg.lstsq(weighted, values / model, rcond=None)[0]
        previous, model = model, scaled @ solution
        if model.min() <= 0:
            return None
        if numpy.abs(model / previous - 1).max() < 1e-12:
            break
    weighted, residual = scaled / model[:, None], values / model - 1
    spare = len(values) - matrix.shape[1]
    squares = float(residual @ residual)
    spread = math.sqrt(squares / spare) if spare > 0 else None
    centred = values / model - numpy.average(values, weights=1 / model**2) / model
    total = float(centred @ centred)
    reach = numpy.full(matrix.shape[1], numpy.nan)
    if spread is not None:
        covariance = numpy.linalg.inv(weighted.T @ weighted) * spread**2
        reach = t_quantile(0.975, spare) * numpy.sqrt(numpy.diag(covariance))
    return LinearFit(
        coefficients=tuple(
            _parameter(float(value), float(half)) for value, half in zip(solution / scale, reach / scale, strict=True)
        ),
        r2=1 - squares / total if total > 0 else None,
        spread=spread,
        num_runs=len(values),
    )


def _parameter(value: float, half: float) -> Parameter:
    return Parameter(value=value) if math.isnan(half) else Parameter(value=value, low=value - half, high=value + half)


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """A message of n bytes takes latency + n seconds_per_byte (Hockney 1994); neither is negative."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """What the model says for `num_bytes`."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float | None:
        """The bandwidth that long messages reach; None where time does not grow with size."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else None


def alpha_beta(num_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta | None:
    """The least-squares fit of relative errors, so that short messages count as much as long ones.

    None with fewer than two different sizes: one point fits any latency.
    """
    if len(set(num_bytes)) < 2:
        return None
    # Minimise sum((alpha x + beta y - 1)^2) with x = 1/t, y = n/t, over alpha, beta >= 0.
    columns = [(1 / t, n / t) for n, t in zip(num_bytes, seconds, strict=True)]
    xx = sum(x * x for x, _ in columns)
    xy = sum(x * y for x, y in columns)
    yy = sum(y * y for _, y in columns)
    x1 = sum(x for x, _ in columns)
    y1 = sum(y for _, y in columns)
    determinant = xx * yy - xy * xy
    alpha = (x1 * yy - y1 * xy) / determinant
    beta = (y1 * xx - x1 * xy) / determinant
    if alpha < 0:
        alpha, beta = 0.0, y1 / yy
    elif beta < 0:
        alpha, beta = x1 / xx, 0.0
    return AlphaBeta(latency_s=alpha, seconds_per_byte=beta)
