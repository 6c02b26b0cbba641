"""Several models of one step, the timeline and scaling laws, weighted by how well each predicted held-out sizes.

A series is one strategy's measured sizes with all else equal, as seconds per sample of a worker. Each law is a prior
over curves, which measurements weight (importance sampling, without a search that could end in a wrong place). `none`
is a line in the logarithm of workers whose slope varies randomly: uncertainty grows with distance.

The timeline knows the strategy's messages; the laws know only how its steps have grown. What none of them explains is
an error that grows with the distance from the measurements, most if much of a step is not computing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.predict.calibration import LEAST_ERROR, MeasuredStep
from hpcdl.predict.evidence import Evidence
from hpcdl.predict.jobs import StepJob

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

NUM_CURVES = 8192
"""Number of curves of each law's prior."""
_LEAST_CURVES = 30.0
"""If measurements leave fewer effective curves, increase their errors: too few curves would look too certain."""
SLOPE, SLOPE_SPREAD = 0.04, 0.08
"""Growth of the log of a step per doubling of workers that `none` expects, and its standard deviation."""
WANDERING = 0.025
"""Change of that slope from one doubling to the next."""
STRONG_SLOPE, STRONG_SLOPE_SPREAD, STRONG_WANDERING = 0.2, 0.3, 0.1
"""The same if workers divide one batch: what is not computing weighs twice as much at each doubling."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSizes:
    """Workers, mean logarithms of seconds per sample, and their standard deviations, by ascending workers.

    `strong` if the workers divide one batch.
    """

    workers: tuple[int, ...]
    logs: tuple[float, ...]
    errors: tuple[float, ...]
    strong: bool = False


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Weighted normal distributions of a logarithm: (components,) each."""

    weights: Array
    centers: Array
    spreads: Array

    def drawn(self, random: Any, size: int) -> Array:
        """Return values drawn from the distribution."""
        chosen = random.choice(len(self.weights), size, p=self.weights)
        result: Array = self.centers[chosen] + self.spreads[chosen] * random.standard_normal(size)
        return result

    def log_density(self, value: float, error: float) -> float:
        """Return the log density of `value`, measured with this error, up to a constant."""
        variances = self.spreads**2 + error**2
        parts = -((self.centers - value) ** 2) / variances / 2 - numpy.log(variances) / 2
        most = float(parts.max())
        # The density itself may underflow, so its largest part is taken out first.
        return most + math.log(float(self.weights @ numpy.exp(parts - most)) + 1e-300)


def foresee(name: str, series: MeasuredSizes, workers: int, batch: float) -> Foreseen:
    """Return what model `name` predicts for a step of `workers` workers with `batch` samples each, from `series`."""
    foreseen = _wandering(series, workers) if name == NONE else _weighed(name, series, workers)
    return dataclasses.replace(foreseen, centers=foreseen.centers + math.log(batch))


def _weighed(name: str, series: MeasuredSizes, workers: int) -> Foreseen:
    """Return a law's curves weighted by the series."""
    weights, level, spread = _fitted(name, series)
    return Foreseen(
        weights=weights,
        centers=level + _curves(name, (workers,), series.strong)[:, 0],
        spreads=numpy.full(len(level), spread),
    )


@functools.lru_cache(maxsize=64)
def _fitted(name: str, series: MeasuredSizes) -> tuple[Array, Array, float]:
    """Return the probability and level of each curve of a law by the series, (curves,) each, and the level's spread."""
    curves = _curves(name, series.workers, series.strong)
    errors = numpy.array(series.errors)
    while True:
        precision = errors**-2
        offsets = numpy.array(series.logs) - curves
        # Curves are relative: the measurements give each its best level.
        level = offsets @ precision / precision.sum()
        cost = (offsets - level[:, None]) ** 2 @ precision
        weights = numpy.exp(-(cost - cost.min()) / 2)
        weights /= weights.sum()
        # Kish's effective number of weighted samples.
        if 1 / float(weights @ weights) >= _LEAST_CURVES:
            return weights, level, float(precision.sum() ** -0.5)
        errors = 1.3 * errors


def _usl(n: Array, _: Array, random: Any) -> Array:
    """Gunther 2007: contention and coherency."""
    sigma, kappa = _positive(random, 0.008, 1.3), _positive(random, 1.2e-4, 1.15)
    result: Array = 1 + sigma * (n - 1) + kappa * n * (n - 1)
    return result


