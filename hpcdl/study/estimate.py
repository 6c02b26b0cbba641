"""What a study will take: from its own finished runs where there are some, else from the networks' sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdl.config.study import Study
from hpcdl.models.spec import parse_emulation
from hpcdl.models.table import FLOP_PER_CORE_AND_SECOND, FLOP_PER_MAC, MODELS
from hpcdl.run.plan import RunPlan
from hpcdl.study.plan import PlannedRun, StudyPoint, StudyRuns
from hpcdl.study.state import StudyState

START_S = 15.0
"""Starting TensorFlow and tracing the step."""


@dataclass(frozen=True, kw_only=True)
class StudyEstimate:
    """Totals over the runs still to do. `unknown` counts runs that nothing is known of; they are in no total."""

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
    """Time and node-hours of the runs of `plan` that `state` does not hold as finished.

    Points that were measured count with their mean. Runs go side by side where `num_nodes` is more than they need:
    `seconds` is the longer of the longest run and of all node-seconds over all nodes.
    """
    done = {run.name for run in state.runs if run.status == "finished"} if state else set()
    known = _measured(state)
    seconds: dict[str, float] = {}
    todo = [run for run in plan.runs if run.name not in done]
    for run in todo:
        guess = known.get(run.point.number) or study.plan.run_estimate
        guess = guess or _computed(run.point, run_plan[run.point.number], cores_per_node)
        if guess is not None:
            seconds[run.name] = guess
    return StudyEstimate(
        seconds_by_run=seconds,
        seconds=_elapsed(todo, seconds, num_nodes),
        node_hours=sum(seconds.get(run.name, 0.0) * run.point.nodes for run in todo) / 3600,
        unknown=len(todo) - len(seconds),
        measured=sum(run.point.number in known for run in todo),
    )


def _measured(state: StudyState | None) -> dict[int, float]:
    """Mean seconds of the finished runs of each point."""
    found: dict[int, list[float]] = {}
    for run in state.runs if state else ():
        if run.status == "finished" and run.seconds is not None:
            found.setdefault(run.point, []).append(run.seconds)
    return {point: statistics.fmean(values) for point, values in found.items()}


def _computed(point: StudyPoint, run_plan: RunPlan, cores_per_node: int) -> float | None:
    """Start and computing; communication is what a study is to find out. None for a network that is not in the table.

    MACs are the table's, scaled by the area of the samples; emulated computing says how long it takes.
    """
    if emulation := parse_emulation(point.model):
        return START_S + run_plan.num_steps * emulation.seconds
    info = MODELS.get(point.model)
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
