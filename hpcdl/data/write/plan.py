"""The plan made before the first byte is written: shards, blocks, alignment and stripes, each with its reason.

A job is the plan with everything else that a writing process must know. It is stored as JSON in the target's work
folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpcdl import __version__
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.files import read_json, write_json
from hpcdl.core.units import counted, format_bytes, format_count
from hpcdl.data.format.hdf5 import ShardFrame, filters
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.source import SourceFacts, SourceSpec
from hpcdl.data.write.lustre import FileSystem, Stripes, striping
from hpcdl.data.write.request import LayoutConfig, parse_split

WORK_NAME = ".hpcdl-work"
REPAIRED = "again"
"""In the work folder: shards written again, to replace damaged ones or to be compared with existing ones."""
FILE_NAME = "job.json"
SHARD_BYTES = 256 * 1024**2
SHARD_BYTES_LEAST = 64 * 1024**2
FEWEST_SHARDS = 8
BLOCK_BYTES = 1024**2
MOST_BLOCK_BYTES = 32 * 1024**2
MOST_SHARDS = 10_000
MOST_SHARD_SAMPLES = 1 << 22
"""Limits the memory of a writer, which keeps data about each sample of a shard, however small the samples are."""
MAX_RANKS = 64
_OWN_BYTES = 320 * 1024**2
"""Memory of a process before the first sample: Python, its libraries, and what listing reads of a source at once."""
_SAMPLE_BYTES = 128
"""Memory per sample: its row in the list, permutation index, checksum, and the fields held until the shard ends."""
_LISTED_BYTES = 16
_BLOCK_COPIES = 4
PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Sizes in bytes; `shards` by split; `sample_bytes` is a mean for encoded data."""

    num_samples: Mapping[str, int]
    shards: Mapping[str, int]
    sample_bytes: float
    total_bytes: int
    block_samples: int
    alignment: int
    stripes: Stripes | None
    reasons: Sequence[str] = field(default=())
    memory_bytes: int = 0
    """The most memory that a writing process takes, without an image being decoded and without a user's reader."""

    def shard_samples(self, split: str, number: int) -> tuple[int, int]:
        """Return a shard's first position in the shuffled sequence of its split, and the position after its last."""
        total, count = self.num_samples[split], self.shards[split]
        # Rounded alike at both ends: every sample is in one shard.
        return total * number // count, total * (number + 1) // count