def _alpha_beta(n: Array, divided: Array, random: Any) -> Array:
    """Hockney 1994 for all-reduces: rounds, bytes, and bytes that take longer if many ranks send at once."""
    tree, ring = _positive(random, 0.003, 1.3), _positive(random, 0.001, 1.3)
    link, power = _positive(random, 0.08, 1.4), numpy.abs(0.25 * random.standard_normal((NUM_CURVES, 1)))
    exchange = tree * numpy.log2(n) + ring * (n - 1) + link * (n - 1) / n * (n / 2) ** power
    result: Array = 1 + divided * exchange
    return result


def _saturation(n: Array, divided: Array, random: Any) -> Array:
    """Draw curves of one resource that all workers share: hidden while computing takes longer, then the only limit.

    It serves samples or, in every second curve, gradients, of which each worker has as many however small its batch.
    """
    served, sharp = _positive(random, 0.04, 1.3), random.uniform(1.5, 10.0, (NUM_CURVES, 1))
    latency = _positive(random, 0.003, 1.3)
    used = served * n * divided ** (numpy.arange(NUM_CURVES)[:, None] % 2)
    result: Array = (1 + used**sharp) ** (1 / sharp) + divided * latency * numpy.log2(n)
    return result


def _onset(n: Array, divided: Array, random: Any) -> Array:
    """Draw curves of a cost that is there from the second worker on and hardly grows: to exchange at all."""
    begun, tree = _positive(random, 0.08, 1.4), _positive(random, 0.003, 1.3)
    result: Array = 1 + divided * (begun * (n > 1) + tree * numpy.log2(n))
    return result


def _positive(random: Any, middle: float, spread: float) -> Array:
    result: Array = middle * numpy.exp(spread * random.standard_normal((NUM_CURVES, 1)))
    return result


NONE = "none"
LAWS: Mapping[str, Callable[[Array, Array, Any], Array]] = {
    "usl": _usl,
    "alpha-beta": _alpha_beta,
    "saturation": _saturation,
    "onset": _onset,
}
MODELS: Sequence[str] = (*LAWS, NONE)


@functools.lru_cache(maxsize=64)
def _curves(name: str, workers: tuple[int, ...], strong: bool) -> Array:
    """Return logs of a sample's seconds on these workers relative to an arbitrary one: (curves, sizes).

    Every call returns the same. A law gets the workers, and how many of them divide a batch that was one worker's.
    """
    # Not hash(), which Python salts for each process.
    random = numpy.random.default_rng(sum(map(ord, name)))
    n = numpy.array([workers], dtype=float)
    logs: Array = numpy.log(LAWS[name](n, n if strong else numpy.ones_like(n), random))
    return logs


def _wandering(series: MeasuredSizes, workers: int) -> Foreseen:
    """Return an integrated Wiener process conditioned on the measurements."""
    x = numpy.log2(numpy.array([*series.workers, workers], dtype=float) / series.workers[0])
    short, long = numpy.minimum(x[:, None], x), numpy.maximum(x[:, None], x)
    slope, spread, wandering = SLOPE, SLOPE_SPREAD, WANDERING
    if series.strong:
        slope, spread, wandering = STRONG_SLOPE, STRONG_SLOPE_SPREAD, STRONG_WANDERING
    # A level with a wide prior, a random slope, and an integrated Wiener process (Rasmussen and Williams, 6.28).
    covariance = 4.0 + spread**2 * x[:, None] * x + wandering**2 * short**2 * (3 * long - short) / 6
    mean = series.logs[0] + slope * x
    measured_covariance = covariance[:-1, :-1] + numpy.diag(numpy.array(series.errors) ** 2)
    gain = numpy.linalg.solve(measured_covariance, covariance[:-1, -1])
    center = mean[-1] + gain @ (numpy.array(series.logs) - mean[:-1])
    variance = covariance[-1, -1] - gain @ covariance[:-1, -1]
    return Foreseen(
        weights=numpy.ones(1), centers=numpy.array([center]), spreads=numpy.array([math.sqrt(max(variance, 0.0))])
    )


