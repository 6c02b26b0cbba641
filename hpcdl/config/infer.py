"""Every setting of `infer`: what is computed, by how many ranks, and where the outputs go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.schema import StartConfig, WatchConfig
from hpcdl.config.settings import AUTO, EXTENT, NOTHING, REQUIRED, RESULT, TIME, setting

EVERY_SPLIT = "all"
"""The value of --split that means all of them."""


@dataclass(frozen=True, kw_only=True)
class InferDataConfig:
    """What the model is given."""

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
    """By whom it is computed, and where to."""

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
