"""The time and cost of a study: from its own or earlier runs if there are any, else from the networks' sizes.

Nothing is started. Without any basis there is no cost, and UsageError says what is missing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.config.study import Study
from hpcdl.core.errors import UsageError
from hpcdl.core.units import counted, listed
from hpcdl.models.table import FLOP_PER_CORE_AND_SECOND, FLOP_PER_MAC, MODELS, parse_emulation
from hpcdl.predict.evidence import Evidence, gather_evidence, guessed_evidence
from hpcdl.predict.forecast import Forecast, Range
from hpcdl.predict.jobs import StepJob, has_period, is_coded, kind_of, label_of, streaming_of
from hpcdl.predict.messages import coded_bytes_of
from hpcdl.predict.network import Network
from hpcdl.report.runs.findings import TracedRun
from hpcdl.report.runs.run import Run
from hpcdl.run.plan import RunPlan
from hpcdl.strategies.table import ALIASES
from hpcdl.study.plan import PlannedRun, StudyPoint, StudyRuns
from hpcdl.study.state import StudyState

START_S = 15.0
"""Seconds to start TensorFlow and trace the step."""


@dataclass(frozen=True, kw_only=True)
class StudyEstimate:
    """Totals over the runs still to do. `unknown` counts runs without an estimate; no total includes them."""

    seconds_by_run: Mapping[str, float]
    seconds: float
    node_hours: float
    unknown: int
    measured: int


def estimate_study(
    study: Study,
    plan: StudyRuns,
    run_plan: Mapping[int, RunPlan],
    cores_per_node: int,
    num_nodes: int,
    state: StudyState | None = None,
) -> StudyEstimate:
    """Return the time and node-hours of the runs of `plan` that `state` does not list as finished.

    Measured points count with their mean. Runs go side by side if `num_nodes` exceeds their needs: `seconds` is the
    longer of the longest run and of all node-seconds divided by the nodes.
    """
    finished = {run.name for run in state.runs if run.status == "finished"} if state else set()
    measured_s = _measured(state)
    seconds: dict[str, float] = {}
    todo = [run for run in plan.runs if run.name not in finished]
    for run in todo:
        # What was measured comes before what the user estimates, and that before a guess from operations.
        guess = measured_s.get(run.point.number) or study.plan.run_estimate
        guess = guess or _computed(run.point, run_plan[run.point.number], cores_per_node)
        if guess is not None:
            seconds[run.name] = guess
    return StudyEstimate(
        seconds_by_run=seconds,
        seconds=_elapsed(todo, seconds, num_nodes),
        node_hours=sum(seconds.get(run.name, 0.0) * run.point.nodes for run in todo) / 3600,
        unknown=len(todo) - len(seconds),
        measured=sum(run.point.number in measured_s for run in todo),
    )


def _measured(state: StudyState | None) -> dict[int, float]:
    """Return the mean seconds of each point's finished runs."""
    seconds_by_point: dict[int, list[float]] = {}
    for run in state.runs if state else ():
        if run.status == "finished" and run.seconds is not None:
            seconds_by_point.setdefault(run.point, []).append(run.seconds)
    return {point: statistics.fmean(values) for point, values in seconds_by_point.items()}


def _computed(point: StudyPoint, run_plan: RunPlan, cores_per_node: int) -> float | None:
    """Return seconds for start and computing, without communication, which the study is to measure; None if unknown.

    MACs are the table's, scaled by the area of the samples. Emulated computing states its own time.
    """
    if emulation := parse_emulation(point.model):
        return START_S + run_plan.num_steps * emulation.seconds
    info = MODELS.get(point.model)
    # Only for images it is known how operations grow with the sample.
    if info is None or len(run_plan.dataset.sample_shape) != 3:
        return None
    height, width, _ = run_plan.dataset.sample_shape
    macs = info.macs * height * width / math.prod(info.input_shape[:2])
    cores = max(cores_per_node / point.ranks_per_node, 1 / point.ranks_per_node)
    if point.threads is not None:
        cores = min(cores, point.threads)
    flop = run_plan.num_steps * run_plan.worker_batch * macs * FLOP_PER_MAC
    return START_S + flop / (cores * FLOP_PER_CORE_AND_SECOND)


def _elapsed(runs: Sequence[PlannedRun], seconds: Mapping[str, float], num_nodes: int) -> float:
    if num_nodes <= 1:
        return sum(seconds.values())
    node_seconds = sum(seconds.get(run.name, 0.0) * run.point.nodes for run in runs)
    return max(node_seconds / num_nodes, max(seconds.values(), default=0.0))


START = Range(mean=START_S, low=START_S / 2, high=2 * START_S)
"""Seconds that a run takes besides its steps, if no run of the study has shown it: a guess within a factor of two."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Earlier runs, and those with traces. For networks without runs, `network` and `machine` replace them."""

    runs: Sequence[Run] = ()
    traced: Sequence[TracedRun] = ()
    network: Network | None = None
    machine: str | None = None


