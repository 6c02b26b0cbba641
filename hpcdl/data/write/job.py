"""One sharding job: all that a writing process must know, kept as JSON in the work folder of the target."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpcdl import __version__
from hpcdl.core.errors import CorruptError
from hpcdl.core.files import read_json, write_json
from hpcdl.core.records import from_json
from hpcdl.data.sources.base import SourceFacts, SourceSpec
from hpcdl.data.write.plan import ShardPlan

WORK_NAME = ".hpcdl-work"
FILE_NAME = "job.json"


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """What is written: `members` says whether a split is a chosen part of the list (else all rows of that name)."""

    name: str
    source_name: str
    spec: SourceSpec
    facts: SourceFacts
    plan: ShardPlan
    fingerprint: str
    encoding: str
    compression: str | None
    sample_shape: Sequence[int]
    dtype: str
    image_size: Sequence[int] | None
    members: bool
    seed: int
    on_error: str
    options: Mapping[str, Any]
    sample_checksums: bool = True
    version: str = field(default=__version__)

    def identity(self) -> str:
        """A checksum of everything that the shards' bytes follow from."""
        wanted = dataclasses.asdict(
            dataclasses.replace(self, spec=dataclasses.replace(self.spec, work="", location=""))
        )
        del wanted["plan"]["reasons"], wanted["on_error"], wanted["facts"]["stamps"]
        del wanted["spec"]["checks"], wanted["options"]
        return xxhash.xxh3_64_hexdigest(json.dumps(wanted, sort_keys=True).encode())

    def attributes(self, split: str, number: int) -> Mapping[str, str | int]:
        """The attributes of a shard."""
        return {
            "schema": "hpcdl.shard/1",
            "hpcdl_version": self.version,
            "name": self.name,
            "source_format": self.spec.format,
            "source_name": self.source_name,
            "seed": self.seed,
            "encoding": self.encoding,
            "block_samples": self.plan.block_samples,
            "height": self.sample_shape[0],
            "width": self.sample_shape[1],
            "channels": self.sample_shape[2],
            "dtype": self.dtype,
            "num_classes": len(self.facts.class_names),
            "split": split,
            "shard": number,
            "shards": self.plan.shards[split],
        }

    def tasks(self) -> list[tuple[str, int]]:
        """Every shard to write: (split, number)."""
        return [(split, number) for split, count in self.plan.shards.items() for number in range(count)]

    def write(self, work: Path) -> None:
        """Keep the job in `work`."""
        write_json(work / FILE_NAME, dataclasses.asdict(self))


def read_job(work: Path) -> ShardJob:
    """The job kept in `work`."""
    try:
        return from_json(ShardJob, read_json(work / FILE_NAME))
    except (TypeError, ValueError, OSError) as error:
        raise CorruptError(f"{work / FILE_NAME} is damaged: {error}; run the same command again") from error


def shard_file(split: str, number: int, unsplit: str) -> str:
    """The name of a shard below the data folder."""
    name = f"shard-{number:05d}.h5"
    return name if split == unsplit else f"{split}/{name}"
