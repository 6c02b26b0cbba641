"""Every setting of `infer` and of `submit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.load import ResolvedConfig, flag_layer, load, replace, settings_by_key, standard_layers
from hpcdl.config.schema import StartConfig, WatchConfig
from hpcdl.config.settings import AUTO, EXTENT, NOTHING, REQUIRED, RESULT, TIME, setting, settings_of

EVERY_SPLIT = "all"
"""The value of --split that stands for all splits."""


@dataclass(frozen=True, kw_only=True)
class InferDataConfig:
    """The input of the model."""

    data: str = setting(REQUIRED, "Folder made by `hpcdl shard`, or synthetic:NAME.", matters=RESULT | TIME)
    split: str | None = setting(None, "Part of the data, or all; by default val, else all.", matters=EXTENT)
    batch_size: int | None = setting(
        None, "Samples computed at once; by default as the run was trained, else 32.", at_least=1, matters=RESULT | TIME
    )
    scale: str = setting(
        AUTO,
        "What becomes of an input's bytes: 0..1 divides by 255, none keeps them; auto: as the run was trained. A "
        ".keras file does not say it.",
        choices=(AUTO, "0..1", "none"),
        matters=RESULT,
    )
    verify_data: bool = setting(True, "Verify shard checksums while reading.", matters=TIME)


@dataclass(frozen=True, kw_only=True)
class InferRun(StartConfig):
    """How the ranks compute, and where the outputs go."""

    out: Path = setting(REQUIRED, "New folder for shards of outputs and the record.", matters=NOTHING)
    resume: bool = setting(
        False, "Compute what is missing in --out; begin where the folder is empty or missing.", matters=NOTHING
    )
    shard_samples: int | None = setting(
        None,
        "Samples in a shard of outputs, whole batches; by default 128 shards or more, of at most 64 MiB.",
        at_least=1,
        matters=NOTHING,
    )
    deterministic: bool = setting(
        False, "Same outputs at every run and number of ranks: op determinism, fixed threads.", matters=RESULT | TIME
    )


@dataclass(frozen=True, kw_only=True)
class InferConfig:
    """All groups of `hpcdl infer`."""

    data: InferDataConfig
    run: InferRun
    safety: WatchConfig


_ADDED_UP = "batch-option"


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The job's size, and what happens at its time limit."""

    nodes: int = setting(1, "Number of nodes.", at_least=1)
    ranks_per_node: int = setting(1, "Ranks on each node.", at_least=1)
    time: float = setting(3600.0, "Time limit, such as 2h or 1-00:00:00.", kind="limit")
    until_done: bool = setting(False, "Checkpoint before the time limit, requeue and continue until done.")
    max_requeues: int = setting(20, "At most so many requeues.", at_least=0)
    warning: float | None = setting(
        None, "Time before the limit to save at; by default a quarter, at most 5m.", kind="seconds"
    )
    stage_env: bool = setting(False, "Unpack the Python environment on each node first.")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The request to the batch system, in its own terms."""

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
    """All groups of `hpcdl submit`."""

    job: JobConfig
    batch: BatchConfig


BATCH_KEYS = ("time", *(item.key for item in settings_of(BatchConfig)))
"""Settings of any job, on one node or many."""


def load_submit(flags: Mapping[str, Any]) -> ResolvedConfig[SubmitConfig]:
    """Return the table [submit] of the site, with the user's and then the flags over it.

    Options of the batch system add up, the site's first. So a licence that every job of a site needs stays when a user
    adds another option. Of two options with the same name, a batch system takes the last. Raises ConfigError with every
    problem.
    """
    layers = [*standard_layers("submit"), flag_layer(flags)]
    resolved = load(SubmitConfig, layers)
    option_setting = settings_by_key(SubmitConfig)[_ADDED_UP]
    by_origin = [(layer.origin, layer.values[_ADDED_UP]) for layer in layers if _ADDED_UP in layer.values]
    options = tuple(option for _, values in by_origin for option in option_setting.parse(values))
    origins = {**resolved.origins, _ADDED_UP: ", ".join(origin for origin, _ in by_origin) or "default"}
    return ResolvedConfig(config=replace(resolved.config, batch_option=options), origins=origins)
