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
    """ibrun places ranks as `sbatch -N -n` asked for: nodes and ranks must be those of the job."""

    name = "ibrun"
    batch = "slurm"
    leaves_nodes_out = False
    continues = False
    leaves_others = False

    def present(self, environment: Mapping[str, str]) -> bool:
        """On a machine of TACC's, inside an allocation, outside its steps."""
        return "TACC_SYSTEM" in environment and bool(_ibrun(environment)) and SLURM.present(environment)

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """The allocation's nodes."""
        return expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))

    def lost_hosts(self, environment: Mapping[str, str]) -> set[str]:
        """As Slurm says."""
        return SLURM.lost_hosts(environment)

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """`ibrun -n N -o 0`; one rank alone needs no ibrun."""
        refuse_without_mpi(self.name, mpi)
        ibrun = _ibrun(environment)
        if not ibrun:
            raise UsageError("the launcher ibrun is not on PATH; `module load TACC`, or set HPCDL_LAUNCHER=slurm")
        if plan.num_ranks == 1:
            return list(command), {}
        return [ibrun, "-n", str(plan.num_ranks), "-o", "0", *command], environment_for(mpi_flavour())

    def first_casualty(self, log: str) -> Casualty | None:
        """As srun or mpiexec tells it, whichever ibrun used."""
        return SLURM.first_casualty(log) or mpiexec_casualty(log)


def _ibrun(environment: Mapping[str, str]) -> str:
    return shutil.which("ibrun", path=environment.get("PATH")) or ""


LAUNCHER = Ibrun()
