"""Where the runs of a study go: this machine, or the nodes of the allocation that `hpcdl sweep` was started in."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpcdl.cluster.environment import placement
from hpcdl.cluster.launchers import LAUNCHER_VARIABLE, find_launcher
from hpcdl.cluster.launchers.base import seconds_left
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import own_program
from hpcdl.study.plan import StudyRuns

NODES_VARIABLE = "SLURM_JOB_NODELIST"
SETTLE_S = 10.0
"""In a job: how long nothing may have changed in what an earlier call left, whose ranks may still end elsewhere."""
LEAVING_S = 60.0
"""What is kept of a job's time for runs under way to save and leave in."""
TRAIN = tuple(own_program("hpcdl", "train"))


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Nodes for the runs of a study, which the sweep hands to one run at a time, and how a run starts on some of them.

    `remedy` says how to get more nodes. `settle_s` is how long the folder of a run that an earlier call left must have
    been still before it is used again. `nodes_variable` tells a run of its own nodes only, where nodes can be chosen.
    """

    nodes: Sequence[str]
    remedy: str = "ask for {num} nodes"
    settle_s: float = SETTLE_S
    nodes_variable: str = ""
    command: Sequence[str] = TRAIN

    def environment(self, nodes: Sequence[str]) -> dict[str, str]:
        """What the environment of a run on `nodes` has beyond the sweep's own."""
        return {self.nodes_variable: ",".join(nodes)} if self.nodes_variable else {}


def find_allocation(environment: Mapping[str, str], sizes: Collection[int] = ()) -> Allocation:
    """The nodes that `environment` speaks of, this machine outside of a job; `sizes` are those that runs need.

    UsageError inside a job step, whose ranks would each start a sweep, and where nodes cannot be chosen for a run:
    under launchers other than Slurm's every run takes all nodes of the job.
    """
    inside = placement(environment)
    if inside is not None:
        raise UsageError(
            f"hpcdl sweep starts ranks itself, but {inside.launcher} has started this one of {inside.size}; "
            "call it without mpiexec or srun"
        )
    launcher = find_launcher(environment)
    nodes = launcher.hosts(environment)
    if not nodes:
        remedy = "start the sweep inside an allocation (such as salloc -N {num}), or with --small"
        return Allocation(nodes=(socket.gethostname(),), remedy=remedy, settle_s=0.0)
    if len(nodes) == 1:
        return Allocation(nodes=tuple(nodes))
    if launcher.name != "slurm":
        if set(sizes) == {len(nodes)}:
            return Allocation(nodes=nodes)
        raise UsageError(
            f"hpcdl sweep cannot give runs some of the {len(nodes)} nodes under {launcher.name}; add "
            f"--only-nodes {len(nodes)} to run the points that need them all, or set {LAUNCHER_VARIABLE}=slurm where "
            "srun works"
        )
    return Allocation(nodes=nodes, nodes_variable=NODES_VARIABLE)


def seconds_for_runs(environment: Mapping[str, str]) -> float | None:
    """Seconds until the last run must have ended here; None where nothing limits them.

    What `hpcdl submit` has told the job, else the scheduler's own limit, less the time in which a run leaves.
    """
    told_s = seconds_left(environment)
    if told_s is not None:
        return told_s
    limit_s = find_launcher(environment).job_seconds_left(environment)
    return None if limit_s is None else max(limit_s - LEAVING_S, 0.0)


def check_room(plan: StudyRuns, allocation: Allocation) -> None:
    """UsageError where a run needs more nodes than there are."""
    most = max(point.nodes for point in plan.points)
    if most > len(allocation.nodes):
        too_large = sum(point.nodes > len(allocation.nodes) for point in plan.points)
        raise UsageError(
            f"{too_large} of {len(plan.points)} points need more than the {len(allocation.nodes)} nodes here, "
            f"up to {most}; " + allocation.remedy.format(num=most)
        )
