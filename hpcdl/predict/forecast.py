"""Predictions with their intervals, and the test on held-out sizes that weights models and widens intervals.

An interval is for one more run. It covers each model's uncertainty, the differences between models, the noise between
runs, and the model error, which grows with each doubling beyond the measurements. All of it is multiplied by the factor
by which held-out sizes were missed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.units import is_bounded
from hpcdl.predict.calibration import NUM_DRAWS, Calibration, calibrate, priors
from hpcdl.predict.ensemble import (
    BATCH_ERROR,
    NEVER_RUN_ERROR,
    OWN_SPEED_ERROR,
    TIMELINE,
    Foreseen,
    MeasuredSizes,
    Weighing,
    error_of,
    mixed,
    pooled,
    prior_weights,
    series_of,
    weigh,
)
from hpcdl.predict.evidence import Evidence, Learning, sample_bytes
from hpcdl.predict.jobs import StepJob
from hpcdl.predict.network import UNKNOWN, Network
from hpcdl.predict.timeline import StepTime, simulate

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

INTERVAL = (0.05, 0.95)
FAR = 16
"""Factor of the largest measured number of nodes beyond which a prediction is marked."""
_INTERVAL_DEVIATIONS = 3.29
"""Width of a 90 % interval of a normal distribution, in standard deviations."""
_TRUST_IN_INTERVALS = 3.0
"""Number of additional held-out points that count as missed exactly as expected."""
_MACHINE_SPREAD = 0.35
_WORTH_TELLING = 0.02
_UNLIKELY = 0.05
_UNBOUNDED = "the runs do not bound the step; repeat them, and run more sizes"
_LARGEST_LOG = 300.0
"""Limit of the logarithm of a step: its exponential, and that of its efficiency, stay finite."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The median of a prediction, and the ends of its 90 % interval."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Range:
        """Return the range times an exact positive number."""
        return Range(mean=self.mean * factor, low=self.low * factor, high=self.high * factor)

    @property
    def bounded(self) -> bool:
        """Whether the interval tells something."""
        return is_bounded(self.low, self.high)

    @property
    def inverse(self) -> Range:
        """The range of 1 / x."""
        return Range(mean=1 / self.mean, low=1 / self.high, high=1 / self.low)


