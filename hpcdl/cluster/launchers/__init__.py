"""The ways in which ranks start on the nodes of a job, and the one that is in use here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdl.core.registry import Entry, Registry

if TYPE_CHECKING:
    from hpcdl.cluster.launchers.base import Launcher

LAUNCHER_VARIABLE = "HPCDL_LAUNCHER"
"""Names the launcher where several would fit; a job script of `hpcdl submit` sets it."""

LAUNCHERS = Registry(
    "launcher",
    {
        "ibrun": Entry(target="hpcdl.cluster.launchers.ibrun:LAUNCHER", summary="TACC's ibrun, inside a Slurm job"),
        "slurm": Entry(
            target="hpcdl.cluster.launchers.slurm:LAUNCHER", summary="srun -K1 with the PMI of the MPI in use"
        ),
        "flux": Entry(target="hpcdl.cluster.launchers.flux:LAUNCHER", summary="flux run, inside a job of Flux"),
        "pbs": Entry(target="hpcdl.cluster.launchers.pbs:LAUNCHER", summary="mpiexec over the nodes of a PBS job"),
        "lsf": Entry(target="hpcdl.cluster.launchers.lsf:LAUNCHER", summary="mpiexec over the hosts of an LSF job"),
        "hostfile": Entry(
            target="hpcdl.cluster.launchers.hostfile:LAUNCHER", summary="mpiexec over the hosts of $HPCDL_HOSTFILE"
        ),
        "local": Entry(target="hpcdl.cluster.launchers.single:LAUNCHER", summary="mpiexec on this node alone"),
    },
    group="hpcdl.launchers",
)
"""In the order in which they are tried, but for `local`, which fits everywhere: it comes behind other packages'."""
_LAST = "local"
JOB_VARIABLES = {
    "ibrun": "TACC_SYSTEM",
    "slurm": "SLURM_JOB_ID",
    "flux": "FLUX_URI",
    "pbs": "PBS_JOBID",
    "lsf": "LSB_JOBID",
    "hostfile": "HPCDL_HOSTFILE",
}
"""What is set wherever a launcher of hpcdl's own is present: without it, its file is not even read."""


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher named by `$HPCDL_LAUNCHER`, else the first whose job this process is in; `local` outside any job.

    UnknownNameError where the variable names none.
    """
    named = environment.get(LAUNCHER_VARIABLE)
    if named:
        return load_launcher(named)
    possible = (name for name in LAUNCHERS if name not in JOB_VARIABLES or JOB_VARIABLES[name] in environment)
    names = [*(name for name in possible if name != _LAST), _LAST]
    return next(launcher for name in names if (launcher := load_launcher(name)).present(environment))


def load_launcher(name: str) -> Launcher:
    """The launcher called `name`; UnknownNameError lists the known ones."""
    launcher: Launcher = LAUNCHERS.load(name)
    return launcher
