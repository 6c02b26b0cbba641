"""Settings of `hpcdl bench step` and `hpcdl bench allreduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.schema import ExchangeConfig, ModelConfig, OptimizerConfig
from hpcdl.config.settings import setting


@dataclass(frozen=True, kw_only=True)
class StepBenchRun:
    """How much `bench step` measures, and on what."""

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
    """All groups of `bench step`."""

    model: ModelConfig
    exchange: ExchangeConfig
    optimizer: OptimizerConfig
    run: StepBenchRun


@dataclass(frozen=True, kw_only=True)
class AllreduceBenchRun:
    """What `bench allreduce` measures."""

    ranks: int = setting(2, "Number of processes on this node; under srun or mpiexec theirs counts.", at_least=1)
    sizes: str = setting("4KiB,64KiB,1MiB,25MiB", "Sizes of the summed buffer, with commas between.")
    repeats: int = setting(10, "Timed calls of each algorithm at each size, after one that warms up.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class AllreduceBenchConfig:
    """All groups of `bench allreduce`."""

    run: AllreduceBenchRun
