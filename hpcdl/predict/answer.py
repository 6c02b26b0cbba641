"""The answer to one question: predictions, the hold-out test, crossings, servers, and the next run to make."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.config.forms import NONE
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import typed
from hpcdl.core.units import IMAGES, common_unit, counted, format_seconds
from hpcdl.node.machines import read_machine
from hpcdl.predict.evidence import NO_RUN_DIRS, Evidence, gather_evidence, guessed_evidence
from hpcdl.predict.forecast import Forecast, HeldOut, Prediction, Range
from hpcdl.predict.jobs import StepJob, has_servers, kind_of, parts_of
from hpcdl.predict.network import Network, read_network
from hpcdl.report.runs.findings import TracedRun
from hpcdl.report.runs.run import Run
from hpcdl.run.trained_data import made_up_data
from hpcdl.strategies.table import ALIASES

FALLS_BELOW = 0.8
MOST_NODES = 1 << 12
"""Limit of the search for a crossing."""
USUAL_STRATEGIES = ("ring", "halving-doubling", "ps", "sync-easgd")
"""Strategies to predict beside the measured ones, if the question names none."""
DEFAULT_BATCH = 32
DEFAULT_REACH = 16
"""By default predictions reach up to this many times the largest measured number of nodes."""
_WORTH_TELLING = 1.05
"""A smaller widening of intervals makes no difference to a reader."""
_WORTH_MENTIONING = 0.1
"""Distance of a measured size from the forecast, as a logarithm, from which no model fits."""
_LARGEST_WIDTH = 10.0
"""A larger half width, relative to the value, tells only that nothing is known."""
_WORTH_RUNNING = 0.95
"""A run that leaves more than this share of an interval is not advised."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question. Empty or None means the usual."""

    nodes: tuple[int, ...] = ()
    strategies: tuple[str, ...] = ()
    batch: int | None = None
    servers: int | None = None
    placement: str | None = None
    network: str | None = None
    machine: str | None = None
    model: str | None = None
    target: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServerChoice:
    """The number and placement of servers with the highest throughput on `nodes` nodes.

    `low` and `high` are the ends of its 90 % interval. Other numbers of servers whose intervals reach into it are in
    `not_distinguishable`.
    """

    strategy: str
    model: str
    nodes: int
    servers: int
    placement: str
    images_per_second: float
    low: float
    high: float
    not_distinguishable: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class NextRun:
    """The most informative run for the question: its cost in nodes, and how far the interval would shrink.

    Widths are half intervals, relative to the value, at the largest size of the question; None: it tells nothing.
    """

    model: str
    strategy: str
    nodes: int
    workers: int
    servers: int
    width: float | None
    width_after: float
    command: str

    @property
    def halves(self) -> bool:
        """Whether it would at least halve the interval."""
        return self.width is None or self.width_after <= 0.5 * self.width


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The whole answer. `counted` is the unit of throughputs."""

    predictions: Sequence[Prediction]
    held_out: Mapping[str, Sequence[HeldOut]]
    crossings: Sequence[Mapping[str, Any]]
    best_servers: Sequence[ServerChoice]
    next_run: NextRun | None
    warnings: Sequence[str] = ()
    counted: str = IMAGES
    parameters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the document of `predict --json`."""
        return {
            "predictions": [_row(item) for item in self.predictions],
            "backtest": [
                {"strategy": item.strategy, "workers": item.workers, "measured": item.measured,
                 "predicted": item.predicted, "error": item.error, "covered": item.covered, "model": model}
                for model, rows in self.held_out.items() for item in rows
            ],
            "crossings": list(self.crossings),
            "best_servers": [dataclasses.asdict(item) for item in self.best_servers],
            "next_run": None if self.next_run is None else dataclasses.asdict(self.next_run)
            | {"halves_interval": self.next_run.halves},
            "parameters": self.parameters,
            "warnings": list(self.warnings),
        }  # fmt: skip


