"""The nodes of an allocation as places for trials; `python -m hpcdl.tuning.nodes CMD...` frees CMD of the job step."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hpcdl.cluster.launchers.hostlist import expand_hosts

SHED = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")
"""Variables by which a process takes itself for one rank of the job step; a trial starts ranks of its own."""


def trial_prefixes(environment: Mapping[str, str]) -> list[list[str]]:
    """What stands before a trial's command, for each node of the allocation; one empty prefix outside of one."""
    hosts = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
    if len(hosts) < 2:
        return [[]]
    srun = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--kill-on-bad-exit=1", "--mpi=none"]
    return [[*srun, f"--nodelist={host}", sys.executable, "-m", "hpcdl.tuning.nodes"] for host in hosts]


def place_of(prefix: Sequence[str]) -> str:
    """The node that a prefix leads to; empty for this one."""
    return next((word.partition("=")[2] for word in prefix if word.startswith("--nodelist=")), "")


def shed(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what says that this process is a rank of a job step."""
    return {name: value for name, value in environment.items() if not name.startswith(SHED)}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], shed(os.environ))