@dataclass(frozen=True, kw_only=True)
class PointCost:
    """`runs` are those still to do; `seconds` and `node_hours` are of one run. `marks`: reasons for less trust."""

    point: StudyPoint
    runs: int
    steps: int
    step_seconds: Range
    seconds: Range
    marks: tuple[str, ...] = ()

    @property
    def node_hours(self) -> Range:
        """Node-hours of one run."""
        return self.seconds.scaled(self.point.nodes / 3600)


@dataclass(frozen=True, kw_only=True)
class StudyCost:
    """The cost of all runs still to do. Totals add the ends of the intervals, as if all errors had the same sign."""

    points: Sequence[PointCost]
    evidence: Sequence[str]
    warnings: Sequence[str]

    @property
    def num_runs(self) -> int:
        """Number of runs still to do."""
        return sum(point.runs for point in self.points)

    @property
    def seconds(self) -> Range:
        """Seconds of the runs one after the other."""
        return _sum([point.seconds.scaled(point.runs) for point in self.points if point.runs])

    @property
    def node_hours(self) -> Range:
        """Node-hours of all runs."""
        return _sum([point.node_hours.scaled(point.runs) for point in self.points if point.runs])

    def as_json(self) -> dict[str, Any]:
        """Return the document of `sweep --predict --json`."""
        return {
            "points": [
                dataclasses.asdict(point.point) | {
                    "runs": point.runs, "steps": point.steps, "step_seconds": dataclasses.asdict(point.step_seconds),
                    "seconds": dataclasses.asdict(point.seconds), "node_hours": dataclasses.asdict(point.node_hours),
                    "marks": list(point.marks),
                }
                for point in self.points
            ],
            "runs": self.num_runs,
            "seconds": dataclasses.asdict(self.seconds),
            "node_hours": dataclasses.asdict(self.node_hours),
            "evidence": list(self.evidence),
            "warnings": list(self.warnings),
        }  # fmt: skip


def _sum(ranges: Sequence[Range]) -> Range:
    mean, low, high = (sum(getattr(range_, key) for range_ in ranges) for key in ("mean", "low", "high"))
    return Range(mean=mean, low=low, high=high)


def predict_cost(
    study: Study,
    plan: StudyRuns,
    run_plan: Mapping[int, RunPlan],
    state: StudyState,
    known: Known,
) -> StudyCost:
    """Return the cost of the runs of `plan` that are not finished in `state`. Raises UsageError naming what is missing.

    Points with a form of gradients that no forecast models have no cost; a warning names them.
    """
    plan, left_out = _modelled(study, plan, run_plan, known)
    evidence_by_model: dict[str, Evidence] = {}
    problems: list[str] = []
    for model in dict.fromkeys(point.model for point in plan.points):
        try:
            evidence_by_model[model] = _evidence(model, plan, run_plan, known)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError(f"{study.origin}: no cost can be predicted: {'; '.join(problems)}")
    forecasts = {
        model: Forecast(
            evidence, known.network, [_label(point, run_plan) for point in plan.points if point.model == model]
        )
        for model, evidence in evidence_by_model.items()
    }
    numbers_left = [run.point.number for run in plan.runs if state.run(run.name).status != "finished"]
    steps = {point.number: _step(forecasts[point.model], point, run_plan[point.number]) for point in plan.points}
    start = _start(state, {number: run_plan[number].num_steps * step.mean for number, (step, _) in steps.items()})
    return StudyCost(
        points=[
            _cost(point, numbers_left.count(point.number), run_plan[point.number].num_steps, steps[point.number], start)
            for point in plan.points
        ],
        evidence=[_evidence_text(model, evidence) for model, evidence in evidence_by_model.items()],
        warnings=list(dict.fromkeys([
            *left_out,
            *(line for evidence in evidence_by_model.values() for line in evidence.remarks),
            *(line for point in plan.points for line in _doubts(point, evidence_by_model[point.model])),
        ])),
    )  # fmt: skip


def _modelled(
    study: Study, plan: StudyRuns, run_plan: Mapping[int, RunPlan], known: Known
) -> tuple[StudyRuns, list[str]]:  # fmt: skip
    """Return `plan` without points whose form of gradients no run of the network has, and a line that names them."""
    forms = {point.number: run_plan[point.number].config.exchange.compress for point in plan.points}
    shown = {
        model: set(coded_bytes_of([run for run in known.runs if run.model == model]))
        for model in {point.model for point in plan.points}
    }
    unmodelled = [
        point
        for point in plan.points
        if is_coded(forms[point.number]) and forms[point.number] not in shown[point.model]
    ]
    if not unmodelled:
        return plan, []
    if len(unmodelled) == len(plan.points):
        raise UsageError(
            f"{study.origin}: no cost can be predicted: all points have --compress "
            f"{', '.join(dict.fromkeys(forms.values()))}, and no earlier run shows what that costs: name one of "
            "several workers with --evidence RUN, or leave it out for the estimate"
        )
    removed = {point.number for point in unmodelled}
    runs = [run for run in plan.runs if run.point.number not in removed]
    modelled_plan = dataclasses.replace(
        plan, points=[point for point in plan.points if point.number not in removed], runs=runs
    )
    names = listed([f"{point.label} (--compress {forms[point.number]})" for point in unmodelled], 6)
    left_out = counted(len(plan.runs) - len(runs), "run")
    return modelled_plan, [
        f"{left_out} not predicted and in no total, no earlier run shows what compressing costs: {names}"
    ]


