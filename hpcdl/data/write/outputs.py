"""A model's outputs as a data folder: shards that are whole or absent, entered one by one, then a manifest.

The format is that of `hpcdl shard` for named fields: the outputs, and the number of each sample in its split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl import __version__
from hpcdl.core.errors import CorruptError
from hpcdl.core.storage.disk import make_folder, replacing, sweep
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.hdf5 import ShardFrame
from hpcdl.data.format.manifest import (
    FIELDS_SCHEMA,
    Field,
    Manifest,
    Recipe,
    ShardEntry,
    SplitEntry,
    read_manifest,
    write_manifest,
)
from hpcdl.data.format.manifest import FILE_NAME as MANIFEST_NAME
from hpcdl.data.format.shard_file import NewShard, faults
from hpcdl.data.write import journal
from hpcdl.data.write.plan import shard_file
from hpcdl.data.write.shards import ShardResult

Array = npt.NDArray[Any]
Task = tuple[str, int]
Done = dict[Task, ShardResult]
SAMPLE = "sample"
"""The field that holds each sample's number in its split of the input data."""
FORMAT = "infer"
"""The source format that the manifest names."""
FEWEST_SHARDS = 128
MOST_SHARD_BYTES = 64 * 1024**2
_ALIGNMENT = 4096
_INDEX = Field(name=SAMPLE, role="target", dtype="int64", resident=True)


def whole_batches(num_samples: Mapping[str, int], batch_size: int, sample_bytes: int) -> int:
    """Return the samples per shard: whole batches, for FEWEST_SHARDS shards or more of at most MOST_SHARD_BYTES each.

    It depends only on the data and the model, so that any number of ranks writes the same files.
    """
    num_batches = sum(-(-count // batch_size) for count in num_samples.values())
    fitting = MOST_SHARD_BYTES // max(1, batch_size * sample_bytes)
    return batch_size * max(1, min(num_batches // FEWEST_SHARDS, fitting))


@dataclass(frozen=True, kw_only=True)
class OutputsPlan:
    """The shards of a model's outputs; `fields` are the outputs, without the samples' numbers.

    `shard_samples` is a multiple of `batch_size`. `identity` is a digest of what produced the outputs.
    """

    name: str
    source_name: str
    num_samples: Mapping[str, int]
    batch_size: int
    shard_samples: int
    fields: tuple[Field, ...]
    identity: str
    understood: Sequence[str] = ()

    def tasks(self) -> list[Task]:
        """Return every shard: (split, number)."""
        return [
            (split, number)
            for split, count in self.num_samples.items()
            for number in range(-(-count // self.shard_samples))
        ]

    def samples_of(self, task: Task) -> range:
        """Return the samples of a shard, by their number in the split."""
        first = task[1] * self.shard_samples
        return range(first, min(first + self.shard_samples, self.num_samples[task[0]]))

    def batches_of(self, task: Task) -> range:
        """Return the first sample of each batch of a shard."""
        samples = self.samples_of(task)
        return range(samples.start, samples.stop, self.batch_size)

    def write(self, folder: Path, task: Task, outputs: Mapping[str, Array]) -> ShardResult:
        """Write a shard to a temporary name, fsync, rename. `outputs` by field, shaped (samples, *field.shape)."""
        samples, file = self.samples_of(task), shard_file(*task, UNSPLIT)
        frame = ShardFrame(
            num_samples=len(samples),
            pictures=False,
            fields=(*self.fields, _INDEX),
            block_samples=self.batch_size,
            about={
                "hpcdl_version": __version__,
                "name": self.name,
                "source_format": FORMAT,
                "source_name": self.source_name,
                "seed": 0,
                "encoding": "raw",
            },
            place={"split": task[0], "shard": task[1]},
            alignment=_ALIGNMENT,
        )
        with replacing(folder / file) as temporary:
            with NewShard(temporary, frame) as shard:
                for output_field in self.fields:
                    values = np.ascontiguousarray(outputs[output_field.name], output_field.stored_type)
                    for first in range(0, len(samples), self.batch_size):
                        block = values[first : first + self.batch_size]
                        shard.write_block(output_field.name, first, block, [output_field.row_bytes] * len(block))
                checksum = shard.finish({SAMPLE: np.arange(samples.start, samples.stop, dtype="<i8")}, {})
            entry = ShardEntry(
                file=file, num_samples=len(samples), num_bytes=temporary.stat().st_size, frame_checksum=checksum
            )
        return ShardResult(split=task[0], number=task[1], entry=entry)

    def begin(self, folder: Path) -> tuple[Done, list[str]]:
        """Make the splits' folders; return the whole shards there, every byte checked, and the faults of the others.

        Temporary files of killed ranks are removed. The caller holds the folder's lock, and knows that it has this
        plan's identity.
        """
        # Without a state: outputs come from no files of a source that could change.
        entered = journal.entered(folder, self.identity, "").done
        # A finished folder has no partial manifests: its shards are in the manifest.
        if (folder / MANIFEST_NAME).is_file():
            entered = self._listed(folder)
        for split in self.num_samples:
            inner = (folder / shard_file(split, 0, UNSPLIT)).parent
            make_folder(inner)
            sweep(inner, r"shard-\d+\.h5")
        sweep(folder, r"manifest\.json")
        whole_shards: Done = {}
        damaged: list[str] = []
        for task, result in entered.items():
            wrong = faults(folder, result.entry) if result.entry is not None else ["not entered"]
            damaged += wrong[:1]
            if not wrong:
                whole_shards[task] = result
        return whole_shards, damaged

    def _listed(self, folder: Path) -> Done:
        """Return the shards of a finished folder; CorruptError if its manifest is damaged or of other outputs."""
        manifest, _ = read_manifest(folder)
        if manifest.recipe.fingerprint != self.identity:
            raise CorruptError(f"{folder / MANIFEST_NAME} is not of these outputs; name another --out")
        numbered = ((split, list(entry.shards)) for split, entry in manifest.splits.items())
        return {
            (split, number): ShardResult(split=split, number=number, entry=entry)
            for split, entries in numbered
            for number, entry in enumerate(entries)
        }

    def finish(self, folder: Path, done: Done) -> Manifest:
        """Write the manifest, which replaces the partial manifests."""
        shards: dict[str, list[ShardEntry]] = {split: [] for split in self.num_samples}
        for task in self.tasks():
            entry = done[task].entry
            assert entry is not None
            shards[task[0]].append(entry)
        first = self.fields[0]
        manifest = Manifest(
            schema=FIELDS_SCHEMA,
            hpcdl_version=__version__,
            name=self.name,
            source={"format": FORMAT, "name": self.source_name},
            seed=0,
            encoding="raw",
            sample_shape=list(first.shape),
            dtype=first.dtype,
            num_classes=0,
            class_names=[],
            block_samples=self.batch_size,
            splits={
                split: SplitEntry(num_samples=count, shards=shards[split]) for split, count in self.num_samples.items()
            },
            recipe=Recipe(
                options={},
                num_samples=dict(self.num_samples),
                shards={split: len(entries) for split, entries in shards.items()},
                alignment=_ALIGNMENT,
                fingerprint=self.identity,
                sample_checksums=True,
            ),
            fields=[*self.fields, _INDEX],
            understood=list(self.understood),
        )
        write_manifest(folder, manifest)
        journal.remove(folder)
        return manifest
