"""Continuing a run after the loss of a rank, `--elastic`: its new settings, and whether in place or with new ranks.

The user chooses what is kept (`--on-fewer-workers`). With keep-batch, the samples per step, the rate and the number of
steps stay, and each worker computes more. With scale-rate, a step has fewer samples, the rate falls in proportion
(linear scaling, Goyal et al. 2017, section 2.1), and the number of steps grows to cover the samples. Workers of the
elastic and asynchronous strategies take steps of their own: each keeps its batch and its rate.
In place, the remaining ranks form a smaller group and repeat the interrupted step (rank/shrink.py).
That needs an MPI that survives the loss of a rank, and a strategy without state that only one rank knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcdl.checkpoint.parity import NONE
from hpcdl.cluster.launchers.base import Launcher, num_nodes, ranks_per_node
from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from hpcdl.config.load import ResolvedConfig, replace
from hpcdl.config.schema import KEEP_BATCH, CheckpointConfig, ScriptConfig, TrainConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import UsageError
from hpcdl.run.plan import RunPlan, global_batch_of, prepare
from hpcdl.strategies.table import STRATEGIES, find_strategy

ORIGIN = "fewer workers"
"""Origin, in run.toml, of the settings of a run on fewer workers."""


def check_least(resolved: ResolvedConfig[Any]) -> None:
    """Raise UsageError if --min-workers or --on-fewer-workers lacks the settings it depends on."""
    checkpoint = resolved.config.checkpoint
    if isinstance(checkpoint, CheckpointConfig) and checkpoint.evict_slow is not None:
        _check_evicts(resolved, f"--evict-slow {checkpoint.evict_slow:g}")
    if checkpoint.min_workers is not None and not checkpoint.elastic:
        raise UsageError(
            f"--min-workers {checkpoint.min_workers} is for runs that restart by themselves: add --elastic"
        )
    chosen = resolved.origins.get("on-fewer-workers", "default")
    if checkpoint.min_workers is None and chosen in ("flag", "--set"):
        raise UsageError("--on-fewer-workers says what --min-workers N keeps: add that, and --elastic")


def _check_evicts(resolved: ResolvedConfig[TrainConfig], given: str) -> None:
    """Raise UsageError if slow workers cannot be found, or none can be spared."""
    config = resolved.config
    info = find_strategy(config.exchange.strategy)
    if not config.checkpoint.elastic:
        raise UsageError(f"{given} is for runs that restart by themselves: add --elastic")
    if not info.features.mpi:
        raise UsageError(
            f"{given}: {info.name} runs on TensorFlow's own servers, where nobody can tell a slow worker from those "
            "that wait for it; leave it out"
        )
    if num_workers(resolved) < 2:
        raise UsageError(f"{given}: this run has one worker, and nobody to compare it with; give more --ranks")


def with_least(resolved: ResolvedConfig[TrainConfig], launcher: Launcher) -> ResolvedConfig[TrainConfig]:
    """With --evict-slow and without --min-workers, allow the loss of one node: on one machine, of one rank."""
    checkpoint, ranks = resolved.config.checkpoint, resolved.config.run.ranks
    if checkpoint.evict_slow is None or not checkpoint.elastic or checkpoint.min_workers is not None or ranks < 2:
        return resolved
    hosts = launcher.hosts(os.environ)
    spared = ranks_per_node(hosts, ranks) if len(hosts) > 1 else 1
    least = max(1, workers_and_servers(resolved.config, ranks - spared)[0])
    origins = {**resolved.origins, "min-workers": "--evict-slow"}
    return ResolvedConfig(config=replace(resolved.config, min_workers=least), origins=origins)


def check_shrunk(resolved: ResolvedConfig[Any], launcher: Launcher) -> None:
    """Raise UsageError if this run could not continue with as few workers as --min-workers says."""
    check_least(resolved)
    _check_several_nodes(resolved, launcher)
    config = resolved.config
    least = config.checkpoint.min_workers
    if least is None:
        return
    flag, all_workers = f"--min-workers {least}", num_workers(resolved)
    if least > all_workers:
        raise UsageError(f"{flag}: this run has {all_workers}; give {all_workers} or fewer, or more --ranks")
    if not launcher.leaves_nodes_out:
        raise UsageError(
            f"{flag}: the launcher {launcher.name} takes all nodes of a job or none; set HPCDL_LAUNCHER=slurm, "
            "or leave it out"
        )
    if isinstance(config, ScriptConfig):
        return
    if config.data.shuffle != "global":
        raise UsageError(
            f"{flag} --shuffle {config.data.shuffle}: with fewer nodes other samples would come twice or not at all; "
            "use --shuffle global, or leave --min-workers out"
        )
    info = find_strategy(config.exchange.strategy)
    if not info.features.equals_single and resolved.origins["on-fewer-workers"] in ("flag", "--set"):
        raise UsageError(
            f"--on-fewer-workers: the workers of {info.name} take steps of their own and keep batch and rate; "
            "leave it out"
        )
    if least < all_workers:
        ranks = next(
            ranks for ranks in range(1, config.run.ranks + 1) if workers_and_servers(config, ranks)[0] >= least
        )
        # The smallest run that may remain is checked now, and not when a rank is lost.
        shrunk = shrink_config(resolved, ranks)
        try:
            # Without faults: those of --inject may name ranks that the smaller run lacks.
            prepare(ResolvedConfig(config=replace(shrunk.config, inject=""), origins=shrunk.origins))
        except UsageError as error:
            raise UsageError(f"{flag}: {error}") from None


def _check_several_nodes(resolved: ResolvedConfig[Any], launcher: Launcher) -> None:
    """Raise UsageError if no other node could restore the state that a lost node held."""
    kept = getattr(resolved.config.checkpoint, "local_checkpoint_redundancy", NONE)
    if kept != NONE and num_nodes(launcher.hosts(os.environ), resolved.config.run.ranks) < 2:
        raise UsageError(
            f"--local-checkpoint-redundancy {kept}: this run is on one node, all is lost with it; leave that out"
        )


def num_workers(resolved: ResolvedConfig[Any], num_ranks: int | None = None) -> int:
    """Return the number of workers of a run, or of the run on `num_ranks` ranks if that is given."""
    config = resolved.config
    ranks = config.run.ranks if num_ranks is None else num_ranks
    return ranks if isinstance(config, ScriptConfig) else workers_and_servers(config, ranks)[0]


def shrink_config(resolved: ResolvedConfig[Any], num_ranks: int, num_servers: int | None = None) -> ResolvedConfig[Any]:
    """Return the settings with which a run continues on at most `num_ranks` ranks.

    If `num_servers` is given, all ranks keep their roles, and that many of them serve.
    """
    config = resolved.config
    changes: dict[str, Any] = {"ranks": num_ranks}
    if not isinstance(config, ScriptConfig):
        workers, servers = workers_and_servers(config, num_ranks)
        if num_servers is not None:
            workers, servers = num_ranks - num_servers, num_servers
        changes = {"ranks": workers + servers}
        if find_strategy(config.exchange.strategy).features.servers:
            changes["servers"] = servers
        changes |= _kept(config, workers)
    origins = {**resolved.origins, **{name.replace("_", "-"): ORIGIN for name in changes}}
    return ResolvedConfig(config=replace(config, **changes), origins=origins)


def describe_change(before: ResolvedConfig[Any], now: ResolvedConfig[Any]) -> str:
    """Describe the change, as the end of a sentence."""
    counts = _counted(before, now)
    if isinstance(now.config, ScriptConfig):
        return counts
    config: TrainConfig = now.config
    if not find_strategy(config.exchange.strategy).features.equals_single:
        return f"{counts}, each with its batch and rate"
    samples = global_batch_of(config, num_workers(now))
    if samples == global_batch_of(before.config, num_workers(before)):
        return f"{counts}, {samples} samples a step as before"
    return f"{counts}, {samples} samples a step and the rate in proportion"


def _counted(before: ResolvedConfig[Any], now: ResolvedConfig[Any]) -> str:
    """Return the number of workers in words, and of servers if it changed."""
    workers, workers_before = num_workers(now), num_workers(before)
    servers, servers_before = now.config.run.ranks - workers, before.config.run.ranks - workers_before
    if servers == servers_before:
        return f"{workers} workers in place of {workers_before}"
    served = f"{servers} server{'s' if servers > 1 else ''}"
    return f"{workers} workers and {served} in place of {workers_before} and {servers_before}"


def workers_and_servers(config: TrainConfig, num_ranks: int) -> tuple[int, int]:
    """Return workers and servers on at most `num_ranks` ranks: servers in proportion, and whole chips of groups."""
    ranks = num_ranks - num_ranks % config.elastic.groups
    if not find_strategy(config.exchange.strategy).features.servers:
        return ranks, 0
    servers = max(1, config.exchange.servers * ranks // config.run.ranks)
    return ranks - servers, servers


def _kept(config: TrainConfig, workers: int) -> dict[str, Any]:
    """Return the changed settings of a training that keep what the user chose to keep."""
    before = global_batch_of(config, workers_and_servers(config, config.run.ranks)[0])
    changes: dict[str, Any] = {}
    if find_strategy(config.exchange.strategy).features.equals_single:
        if config.checkpoint.on_fewer_workers == KEEP_BATCH:
            return {"keep_batch": before}
        # The rate is scaled by batch over base_batch, so it falls in proportion to the batch.
        changes = {"base_batch": config.optimizer.base_batch or before}
    if config.run.steps is not None:
        # Rounded up: all samples of the original run are covered.
        changes["steps"] = -(-config.run.steps * before // global_batch_of(config, workers))
    return changes


VARIABLE = "HPCDL_IN_PLACE"
"""Tells the ranks that they may continue without a rank that dies."""
_MOVES_LATE = "weights move once a step's exchange is over"
_FLAVOUR, _SINCE = "openmpi", 5
"""The MPI that has ULFM, and its first version with it."""


@dataclass(frozen=True, kw_only=True)
class ShrunkRun:
    """A run after the loss of ranks in place: its settings `resolved`, and the `least` number of workers."""

    resolved: ResolvedConfig[TrainConfig]
    least: int

    def on(self, num_ranks: int, num_servers: int = 0) -> ShrunkRun:
        """Return the run on that many ranks, without injected faults: these refer to the ranks of the start."""
        shrunk = shrink_config(self.resolved, num_ranks, num_servers)
        config = replace(shrunk.config, inject="", resume=True)
        return ShrunkRun(resolved=ResolvedConfig(config=config, origins=shrunk.origins), least=self.least)

    def run_plan(self) -> RunPlan:
        """Return the plan that follows from the settings."""
        return prepare(self.resolved)


def shrunk_of(resolved: ResolvedConfig[TrainConfig]) -> ShrunkRun:
    """Return the run of `resolved` before any loss."""
    least = resolved.config.checkpoint.min_workers
    return ShrunkRun(resolved=resolved, least=least or num_workers(resolved))


def way_of(run_plan: RunPlan, launcher: Launcher) -> tuple[bool, str]:
    """Return whether this run under --elastic continues in place, and a message about it."""
    why = next(_against(run_plan, launcher), "")
    if why:
        return False, f"where a rank is lost, all are started again from the newest state that is kept ({why})"
    price = "each keeps its own steps" if run_plan.info.features.periodic else _MOVES_LATE
    return True, (
        f"where a rank is lost, the others continue in place (ULFM), down to {run_plan.config.checkpoint.min_workers} "
        f"workers; {price}"
    )


def _against_apart(config: TrainConfig) -> Iterator[str]:
    """Yield the settings that let workers be more than one step apart, or keep the center on one worker only."""
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
    """Yield the reasons why this run cannot continue in place, cheapest checks first."""
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
        yield "--evict-slow starts ranks again without a slow one"
    if config.checkpoint.local_checkpoint_redundancy != NONE:
        yield "--local-checkpoint-redundancy keeps parity over all nodes, for new ranks"
    if not launcher.continues:
        yield f"the launcher {launcher.name} ends all ranks with the first"
    try:
        mpi = find_mpiexec()
    except UsageError:  # the start reports it better
        yield "no MPI is found"
        return
    if mpi.flavour != _FLAVOUR or int(mpi.version.partition(".")[0]) < _SINCE:
        yield f"{mpi.flavour} {mpi.version} has no ULFM, Open MPI 5 has"
