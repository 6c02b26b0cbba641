"""The unknowns of the timeline, estimated from measured steps: the most probable point and its uncertainty.

Each is estimated on a scale where it is unbounded: positive ones as logarithms, shares as log odds. The method is least
squares of logarithms with the priors as further observations (maximum a posteriori), linearized there (Laplace). The
noise between runs is estimated with it: from repeats, and from what the timeline does not explain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.predict.jobs import StepJob, parts_of
from hpcdl.predict.network import Network
from hpcdl.predict.timeline import StepTime, exchange_seconds, simulate

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]


def _same(value: Array) -> Array:
    return value


def _share(value: Array) -> Array:
    result: Array = 1 / (1 + numpy.exp(-value))
    return result


def _positive(value: Array) -> Array:
    # Trial points of the fit may be far off; clipped, their exponentials stay finite.
    result: Array = numpy.exp(numpy.clip(value, -60, 60))
    return result


@dataclass(frozen=True, kw_only=True)
class Prior:
    """One unknown: `center` and `spread` (mean and standard deviation) on the scale that `natural` transforms back.

    `words` describe it to a person.
    """

    name: str
    center: float
    spread: float
    natural: Callable[[Array], Array] = _positive
    words: str = ""


def _log(name: str, value: float, spread: float, words: str) -> Prior:
    return Prior(name=name, center=math.log(value), spread=spread, words=words)


USUAL: tuple[Prior, ...] = (
    _log("image_s", 0.01, 4.0, "seconds of computing per sample and worker"),
    _log("batch_overhead", 1.0, 1.0, "samples' worth of computing that a batch of any size costs"),
    _log("update_s", 1e-3, 1.5, "the update and what else is done once a step"),
    _log("input_s", 1e-5, 1.0, "waiting for a batch"),
    _log("latency_s", 15e-6, 2.0, "a message's latency between nodes"),
    _log("byte_s", 1 / 2e9, 1.3, "a byte's way between nodes"),
    _log("memory_latency_s", 10e-6, 1.0, "a message's latency inside a node"),
    _log("memory_byte_s", 1 / 3e9, 0.8, "a byte's way inside a node"),
    _log("sum_byte_s", 1 / 6e9, 0.5, "adding up a byte"),
    Prior(name="overlap", center=0.8, spread=1.0, natural=_share, words="share of an exchange that computing hides"),
    Prior(name="early", center=2.5, spread=1.2, natural=_share, words="how early gradients leave, of what they could"),
    _log("noise", 0.04, 0.8, "variation of a worker's computing from step to step"),
    Prior(name="contention", center=0.04, spread=0.06, natural=_same, words="growth of a byte's cost with nodes"),
    _log("server_factor", 1.2, 0.4, "a byte's cost at a server over that of the link"),
    _log("server_latency_s", 20e-6, 1.0, "a server's work for one request, whatever its size"),
    _log("grpc_byte_s", 1 / 0.8e9, 0.4, "a byte's cost at a gRPC server"),
    Prior(name="thread_power", center=0.9, spread=0.12, natural=_same, words="gain by threads, as a power"),
    _log("file_system_images_s", 1e12, 0.01, "samples per second that the file system gives all nodes"),
)
EFFICACY = "efficacy "
CODING = "coding "
EFFICACY_SPREAD = 0.15
"""Standard deviation of the log ratio of a strategy's exchange time to that of its messages."""
UNKNOWN_LAYERS_SPREAD = 0.6
"""The same if only the sum of all layers is known."""


def priors(
    strategies: Sequence[str],
    network: Network,
    stated: Mapping[str, tuple[float, float]],
    *,
    layers_known: bool = True,
) -> list[Prior]:
    """Return the priors: usual values, replaced by those of the network, then by `stated`.

    `strategies` are labels (jobs.py). `stated` holds values with the spreads of their logarithms. If layers are
    unknown, buckets and the busiest server's share are guesses, and every strategy's own speed has a wide prior.
    """
    values_by_name: dict[str, tuple[float, float]] = {}
    for prefix, latency, bandwidth in (
        ("", network.latency_s, network.bytes_per_second),
        ("memory_", network.memory_latency_s, network.memory_bytes_per_second),
    ):
        if latency is not None:
            # A program waits longer for a message than the wire takes.
            values_by_name[f"{prefix}latency_s"] = (latency + _SOFTWARE_S, max(network.spread, 0.5))
        if bandwidth is not None:
            values_by_name[f"{prefix}byte_s"] = (1 / bandwidth, network.spread)
    values_by_name |= stated
    usual = [
        dataclasses.replace(prior, center=math.log(values_by_name[prior.name][0]), spread=values_by_name[prior.name][1])
        if prior.name in values_by_name
        else prior
        for prior in USUAL
    ]
    spread = EFFICACY_SPREAD if layers_known else UNKNOWN_LAYERS_SPREAD
    own_speeds = (
        Prior(name=EFFICACY + name, center=0.0, spread=spread, natural=_same, words=f"{name}'s own speed")
        for name in sorted(set(strategies))
    )
    return [*usual, *own_speeds, *_coding(strategies)]


