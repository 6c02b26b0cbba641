"""Every setting of `submit`: what a job asks of the batch system, and what it does at its time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdl.config.load import ResolvedConfig, flag_layer, load, replace, settings_by_key, standard_layers
from hpcdl.config.settings import setting, settings_of

_ADDED_UP = "batch-option"


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The job's size, and what becomes of it at its limit."""

    nodes: int = setting(1, "Number of nodes.", at_least=1)
    ranks_per_node: int = setting(1, "Ranks on each node.", at_least=1)
    time: float = setting(3600.0, "Time limit, such as 2h or 1-00:00:00.", kind="seconds")
    until_done: bool = setting(False, "Checkpoint before the time limit, requeue and continue until done.")
    max_requeues: int = setting(20, "At most so many requeues.", at_least=0)
    warning: float | None = setting(
        None, "Time before the limit to save at; by default a quarter, at most 5m.", kind="seconds"
    )
    stage_env: bool = setting(False, "Unpack the Python environment on each node first.")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """What is asked of the batch system, in its own words."""

    partition: str = setting("", "Partition or queue.")
    account: str = setting("", "Account that pays.")
    cpus_per_task: int | None = setting(None, "CPUs of each rank; by default all of a node, by its ranks.", at_least=1)
    exclusive: bool = setting(False, "Nodes without other jobs; grpc-* need it.")
    mem: str = setting("", "Memory of each node, such as 64G.")
    qos: str = setting("", "Quality of service (Slurm).")
    constraint: str = setting("", "Features that nodes must have; under PBS resources, such as cpu_type=rome.")
    gres: str = setting("", "Devices of each node: gpu:4 under Slurm, ngpus=4 under PBS.")
    exclude: str = setting("", "Nodes to leave out (Slurm).")
    batch_option: Sequence[str] = setting(
        (), "Any other option of the batch system, as --nice=100; those of site.toml stay.", kind="words"
    )


@dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """All of it."""

    job: JobConfig
    batch: BatchConfig


BATCH_KEYS = ("time", *(item.key for item in settings_of(BatchConfig)))
"""What a job of any command takes, of one node or of many."""


def load_submit(flags: Mapping[str, Any]) -> ResolvedConfig[SubmitConfig]:
    """The site's table [submit], the user's over it, and the flags over both. ConfigError holds every problem.

    Options of the batch system add up, the site's first: a licence that each job of a site needs stays when a user
    adds another option, and a batch system takes the last of two that say the same.
    """
    layers = [*standard_layers("submit"), flag_layer(flags)]
    found = load(SubmitConfig, layers)
    own = settings_by_key(SubmitConfig)[_ADDED_UP]
    given = [(layer.origin, layer.values[_ADDED_UP]) for layer in layers if _ADDED_UP in layer.values]
    options = tuple(option for _, values in given for option in own.parse(values))
    origins = {**found.origins, _ADDED_UP: ", ".join(origin for origin, _ in given) or "default"}
    return ResolvedConfig(config=replace(found.config, batch_option=options), origins=origins)
