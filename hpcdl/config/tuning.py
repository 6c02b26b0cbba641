"""Settings of `hpcdl tune-threads`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.settings import setting


@dataclass(frozen=True, kw_only=True)
class TuneWorkload:
    """What every trial trains."""

    model: str | None = setting(None, "Network to tune for: a name from `hpcdl models`, or your own file.py:build.")
    batch_size: int = setting(32, "Samples per worker and step.", at_least=1)
    batch_sizes: str | None = setting(None, "Batch sizes to search too, by commas: 32,64,128.")
    data: str | None = setting(None, "Folder made by `hpcdl shard`; by default samples are made up.")
    steps: int = setting(20, "Steps that each trial measures.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TuneSearch:
    """How long and where the search looks."""

    budget: float = setting(600.0, "Time for the whole search.", kind="seconds", above=0)
    precision: float = setting(0.03, "Relative half width of the winner's 95 % interval that is enough.", above=0)
    trial_timeout: float = setting(300.0, "A trial that takes longer is killed.", kind="seconds", above=0)
    ranks_per_node: int | None = setting(None, "Search with this number of ranks only.", at_least=1)
    space: Path | None = setting(None, "TOML file of levels (setting = [values]) that narrows or extends the space.")
    machine: str | None = setting(None, "With --plan: the node type to plan for, a name or an hwloc XML file.")
    seed: int = setting(0, "Seed of the search.", at_least=0)


@dataclass(frozen=True, kw_only=True)
class TuneOutput:
    """Where the result goes."""

    out: Path | None = setting(None, "Profile file; by default in the user's folder of profiles, where train looks.")
    site: bool = setting(False, "Store the profile for everybody, in the installation's share folder.")
    log: Path | None = setting(None, "Trial log; by default beside the profile.")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """All groups of one search."""

    workload: TuneWorkload
    search: TuneSearch
    output: TuneOutput
