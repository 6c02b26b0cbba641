"""Ranks by `ibrun`, TACC's own starter, inside a job of Slurm. It knows the site's fabric and its MPI."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from hpcdl.cluster.launchers.base import Casualty, Launcher, expand_hosts, refuse_without_mpi
from hpcdl.cluster.launchers.hostfile import mpiexec_casualty
from hpcdl.cluster.launchers.mpiexec import environment_for, mpi_flavour
from hpcdl.cluster.launchers.slurm import LAUNCHER as SLURM
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan


class Ibrun(Launcher):
    """ibrun places ranks as requested by `sbatch -N -n`: nodes and ranks must be those of the job."""

    name = "ibrun"
    batch = "slurm"
    leaves_nodes_out = False
    continues = False
    leaves_others = False

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this is a machine of TACC, inside an allocation, outside its steps."""
        return "TACC_SYSTEM" in environment and bool(_ibrun(environment)) and SLURM.present(environment)

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the allocation's nodes."""
        return expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))

    def lost_hosts(self, environment: Mapping[str, str]) -> set[str]:
        """Return the nodes that Slurm reports as lost."""
        return SLURM.lost_hosts(environment)

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return `ibrun -n N -o 0`; a single rank needs no ibrun."""
        refuse_without_mpi(self.name, mpi)
        ibrun = _ibrun(environment)
        if not ibrun:
            raise UsageError("the launcher ibrun is not on PATH; `module load TACC`, or set HPCDL_LAUNCHER=slurm")
        if plan.num_ranks == 1:
            return list(command), {}
        return [ibrun, "-n", str(plan.num_ranks), "-o", "0", *command], environment_for(mpi_flavour())

    def first_casualty(self, log: str) -> Casualty | None:
        """Return the first death by the report of srun or mpiexec, whichever ibrun used."""
        return SLURM.first_casualty(log) or mpiexec_casualty(log)


def _ibrun(environment: Mapping[str, str]) -> str:
    return shutil.which("ibrun", path=environment.get("PATH")) or ""


LAUNCHER = Ibrun()
