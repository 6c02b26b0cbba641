"""Several models of one step, weighed by what each said of a size before it was measured.

The timeline knows the strategy's messages; the laws of models.py know only how its steps have grown. What none of them
explains is an error that grows with the distance from what was measured, most where much of a step is not computing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.predict.calibration import LEAST_ERROR, MeasuredStep
from hpcdl.predict.evidence import Evidence
from hpcdl.predict.jobs import StepJob
from hpcdl.predict.models import MODELS, Foreseen, MeasuredSizes, foresee

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

TIMELINE = "timeline"
TIMELINE_PRIOR = 2.0
"""How much more probable the timeline is than each other model before anything is held out."""
SERVERS_PRIOR = 4.0
"""That of saturation where workers queue at servers."""
MOST_FROM_OTHERS = 1.0
"""The most that another strategy's held-out size says for or against the timeline, as a logarithm of odds: it may be
wrong about that strategy alone."""
MODEL_ERROR = 0.01
"""Relative standard deviation of what no model explains, for one doubling of workers beyond those measured."""
EXCHANGE_ERROR = 0.07
"""The same of the seconds that are not computing: a switch is full, a link is slower."""
UNKNOWN_EXCHANGE_ERROR = {"mpi": 0.25}
"""In its place where nobody knows the messages: a library changes its algorithm by the number of ranks."""
BATCH_ERROR = 0.12
"""The same of computing for one doubling of the batch where all runs had one: nobody knows then what a batch costs
besides its samples. Of a batch of 32 in all runs, the intervals for 64 and 128 then hold costs of up to 16 samples."""
_DRAWS = 2000
OWN_SPEED_ERROR = 0.1
"""That of the seconds that are not computing where the strategy itself was measured at one size, or nothing was."""
NEVER_RUN_ERROR = 0.9
"""The same where others were measured and the strategy never: it may have a law of its own. Found by calibration over
clusters in which every strategy has one (decision 0187)."""


def series_of(job: StepJob, evidence: Evidence, run_noise: float) -> MeasuredSizes | None:
    """What was measured of `job` on other numbers of workers; None where that is fewer than two, or none on its way."""
    like = [seen for seen in evidence.monitors if _alike(seen.job, job, evidence.mode)]
    if job.nodes > 1 and not any(seen.job.nodes > 1 for seen in like):
        return None  # how steps grow inside a node says nothing of the way to another
    sizes: dict[int, list[MeasuredStep]] = defaultdict(list)
    for seen in like:
        sizes[seen.job.workers].append(seen)
    if len(sizes) < 2:
        return None
    workers = tuple(sorted(sizes))
    return MeasuredSizes(
        workers=workers,
        logs=tuple(statistics.fmean([seen.log_mean - math.log(seen.job.batch) for seen in sizes[n]]) for n in workers),
        errors=tuple(
            math.sqrt(run_noise**2 / sum(len(seen.seconds) for seen in sizes[n]) + LEAST_ERROR**2) for n in workers
        ),
    )


def _alike(seen: StepJob, job: StepJob, mode: str) -> bool:
    """Whether only the number of workers, and of servers in proportion, sets them apart."""
    batch = job.batch if mode == "weak" else job.batch * job.workers / seen.workers
    if not math.isclose(seen.batch, batch, rel_tol=0.01) or seen.threads != job.threads:
        return False
    if seen.alone and job.servers == 0:
        return True
    servers = seen.servers == job.servers or seen.servers * job.workers == job.servers * seen.workers
    exchange = ("strategy", "compress", "placement", "variant", "bucket_bytes")
    periods = ("period", "period_within", "fragments", "overlap")
    return servers and all(getattr(seen, key) == getattr(job, key) for key in (*exchange, *periods))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighing:
    """The probability of each model, and how well a size that was held out was foreseen."""

    weights: Mapping[str, float]
    prior: float = 0.0
    evidence: float = 0.0
    """Logarithms of odds of the timeline against all others: before, and by what was held out."""
    center: float = 0.0
    spread: float = 1.0
    covered: bool = True


def prior_weights(job: StepJob) -> dict[str, float]:
    """Before anything is held out: what servers do, all at once fill up, or their kind do."""
    known = {TIMELINE: TIMELINE_PRIOR, **dict.fromkeys(MODELS, 1.0)}
    if job.servers:
        known["saturation"] = SERVERS_PRIOR
    return {name: value / sum(known.values()) for name, value in known.items()}


def pooled(weighings: Mapping[str, Sequence[Weighing]]) -> dict[str, dict[str, float]]:
    """The probability of each model, by strategy, with what all held-out sizes say of the timeline.

    The timeline describes the cluster, with all strategies on it: what it foresees of one speaks for it in the others.
    The laws describe one strategy each, and share what is left by its own held-out sizes.
    """
    clipped = {name: min(max(own[-1].evidence, -MOST_FROM_OTHERS), MOST_FROM_OTHERS) for name, own in weighings.items()}
    result = {}
    for strategy, own in weighings.items():
        last = own[-1]
        odds = last.prior + last.evidence + sum(value for name, value in clipped.items() if name != strategy)
        share = 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))
        laws = {name: value for name, value in last.weights.items() if name != TIMELINE}
        rest = sum(laws.values())
        if rest:  # of two sizes the smaller one alone gave the laws nothing to be weighed by: they stay as probable
            result[strategy] = {TIMELINE: share, **{name: (1 - share) * value / rest for name, value in laws.items()}}
    return result


def weigh(
    seen: MeasuredStep, timeline: Foreseen, computing: float, series: MeasuredSizes | None, run_noise: float
) -> Weighing:
    """Hold `seen` out: `timeline` is what its calibration without it foresaw, `series` are the smaller sizes.

    `computing` is the logarithm of the seconds of computing.
    """
    random = numpy.random.default_rng(17)
    foreseen = {TIMELINE: timeline}
    if series is not None:
        foreseen |= {name: foresee(name, series, seen.job.workers, seen.job.batch) for name in MODELS}
    before = {name: share for name, share in prior_weights(seen.job).items() if name in foreseen}
    noise = math.sqrt(run_noise**2 / len(seen.seconds) + LEAST_ERROR**2)
    draws = numpy.concatenate(
        [foreseen[name].drawn(random, max(1, round(_DRAWS * share))) for name, share in before.items()]
    )
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
        spread=(high - low) / 3.29,
        covered=low <= seen.log_mean <= high,
    )


def _log_odds(weights: Mapping[str, float]) -> float:
    """Of the timeline against all others; without others nothing is known of it."""
    others = sum(value for name, value in weights.items() if name != TIMELINE)
    return math.log(max(weights[TIMELINE], 1e-12) / max(others, 1e-12)) if len(weights) > 1 else 0.0


def error_of(job: StepJob, logs: Array, computing: Array, largest: float, own_error: float = 0.0) -> Array:
    """Standard deviation of what no model explains, where up to `largest` workers were measured.

    `own_error` is that of the seconds that are not computing, for what is not known of this strategy.
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
    """Logarithms of a step, of each model as many as it is probable: as many as `timeline` has."""
    result: Array = timeline.copy()
    if series is None:
        return result
    owners = random.choice(len(weights), len(timeline), p=list(weights.values()))
    for number, name in enumerate(weights):
        places = owners == number
        if name != TIMELINE and places.any():
            result[places] = foresee(name, series, job.workers, job.batch).drawn(random, int(places.sum()))
    return result