def range_of(values: Array) -> Range:
    """Return median and interval of equally probable values."""
    low, middle, high = (float(value) for value in numpy.quantile(values, [INTERVAL[0], 0.5, INTERVAL[1]]))
    return Range(mean=middle, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One job's step. `losses` are shares of the step beyond computing; `faster` is what halving one cost would save.

    `efficiency` is beside `base`. `models` are the probabilities of the mixed models. `marks` are reasons for less
    trust. Node-hours and seconds are per epoch, and up to the target accuracy.
    """

    job: StepJob
    step_seconds: Range
    images_per_second: Range
    efficiency: Range
    base: StepJob
    limited_by: str
    losses: Mapping[str, float]
    faster: Mapping[str, float]
    epoch_seconds: Range | None = None
    epoch_node_hours: Range | None = None
    target_seconds: Range | None = None
    models: Mapping[str, float] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A measured size that was predicted from the smaller ones. `error` is predicted over measured, minus 1."""

    strategy: str
    workers: int
    measured: float
    predicted: float
    deviations: float
    covered: bool

    @property
    def error(self) -> float:
        """Relative error of the step's seconds."""
        return self.predicted / self.measured - 1


class Forecast:
    """One network's predictions.

    Intervals of sizes that were not run are those of the models times `widening`, which is at least 1: the root mean
    square of the held-out sizes' deviations, with `_TRUST_IN_INTERVALS` more as expected. `weights` are those of the
    models by strategy.
    """

    def __init__(
        self,
        evidence: Evidence,
        network: Network | None,
        strategies: Sequence[str] = (),
        cores_per_node: int | None = None,
    ) -> None:
        self.evidence = evidence
        self.network = network or UNKNOWN
        self._names = sorted({*evidence.strategies, *strategies})
        self.posterior = self._calibrate(evidence)
        self.weights: dict[str, Mapping[str, float]] = {}
        self.held_out = self._hold_out()
        chi_square = sum(item.deviations**2 for item in self.held_out) + _TRUST_IN_INTERVALS
        self.widening = max(1.0, math.sqrt(chi_square / (len(self.held_out) + _TRUST_IN_INTERVALS)))
        self.other_machine = bool(evidence.monitors) and cores_per_node is not None
        if self.other_machine and cores_per_node is not None:
            self._change_machine(cores_per_node)
        # After a change of machine, which replaces the posterior.
        self._points = self.posterior.points
        random = numpy.random.default_rng(11)
        freedom = self.posterior.freedom
        # Student's t, because the noise itself is estimated from few runs.
        student = random.standard_normal(NUM_DRAWS) / numpy.sqrt(random.chisquare(freedom, NUM_DRAWS) / freedom)
        self._run_noise = self.posterior.run_noise * student
        self._unexplained = random.standard_normal(NUM_DRAWS)
        self._of_batch = random.standard_normal(NUM_DRAWS)
        batches = {round(measurement.job.batch, 6) for measurement in evidence.monitors}
        self._only_batch = batches.pop() if len(batches) == 1 else None
        self._steps: dict[StepJob, StepTime] = {}
        self._logs: dict[StepJob, Array] = {}
        self._missed: dict[tuple[int, int], Array] = {}

    def _calibrate(self, evidence: Evidence, *, draws: bool = True) -> Calibration:
        stated = dict(evidence.stated)
        size = sample_bytes(evidence.model)
        if self.network.file_system_bytes_per_second and size:
            stated["file_system_images_s"] = (self.network.file_system_bytes_per_second / size, 0.2)
        return calibrate(
            evidence.monitors,
            priors(self._names, self.network, stated, layers_known=evidence.layers_known),
            self.network,
            draws=draws,
        )

    def _hold_out(self) -> tuple[HeldOut, ...]:
        """Predict the largest size of every strategy that has smaller ones, without any of these sizes."""
        largest: dict[str, int] = {}
        for measurement in self.evidence.monitors:
            sizes = {other.job.workers for other in self.evidence.monitors if other.job.label == measurement.job.label}
            # A strategy of one size can still be predicted from smaller sizes of others.
            if len(sizes) > 1 or (min(self.evidence.sizes) < measurement.job.workers):
                largest[measurement.job.label] = max(sizes)
        held = [
            measurement
            for measurement in self.evidence.monitors
            if largest.get(measurement.job.label) == measurement.job.workers
        ]
        kept = tuple(measurement for measurement in self.evidence.monitors if measurement not in held)
        if not held or not kept:
            return ()
        smaller = dataclasses.replace(self.evidence, monitors=kept)
        posterior = self._calibrate(smaller, draws=False)
        held_out, weighings = [], dict[str, list[Weighing]]()
        for measurement in held:
            slopes = posterior.slopes(measurement.job)
            step = posterior.step(measurement.job)
            predicted, computing = math.log(float(step.seconds[0])), math.log(float(step.compute[0]))
            spread = math.sqrt(max(float(slopes @ posterior.covariance @ slopes), 0.0))
            timeline = Foreseen(weights=numpy.ones(1), centers=numpy.array([predicted]), spreads=numpy.array([spread]))
            series = series_of(measurement.job, smaller, posterior.run_noise)
            weighing = weigh(measurement, timeline, computing, series, posterior.run_noise)
            weighings.setdefault(measurement.job.label, []).append(weighing)
            held_out.append(
                HeldOut(strategy=measurement.job.label, workers=measurement.job.workers,
                        measured=math.exp(measurement.log_mean), predicted=math.exp(weighing.center),
                        covered=weighing.covered, deviations=(weighing.center - measurement.log_mean) / weighing.spread)
            )  # fmt: skip
        self.weights.update(pooled(weighings))
        return tuple(held_out)

    def _change_machine(self, cores: int) -> None:
        """Scale computing with the number of cores. This is a guess, because other nodes have other cores."""
        index = [prior.name for prior in self.posterior.items].index("image_s")
        point, covariance = self.posterior.point.copy(), self.posterior.covariance.copy()
        gain = math.log(cores / (self.evidence.cores_per_node or cores))
        point[index] -= gain
        covariance[index, index] += _MACHINE_SPREAD**2
        points = self.posterior.points.copy()
        points[:, index] += _MACHINE_SPREAD * numpy.random.default_rng(13).standard_normal(len(points)) - gain
        self.posterior = dataclasses.replace(self.posterior, point=point, covariance=covariance, points=points)

    def base(self, job: StepJob) -> StepJob:
        """Return the base of efficiency: a single worker if one was measured, with any strategy; else the fewest
        workers of the strategy, if possible with as many servers; one worker without measurements. The same batch.
        """
        workers, nodes, servers, label = 1, 1, 0, job.label
        jobs = [monitored.job for monitored in self.evidence.monitors]
        same_strategy = [monitored for monitored in jobs if monitored.label == job.label]
        like = [monitored for monitored in same_strategy if monitored.servers == job.servers]
        bases = [monitored for monitored in jobs if monitored.alone] or like or same_strategy or jobs
        if bases:
            first = min(bases, key=lambda monitored: (monitored.workers, monitored.nodes))
            workers, nodes, servers, label = first.workers, first.nodes, first.servers, first.label
        batch = job.batch if self.evidence.mode == "weak" else job.batch * job.workers / workers
        return dataclasses.replace(self.evidence.at(label, nodes, workers, servers), batch=batch, threads=job.threads)

    def step_seconds(self, job: StepJob) -> Range:
        """Return the seconds of a step of `job`."""
        return range_of(numpy.exp(self._log_steps(job)))

    def predict(self, job: StepJob) -> Prediction:
        """Return the prediction of the step of `job`."""
        rate = job.workers * job.batch
        step = self.step_seconds(job)
        exact = self.posterior.step(job)
        middle = float(exact.seconds[0])
        losses = {name: float(loss[0]) / middle for name, loss in exact.losses.items() if float(loss[0]) > 0}
        largest = max(losses, key=lambda name: losses[name], default="")
        epoch = self._per_epoch(step.inverse.scaled(rate))
        return Prediction(
            job=job,
            step_seconds=step,
            images_per_second=step.inverse.scaled(rate),
            efficiency=self.efficiency(job),
            base=self.base(job),
            limited_by=largest if losses.get(largest, 0.0) > _WORTH_TELLING else "computing",
            losses=losses,
            faster=self._faster(job, middle),
            epoch_seconds=epoch,
            epoch_node_hours=epoch.scaled(job.nodes / 3600) if epoch else None,
            target_seconds=self._to_target(job, epoch),
            models=self._models(job, self._series(job)),
            marks=self._marks(job) if step.bounded else (_UNBOUNDED, *self._marks(job)),
        )

    def efficiency(self, job: StepJob) -> Range:
        """Return throughput per worker relative to the base's."""
        base = self.base(job)
        if base == job:
            return Range(mean=1.0, low=1.0, high=1.0)
        # Both terms use the same draws, so what base and job have in common cancels.
        relative = numpy.log(self._step(base).seconds) + self._batch_error(base) - self._log_steps(job)
        return range_of(numpy.exp(relative) * job.batch / base.batch)

    def _step(self, job: StepJob) -> StepTime:
        """Return the timeline's step at all points. It is cached, because several callers need the same job."""
        if job not in self._steps:
            self._steps[job] = self.posterior.step(job, self._points)
        return self._steps[job]

    def _log_steps(self, job: StepJob) -> Array:
        """Return logs of one more run of `job` by all models, with the deviations that no model explains."""
        if job not in self._logs:
            self._logs[job] = self._drawn_logs(job, self._step(job))
        return self._logs[job]

    def _drawn_logs(self, job: StepJob, step_time: StepTime) -> Array:
        # The same draws for every job: two forecasts must not differ by chance.
        random = numpy.random.default_rng(19)
        timeline = numpy.log(step_time.seconds)
        series = self._series(job)
        logs = mixed(self._models(job, series), timeline, series, job, random)
        own_error = 0.0 if series is not None or job.alone else OWN_SPEED_ERROR
        if self._never_run(job):
            computing = numpy.minimum(logs, numpy.log(step_time.compute))
            # A faster exchange than the timeline's does not make computing faster.
            logs = numpy.maximum(logs + self._missed_elsewhere(job.nodes, job.workers), computing)
            own_error = NEVER_RUN_ERROR
        computing = numpy.minimum(logs, numpy.log(step_time.compute))
        largest = self._only_size(job) or self.evidence.largest_workers if series is None else max(series.workers)
        error = error_of(job, logs, computing, largest, own_error)
        middle = numpy.median(logs)
        off = logs - middle + error * self._unexplained + self._run_noise
        result: Array = middle + self._widening_at(job) * off + self._batch_error(job)
        clipped: Array = numpy.clip(result, -_LARGEST_LOG, _LARGEST_LOG)
        return clipped

    def _never_run(self, job: StepJob) -> bool:
        """Return whether others were run and the strategy of `job` was not; a run of one rank shows no exchange."""
        exchanged = {monitored.job.label for monitored in self.evidence.monitors if not monitored.job.alone}
        measured = exchanged or set(self.evidence.strategies)
        return bool(measured) and not job.alone and job.label not in measured

    def _only_size(self, job: StepJob) -> int | None:
        """Return the workers of the only size that the strategy of `job` was run at; None for no size or several."""
        jobs = [monitored.job for monitored in self.evidence.monitors]
        of_it = {run.workers for run in jobs if run.label == job.label and not run.alone}
        if len(of_it) != 1 or (job.servers == 0 and any(run.alone for run in jobs)):
            return None
        return next(iter(of_it))

    def _widening_at(self, job: StepJob) -> float:
        """Return 1 for a size that was run: a miss at a size that was held out says nothing against its own runs."""
        series = self._series(job)
        return 1.0 if series is not None and job.workers in series.workers else self.widening

    def _batch_error(self, job: StepJob) -> Array:
        """Return the error of a batch size that no run had, as a logarithm of a step, by its computing alone."""
        step = self._step(job)
        doublings = abs(math.log2(job.batch / self._only_batch)) if self._only_batch else 0.0
        result: Array = BATCH_ERROR * doublings * self._of_batch * numpy.minimum(1.0, step.compute / step.seconds)
        return result

    def _missed_elsewhere(self, nodes: int, workers: int) -> Array:
        """Return the largest distance of a measured strategy's models from the timeline at this size.

        A strategy that was never run has no other model, and the timeline may miss the same there.
        """
        if (nodes, workers) not in self._missed:
            misses = [self._beside_timeline(job) for job in self._measured_at(nodes, workers)]
            far = max(misses, key=lambda off: float(numpy.abs(off).mean()), default=numpy.zeros(len(self._points)))
            self._missed[nodes, workers] = far
        return self._missed[nodes, workers]

    def _measured_at(self, nodes: int, workers: int) -> Iterator[StepJob]:
        for name, like in self.evidence.templates.items():
            if name != "single":
                yield self.evidence.at(name, nodes, workers, like.servers)

    def _beside_timeline(self, job: StepJob) -> Array:
        timeline, series = numpy.log(self._step(job).seconds), self._series(job)
        random = numpy.random.default_rng(23)
        off: Array = mixed(self._models(job, series), timeline, series, job, random) - timeline
        return off

    def _models(self, job: StepJob, series: MeasuredSizes | None) -> Mapping[str, float]:
        return {TIMELINE: 1.0} if series is None else self.weights.get(job.label) or prior_weights(job)

    def _series(self, job: StepJob) -> MeasuredSizes | None:
        return None if self.other_machine else series_of(job, self.evidence, self.posterior.run_noise)

    def _per_epoch(self, images_per_second: Range) -> Range | None:
        samples = self.evidence.num_samples
        return images_per_second.inverse.scaled(samples) if samples else None

    def _to_target(self, job: StepJob, epoch: Range | None) -> Range | None:
        """Return seconds to the accuracy: epochs as they grew with the global batch, times seconds per epoch."""
        if epoch is None or not self.evidence.learning:
            return None
        epochs = epochs_at(self.evidence.learning, job.workers * job.batch)
        relative = [math.log(epoch.low / epoch.mean), math.log(epoch.high / epoch.mean)]
        spread = 1.645 * epochs[1]  # the end of a 90 % interval, in standard deviations
        mean = epoch.mean * epochs[0]
        return Range(
            mean=mean,
            low=mean * math.exp(-math.hypot(relative[0], spread)),
            high=mean * math.exp(math.hypot(relative[1], spread)),
        )

    def _faster(self, job: StepJob, seconds: float) -> dict[str, float]:
        """Return the share of the step that is saved by halving each cost."""
        points = numpy.repeat(self.posterior.point[None, :], len(HALVED), axis=0)
        values = {name: array.copy() for name, array in self.posterior.values(points).items()}
        for row, names in enumerate(HALVED.values()):
            for name in names:
                values[name][row] /= 2
        halved = simulate(job, values, self.network).seconds
        return {part: max(0.0, 1 - float(after) / seconds) for part, after in zip(HALVED, halved, strict=True)}

    def _marks(self, job: StepJob) -> tuple[str, ...]:
        marks = []
        if not self.evidence.monitors:
            marks.append("nothing measured")
        elif job.nodes > FAR * self.evidence.largest_nodes:
            marks.append(f"beyond {FAR} x the largest size")
        if self.evidence.monitors and self.evidence.largest_nodes == 1 and job.nodes > 1 and self.network is UNKNOWN:
            marks.append("no run between nodes")
        if self.other_machine:
            marks.append("another node type")
        if self._only_batch and not math.isclose(job.batch, self._only_batch):
            marks.append("batch size not run")
        if self._never_run(job):
            marks.append("strategy not measured")
        elif (only := self._only_size(job)) and job.workers > only and len(self.evidence.sizes) > 1:
            marks.append("strategy measured at one size")
        if self._models(job, self._series(job))[TIMELINE] < _UNLIKELY:
            marks.append("the timeline does not explain these runs, so what limits a step is a guess")
        return tuple(marks)

    def deviation(self, job: StepJob) -> float:
        """Return the standard deviation of the log of the step, for one more run of `job`."""
        interval = range_of(self._log_steps(job))
        return (interval.high - interval.low) / _INTERVAL_DEVIATIONS

    def deviation_after(self, job: StepJob, run: StepJob) -> float:
        """Return what `deviation` would be after measuring `run`.

        The timeline's part follows from its linearization; other models and the model error scale with distance.
        """
        slopes, widening = self.posterior.slopes(job), self._widening_at(job)
        deviation_now, deviation_then = (
            widening * math.sqrt(max(float(slopes @ covariance @ slopes), 0.0) + self.posterior.run_noise**2)
            for covariance in (self.posterior.covariance, self.after(run))
        )
        unexplained = math.sqrt(max(0.0, self.deviation(job) ** 2 - deviation_now**2))
        largest = max(1, self.evidence.largest_workers if self.evidence.monitors else 1)
        far, near = (math.log2(max(1.0, job.workers / n)) for n in (largest, max(largest, run.workers)))
        return math.hypot(min(deviation_now, deviation_then), unexplained * near / far if far else unexplained)

    def after(self, job: StepJob) -> Array:
        """Return the covariance after a run of `job`."""
        slopes, before = self.posterior.slopes(job), self.posterior.covariance
        gain = before @ slopes
        # Kalman's update of the linearized model by one run.
        result: Array = before - numpy.outer(gain, gain) / (slopes @ gain + self.posterior.run_noise**2)
        return result


HALVED: Mapping[str, tuple[str, ...]] = {
    "link": ("byte_s", "grpc_byte_s"),
    "latency": ("latency_s",),
    "compute noise": ("noise",),
    "server": ("server_factor", "grpc_byte_s", "server_latency_s"),
    "memory": ("memory_byte_s", "memory_latency_s", "sum_byte_s"),
    "node": ("image_s",),
    "input": ("input_s",),
}
"""Parts that could be made twice as fast, and the unknowns that this halves."""


def epochs_at(learning: Sequence[Learning], global_batch: float) -> tuple[float, float]:
    """Return epochs at another global batch, and the standard deviation of their logarithm.

    They grow with a power of the batch, fitted to at least two batch sizes, and never fall. Beyond the largest tried
    batch another half power is considered possible.
    """
    x = numpy.log([point.global_batch for point in learning])
    y = numpy.log([max(point.epochs, 1e-3) for point in learning])
    power = 0.0
    if len(set(x.tolist())) > 1:
        # With a power of 1 the number of steps stays the same: a larger batch then brings nothing.
        power = min(1.0, max(0.0, float(numpy.polyfit(x, y, 1)[0])))
    intercepts = y - power * x
    scatter = float(intercepts.std(ddof=1)) if len(intercepts) > 1 else 0.15
    beyond = max(0.0, math.log(global_batch) - float(x.max()))
    # Two standard deviations of 0.25 are the half power.
    return math.exp(float(intercepts.mean()) + power * math.log(global_batch)), math.hypot(scatter, 0.25 * beyond)
