"""The launchers that start ranks on the nodes of a job, and the choice of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdl.core.registry import Entry, Registry

if TYPE_CHECKING:
    from hpcdl.cluster.launchers.base import Launcher

LAUNCHER_VARIABLE = "HPCDL_LAUNCHER"
"""Names the launcher if several would fit; a job script of `hpcdl submit` sets it."""

LAUNCHERS = Registry(
    "launcher",
    {
        "ibrun": Entry(target="hpcdl.cluster.launchers.ibrun:LAUNCHER", summary="TACC's ibrun, inside a Slurm job"),
        "slurm": Entry(target="hpcdl.cluster.launchers.slurm:LAUNCHER", summary="srun with the PMI of the MPI in use"),
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
"""In order of preference, except `local`, which fits everywhere and therefore follows those of other packages."""
_LAST = "local"
JOB_VARIABLES = {
    "ibrun": "TACC_SYSTEM",
    "slurm": "SLURM_JOB_ID",
    "flux": "FLUX_URI",
    "pbs": "PBS_JOBID",
    "lsf": "LSB_JOBID",
    "hostfile": "HPCDL_HOSTFILE",
}
"""A variable that is set wherever a launcher is present: without it, the launcher's file is not loaded."""


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Return the launcher of `$HPCDL_LAUNCHER`, else the first that fits this process's job; `local` outside any job.

    Raises UnknownNameError if the variable holds an unknown name.
    """
    named = environment.get(LAUNCHER_VARIABLE)
    if named:
        return load_launcher(named)
    possible = (name for name in LAUNCHERS if name not in JOB_VARIABLES or JOB_VARIABLES[name] in environment)
    names = [*(name for name in possible if name != _LAST), _LAST]
    return next(launcher for name in names if (launcher := load_launcher(name)).present(environment))


def load_launcher(name: str) -> Launcher:
    """Return the launcher called `name`. Raises UnknownNameError with the known ones."""
    launcher: Launcher = LAUNCHERS.load(name)
    return launcher