def make_plan(
    num_samples: Mapping[str, int],
    total_bytes: int,
    layout: LayoutConfig,
    file_system: FileSystem,
    largest_bytes: int = 0,
) -> ShardPlan:
    """Plan `total_bytes` of samples in splits of `num_samples`; the largest sample has `largest_bytes`.

    Raises UsageError if the requested layout is impossible.
    """
    everything = sum(num_samples.values())
    sample_bytes = total_bytes / everything
    reasons: list[str] = []
    train = num_samples.get("train", max(num_samples.values()))
    # A small data set cannot give each of the usual ranks a sample.
    max_ranks = layout.max_ranks or min(MAX_RANKS, train)
    if max_ranks > train:
        raise UsageError(
            f"--max-ranks {max_ranks} is more than the {train} samples to train on; give --max-ranks {train} or less"
        )
    block = _block_samples(sample_bytes, train // max_ranks, layout, file_system, reasons)
    shard_bytes = _shard_bytes(total_bytes, layout, file_system, reasons)
    shards = {name: _num_shards(count, sample_bytes, shard_bytes, layout) for name, count in num_samples.items()}
    largest = max(int(count * sample_bytes / shards[name]) for name, count in num_samples.items())
    stripes = striping(file_system, largest, layout, reasons)
    alignment = max(PAGE, stripes.size if stripes else 0)
    why = "the stripe size" if stripes else "a memory page"
    reasons.append(f"the first block starts at a multiple of {format_bytes(alignment)}: {why}")
    reasons.append(steps_rule(train, max_ranks))
    if layout.compression:
        reasons.append(f"blocks are compressed ({layout.compression}): smaller, but every read decompresses")
    memory = _memory_bytes(num_samples, shards, max(block * sample_bytes, largest_bytes))
    reasons.append(f"memory: at most about {format_bytes(memory)} a process, besides a picture that is decoded")
    return ShardPlan(
        num_samples=dict(num_samples),
        shards=shards,
        sample_bytes=sample_bytes,
        total_bytes=total_bytes,
        block_samples=block,
        alignment=alignment,
        stripes=stripes,
        reasons=reasons,
        memory_bytes=memory,
    )


def _memory_bytes(num_samples: Mapping[str, int], shards: Mapping[str, int], block_bytes: float) -> int:
    """Return the most memory that a writing process takes: its own, the samples of a shard, the list, and a block."""
    of_shard = max(-(-count // shards[name]) for name, count in num_samples.items())
    list_bytes = _LISTED_BYTES * sum(num_samples.values())
    return int(_OWN_BYTES + _SAMPLE_BYTES * of_shard + list_bytes + _BLOCK_COPIES * block_bytes)


def steps_rule(num_samples: int, max_ranks: int) -> str:
    """State the rule by which all ranks take the same number of steps, with numbers."""
    return (
        "every rank takes floor(samples / (batch size x workers)) steps an epoch, whatever the number of ranks; the "
        "samples left over, always fewer than one global batch, are dropped, others in each epoch: batch size 1 on "
        f"{counted(max_ranks, 'worker')} gives {counted(num_samples // max_ranks, 'step')} and leaves "
        f"{num_samples % max_ranks} of {format_count(num_samples)}"
    )


def _block_samples(
    sample_bytes: float, by_ranks: int, layout: LayoutConfig, file_system: FileSystem, reasons: list[str]
) -> int:
    block_bytes = layout.block_size or BLOCK_BYTES
    if layout.block_size is None and file_system.is_lustre and layout.stripe_size:
        block_bytes = min(layout.stripe_size, 4 * BLOCK_BYTES)
    if block_bytes > MOST_BLOCK_BYTES:
        raise UsageError(
            f"--block-size {format_bytes(block_bytes).replace(' ', '')} is more than a writer may hold; "
            f"give {format_bytes(MOST_BLOCK_BYTES).replace(' ', '')} or less"
        )
    by_size = max(1, round(block_bytes / max(1.0, sample_bytes)))
    samples = min(by_size, by_ranks)
    why = "asked for" if layout.block_size else "large enough for full speed, small enough to shuffle"
    if by_ranks < by_size:
        why = "so that each of the --max-ranks ranks has a block of its own"
    block_text = f"{counted(samples, 'sample')}, about {format_bytes(round(samples * sample_bytes))}"
    reasons.append(f"blocks of {block_text}: {why}")
    return samples


def _shard_bytes(total_bytes: int, layout: LayoutConfig, file_system: FileSystem, reasons: list[str]) -> int:
    if layout.shards:
        reasons.append(f"{layout.shards} shards in each split: asked for")
        return 0
    if layout.shard_size:
        reasons.append(f"shards of about {format_bytes(layout.shard_size)}: asked for")
        return layout.shard_size
    num_shards = max(FEWEST_SHARDS, file_system.num_osts or 0)
    size = min(SHARD_BYTES, max(SHARD_BYTES_LEAST, total_bytes // num_shards))
    why = f"few files, quick to write again; {num_shards} of them where the data allow, "
    why += "to load every object storage target" if num_shards > FEWEST_SHARDS else "to write in parallel"
    if total_bytes // size > MOST_SHARDS:
        size, why = total_bytes // MOST_SHARDS, f"more than {MOST_SHARDS} files would burden the metadata server"
    reasons.append(f"shards of about {format_bytes(size)}: {why}")
    return size


def _num_shards(count: int, sample_bytes: float, shard_bytes: int, layout: LayoutConfig) -> int:
    if layout.shards:
        return min(layout.shards, count)
    return min(count, max(1, round(count * sample_bytes / shard_bytes), -(-count // MOST_SHARD_SAMPLES)))


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """The work to write: `members` says whether a split is a chosen part of the list (else all rows of that name)."""

    name: str
    source_name: str
    spec: SourceSpec
    facts: SourceFacts
    plan: ShardPlan
    fingerprint: str
    encoding: str
    compression: str | None
    fields: Sequence[Field]
    image_size: Sequence[int] | None
    members: bool
    seed: int
    on_error: str
    options: Mapping[str, Any]
    sample_checksums: bool = True
    state: str = ""
    """The state of the source's files when they were listed."""
    version: str = field(default=__version__)

    @property
    def pictures(self) -> bool:
        """Whether samples are images with a class, which are written in format 1."""
        return not self.facts.fields

    @property
    def sample_shape(self) -> Sequence[int]:
        """The shape of the first input."""
        return self.fields[0].shape

    @property
    def dtype(self) -> str:
        """The type of the first input."""
        return self.fields[0].dtype

    def identity(self) -> str:
        """Return a checksum of everything that determines the shards' bytes, except where source and target are."""
        document = dataclasses.asdict(
            dataclasses.replace(self, spec=dataclasses.replace(self.spec, work="", location="", reader=""))
        )
        del (
            document["plan"]["reasons"],
            document["plan"]["memory_bytes"],
            document["on_error"],
            document["facts"]["stamps"],
            document["facts"]["remarks"],  # they may quote values, and changed values have a message of their own
            document["state"],
        )
        del document["spec"]["checks"], document["spec"]["workers"], document["options"]
        if split := self.options.get("split"):  # a list, because parts of the same sizes in another order differ
            document["split"] = list(parse_split(split).items())
        text = json.dumps(document, sort_keys=True)
        location = Path(self.spec.location)
        for folder, name in (
            (self.spec.work, "work"),
            (str(location.parent if location.is_file() else location), "source"),
        ):
            text = text.replace(f"{json.dumps(folder)[1:-1]}/", f"{name}:")  # as it is escaped in `text`
        checksum = xxhash.xxh3_64_hexdigest(text.encode())
        return f"{checksum}-{self.spec.reader_digest}" if self.spec.reader_digest else checksum

    def frame(self, split: str, number: int, num_samples: int, rows: Mapping[str, int]) -> ShardFrame:
        """Return a shard without its samples; `rows` as in ShardFrame."""
        return ShardFrame(
            pictures=self.pictures,
            num_samples=num_samples,
            fields=self.fields,
            rows=rows,
            block_samples=self.plan.block_samples,
            about={
                "hpcdl_version": self.version,
                "name": self.name,
                "source_format": self.spec.format,
                "source_name": self.source_name,
                "seed": self.seed,
                "encoding": self.encoding,
            },
            place={"split": split, "shard": number, "shards": self.plan.shards[split]},
            alignment=self.plan.alignment,
            filters=filters(self.compression),
            sample_checksums=self.sample_checksums,
        )

    def tasks(self) -> list[tuple[str, int]]:
        """Return every shard to write: (split, number)."""
        return [(split, number) for split, count in self.plan.shards.items() for number in range(count)]

    def write(self, work: Path) -> None:
        """Store the job in `work`."""
        write_json(work / FILE_NAME, dataclasses.asdict(self))


def read_job(work: Path) -> ShardJob:
    """Read the job stored in `work`; CorruptError if it is damaged."""
    try:
        return from_json(ShardJob, read_json(work / FILE_NAME))
    except (TypeError, ValueError, OSError) as error:
        raise CorruptError(f"{work / FILE_NAME} is damaged: {error}; run the same command again") from error


def shard_file(split: str, number: int, unsplit: str) -> str:
    """Return the path of a shard below the data folder."""
    name = f"shard-{number:05d}.h5"
    return name if split == unsplit else f"{split}/{name}"
