"""Ranks by the mpiexec of the MPI in use, over the hosts of an LSF job. Tested only against LSF's documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.cluster.launchers.base import expand_hosts
from hpcdl.cluster.launchers.hostfile import MpiexecOverHosts, read_hosts
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan

_REMOTE_SHELL = {
    "HYDRA_LAUNCHER": "ssh",
    "HYDRA_LAUNCHER_EXEC": "blaunch",
    "OMPI_MCA_plm": "rsh",
    "OMPI_MCA_plm_rsh_agent": "blaunch",
    "PRTE_MCA_plm": "ssh",
    "PRTE_MCA_plm_ssh_agent": "blaunch",
}
"""LSF's replacement for ssh: ranks belong to the job, need no key, and get the job's environment."""


class Lsf(MpiexecOverHosts):
    """`$LSB_DJOB_HOSTFILE` holds a line for each slot; `$LSB_MCPU_HOSTS` names each host with its slots."""

    name = "lsf"
    batch = "lsf"
    remote_shell = ("blaunch",)

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this is inside an LSF job."""
        return "LSB_JOBID" in environment and bool(_named(environment))

    def all_hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the job's nodes, each once."""
        if file := environment.get("LSB_DJOB_HOSTFILE"):
            return read_hosts(Path(file))
        if host_counts := environment.get("LSB_MCPU_HOSTS", "").split():
            return list(dict.fromkeys(host for word in host_counts[::2] for host in expand_hosts(word)))
        raise UsageError(
            "the launcher lsf needs LSB_DJOB_HOSTFILE or LSB_MCPU_HOSTS, which LSF sets inside a job; "
            "use `hpcdl submit`"
        )

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return mpiexec over the hosts, which it reaches by blaunch; variables set by the user stay unchanged."""
        line, variables = super().line(plan, command, mpi=mpi, environment=environment)
        return line, {**{name: value for name, value in _REMOTE_SHELL.items() if name not in environment}, **variables}


def _named(environment: Mapping[str, str]) -> str:
    return environment.get("LSB_DJOB_HOSTFILE") or environment.get("LSB_MCPU_HOSTS", "")


LAUNCHER = Lsf()
