"""Ranks by `flux run`, inside a job of Flux. Tested only against sessions recorded in Flux's documentation."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from hpcdl.cluster.launchers.base import Launcher, expand_hosts
from hpcdl.cluster.launchers.mpiexec import environment_for, mpi_flavour
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import LaunchPlan

_ASK_S = 20.0


class Flux(Launcher):
    """`flux run` in the instance that `flux batch` or `flux alloc` started; hpcdl binds the ranks itself."""

    name = "flux"
    batch = "flux"
    leaves_nodes_out = False
    continues = False
    leaves_others = False

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this is an instance of Flux, outside its tasks."""
        return "FLUX_URI" in environment and "FLUX_TASK_RANK" not in environment and bool(_flux(environment))

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return the instance's nodes; empty (this node only) if Flux does not answer."""
        try:
            answer = subprocess.run(
                [_flux(environment) or "flux", "getattr", "hostlist"],
                capture_output=True, text=True, timeout=_ASK_S, check=True, env=dict(environment),
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return []
        return list(dict.fromkeys(expand_hosts(answer.stdout)))

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return `flux run` on as many nodes as the plan needs; the first rank that fails ends the others."""
        flux = _flux(environment)
        if not flux:
            raise UsageError("the launcher flux needs flux, which is not on PATH; load the site's Flux module")
        num_nodes = -(-plan.num_ranks // plan.ranks_per_node)
        arguments = [
            flux,
            "run",
            f"--nodes={num_nodes}",
            f"--ntasks={plan.num_ranks}",
            "--exclusive",  # within the job's own nodes: all their cores belong to the ranks
            "--setopt=cpu-affinity=off",
            "--setopt=exit-on-error",
        ]
        flavour = mpi_flavour() if mpi and plan.num_ranks > 1 else ""
        return [*arguments, *command], environment_for(flavour)


def _flux(environment: Mapping[str, str]) -> str:
    return shutil.which("flux", path=environment.get("PATH")) or ""


LAUNCHER = Flux()
