"""Where the runs of a study go: this machine, or the nodes of the allocation that `hpcdl sweep` was started in.

A place is asked for a run's command; it knows its nodes, and the sweep hands each of them to one run at a time.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcdl.cluster.environment import placement
from hpcdl.cluster.launchers.table import LAUNCHER_VARIABLE, find_launcher
from hpcdl.core.errors import UsageError
from hpcdl.study.plan import Plan, Point

NODES_VARIABLE = "SLURM_JOB_NODELIST"
SETTLE_S = 10.0
"""In a job: how long nothing may have changed in what an earlier call left, whose ranks may still end elsewhere."""
TRAIN = (sys.executable, "-m", "hpcdl", "train")


@dataclass(frozen=True, kw_only=True)
class Start:
    """How one run is started: its words, and what its environment has beyond the sweep's own."""

    command: Sequence[str]
    environment: Mapping[str, str]


class Place(Protocol):
    """Nodes, and how a run is started on some of them."""

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes that runs may take."""

    @property
    def remedy(self) -> str:
        """How to get more nodes, for people."""

    @property
    def settle_s(self) -> float:
        """How long the folder of a run that an earlier call left must have been still before it is used again."""

    def start(self, point: Point, nodes: Sequence[str], words: Sequence[str]) -> Start:
        """What starts `hpcdl train WORDS` on `nodes`."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """This machine alone: `hpcdl train` starts the ranks itself."""

    nodes: Sequence[str]
    remedy: str = "start the sweep inside an allocation (such as salloc -N {num}), or with --small"
    settle_s: float = 0.0

    def start(self, point: Point, nodes: Sequence[str], words: Sequence[str]) -> Start:
        """The command as a user would type it."""
        return Start(command=[*TRAIN, *words], environment={})


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a Slurm job; runs on disjoint nodes go side by side.

    A run is told of its own nodes only, by the variable in which `hpcdl train` looks for those of the job.
    """

    nodes: Sequence[str]
    remedy: str = "ask for {num} nodes"
    settle_s: float = SETTLE_S

    def start(self, point: Point, nodes: Sequence[str], words: Sequence[str]) -> Start:
        """The command as a user would type it in a job of these nodes."""
        return Start(command=[*TRAIN, *words], environment={NODES_VARIABLE: ",".join(nodes)})


def find_place(environment: Mapping[str, str], sizes: Collection[int] = ()) -> Place:
    """The place that `environment` speaks of; `sizes` are the numbers of nodes that runs need.

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
        return Local(nodes=(socket.gethostname(),))
    if len(nodes) == 1:
        return Local(nodes=tuple(nodes), settle_s=SETTLE_S)
    if launcher.name != "slurm":
        if set(sizes) == {len(nodes)}:
            return Local(nodes=nodes, remedy="ask for {num} nodes", settle_s=SETTLE_S)
        raise UsageError(
            f"hpcdl sweep cannot give runs some of the {len(nodes)} nodes under {launcher.name}; add "
            f"--only-nodes {len(nodes)} to run the points that need them all, or set {LAUNCHER_VARIABLE}=slurm where "
            "srun works"
        )
    return Allocation(nodes=nodes)


def check_room(plan: Plan, place: Place) -> None:
    """UsageError where a run needs more nodes than there are."""
    most = max(point.nodes for point in plan.points)
    if most > len(place.nodes):
        too_large = sum(point.nodes > len(place.nodes) for point in plan.points)
        raise UsageError(
            f"{too_large} of {len(plan.points)} points need more than the {len(place.nodes)} nodes here, up to {most}; "
            + place.remedy.format(num=most)
        )
