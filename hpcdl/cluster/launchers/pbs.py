"""Ranks by the mpiexec of the MPI in use, over the nodes of a PBS job. Tested without a PBS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcdl.cluster.launchers.hostfile import MpiexecOverHosts, read_hosts
from hpcdl.core.errors import UsageError


class Pbs(MpiexecOverHosts):
    """`$PBS_NODEFILE` holds a line for each requested rank."""

    name = "pbs"
    batch = "pbs"

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this is inside a PBS job."""
        return "PBS_JOBID" in environment and "PBS_NODEFILE" in environment

    def all_hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the job's nodes, each once."""
        named = environment.get("PBS_NODEFILE")
        if not named:
            raise UsageError("the launcher pbs needs PBS_NODEFILE, which PBS sets inside a job; use `hpcdl submit`")
        return read_hosts(Path(named))


LAUNCHER = Pbs()
