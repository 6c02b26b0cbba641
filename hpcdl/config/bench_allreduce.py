"""Settings of `hpcdl bench allreduce`."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdl.config.settings import setting


@dataclass(frozen=True, kw_only=True)
class AllreduceBenchRun:
    """What is measured."""

    ranks: int = setting(2, "Number of processes on this node; under srun or mpiexec theirs counts.", at_least=1)
    sizes: str = setting("4KiB,64KiB,1MiB,25MiB", "Sizes of the summed buffer, with commas between.")
    repeats: int = setting(10, "Timed calls of each algorithm at each size, after one that warms up.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class AllreduceBenchConfig:
    """All groups of one measurement."""

    run: AllreduceBenchRun
