"""From measured steps to what is known of the unknowns: the most probable point, and how far it may be off.

Least squares of logarithms with the priors as further observations (maximum a posteriori), linearised there (Laplace).
The noise between runs is estimated with it: from repeats, and from what the timeline leaves unexplained.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.predict.jobs import StepJob
from hpcdl.predict.network import Network
from hpcdl.predict.parameters import Prior, natural_values
from hpcdl.predict.timeline import StepTime, exchange_seconds, simulate

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

USUAL_NOISE = 0.012
USUAL_FREEDOM = 2.0
"""Relative standard deviation of a run's mean step, and how many runs that prior weighs as."""
LEAST_ERROR = 0.005
"""No timeline is better than this."""
NUM_DRAWS = 400
NUM_TRIED = 1000
"""Points of which as many are chosen."""
_BENCH_ERROR = 0.15
_WAIT_ERROR = 0.4
_STEP = 1e-4
_ROUNDS = 3
_ITERATIONS = 25


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The repeats of one job: seconds of a step of each, and the mean seconds of parts where they were measured."""

    job: StepJob
    seconds: tuple[float, ...]
    wait_s: float | None = None
    compute_s: float | None = None

    @functools.cached_property
    def log_mean(self) -> float:
        """Mean of the logarithms."""
        return sum(map(math.log, self.seconds)) / len(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is known after the observations: `point` and `covariance` of the unknowns, on their own scales.

    `points` (sets, unknowns) are equally probable; `run_noise` is the relative standard deviation of a run around the
    timeline, judged with so much `freedom`.
    """

    items: tuple[Prior, ...]
    network: Network
    point: Array
    covariance: Array
    points: Array
    run_noise: float
    freedom: float

    def values(self, points: Array | None = None) -> dict[str, Array]:
        """The unknowns by name: at the most probable point, or at `points` (sets, unknowns)."""
        return natural_values(self.items, self.point[None, :] if points is None else points)

    def step(self, job: StepJob, points: Array | None = None) -> StepTime:
        """The timeline of `job`."""
        return simulate(job, self.values(points), self.network)

    def slopes(self, job: StepJob) -> Array:
        """How the logarithm of the step's seconds changes with each unknown."""
        rows = _slopes(lambda points: numpy.log(self.step(job, points).seconds)[:, None], self.point)
        result: Array = rows[0]
        return result


def calibrate(
    monitors: Sequence[MeasuredStep], items: Sequence[Prior], network: Network, *, draws: bool = True
) -> Calibration:
    """The posterior of `items` by all observations, and by the all-reduces that were timed on the network.

    Without `draws` its only point is the most probable one.
    """
    center = numpy.array([item.center for item in items])
    spread = numpy.array([item.spread for item in items])
    noise, freedom = USUAL_NOISE, USUAL_FREEDOM
    point, covariance = center.copy(), numpy.diag(spread**2)
    for _ in range(_ROUNDS):
        residuals = functools.partial(_residuals, monitors, tuple(items), network, center, spread, noise)
        point = _minimise(residuals, point)
        jacobian = _slopes(residuals, point)
        covariance = numpy.linalg.inv(jacobian.T @ jacobian)
        used = float(len(items) - (numpy.diag(covariance) / spread**2).sum())
        noise, freedom = _noise(monitors, items, network, point, used)
    return Calibration(
        items=tuple(items), network=network, point=point, covariance=covariance,
        points=_drawn(residuals, point, covariance) if draws else point[None, :],
        run_noise=noise, freedom=freedom,
    )  # fmt: skip


def _drawn(residuals: Callable[[Array], Array], point: Array, covariance: Array) -> Array:
    """Equally probable points, the same in every call: of the linearisation, those chosen by what they really cost.

    Costs that computing hides leave long flat valleys, where the linearisation alone would be far off.
    """
    random = numpy.random.default_rng(7)
    values, vectors = numpy.linalg.eigh(covariance)
    # The sign of an eigenvector is the linear algebra library's: on another processor the draws would be others.
    vectors *= numpy.sign(vectors[numpy.abs(vectors).argmax(axis=0), numpy.arange(len(point))])
    normal = random.standard_normal((NUM_TRIED, len(point)))
    points = point + normal @ (vectors * numpy.sqrt(numpy.maximum(values, 0.0))).T
    off = (normal**2).sum(axis=1) - _costs(residuals, points)
    # Few points must not outweigh all others: weights are the fourth root of what they should be.
    weights = numpy.exp((off - off.max()) / 8)
    result: Array = points[random.choice(NUM_TRIED, NUM_DRAWS, p=weights / weights.sum())]
    return result


