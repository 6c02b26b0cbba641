"""Ranks by `srun`, inside a job of Slurm."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence

from hpcdl.cluster.launchers.base import Casualty, expand_hosts
from hpcdl.cluster.launchers.mpiexec import environment_for, mpi_flavour
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan

PMI_VARIABLE = "HPCDL_SRUN_MPI"
"""Overrides `srun --mpi`, where a site's MPI was built for another interface."""
PMI_BY_FLAVOUR = {
    "openmpi": "pmix",
    "mpich": "pmi2",
    "intel": "pmi2",
    "mvapich": "pmi2",
    "cray": "cray_shasta",
}
"""What each MPI asks its launcher for; the wrong one starts N jobs of one rank each."""
_NO_STEP = "42949672"
"""Slurm numbers batch scripts and interactive shells from 4294967290 up: no step of ranks."""
_CASUALTY = re.compile(r"srun: error: (?P<host>\S+): task (?P<rank>\d+): (?!Terminated)")
_LOST_NODE = re.compile(r"srun: error: Node failure on (?P<hosts>\S+)")


def srun_mpi(flavour: str, environment: Mapping[str, str]) -> str:
    """The word behind `srun --mpi` for an MPI of this flavour."""
    return environment.get(PMI_VARIABLE) or PMI_BY_FLAVOUR[flavour]


class Slurm:
    """srun ends the whole step when one rank fails (-K1) and leaves binding to hpcdl."""

    name = "slurm"
    batch = "slurm"

    def present(self, environment: Mapping[str, str]) -> bool:
        """Inside an allocation, outside its steps."""
        step = environment.get("SLURM_STEP_ID", _NO_STEP)
        return "SLURM_JOB_ID" in environment and step.startswith(_NO_STEP) and bool(_srun(environment))

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """The allocation's nodes."""
        return expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """`srun` on as many nodes as the plan needs, the first that are named; several ranks may share a core."""
        srun = _srun(environment)
        if not srun:
            raise UsageError("the launcher slurm needs srun, which is not on PATH; load the site's Slurm module")
        num_nodes, hosts = -(-plan.num_ranks // plan.ranks_per_node), self.hosts(environment)
        flavour = mpi_flavour() if mpi and plan.num_ranks > 1 else ""
        words = [
            srun,
            "--kill-on-bad-exit=1",
            f"--mpi={srun_mpi(flavour, environment) if flavour else 'none'}",
            f"--nodes={num_nodes}",
            *([f"--nodelist={','.join(hosts[:num_nodes])}"] if num_nodes <= len(hosts) else []),
            f"--ntasks={plan.num_ranks}",
            f"--ntasks-per-node={plan.ranks_per_node}",
            "--cpu-bind=none",
            "--overcommit",
            "--input=none",
        ]
        return [*words, *command], environment_for(flavour)

    def first_casualty(self, log: str) -> Casualty | None:
        """A node that went down, which takes all other tasks along; else the first task srun complains about."""
        if lost := _LOST_NODE.search(log):
            return Casualty(lost_host=expand_hosts(lost["hosts"])[0])
        found = _CASUALTY.search(log)
        return Casualty(rank=int(found["rank"]), host=found["host"]) if found else None


def _srun(environment: Mapping[str, str]) -> str:
    return shutil.which("srun", path=environment.get("PATH")) or ""


LAUNCHER = Slurm()