def _evidence(model: str, plan: StudyRuns, run_plan: Mapping[int, RunPlan], known: Known) -> Evidence:
    model_runs = [run for run in known.runs if run.model == model]
    if model_runs:
        return gather_evidence(model_runs, known.network, traced=known.traced)[0]
    points = [point for point in plan.points if point.model == model]
    batch = run_plan[points[0].number].worker_batch
    alone = all(point.ranks == 1 for point in points)
    if known.network is None and not alone:
        raise UsageError(
            f"of {model} there is no run: name earlier ones with --evidence RUN, or the network with --network NAME for"
            " a guess from operations and cores"
        )
    emulation = parse_emulation(model)
    if emulation is None:
        return guessed_evidence(model, batch, known.machine)
    guessed = guessed_evidence(emulation.network, batch, known.machine)
    seconds = emulation.seconds / batch
    return dataclasses.replace(
        guessed, model=model, gradient_bytes=MODELS[emulation.network].gradient_bytes,
        stated={**guessed.stated, "image_s": (seconds, 0.02), "batch_overhead": (1e-3, 0.1)},
        remarks=(f"nothing of {model} is measured: its computing takes what it says, messages what the network does",),
    )  # fmt: skip


def _strategy(point: StudyPoint) -> str:
    kind_of(point.strategy)
    return ALIASES.get(point.strategy, point.strategy)


def _label(point: StudyPoint, run_plan: Mapping[int, RunPlan]) -> str:
    return label_of(_strategy(point), run_plan[point.number].config.exchange.compress)


def job_of_point(point: StudyPoint, run_plan: RunPlan, evidence: Evidence) -> StepJob:
    """Return the step that a run of `point` repeats, with the settings of this study."""
    exchange, elastic, strategy = run_plan.config.exchange, run_plan.config.elastic, _strategy(point)
    label = label_of(strategy, exchange.compress)
    job = evidence.at(label, point.nodes, point.workers, point.servers, run_plan.worker_batch)
    per_node = -(-point.workers // point.nodes)
    default = run_plan.info.features.default_period  # a run finds another period only at run time
    fragments, overlap = streaming_of(strategy, vars(elastic))
    return dataclasses.replace(
        job,
        workers_per_node=per_node,
        threads=(point.threads or _threads(job, per_node, evidence)) if job.threads else 0,
        compress=exchange.compress,
        bucket_bytes=exchange.bucket_bytes,
        placement=(exchange.placement or "") if point.servers else "",
        period=(elastic.period_steps or default) if has_period(strategy) else 1,
        period_within=elastic.period_within or 0,
        fragments=fragments,
        overlap=overlap,
        variant=elastic.variant if strategy == "sync-easgd" else job.variant,
    )


def _threads(job: StepJob, per_node: int, evidence: Evidence) -> int:
    """Return the threads of runs with as many workers per node, else the node's cores divided among the workers."""
    alike = [
        measurement.job.threads for measurement in evidence.monitors if measurement.job.workers_per_node == per_node
    ]
    return alike[0] if alike else max(1, (evidence.cores_per_node or job.threads * per_node) // per_node)


def _step(forecast: Forecast, point: StudyPoint, run_plan: RunPlan) -> tuple[Range, tuple[str, ...]]:
    prediction = forecast.predict(job_of_point(point, run_plan, forecast.evidence))
    return prediction.step_seconds, prediction.marks


def _start(state: StudyState, training: Mapping[int, float]) -> Range:
    """Return the seconds of finished runs beyond `training` (predicted seconds of all steps by point), else a guess."""
    # A run faster than its forecast says nothing of its start.
    beside = [
        run.seconds - training[run.point]
        for run in state.runs
        if run.status == "finished" and run.seconds is not None and run.seconds > training.get(run.point, run.seconds)
    ]
    if not beside:
        return START
    return Range(mean=statistics.median(beside), low=min(beside), high=max(beside))


def _cost(
    point: StudyPoint, runs: int, num_steps: int, estimate: tuple[Range, tuple[str, ...]], start: Range
) -> PointCost:
    step, marks = estimate
    seconds = _sum([step.scaled(num_steps), start])
    return PointCost(point=point, runs=runs, steps=num_steps, step_seconds=step, seconds=seconds, marks=marks)


def _evidence_text(model: str, evidence: Evidence) -> str:
    if not evidence.monitors:
        return f"{model}: nothing measured"
    runs = sum(len(measurement.seconds) for measurement in evidence.monitors)
    sizes = ", ".join(map(str, evidence.sizes))
    return f"{model}: {runs} runs on {sizes} workers by {', '.join(evidence.strategies)}"


def _doubts(point: StudyPoint, evidence: Evidence) -> list[str]:
    """Return warnings about aspects of the point that the evidence does not cover."""
    if point.threads and evidence.monitors and not evidence.threads:
        return [f"threads vary in the study, but not in the runs of {point.model}: all are taken to be as fast"]
    return []