def _coding(labels: Iterable[str]) -> list[Prior]:
    """Return the priors of the coded forms of gradients: some passes over each value, more or fewer."""
    forms = sorted({form for _, form in map(parts_of, labels) if form})
    return [_log(CODING + form, 10e-9, 1.5, f"packing and unpacking a value as {form}") for form in forms]


_SOFTWARE_S = 5e-6


def natural_values(items: Sequence[Prior], points: Array) -> dict[str, Array]:
    """Return points (sets, unknowns) as values by name, with shape (sets,) each."""
    return {prior.name: prior.natural(points[:, index]) for index, prior in enumerate(items)}


USUAL_NOISE = 0.012
USUAL_FREEDOM = 2.0
"""Relative standard deviation of a run's mean step, and the number of runs that this prior is worth."""
LEAST_ERROR = 0.005
"""Minimum relative error of any timeline."""
NUM_DRAWS = 400
NUM_TRIED = 1000
"""Number of points from which NUM_DRAWS are chosen."""
_BENCH_ERROR = 0.15
_WAIT_ERROR = 0.4
_STEP = 1e-4
_ROUNDS = 3
_ITERATIONS = 25


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The repeats of one job: seconds per step of each, and mean seconds of parts if they were measured."""

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
    """The posterior: `point` and `covariance` of the unknowns, on their own scales.

    `points` (sets, unknowns) are equally probable. `run_noise` is the relative standard deviation of a run around the
    timeline, estimated with `freedom` degrees of freedom.
    """

    items: tuple[Prior, ...]
    network: Network
    point: Array
    covariance: Array
    points: Array
    run_noise: float
    freedom: float

    def values(self, points: Array | None = None) -> dict[str, Array]:
        """Return the unknowns by name: at the most probable point, or at `points` (sets, unknowns)."""
        return natural_values(self.items, self.point[None, :] if points is None else points)

    def step(self, job: StepJob, points: Array | None = None) -> StepTime:
        """Return the timeline of `job`."""
        return simulate(job, self.values(points), self.network)

    def slopes(self, job: StepJob) -> Array:
        """Return the derivatives of the logarithm of the step's seconds by each unknown."""
        rows = _slopes(lambda points: numpy.log(self.step(job, points).seconds)[:, None], self.point)
        result: Array = rows[0]
        return result


def calibrate(
    monitors: Sequence[MeasuredStep], items: Sequence[Prior], network: Network, *, draws: bool = True
) -> Calibration:
    """Return the posterior of `items` by all observations, and by the all-reduces that were timed on the network.

    Without `draws` its only point is the most probable one.
    """
    center = numpy.array([prior.center for prior in items])
    spread = numpy.array([prior.spread for prior in items])
    noise, freedom = USUAL_NOISE, USUAL_FREEDOM
    point, covariance = center.copy(), numpy.diag(spread**2)
    # The noise weighs the residuals and is estimated from them, so the two take turns.
    for _ in range(_ROUNDS):
        residuals = functools.partial(_residuals, monitors, tuple(items), network, center, spread, noise)
        point = _minimise(residuals, point)
        jacobian = _slopes(residuals, point)
        covariance = numpy.linalg.inv(jacobian.T @ jacobian)
        # The number of parameters that the data determine (MacKay 1992): one with its prior's variance counts as 0.
        used = float(len(items) - (numpy.diag(covariance) / spread**2).sum())
        noise, freedom = _noise(monitors, items, network, point, used)
    return Calibration(
        items=tuple(items), network=network, point=point, covariance=covariance,
        points=_drawn(residuals, point, covariance) if draws else point[None, :],
        run_noise=noise, freedom=freedom,
    )  # fmt: skip


