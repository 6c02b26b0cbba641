"""Where the runs of a study go: this machine, or the nodes of the allocation that `hpcdl sweep` was started in.

A place is asked for a run's command; it knows its nodes, and the sweep hands each of them to one run at a time.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcdl.cluster.environment import placement
from hpcdl.cluster.hostlist import expand_hosts
from hpcdl.cluster.local import BINDING_VARIABLE
from hpcdl.core.errors import UsageError
from hpcdl.study.nodes import trial_prefixes
from hpcdl.study.plan import Plan, Point
from hpcdl.study.threads import plan_of_ranks

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

    def start(self, point: Point, nodes: Sequence[str], words: Sequence[str], profile: str) -> Start:
        """What starts `hpcdl train WORDS` on `nodes`; `profile` is the node profile that the run names."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """This machine alone: `hpcdl train` starts the ranks itself."""

    nodes: Sequence[str]
    remedy: str = "start the sweep inside an allocation (such as salloc -N {num}), or with --small"

    def start(self, point: Point, nodes: Sequence[str], words: Sequence[str], profile: str) -> Start:
        """The command as a user would type it."""
        return Start(command=[*TRAIN, *words], environment={})


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of a Slurm job; runs on disjoint nodes go side by side.

    A run on one node is started there by `hpcdl train`; srun starts the ranks of one on several nodes, by the kind of
    MPI that `$SLURM_MPI_TYPE` or the site's default names.
    """

    nodes: Sequence[str]
    prefixes: Mapping[str, Sequence[str]]
    remedy: str = "ask for {num} nodes"

    def start(self, point: Point, nodes: Sequence[str], words: Sequence[str], profile: str) -> Start:
        """The command behind srun."""
        if point.nodes == 1:
            return Start(command=[*self.prefixes[nodes[0]], *TRAIN, *words], environment={})
        srun = ["srun", f"--nodes={point.nodes}", f"--ntasks={point.ranks}", f"--nodelist={','.join(nodes)}"]
        srun += [f"--ntasks-per-node={point.ranks_per_node}", "--overlap", "--cpu-bind=none", "--kill-on-bad-exit=1"]
        plan = plan_of_ranks(point, profile)
        binding = {BINDING_VARIABLE: json.dumps([list(cpus) for cpus in plan.cpus_by_local_rank])}
        return Start(command=[*srun, *TRAIN, *words], environment={**plan.environment, **binding})


def find_place(environment: Mapping[str, str]) -> Place:
    """The place that `environment` speaks of. UsageError inside a job step: its ranks would each start a sweep."""
    inside = placement(environment)
    if inside is not None:
        raise UsageError(
            f"hpcdl sweep starts ranks itself, but {inside.launcher} has started this one of {inside.size}; "
            "call it without mpiexec or srun"
        )
    nodes = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    if len(nodes) < 2:
        return Local(nodes=(socket.gethostname(),))
    return Allocation(nodes=nodes, prefixes=dict(zip(nodes, trial_prefixes(environment), strict=True)))


def check_room(plan: Plan, place: Place) -> None:
    """UsageError where a run needs more nodes than there are."""
    most = max(point.nodes for point in plan.points)
    if most > len(place.nodes):
        too_large = sum(point.nodes > len(place.nodes) for point in plan.points)
        raise UsageError(
            f"{too_large} of {len(plan.points)} points need more than the {len(place.nodes)} nodes here, up to {most}; "
            + place.remedy.format(num=most)
        )