TIMELINE = "timeline"
TIMELINE_PRIOR = 2.0
"""How much more probable the timeline is than each other model before anything is held out."""
SERVERS_PRIOR = 4.0
"""The same for saturation if workers queue at servers."""
MOST_FROM_OTHERS = 1.0
"""Limit of the log odds that another strategy's held-out size adds for or against the timeline: it may be wrong only
about that strategy."""
MODEL_ERROR = 0.01
"""Relative standard deviation of what no model explains, per doubling of workers beyond those measured."""
EXCHANGE_ERROR = 0.07
"""The same for the seconds that are not computing: a switch is full, a link is slower."""
UNKNOWN_EXCHANGE_ERROR = {"mpi": 0.25}
"""Replacement if the messages are unknown: a library changes its algorithm with the number of ranks."""
BATCH_ERROR = 0.12
"""The same for computing per doubling of the batch if all runs had one batch size: the cost of a batch beyond its
samples is then unknown. From runs with batch 32, the intervals for 64 and 128 cover costs of up to 16 samples."""
_DRAWS = 2000
OWN_SPEED_ERROR = 0.1
"""The same for the non-computing seconds if the strategy was measured at one size, or nothing was measured."""
NEVER_RUN_ERROR = 0.9
"""The same if others were measured and the strategy never was: it may follow its own law. Calibrated over clusters in
which every strategy does (decision 0187)."""


def series_of(job: StepJob, evidence: Evidence, run_noise: float) -> MeasuredSizes | None:
    """Return what was measured of `job` on other numbers of workers; None if fewer than two, or none between nodes."""
    like = [measurement for measurement in evidence.monitors if _alike(measurement.job, job, evidence.mode)]
    if job.nodes > 1 and not any(measurement.job.nodes > 1 for measurement in like):
        return None  # growth inside a node says nothing about other nodes
    sizes: dict[int, list[MeasuredStep]] = defaultdict(list)
    for measurement in like:
        sizes[measurement.job.workers].append(measurement)
    if len(sizes) < 2:
        return None
    workers = tuple(sorted(sizes))
    return MeasuredSizes(
        strong=evidence.mode == "strong",
        workers=workers,
        logs=tuple(
            statistics.fmean([measurement.log_mean - math.log(measurement.job.batch) for measurement in sizes[n]])
            for n in workers
        ),
        errors=tuple(
            math.sqrt(run_noise**2 / sum(len(measurement.seconds) for measurement in sizes[n]) + LEAST_ERROR**2)
            for n in workers
        ),
    )


def _alike(seen: StepJob, job: StepJob, mode: str) -> bool:
    """Return whether they differ only in the number of workers, and of servers in proportion."""
    batch = job.batch if mode == "weak" else job.batch * job.workers / seen.workers
    if not math.isclose(seen.batch, batch, rel_tol=0.01) or seen.threads != job.threads:
        return False
    # One worker exchanges nothing, so it is the first size of every strategy without servers.
    if seen.alone and job.servers == 0:
        return True
    servers = seen.servers == job.servers or seen.servers * job.workers == job.servers * seen.workers
    exchange = ("strategy", "compress", "placement", "variant", "bucket_bytes")
    periods = ("period", "period_within", "fragments", "overlap")
    return servers and all(getattr(seen, key) == getattr(job, key) for key in (*exchange, *periods))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighing:
    """The probability of each model, and how well a held-out size was predicted."""

    weights: Mapping[str, float]
    prior: float = 0.0
    evidence: float = 0.0
    """Log odds of the timeline against all others: the prior, and the evidence of the held-out size."""
    center: float = 0.0
    spread: float = 1.0
    covered: bool = True


def prior_weights(job: StepJob) -> dict[str, float]:
    """Return the probabilities before anything is held out. Servers make saturation more probable."""
    weights = {TIMELINE: TIMELINE_PRIOR, **dict.fromkeys(MODELS, 1.0)}
    if job.servers:
        weights["saturation"] = SERVERS_PRIOR
    return {name: value / sum(weights.values()) for name, value in weights.items()}


def pooled(weighings: Mapping[str, Sequence[Weighing]]) -> dict[str, dict[str, float]]:
    """Return the probability of each model, by strategy, with the evidence of all held-out sizes on the timeline.

    The timeline describes the cluster, with all strategies on it: success for one strategy supports it for the others.
    The laws describe one strategy each, and share the remaining probability by its own held-out sizes.
    """
    clipped = {
        name: min(max(strategy_weighings[-1].evidence, -MOST_FROM_OTHERS), MOST_FROM_OTHERS)
        for name, strategy_weighings in weighings.items()
    }
    result = {}
    for strategy, strategy_weighings in weighings.items():
        last = strategy_weighings[-1]
        odds = last.prior + last.evidence + sum(value for name, value in clipped.items() if name != strategy)
        share = 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))
        laws = {name: value for name, value in last.weights.items() if name != TIMELINE}
        total = sum(laws.values())
        if total:  # with two sizes, the smaller one alone cannot weight the laws: they keep their probabilities
            result[strategy] = {TIMELINE: share, **{name: (1 - share) * value / total for name, value in laws.items()}}
    return result


