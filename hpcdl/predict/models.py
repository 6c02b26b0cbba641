"""Laws of scaling that share nothing with the timeline: what each says of a strategy at a size that was not run.

A series is one strategy's measured sizes with all else the same, as seconds per sample of a worker. Each law is a prior
over curves; what is measured weighs them (importance sampling, no search that could end in a wrong place). `none` is a
line in the logarithm of workers whose slope wanders: the further away, the less is known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

NUM_CURVES = 8192
"""Curves of each law's prior."""
_LEAST_CURVES = 30.0
"""Were fewer left by what is measured, its errors are taken as larger: too few curves would look too sure."""
SLOPE, SLOPE_SPREAD = 0.04, 0.08
"""Growth of the logarithm of a step for a doubling of workers that `none` expects, and how far it may be off."""
WANDERING = 0.025
"""By how much that slope changes from one doubling to the next."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSizes:
    """Workers, mean logarithms of seconds per sample, and their standard deviations; by rising workers."""

    workers: tuple[int, ...]
    logs: tuple[float, ...]
    errors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Normal distributions of a logarithm, weighed: (components,) each."""

    weights: Array
    centers: Array
    spreads: Array

    def drawn(self, random: Any, size: int) -> Array:
        """Values that are as probable."""
        chosen = random.choice(len(self.weights), size, p=self.weights)
        result: Array = self.centers[chosen] + self.spreads[chosen] * random.standard_normal(size)
        return result

    def log_density(self, value: float, error: float) -> float:
        """How probable `value` is, measured with this error."""
        variances = self.spreads**2 + error**2
        parts = -((self.centers - value) ** 2) / variances / 2 - numpy.log(variances) / 2
        most = float(parts.max())
        return most + math.log(float(self.weights @ numpy.exp(parts - most)) + 1e-300)


def foresee(name: str, series: MeasuredSizes, workers: int, batch: float) -> Foreseen:
    """What the model `name` says of a step of so many workers, `batch` samples each, with all sizes of `series`."""
    found = _wandering(series, workers) if name == NONE else _weighed(name, series, workers)
    return dataclasses.replace(found, centers=found.centers + math.log(batch))


def _weighed(name: str, series: MeasuredSizes, workers: int) -> Foreseen:
    """A law's curves as probable as the series makes them."""
    weights, level, spread = _fitted(name, series)
    return Foreseen(
        weights=weights, centers=level + _curves(name, (workers,))[:, 0], spreads=numpy.full(len(level), spread)
    )


@functools.lru_cache(maxsize=64)
def _fitted(name: str, series: MeasuredSizes) -> tuple[Array, Array, float]:
    """How probable each curve of a law is by the series, and at which level, (curves,) each; the level's spread."""
    curves = _curves(name, series.workers)
    errors = numpy.array(series.errors)
    while True:
        precision = errors**-2
        rest = numpy.array(series.logs) - curves
        level = rest @ precision / precision.sum()
        cost = (rest - level[:, None]) ** 2 @ precision
        weights = numpy.exp(-(cost - cost.min()) / 2)
        weights /= weights.sum()
        if 1 / float(weights @ weights) >= _LEAST_CURVES:
            return weights, level, float(precision.sum() ** -0.5)
        errors = 1.3 * errors


def _usl(n: Array, random: Any) -> Array:
    """Gunther 2007: contention and coherency."""
    sigma, kappa = _positive(random, 0.008, 1.3), _positive(random, 1.2e-4, 1.15)
    result: Array = 1 + sigma * (n - 1) + kappa * n * (n - 1)
    return result


def _alpha_beta(n: Array, random: Any) -> Array:
    """Hockney 1994 for all-reduces: rounds, bytes, and bytes that take longer where many send at once."""
    tree, ring = _positive(random, 0.003, 1.3), _positive(random, 0.001, 1.3)
    link, power = _positive(random, 0.08, 1.4), numpy.abs(0.25 * random.standard_normal((NUM_CURVES, 1)))
    result: Array = 1 + tree * numpy.log2(n) + ring * (n - 1) + link * (n - 1) / n * (n / 2) ** power
    return result


def _saturation(n: Array, random: Any) -> Array:
    """One resource that all share: hidden while computing takes longer, the only limit beyond."""
    served, sharp = _positive(random, 0.04, 1.3), random.uniform(1.5, 10.0, (NUM_CURVES, 1))
    latency = _positive(random, 0.003, 1.3)
    result: Array = (1 + (served * n) ** sharp) ** (1 / sharp) + latency * numpy.log2(n)
    return result


def _positive(random: Any, middle: float, spread: float) -> Array:
    result: Array = middle * numpy.exp(spread * random.standard_normal((NUM_CURVES, 1)))
    return result


NONE = "none"
LAWS: Mapping[str, Callable[[Array, Any], Array]] = {
    "usl": _usl,
    "alpha-beta": _alpha_beta,
    "saturation": _saturation,
}
MODELS: Sequence[str] = (*LAWS, NONE)


@functools.lru_cache(maxsize=64)
def _curves(name: str, workers: tuple[int, ...]) -> Array:
    """Logarithms of a step on these workers over an arbitrary one: (curves, sizes), the same in every call."""
    random = numpy.random.default_rng(sum(map(ord, name)))
    found: Array = numpy.log(LAWS[name](numpy.array([workers], dtype=float), random))
    return found


def _wandering(series: MeasuredSizes, workers: int) -> Foreseen:
    """An integrated Wiener process, given what is measured."""
    x = numpy.log2(numpy.array([*series.workers, workers], dtype=float) / series.workers[0])
    short, long = numpy.minimum(x[:, None], x), numpy.maximum(x[:, None], x)
    covariance = 4.0 + SLOPE_SPREAD**2 * x[:, None] * x + WANDERING**2 * short**2 * (3 * long - short) / 6
    mean = series.logs[0] + SLOPE * x
    known = covariance[:-1, :-1] + numpy.diag(numpy.array(series.errors) ** 2)
    gain = numpy.linalg.solve(known, covariance[:-1, -1])
    center = mean[-1] + gain @ (numpy.array(series.logs) - mean[:-1])
    variance = covariance[-1, -1] - gain @ covariance[:-1, -1]
    return Foreseen(
        weights=numpy.ones(1), centers=numpy.array([center]), spreads=numpy.array([math.sqrt(max(variance, 0.0))])
    )