def _costs(residuals: Callable[[Array], Array], points: Array) -> Array:
    result: Array = numpy.nan_to_num((residuals(points) ** 2).sum(axis=1), nan=1e300, posinf=1e300)
    return result


def _residuals(
    monitors: Sequence[MeasuredStep], items: Sequence[Prior], network: Network, center: Array, spread: Array,
    noise: float, points: Array,
) -> Array:  # fmt: skip
    """What is to become small: (sets, observations and priors), each in its own standard deviations."""
    values = natural_values(items, points)
    columns = []
    for seen in monitors:
        found = simulate(seen.job, values, network)
        error = math.sqrt(noise**2 / len(seen.seconds) + LEAST_ERROR**2)
        columns.append((numpy.log(found.seconds) - seen.log_mean) / error)
        if seen.wait_s is not None:
            scale = _WAIT_ERROR * seen.wait_s + 0.01 * math.exp(seen.log_mean)
            columns.append((found.losses["compute noise"] - seen.wait_s) / scale)
        if seen.compute_s is not None:
            columns.append((numpy.log(found.compute) - math.log(seen.compute_s)) / max(error, 0.02))
    for row in network.measured:
        job = StepJob(
            strategy=row.strategy, model="", nodes=row.nodes, workers=row.ranks, batch=1,
            workers_per_node=-(-row.ranks // row.nodes), lengths=(max(1, row.bytes // 4),),
        )  # fmt: skip
        columns.append((numpy.log(exchange_seconds(job, values, network)) - math.log(row.seconds)) / _BENCH_ERROR)
    return numpy.column_stack([*columns, (points - center) / spread])


def _noise(
    monitors: Sequence[MeasuredStep], items: Sequence[Prior], network: Network, point: Array, used: float
) -> tuple[float, float]:
    """Relative standard deviation of runs and its degrees of freedom."""
    values = natural_values(items, point[None, :])
    squares, freedom = USUAL_FREEDOM * USUAL_NOISE**2, USUAL_FREEDOM
    missed = 0.0
    for seen in monitors:
        squares += sum((math.log(seconds) - seen.log_mean) ** 2 for seconds in seen.seconds)
        freedom += len(seen.seconds) - 1
        off = math.log(float(simulate(seen.job, values, network).seconds[0])) - seen.log_mean
        missed += len(seen.seconds) * max(0.0, off**2 - LEAST_ERROR**2)
    left = max(0.0, len(monitors) - used)
    return math.sqrt((squares + missed) / (freedom + left)), freedom + left


def _minimise(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Levenberg and Marquardt."""
    point, damping = start.copy(), 1e-3
    here = residuals(point[None, :])[0]
    for _ in range(_ITERATIONS):
        jacobian = _slopes(residuals, point)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ here
        for _ in range(8):
            move = numpy.linalg.solve(normal + damping * numpy.diag(numpy.diag(normal)), -gradient)
            move = numpy.clip(move, -2.0, 2.0)
            there = residuals((point + move)[None, :])[0]
            if there @ there <= here @ here:
                break
            damping *= 5
        else:
            return point
        gain = here @ here - there @ there
        point, here, damping = point + move, there, damping / 5
        if gain < 1e-4 * (1 + here @ here):
            break
    return point


def _slopes(function: Callable[[Array], Array], point: Array) -> Array:
    """The Jacobian by central differences: (results, unknowns)."""
    moves = numpy.eye(len(point)) * _STEP
    found = function(numpy.concatenate([point + moves, point - moves]))
    ahead, behind = found[: len(point)], found[len(point) :]
    result: Array = ((ahead - behind) / (2 * _STEP)).T
    return result
