"""What does not go together: a strategy's declared features against the settings of a run."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import UsageError
from hpcdl.strategies.base import Features, StrategyInfo


def check_exchange(info: StrategyInfo, exchange: ExchangeConfig, *, num_workers: int) -> None:
    """UsageError for a setting of the exchange that the strategy does not have, or that leaves nobody to wait for."""
    features = info.features
    if exchange.placement is not None and exchange.placement not in features.placements:
        remedy = f"use one of {', '.join(features.placements)}" if features.placements else "leave it out"
        raise UsageError(f"--placement {exchange.placement}: strategy {info.name!r} does not have it; {remedy}")
    refused = {
        f"--compress {exchange.compress}": exchange.compress != "none" and not features.compression,
        f"--accumulate {exchange.accumulate}": exchange.accumulate > 1 and not features.accumulation,
        f"--backup-workers {exchange.backup_workers}": exchange.backup_workers and not features.backup_workers,
    }
    _refuse(info, [setting for setting, wrong in refused.items() if wrong])
    if exchange.backup_workers >= num_workers:
        raise UsageError(
            f"--backup-workers {exchange.backup_workers}: with {num_workers} workers at most {num_workers - 1} "
            "can be left behind; use fewer, or more --ranks"
        )


def check_optimizer(info: StrategyInfo, optimizer: OptimizerConfig, precision: str) -> None:
    """UsageError for an optimizer setting that the strategy's own engine does not have."""
    _refuse(info, list(_unknown_to_engine(info.features, optimizer, precision)))


def check_allowed(info: StrategyInfo, forbidden: tuple[str, ...], where: str) -> None:
    """UsageError where the site does not allow the strategy."""
    if info.name in forbidden:
        raise UsageError(
            f"--strategy {info.name}: this site forbids it (forbid-strategies in {where}); "
            "use one that runs over MPI, such as ring or ps"
        )


def _unknown_to_engine(features: Features, optimizer: OptimizerConfig, precision: str) -> Iterator[str]:
    if optimizer.optimizer == "lars" and not features.lars:
        yield "--optimizer lars"
    if features.keras_optimizer:
        return
    if optimizer.weight_decay:
        yield f"--weight-decay {optimizer.weight_decay:g}"
    if precision == "mixed_float16":
        yield f"--precision {precision}"


def _refuse(info: StrategyInfo, settings: list[str]) -> None:
    if settings:
        raise UsageError(
            f"{', '.join(settings)}: strategy {info.name!r} does not have it; leave it out, "
            "or choose another --strategy (`hpcdl strategies` lists what each has)"
        )
