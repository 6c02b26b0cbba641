"""Points of a study as `hpcdl train` takes them: settings and a node profile, all checked before anything runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpcdl.config.load import Layer, load, standard_layers
from hpcdl.config.schema import TrainConfig
from hpcdl.config.study import OF_A_STUDY, Study
from hpcdl.core.errors import ConfigError, CorruptError, UsageError
from hpcdl.core.units import counted
from hpcdl.node.engine import check_library
from hpcdl.node.machines import read_topology
from hpcdl.node.profile import Profile, Settings, write_profile
from hpcdl.node.topology import Topology
from hpcdl.run.plan import RunPlan, prepare
from hpcdl.study.plan import StudyPoint, StudyRuns

OWN = {
    **dict.fromkeys(("model", "data", "strategy", "servers", "batch-size"), "list it in [matrix]"),
    **OF_A_STUDY,
}
"""Settings of a run that a study chooses, and where to set them instead."""


def prepare_points(study: Study, plan: StudyRuns) -> tuple[StudyRuns, dict[int, RunPlan]]:
    """Return the plan without points that `hpcdl train` would refuse, and the prepared runs of the others by number.

    Raises ConfigError with all problems. A strategy may take some points of a network and data set and refuse
    others (too few workers, more samples per step than there are). These are omitted, with a message.
    """
    problems = [f"{study.origin}: [train] {key}: {OWN[key]}" for key in study.train if key in OWN]
    profiled = "profile" in study.train or any("profile" in matrix.axes for matrix in study.matrices)
    if any(point.threads for point in plan.points) and profiled:
        problems.append(f"{study.origin}: profile: threads in [matrix] make profiles of their own; drop one")
    shared = {key: value for key, value in study.train.items() if key not in OWN}
    layers = [*standard_layers("train"), Layer(origin=f"{study.origin}: [train]", values=shared)]
    prepared: dict[int, RunPlan] = {}
    refused: dict[int, str] = {}
    for point in plan.points:
        layer = Layer(origin=f"point {point.number}", values=settings_of_point(point))
        try:
            resolved = load(TrainConfig, [*layers, layer])
        except ConfigError as error:
            problems += error.problems
            continue
        try:
            check_library(resolved.config.run.allocator)
        except UsageError as error:  # a library missing on this node does not make a combination impossible
            problems.append(f"{study.origin}: {error}")
            continue
        try:
            prepared[point.number] = prepare(resolved)
        except (UsageError, CorruptError) as error:
            refused[point.number] = str(error)
    # A try that can run measures nothing: without the point that it is for it is left out too.
    able = {_job(point) for point in plan.points if point.number in prepared and not point.tried_for}
    wrong = [point for point in plan.points if point.number in refused and _job(point) not in able]
    problems += [f"{study.origin}: {line}" for point in wrong for line in refused[point.number].splitlines()]
    if problems:
        # Many points have the same problem.
        raise ConfigError(dict.fromkeys(problems))
    plan = plan.without(refused)
    return (plan if profiled or study.plan.mode != "weak" else _with_equal_threads(plan, read_topology())), prepared


def _with_equal_threads(plan: StudyRuns, topology: Topology) -> StudyRuns:
    """Return `plan` with the same threads per rank at every size, if sizes would share a node's cores differently.

    A single worker with all cores, compared with two workers with half the cores each, is not weak scaling.
    """
    shares = {point.ranks_per_node for point in plan.points}
    if len(shares) == 1 or any(point.threads for point in plan.points):
        return plan
    cores, most = len(topology.usable_cores), max(shares)
    threads = max(cores // most, 1)
    remarks = [
        f"weak scaling on a node: each rank has {counted(threads, 'thread')} at every size, its share where "
        f"{most} are on one"
    ]
    if most > cores:
        remarks.append(
            f"{most} ranks on a node of {cores} cores share them: what that costs is part of every efficiency at that"
            " size; leave it out, or run it on more nodes"
        )
    return plan.with_threads(threads, remarks)


def _job(point: StudyPoint) -> tuple[str, str, str]:
    return point.model, point.data, point.strategy


def settings_of_point(point: StudyPoint) -> dict[str, Any]:
    """Return the point as settings of `hpcdl train`, by key."""
    values: dict[str, Any] = {
        "model": point.model,
        "data": point.data,
        "strategy": point.strategy,
        "ranks": point.ranks,
        "batch-size": point.batch_size,
    }
    return values | ({"servers": point.servers} if point.servers else {}) | dict(point.settings)


def profile_of_point(point: StudyPoint, folder: Path) -> Path | None:
    """Return the file in `folder` of a profile with the point's threads, created if missing; None without threads."""
    threads = point.threads or point.shared_threads
    if threads is None:
        return None
    path = folder / f"{point.ranks_per_node}-ranks-{threads}-threads.toml"
    if not path.exists():
        topology = read_topology()
        profile = Profile(
            settings=thread_settings(threads, point.ranks_per_node, topology),
            machine="study",
            processor=topology.processor,
            fingerprint=topology.fingerprint,
            num_cores=len(topology.cores),
            model=point.model,
            batch_size=point.batch_size,
        )
        write_profile(profile, path)
    return path


def thread_settings(threads: int, ranks_per_node: int, topology: Topology) -> Settings:
    """Return settings that give each rank `threads` threads on as few hardware threads per core as possible.

    If all hardware threads are too few, nothing is bound: the study then measures oversubscription.
    """
    cores_each = len(topology.usable_cores) // ranks_per_node
    per_core = math.ceil(threads / cores_each) if cores_each else topology.threads_per_core + 1
    fits = per_core <= topology.threads_per_core
    return Settings(
        ranks_per_node=ranks_per_node,
        intra_op_threads=threads,
        threads_per_core=per_core if fits else 1,
        binding="balanced" if fits else "none",
    )
