"""What every launcher can do; hpcdl/cluster/launchers/table.py is the table of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan

STOP_VARIABLE = "HPCDL_STOP_AT"
"""Unix time at which a run should save and leave, some time before the limit; job scripts of `hpcdl submit` set it.

Slurm sends its warning once, to the steps that are there: a run that is still starting up then would never hear of it.
"""


@dataclass(frozen=True, kw_only=True)
class Casualty:
    """What ended first by a launcher's word: a rank, by its number or by `host` and `pid`; or all of `lost_host`."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    lost_host: str = ""


class Launcher(Protocol):
    """Starts ranks on the nodes of one job. Stateless; everything comes from `environment`."""

    name: str
    batch: str
    """The batch system that takes this launcher's scripts (hpcdl/cluster/batch/script.py); empty for none."""

    def present(self, environment: Mapping[str, str]) -> bool:
        """Whether this process is in a job that this launcher starts ranks in."""

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """The job's nodes in rank order; empty for this node alone."""

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """The command that starts `command` on every rank of `plan`, and what it needs in its environment.

        Without `mpi` the ranks must find each other by other means. UsageError says why it cannot work here.
        """

    def first_casualty(self, log: str) -> Casualty | None:
        """What died first, as the launcher's own chatter tells it; None where it does not."""


def ranks_per_node(hosts: Sequence[str], num_ranks: int) -> int:
    """Ranks on the fullest node when `num_ranks` are spread evenly over `hosts` (empty: this node alone)."""
    return math.ceil(num_ranks / max(len(hosts), 1))


def seconds_left(environment: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a run may still work in this job, never negative; None where nobody says."""
    text = environment.get(STOP_VARIABLE, "")
    return max(int(text) - (time.time() if now is None else now), 0.0) if text.isdigit() else None


def refuse_without_mpi(name: str, mpi: bool) -> None:
    """UsageError where a strategy that goes without MPI is to be started by a launcher that cannot do that."""
    if not mpi:
        raise UsageError(
            f"the launcher {name} starts ranks by MPI only; take a strategy other than grpc-*, or run on one node"
        )
