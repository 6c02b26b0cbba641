"""Which way a run under --elastic goes on without a rank that is lost: in place, or with new ranks.

In place the others stay: they make a smaller group and repeat the step that was under way (rank/shrink.py).
That needs an MPI that outlives its ranks, and a strategy of whose state no rank alone knows a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcdl.checkpoint.parity import NONE
from hpcdl.cluster.launchers.base import Launcher
from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from hpcdl.config.load import ResolvedConfig, replace
from hpcdl.config.schema import TrainConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import UsageError
from hpcdl.run.plan import RunPlan, prepare
from hpcdl.run.shrink import num_workers, shrink_config
from hpcdl.strategies.table import STRATEGIES, find_strategy

VARIABLE = "HPCDL_IN_PLACE"
"""Tells the ranks that they were started so that they can go on without one that dies."""
_MOVES_LATE = "weights move once a step's exchange is over"
_FLAVOUR, _SINCE = "openmpi", 5
"""The MPI that has ULFM, and from which version on."""


@dataclass(frozen=True, kw_only=True)
class ShrunkRun:
    """What a run becomes when ranks are lost in place: `resolved` as it stands, and with how few it still goes on."""

    resolved: ResolvedConfig[TrainConfig]
    least: int

    def on(self, num_ranks: int, num_servers: int = 0) -> ShrunkRun:
        """The same run on so many ranks; its faults, which go by the ranks of the start, are not its settings'."""
        shrunk = shrink_config(self.resolved, num_ranks, num_servers)
        config = replace(shrunk.config, inject="", resume=True)
        return ShrunkRun(resolved=ResolvedConfig(config=config, origins=shrunk.origins), least=self.least)

    def run_plan(self) -> RunPlan:
        """All that follows from the settings."""
        return prepare(self.resolved)


def shrunk_of(resolved: ResolvedConfig[TrainConfig]) -> ShrunkRun:
    """The run of `resolved`, none of whose ranks is lost."""
    least = resolved.config.checkpoint.min_workers
    return ShrunkRun(resolved=resolved, least=least or num_workers(resolved))


def way_of(run_plan: RunPlan, launcher: Launcher) -> tuple[bool, str]:
    """Whether this run, one under --elastic, goes on in place, and what to say of it."""
    why = next(_against(run_plan, launcher), "")
    if why:
        return False, f"where a rank is lost, all are started again from the newest state that is kept ({why})"
    price = "each keeps its own steps" if run_plan.info.features.periodic else _MOVES_LATE
    return True, (
        f"where a rank is lost, the others continue in place (ULFM), down to {run_plan.config.checkpoint.min_workers} "
        f"workers; {price}"
    )


def _against_apart(config: TrainConfig) -> Iterator[str]:
    """What lets workers be more than one step apart, or one of them alone hold the center."""
    if config.exchange.backup_workers:
        yield "--backup-workers lets workers be several steps apart"
    if config.elastic.variant == "1":
        yield "--variant 1 keeps the center on rank 0 alone, 2 and 3 on every rank"
    features = find_strategy(config.exchange.strategy).features
    if config.elastic.period != 1 and features.synchronous and not features.periodic:
        yield f"--period {config.elastic.period} has workers take several steps by themselves"
    if features.periodic and config.elastic.period == AUTO:
        yield "--period auto is found by all workers together"
    if config.elastic.period_within is not None:
        yield f"--period-within {config.elastic.period_within} goes by the workers of a node"
    if config.elastic.groups > 1:
        yield f"--groups {config.elastic.groups} takes whole chips"


def _against(run_plan: RunPlan, launcher: Launcher) -> Iterator[str]:
    """Why this run cannot go on in place, what is known at once first."""
    config, least = run_plan.config, run_plan.config.checkpoint.min_workers
    if least is None or least >= run_plan.num_workers:
        yield "no worker may be missing: --min-workers N says how few may continue"
    if not run_plan.info.features.in_place:
        able = ", ".join(info.name for info in STRATEGIES.values() if info.features.in_place)
        yield f"{run_plan.info.name} cannot continue in place; these do: {able}"
    yield from _against_apart(config)
    if config.data.stage is not None:
        yield "--stage shares the data out among all ranks"
    if config.run.steps_per_call not in (1, AUTO):
        yield "--steps-per-call has several steps move before anybody counts them"
    if config.checkpoint.evict_slow is not None:
        yield "--evict-slow starts ranks anew without a slow one"
    if config.checkpoint.local_checkpoint_redundancy != NONE:
        yield "--local-checkpoint-redundancy keeps parity over all nodes, for new ranks"
    if not launcher.continues:
        yield f"the launcher {launcher.name} ends all ranks with the first"
    try:
        mpi = find_mpiexec()
    except UsageError:  # the start says it better
        yield "no MPI is found"
        return
    if mpi.flavour != _FLAVOUR or int(mpi.version.partition(".")[0]) < _SINCE:
        yield f"{mpi.flavour} {mpi.version} has no ULFM, Open MPI 5 has"