def weigh(
    seen: MeasuredStep, timeline: Foreseen, computing: float, series: MeasuredSizes | None, run_noise: float
) -> Weighing:
    """Hold `seen` out: `timeline` is the prediction calibrated without it, `series` are the smaller sizes.

    `computing` is the logarithm of the seconds of computing.
    """
    random = numpy.random.default_rng(17)
    foreseen = {TIMELINE: timeline}
    if series is not None:
        foreseen |= {name: foresee(name, series, seen.job.workers, seen.job.batch) for name in MODELS}
    before = {name: share for name, share in prior_weights(seen.job).items() if name in foreseen}
    noise = math.sqrt(_noise_of(seen, run_noise) ** 2 / len(seen.seconds) + LEAST_ERROR**2)
    draws = numpy.concatenate(
        [foreseen[name].drawn(random, max(1, round(_DRAWS * share))) for name, share in before.items()]
    )
    # Without smaller sizes of its own, the held-out size counts as one doubling away.
    largest = seen.job.workers / 2 if series is None else series.workers[-1]
    error = error_of(seen.job, draws, numpy.full(len(draws), computing), largest)
    draws = draws + random.standard_normal(len(draws)) * numpy.hypot(error, noise)
    missed = math.hypot(noise, float(numpy.median(error)))
    scores = {
        name: math.log(share) + foreseen[name].log_density(seen.log_mean, missed) for name, share in before.items()
    }
    likely = {name: math.exp(score - max(scores.values())) for name, score in scores.items()}
    low, middle, high = (float(value) for value in numpy.quantile(draws, [0.05, 0.5, 0.95]))
    after = {name: value / sum(likely.values()) for name, value in likely.items()}
    return Weighing(
        weights=after,
        prior=_log_odds(before),
        evidence=_log_odds(after) - _log_odds(before),
        center=middle,
        spread=(high - low) / 3.29,  # a normal distribution's 90 % interval, in standard deviations
        covered=low <= seen.log_mean <= high,
    )


_RESTLESS = 3.0
"""Repeats that scatter by more than this multiple of the smaller sizes' noise have their own noise."""


def _noise_of(seen: MeasuredStep, run_noise: float) -> float:
    """Return the noise between the repeats of the held-out size, which limits how well their mean is known."""
    if len(seen.seconds) < 2:
        return run_noise
    spread = statistics.stdev(map(math.log, seen.seconds))
    return spread if spread > _RESTLESS * run_noise else run_noise


def _log_odds(weights: Mapping[str, float]) -> float:
    """Return the log odds of the timeline against all others; 0 without others."""
    of_laws = sum(value for name, value in weights.items() if name != TIMELINE)
    return math.log(max(weights[TIMELINE], 1e-12) / max(of_laws, 1e-12)) if len(weights) > 1 else 0.0


def error_of(job: StepJob, logs: Array, computing: Array, largest: float, own_error: float = 0.0) -> Array:
    """Return the standard deviation of the deviations that no model explains, if up to `largest` workers were measured.

    `own_error` is the error of the non-computing seconds, for what is unknown about this strategy.
    """
    doublings = math.log2(max(1.0, job.workers / largest))
    share = numpy.maximum(0.0, 1 - numpy.exp(computing - logs))
    exchange = UNKNOWN_EXCHANGE_ERROR.get(job.strategy, EXCHANGE_ERROR)
    beyond = doublings * numpy.hypot(MODEL_ERROR, exchange * share)
    result: Array = numpy.hypot(beyond, own_error * share)
    return result


def mixed(
    weights: Mapping[str, float], timeline: Array, series: MeasuredSizes | None, job: StepJob, random: Any
) -> Array:
    """Return logarithms of a step, as many as `timeline` has, in proportion to each model's probability."""
    result: Array = timeline.copy()
    if series is None:
        return result
    owners = random.choice(len(weights), len(timeline), p=list(weights.values()))
    for number, name in enumerate(weights):
        rows = owners == number
        if name != TIMELINE and rows.any():
            result[rows] = foresee(name, series, job.workers, job.batch).drawn(random, int(rows.sum()))
    return result
