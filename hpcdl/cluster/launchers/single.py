"""Ranks on this node: one process directly, several by the mpiexec of the MPI in use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcdl.cluster.launchers.base import Launcher
from hpcdl.cluster.launchers.mpiexec import CONTINUES, environment_for, find_mpiexec, kept_on_node
from hpcdl.core.protocols import LaunchPlan


class Local(Launcher):
    """The launcher outside any job. Ranks of strategies without MPI are started one by one, by cluster/supervise.py."""

    name = "local"
    batch = ""
    leaves_nodes_out = True
    continues = True
    leaves_others = False

    def present(self, environment: Mapping[str, str]) -> bool:
        """Return True."""
        return True

    def hosts(self, environment: Mapping[str, str]) -> list[str]:
        """Return an empty list: this node only."""
        return []

    def line(
        self, plan: LaunchPlan, command: Sequence[str], *, mpi: bool, environment: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Return `mpiexec -n N`, or the command itself for one rank or without MPI."""
        if not mpi or plan.num_ranks == 1:
            return list(command), {}
        mpiexec = find_mpiexec()
        arguments = [*(CONTINUES if plan.continues else ()), "-n", str(plan.num_ranks)]
        flavour = mpiexec.flavour
        # With --elastic, Open MPI may need its own connections to report dead ranks.
        kept = {} if plan.continues else kept_on_node(flavour, plan.num_ranks, {**os.environ, **environment})
        return [str(mpiexec.path), *arguments, *command], {**environment_for(flavour), **kept}


LAUNCHER = Local()
