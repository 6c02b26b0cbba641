"""Ranks by the mpiexec of the MPI in use, over the nodes of a PBS job. Tested without a PBS."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.cluster.launchers.base import Casualty, refuse_without_mpi
from hpcdl.cluster.launchers.hostfile import mpiexec_casualty, mpiexec_line, read_hosts
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan


class Pbs:
    """`$PBS_NODEFILE` holds a line for each rank that was asked for."""

    name = "pbs"
    batch = "pbs"

    def present(self, environment: Mapping[str, str]) -> bool:
        """Inside a PBS job."""
        return "PBS_JOBID" in environment and "PBS_NODEFILE" in environment

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """The job's nodes, each once."""
        named = environment.get("PBS_NODEFILE")
        if not named:
            raise UsageError("the launcher pbs needs PBS_NODEFILE, which PBS sets inside a job; use `hpcdl submit`")
        return read_hosts(Path(named))

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """mpiexec over the job's nodes; one rank alone runs here."""
        refuse_without_mpi(self.name, mpi)
        if plan.num_ranks == 1:
            return list(command), {}
        return mpiexec_line(plan, command, self.hosts(environment), {**os.environ, **environment})

    def first_casualty(self, log: str) -> Casualty | None:
        """As mpiexec tells it."""
        return mpiexec_casualty(log)


LAUNCHER = Pbs()
