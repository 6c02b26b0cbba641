"""A run that goes on with fewer workers, `--min-workers`: its settings then, and what is refused before the start.

What is kept is the user's choice (`--on-fewer-workers`). With keep-batch the samples of every step, the rate and the
number of steps stay, each worker computes more; with scale-rate a step has fewer samples, the rate falls with them
(linear scaling, Goyal et al. 2017, section 2.1), and there are as many more steps as the samples need. Workers of the
elastic and asynchronous strategies take steps of their own: each keeps its batch and its rate.
"""

from __future__ import annotations

from typing import Any

from hpcdl.cluster.launchers.base import Launcher
from hpcdl.config.load import Effective, replace
from hpcdl.config.schema import KEEP_BATCH, ScriptConfig, TrainConfig
from hpcdl.core.errors import UsageError
from hpcdl.strategies.table import find_strategy
from hpcdl.training.launch.prepare import global_batch_of, prepare

ORIGIN = "fewer workers"
"""Where run.toml says that the settings of a run on fewer workers come from."""


def check_least(effective: Effective[Any]) -> None:
    """UsageError where --min-workers or --on-fewer-workers goes without what it belongs to."""
    checkpoint = effective.config.checkpoint
    if checkpoint.min_workers is not None and not checkpoint.elastic:
        raise UsageError(f"--min-workers {checkpoint.min_workers} is for runs that go on by themselves: add --elastic")
    chosen = effective.origins.get("on-fewer-workers", "default")
    if checkpoint.min_workers is None and chosen in ("flag", "--set"):
        raise UsageError("--on-fewer-workers says what --min-workers N keeps: add that, and --elastic")


def check_fewer(effective: Effective[Any], launcher: Launcher) -> None:
    """UsageError where this run could not go on with as few workers as --min-workers says."""
    check_least(effective)
    config = effective.config
    least = config.checkpoint.min_workers
    if least is None:
        return
    given, all_workers = f"--min-workers {least}", num_workers(effective)
    if least > all_workers:
        raise UsageError(f"{given}: this run has {all_workers}; give {all_workers} or fewer, or more --ranks")
    if not launcher.leaves_nodes_out:
        raise UsageError(
            f"{given}: the launcher {launcher.name} takes all nodes of a job or none; set HPCDL_LAUNCHER=slurm, "
            "or leave it out"
        )
    if isinstance(config, ScriptConfig):
        return
    if config.data.shuffle != "global":
        raise UsageError(
            f"{given} --shuffle {config.data.shuffle}: with fewer nodes other samples would come twice or not at all; "
            "use --shuffle global, or leave --min-workers out"
        )
    info = find_strategy(config.exchange.strategy)
    if not info.features.equals_single and effective.origins["on-fewer-workers"] in ("flag", "--set"):
        raise UsageError(
            f"--on-fewer-workers: the workers of {info.name} take steps of their own and keep batch and rate; "
            "leave it out"
        )
    if least < all_workers:
        ranks = next(ranks for ranks in range(1, config.run.ranks + 1) if _shared_out(config, ranks)[0] >= least)
        fewer = with_fewer(effective, ranks)
        try:
            prepare(Effective(config=replace(fewer.config, inject=""), origins=fewer.origins))
        except UsageError as error:
            raise UsageError(f"{given}: {error}") from None


def num_workers(effective: Effective[Any], num_ranks: int | None = None) -> int:
    """Workers of a run; on `num_ranks` ranks in place of its own, where that is given."""
    config = effective.config
    ranks = config.run.ranks if num_ranks is None else num_ranks
    return ranks if isinstance(config, ScriptConfig) else _shared_out(config, ranks)[0]


def with_fewer(effective: Effective[Any], num_ranks: int) -> Effective[Any]:
    """The settings with which a run goes on on at most `num_ranks` ranks."""
    config = effective.config
    changes: dict[str, Any] = {"ranks": num_ranks}
    if not isinstance(config, ScriptConfig):
        workers, servers = _shared_out(config, num_ranks)
        changes = {"ranks": workers + servers}
        if find_strategy(config.exchange.strategy).features.servers:
            changes["servers"] = servers
        changes |= _kept(config, workers)
    origins = {**effective.origins, **{name.replace("_", "-"): ORIGIN for name in changes}}
    return Effective(config=replace(config, **changes), origins=origins)


def told(before: Effective[Any], now: Effective[Any]) -> str:
    """What has changed, as the end of a sentence."""
    counts = f"{num_workers(now)} workers in place of {num_workers(before)}"
    if isinstance(now.config, ScriptConfig):
        return counts
    config: TrainConfig = now.config
    if not find_strategy(config.exchange.strategy).features.equals_single:
        return f"{counts}, each with its batch and rate"
    samples = global_batch_of(config, num_workers(now))
    if config.data.keep_batch is not None:
        return f"{counts}, {samples} samples a step as before"
    return f"{counts}, {samples} samples a step and the rate in proportion"


def _shared_out(config: TrainConfig, num_ranks: int) -> tuple[int, int]:
    """Workers and servers on at most `num_ranks` ranks: no more servers in proportion, whole chips of groups."""
    ranks = num_ranks - num_ranks % config.elastic.groups
    if not find_strategy(config.exchange.strategy).features.servers:
        return ranks, 0
    servers = max(1, config.exchange.servers * ranks // config.run.ranks)
    return ranks - servers, servers


def _kept(config: TrainConfig, workers: int) -> dict[str, Any]:
    """What changes of a training, so that what the user chose to keep is kept."""
    before = global_batch_of(config, _shared_out(config, config.run.ranks)[0])
    changes: dict[str, Any] = {}
    if find_strategy(config.exchange.strategy).features.equals_single:
        if config.checkpoint.on_fewer_workers == KEEP_BATCH:
            return {"keep_batch": before}
        changes = {"base_batch": config.optimizer.base_batch or before}
    if config.run.steps is not None:
        changes["steps"] = -(-config.run.steps * before // global_batch_of(config, workers))
    return changes