def check(question: Question) -> Network | None:
    """Return the network of the question. Raises UsageError for names and files that no run could make valid."""
    for name in question.strategies:
        kind_of(name)
    if question.machine is not None:
        read_machine(question.machine)
    return None if question.network is None else read_network(question.network)


def answer(
    question: Question,
    runs: Sequence[Run],
    traced: Sequence[TracedRun] = (),
    run_dirs: Mapping[str, Path] = NO_RUN_DIRS,
) -> Answer:
    """Predict from `runs`, or if there are none from the machine, network and model of the question.

    `traced` are the runs that have traces; `run_dirs` holds the runs' directories by name.
    """
    network = check(question)
    evidence = (
        gather_evidence(runs, network, question.target, traced, question.model, run_dirs)
        if runs
        else [_unmeasured(question, network)]
    )
    answers = [_of_network(question, item, network) for item in evidence]
    advised = [item.next_run for item in answers if item.next_run]
    largest = max(advised, key=lambda run: run.width or math.inf, default=None)
    return Answer(
        predictions=[row for item in answers for row in item.predictions],
        held_out={model: rows for item in answers for model, rows in item.held_out.items()},
        crossings=[row for item in answers for row in item.crossings],
        best_servers=[row for item in answers for row in item.best_servers],
        next_run=largest,
        warnings=list(dict.fromkeys(line for item in answers for line in item.warnings)),
        counted=common_unit(run.counted for run in runs if run.images_per_second is not None),
        parameters={model: values for item in answers for model, values in item.parameters.items()},
    )


def _unmeasured(question: Question, network: Network | None) -> Evidence:
    missing = [
        text
        for text, value in (
            ("the model (--model NAME, FILE.keras or FILE.py:FUNCTION)", question.model),
            ("the network (--network NAME or latency,bandwidth)", network),
        )
        if value is None
    ]
    if missing:
        raise UsageError(
            "nothing to predict from: name runs of hpcdl train, or --import csv FILE; without any,"
            f" {' and '.join(missing)} must be given"
        )
    return guessed_evidence(question.model or "", question.batch or DEFAULT_BATCH, question.machine)


def _of_network(question: Question, evidence: Evidence, network: Network | None) -> Answer:
    strategies = _labels(evidence, [ALIASES.get(name, name) for name in question.strategies])
    cores = None
    if question.machine is not None and evidence.monitors:
        cores = len(read_machine(question.machine).topology.cores)
    forecast = Forecast(evidence, network, strategies, cores)
    nodes = question.nodes or _usual_nodes(evidence)
    predictions, refused = [], []
    for strategy in strategies:
        for count in nodes:
            job = job_for(question, evidence, strategy, count)
            if job is None:
                refused.append((strategy, count))
            else:
                predictions.append(forecast.predict(job))
    if not predictions:
        raise UsageError(_no_room(question, refused))
    bounded = {prediction.job.label for prediction in predictions if prediction.step_seconds.bounded}
    known = [strategy for strategy in strategies if strategy in bounded]  # of the others nothing can be said
    # Of the largest size the least certain strategy: the next run is to narrow its interval.
    largest = max(
        predictions,
        key=lambda prediction: (prediction.job.nodes, prediction.step_seconds.high / prediction.step_seconds.low),
    )
    return Answer(
        predictions=predictions,
        held_out={evidence.model: forecast.held_out},
        crossings=[*_below(question, forecast, known), *_changes(predictions)],
        best_servers=_servers(question, forecast, known, nodes),
        next_run=_next_run(forecast, largest.job),
        warnings=[*evidence.remarks, *_warnings(forecast, predictions)],
        parameters={evidence.model: _parameters(forecast)},
    )


def _labels(evidence: Evidence, asked: Sequence[str]) -> list[str]:
    """Return the strategies `asked` for, by default the usual ones, each in the forms in which it was run."""
    measured = [label for label in evidence.strategies if label != "single"]
    if not asked:
        return list(dict.fromkeys([*measured, *USUAL_STRATEGIES]))
    forms = [label for name in asked for label in measured if parts_of(label)[0] == name and label != name]
    return list(dict.fromkeys([*asked, *forms]))


