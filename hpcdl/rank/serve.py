"""What a server's rank does from the moment the workers build their models. Does not import TensorFlow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hpcdl.comm.observed import EXCHANGE, Observed
from hpcdl.core.errors import BrokenGroup
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.records.run_record import RankRecord
from hpcdl.rank import results
from hpcdl.run.plan import RunPlan
from hpcdl.strategies.base.salvage import gather_center
from hpcdl.strategies.base.strategy import Context, HoldsCenter, Server
from hpcdl.strategies.table import load_strategy
from hpcdl.supervision.regroup import in_time, surviving_ranks, surviving_roles
from hpcdl.supervision.watchdog import Watchdog, survivors


def serve(
    run_plan: RunPlan, context: Context, communicator: Observed, watch: Watchdog, least: int | None = None
) -> Observed:
    """Serve until the workers have left. Return the group of the ranks left at the end.

    `least`, if given, is the minimum number of workers with which the run continues in place when ranks are lost.
    """
    for _ in range(1 if run_plan.config.data.stage is None else 2):  # the workers' splits are collective over all
        communicator.split(1)
    # Signals reach every rank: the workers agree on the step at which all stop, and inform this server.
    StopRequest().install()
    server = load_strategy(run_plan.info).server(context)
    if least is None:
        return _to_the_end(server, run_plan, communicator)
    return ServeInPlace(run_plan=run_plan, world=communicator, context=context, watch=watch, least=least).to_the_end(
        server
    )


def _to_the_end(server: Server, run_plan: RunPlan, communicator: Observed) -> Observed:
    """Serve, and contribute this rank's record."""
    monitor = communicator.monitor
    before = monitor.traffic()
    monitor.doing("serving")
    with monitor.patiently():
        details = server.serve()
    monitor.doing("leaving")
    steps = details.pop("steps", 0)
    rank_record = RankRecord(
        rank=communicator.rank,
        host=communicator.host,
        role="server",
        **(monitor.traffic() - before).per_step(steps, countable=run_plan.info.features.mpi),
        busy_seconds_per_step=details.pop("busy_seconds_per_step", None),
        peak_memory_bytes=results.peak_memory_bytes(),
        clock_set_s=results.clock_set_s(),
        processors=results.processors(),
        details={"steps": steps, **details},
    )
    communicator = survivors(communicator, details.get("lost_workers", 0))
    results.gather_ranks(communicator, rank_record)
    return communicator


@dataclass(frozen=True, kw_only=True)
class ServeInPlace:
    """A server of `world` that serves the surviving workers; counterpart of `InPlaceRecovery` in rank/shrink.py."""

    run_plan: RunPlan
    world: Observed
    context: Context
    watch: Watchdog
    least: int

    def to_the_end(self, server: Server) -> Observed:
        """Serve until the surviving workers have left; return their group."""
        group = self.world
        while True:
            try:
                group = _to_the_end(server, self.run_plan, group)
                group.barrier()
                return group
            except BrokenGroup:
                pass
            with in_time(self.watch):
                group, server = self._mended(server)

    def _mended(self, before: Server) -> tuple[Observed, Server]:
        """Return the group of the survivors and its server; makes the same collective calls as the workers.

        The part of the center that the server `before` holds goes to the first worker, who distributes the new parts.
        """
        group, lost = surviving_ranks(self.world, self.watch)
        workers, servers = surviving_roles(group, self.context.num_workers, self.least, lost)
        gather_center(group, before.part() if isinstance(before, HoldsCenter) else None)
        # As in rank/shrink.py: split, then the allgather_json and the barrier of `_note` and `_mended`.
        group.split(1)
        exchange = group.for_purpose(EXCHANGE)
        context = dataclasses.replace(self.context, communicator=exchange, num_workers=workers, num_servers=servers)
        server = load_strategy(self.run_plan.info).server(context)
        group.allgather_json(group.host)
        group.barrier()
        return group, server