def _drawn(residuals: Callable[[Array], Array], point: Array, covariance: Array) -> Array:
    """Draw equally probable points, the same in every call: from the linearization, resampled by their true costs.

    Costs that computing hides form long flat valleys, where the linearization alone would be far off.
    """
    random = numpy.random.default_rng(7)
    values, vectors = numpy.linalg.eigh(covariance)
    # The linear algebra library chooses an eigenvector's sign: other processors would give other draws.
    vectors *= numpy.sign(vectors[numpy.abs(vectors).argmax(axis=0), numpy.arange(len(point))])
    normal = random.standard_normal((NUM_TRIED, len(point)))
    points = point + normal @ (vectors * numpy.sqrt(numpy.maximum(values, 0.0))).T
    # Twice the logarithm of the true posterior over the linearization's, at each point.
    off = (normal**2).sum(axis=1) - _costs(residuals, points)
    # Few points must not outweigh all others: weights are the fourth root of the exact ones.
    weights = numpy.exp((off - off.max()) / 8)
    result: Array = points[random.choice(NUM_TRIED, NUM_DRAWS, p=weights / weights.sum())]
    return result


def _costs(residuals: Callable[[Array], Array], points: Array) -> Array:
    # Where the timeline gives no number, a point must never be drawn.
    result: Array = numpy.nan_to_num((residuals(points) ** 2).sum(axis=1), nan=1e300, posinf=1e300)
    return result


def _residuals(
    monitors: Sequence[MeasuredStep], items: Sequence[Prior], network: Network, center: Array, spread: Array,
    noise: float, points: Array,
) -> Array:  # fmt: skip
    """Return the residuals to minimize: (sets, observations and priors), each in its own standard deviations."""
    values = natural_values(items, points)
    columns = []
    for measurement in monitors:
        step = simulate(measurement.job, values, network)
        error = math.sqrt(noise**2 / len(measurement.seconds) + LEAST_ERROR**2)
        columns.append((numpy.log(step.seconds) - measurement.log_mean) / error)
        if measurement.wait_s is not None:
            # A share of the step is added: with a relative error alone, a wait near 0 would outweigh all else.
            scale = _WAIT_ERROR * measurement.wait_s + 0.01 * math.exp(measurement.log_mean)
            # A record's wait is for the slowest worker, as is the timeline's noise of computing.
            columns.append((step.losses["compute noise"] - measurement.wait_s) / scale)
        if measurement.compute_s is not None:
            columns.append((numpy.log(step.compute) - math.log(measurement.compute_s)) / max(error, 0.02))
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
    """Return the relative standard deviation of runs and its degrees of freedom."""
    values = natural_values(items, point[None, :])
    squares, freedom = USUAL_FREEDOM * USUAL_NOISE**2, USUAL_FREEDOM
    missed = 0.0
    for measurement in monitors:
        squares += sum((math.log(seconds) - measurement.log_mean) ** 2 for seconds in measurement.seconds)
        freedom += len(measurement.seconds) - 1
        off = math.log(float(simulate(measurement.job, values, network).seconds[0])) - measurement.log_mean
        # What any timeline may miss is no noise of runs.
        missed += len(measurement.seconds) * max(0.0, off**2 - LEAST_ERROR**2)
    left = max(0.0, len(monitors) - used)
    return math.sqrt((squares + missed) / (freedom + left)), freedom + left


def _minimise(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Minimize by Levenberg and Marquardt."""
    point, damping = start.copy(), 1e-3
    residual = residuals(point[None, :])[0]
    for _ in range(_ITERATIONS):
        jacobian = _slopes(residuals, point)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ residual
        for _ in range(8):
            # Scaled by the diagonal (Marquardt 1963): the unknowns differ much in how far they move a step.
            move = numpy.linalg.solve(normal + damping * numpy.diag(numpy.diag(normal)), -gradient)
            # On logarithms a move of 2 is a factor of 7: further away the linearization says nothing.
            move = numpy.clip(move, -2.0, 2.0)
            new_residual = residuals((point + move)[None, :])[0]
            if new_residual @ new_residual <= residual @ residual:
                break
            damping *= 5
        else:
            return point
        gain = residual @ residual - new_residual @ new_residual
        point, residual, damping = point + move, new_residual, damping / 5
        if gain < 1e-4 * (1 + residual @ residual):
            break
    return point


def _slopes(function: Callable[[Array], Array], point: Array) -> Array:
    """Return the Jacobian by central differences: (results, unknowns)."""
    moves = numpy.eye(len(point)) * _STEP
    values = function(numpy.concatenate([point + moves, point - moves]))
    ahead, behind = values[: len(point)], values[len(point) :]
    result: Array = ((ahead - behind) / (2 * _STEP)).T
    return result