def _usual_nodes(evidence: Evidence) -> tuple[int, ...]:
    reach = evidence.largest_nodes * DEFAULT_REACH if evidence.monitors else 1024
    return tuple(1 << power for power in range(reach.bit_length()))


def job_for(question: Question, evidence: Evidence, label: str, nodes: int) -> StepJob | None:
    """Return the requested job on `nodes` nodes; None if they have no room for it."""
    like = evidence.templates.get(label)
    servers = question.servers or (like.servers if like else 1) or 1
    job = evidence.job(label, nodes, servers, question.batch)
    if job is not None and question.placement and has_servers(job.strategy):
        job = dataclasses.replace(job, placement=question.placement)
    return job


def _no_room(question: Question, refused: Sequence[tuple[str, int]]) -> str:
    strategy, nodes = refused[0]
    if strategy == "single":
        return f"--strategy single has one worker: ask for --nodes 1, not {nodes}"
    return f"--nodes {nodes} has no room for a worker beside {question.servers or 1} servers; give more nodes"


def _below(question: Question, forecast: Forecast, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """Return where each strategy's efficiency falls below 80 %: by doubling, then interpolation in log nodes."""
    rows: list[dict[str, Any]] = []
    for strategy in strategies:
        curve: list[tuple[int, Range]] = []
        nodes = 1
        while nodes <= MOST_NODES:
            job = job_for(question, forecast.evidence, strategy, nodes)
            if job is not None:
                curve.append((nodes, forecast.efficiency(job)))
                if curve[-1][1].high < FALLS_BELOW:
                    break
            nodes *= 2
        if not curve:
            continue
        ends = {key: _crossing(curve, key) for key in ("mean", "low", "high")}
        rows.append({
            "what": "efficiency below 80 %", "model": forecast.evidence.model, "strategy": strategy,
            "nodes": ends["mean"], "low": ends["low"], "high": ends["high"],
        })  # fmt: skip
    return rows


def _crossing(curve: Sequence[tuple[int, Range]], key: str) -> int | None:
    """Return the first number of nodes at which this end of the range is below; None if it stays above."""
    before: tuple[int, float] | None = None
    for nodes, efficiency in curve:
        value = float(getattr(efficiency, key))
        if value < FALLS_BELOW:
            if before is None:
                return nodes
            share = (before[1] - FALLS_BELOW) / max(before[1] - value, 1e-12)
            return max(before[0] + 1, round(before[0] * math.exp(share * math.log(nodes / before[0]))))
        before = (nodes, value)
    return None


def _changes(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Return the sizes at which another strategy becomes the best: most samples per second on the same nodes.

    A best one remains so until another is better beyond the intervals. Those that are not distinguishable from it at
    one of its sizes are listed with it. None is the best if the steps of fewer than two are known.
    """
    changes: list[dict[str, Any]] = []
    before = ""
    known = [row for row in predictions if row.step_seconds.bounded]
    if len({row.job.label for row in known}) < 2:
        return []
    for nodes in sorted({row.job.nodes for row in known}):
        rows = [row for row in known if row.job.nodes == nodes]
        best = max(rows, key=lambda row: row.images_per_second.mean)
        kept = next((row for row in rows if row.job.label == before), None)
        if kept is not None and kept.images_per_second.high > best.images_per_second.low:
            best = kept
        if best.job.label != before:
            changes.append({
                "what": "best strategy", "model": best.job.model, "nodes": nodes, "strategy": best.job.label,
                "before": before or None, "not_distinguishable": [],
            })  # fmt: skip
            before = best.job.label
        similar = changes[-1]["not_distinguishable"]
        similar += [row.job.label for row in rows if row is not best and row.job.label not in similar
                    and row.images_per_second.high > best.images_per_second.low]  # fmt: skip
    return changes


def _servers(
    question: Question, forecast: Forecast, strategies: Sequence[str], nodes: Sequence[int]
) -> list[ServerChoice]:
    """Return for each strategy with servers and each size their best number and placement, by samples per second."""
    labels = [label for label in strategies if has_servers(parts_of(label)[0])]
    best = [_servers_on(question, forecast, label, count) for label in labels for count in nodes]
    return [choice for choice in best if choice is not None]


def _servers_on(question: Question, forecast: Forecast, strategy: str, nodes: int) -> ServerChoice | None:
    rates: dict[tuple[int, str], Range] = {}
    for servers in _powers(nodes):
        for placement in _PLACEMENTS.get(strategy, ("",)):
            asked = dataclasses.replace(question, servers=servers, placement=placement or None)
            job = job_for(asked, forecast.evidence, strategy, nodes)
            step = None if job is None else forecast.step_seconds(job)
            if job is not None and step is not None and step.bounded:
                rates[servers, placement] = step.inverse.scaled(job.workers * job.batch)
    if not rates:
        return None
    # Of equally fast ones the fewest servers, which leave nodes to workers.
    best = max(rates, key=lambda way: (round(rates[way].mean, 6), -way[0]))
    close = {servers for (servers, _), rate in rates.items() if rate.high > rates[best].low} - {best[0]}
    return ServerChoice(
        strategy=strategy, model=forecast.evidence.model, nodes=nodes, servers=best[0], placement=best[1],
        images_per_second=rates[best].mean, low=rates[best].low, high=rates[best].high,
        not_distinguishable=sorted(close),
    )  # fmt: skip


_PLACEMENTS = {"ps": ("split", "greedy", "round-robin"), "grpc-ps": ("greedy", "round-robin")}


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _next_run(forecast: Forecast, target: StepJob) -> NextRun | None:
    """Return the cheapest run that halves the interval of `target`, else the one that narrows it most, or None."""
    deviation = forecast.deviation(target)
    choices = [(job, forecast.deviation_after(target, job)) for job in _candidates(forecast, target)]
    if not choices:
        return None
    halving = [item for item in choices if item[1] <= 0.5 * deviation]
    job, after = min(halving, key=lambda item: item[0].nodes) if halving else min(choices, key=lambda item: item[1])
    command = command_of(dataclasses.replace(job, model=forecast.evidence.spec), forecast.evidence.data)
    width_after = _half_width(after)
    if after > _WORTH_RUNNING * deviation or width_after is None:
        return None
    return NextRun(
        model=job.model, strategy=job.label, nodes=job.nodes, workers=job.workers, servers=job.servers,
        width=_half_width(deviation), width_after=width_after, command=command,
    )  # fmt: skip


def _half_width(deviation: float) -> float | None:
    """Return half the 90 % interval, relative to the value, of this standard deviation of logarithms."""
    reach = 1.645 * deviation  # the end of a 90 % interval, in standard deviations
    return math.expm1(reach) if reach < math.log1p(_LARGEST_WIDTH) else None


def _candidates(forecast: Forecast, target: StepJob) -> list[StepJob]:
    """Return runs of the same strategy on up to half of the requested nodes."""
    evidence = forecast.evidence
    candidates = []
    nodes = 1
    while nodes <= max(1, target.nodes // 2):
        job = evidence.job(target.label, nodes, target.servers or 1)
        if job is not None:
            candidates.append(job)
        nodes *= 2
    return candidates


def command_of(job: StepJob, data: str) -> str:
    """Return the command for this run on the data of the runs."""
    arguments = ["train", "--model", job.model, "--strategy", job.strategy, "--ranks", job.workers + job.servers]
    servers = ["--servers", job.servers] if job.servers else []
    compress = ["--compress", job.compress] if job.compress != NONE else []
    arguments += [*servers, *compress, "--batch-size", round(job.batch), "--steps", 100]
    arguments += ["--data", data or made_up_data(job.model) or "DIR"]
    if job.nodes == 1:
        return typed(*arguments)
    per_node = -(-(job.workers + job.servers) // job.nodes)
    where = ["--nodes", job.nodes, "--ranks-per-node", per_node, "--time", "20m"]
    return typed("submit", *where, "--", *arguments)


def _missed(forecast: Forecast) -> str:
    """Return a line on the measured size that the forecast misses most; empty if it reproduces all."""
    off = [
        (math.log(step) - seen.log_mean, step, seen)
        for seen in forecast.evidence.monitors
        if (step := forecast.step_seconds(seen.job).mean)
    ]
    # Within two standard errors of their mean the repeats themselves show no miss.
    missed = [item for item in off if abs(item[0]) > max(_WORTH_MENTIONING, 2 * _scatter(item[2].seconds))]
    if not missed:
        return ""
    _, step, seen = max(missed, key=lambda item: abs(item[0]))
    size = f"{seen.job.label} on {counted(seen.job.workers, 'worker')}"
    took = f"took {format_seconds(math.exp(seen.log_mean))}, {format_seconds(step)} by the models"
    sizes = f"{len(missed)} of {counted(len(off), 'measured size')} {'is' if len(missed) == 1 else 'are'}"
    return f"no model fits these runs: {sizes} missed by more than {100 * _WORTH_MENTIONING:.0f} %; {size} {took}"


def _scatter(seconds: Sequence[float]) -> float:
    """Return the standard error of the mean logarithm of repeats; 0 for one run, which does not tell it."""
    return statistics.stdev(map(math.log, seconds)) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0


def _warnings(forecast: Forecast, predictions: Sequence[Prediction]) -> list[str]:
    lines = []
    for mark in dict.fromkeys(mark for prediction in predictions for mark in prediction.marks):
        count = sum(mark in prediction.marks for prediction in predictions)
        lines.append(f"{count} of {len(predictions)} predictions are marked: {mark}")
    largest, asked = forecast.evidence.largest_nodes, max(item.job.nodes for item in predictions)
    if forecast.evidence.monitors and asked > largest:
        lines.append(
            f"the intervals assume no jump beyond {counted(largest, 'node')}, such as a full switch, server or file"
            f" system: a run on {counted(min(2 * largest, asked), 'node')} would show it"
        )
    if missed := _missed(forecast):
        lines.append(missed)
    if not forecast.held_out:
        lines.append("nothing could be held out: intervals are not tested against a measured size")
    elif forecast.widening >= _WORTH_TELLING:
        lines.append(
            "the held-out size was missed by more than expected: intervals of sizes that were not run are"
            f" {forecast.widening:.2g} x wider"
        )
    return lines


def _parameters(forecast: Forecast) -> dict[str, float]:
    """Return the unknowns at their most probable values, and the noise between runs."""
    values = {name: float(value[0]) for name, value in forecast.posterior.values().items()}
    return values | {"run_noise": forecast.posterior.run_noise}


def _row(row: Prediction) -> dict[str, Any]:
    job = row.job

    def range_json(interval: Range | None) -> dict[str, float | None] | None:
        # All other ranges follow from the step's, and tell as little.
        if interval is not None and not row.step_seconds.bounded:
            return {"mean": None, "low": None, "high": None}
        return None if interval is None else dataclasses.asdict(interval)

    return {
        "strategy": job.label, "model": job.model, "nodes": job.nodes, "workers": job.workers,
        "servers": job.servers, "batch_per_rank": job.batch, "step_seconds": range_json(row.step_seconds),
        "images_per_second": range_json(row.images_per_second), "efficiency": range_json(row.efficiency),
        "limited_by": row.limited_by, "losses": row.losses, "faster": row.faster,
        "epoch_seconds": range_json(row.epoch_seconds), "epoch_node_hours": range_json(row.epoch_node_hours),
        "target_seconds": range_json(row.target_seconds), "models": dict(row.models), "marks": list(row.marks),
    }  # fmt: skip
