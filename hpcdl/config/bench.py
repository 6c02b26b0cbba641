"""Settings of `hpcdl bench step`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.schema import ExchangeConfig, ModelConfig, OptimizerConfig
from hpcdl.config.settings import setting


@dataclass(frozen=True, kw_only=True)
class StepBenchRun:
    """How much is measured, and on what."""

    batch_size: int = setting(32, "Samples per worker and step.", at_least=1)
    data: Path | None = setting(None, "Folder made by `hpcdl shard`; by default samples are made up once.")
    ranks: int = setting(1, "Number of processes on this node.", at_least=1)
    steps: int = setting(20, "Steps measured with, and as many without, the exchange.", at_least=1)
    exchange_only: bool = setting(False, "Leave out the steps without exchange: half the time, no efficiency.")
    warmup_steps: int = setting(3, "Steps of each kind left out first.", at_least=0)
    seed: int = setting(0, "Seed of weights and samples.", at_least=0)
    deterministic: bool = setting(False, "Op determinism and fixed thread counts, to see what they cost.")
    profile: str = setting("none", "Node profile: a file, `none`, or `auto`, the best that fits.")


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig:
    """All groups of one measurement."""

    model: ModelConfig
    exchange: ExchangeConfig
    optimizer: OptimizerConfig
    run: StepBenchRun
