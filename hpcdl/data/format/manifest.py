"""The manifest of a data folder (docs/reference/shard-format.md): what is there, checksums.

Pictures with a class have the schema `hpcdl.data/1`, which does not spell out their two fields; samples of named
fields have `hpcdl.data/2`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from hpcdl.core.errors import CorruptError
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.files import read_json, write_text
from hpcdl.data.format.fields import DTYPES, Field, picture_with_class

SCHEMA = "hpcdl.data/1"
FIELDS_SCHEMA = "hpcdl.data/2"
FILE_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard: its file below the data folder, sizes in samples and bytes, and where things lie in the file.

    `frame_checksum` covers every byte but the blocks; the blocks' own checksums lie in the shard, so that it stands
    for the whole file.
    """

    file: str
    num_samples: int
    num_bytes: int
    frame_checksum: str


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """One split: its shards, in order of sample ids."""

    num_samples: int
    shards: Sequence[ShardEntry]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What it takes to make any shard again from the same source: options, planned sizes, checksum of the list.

    Shards of earlier versions have no checksums of single samples.
    """

    options: Mapping[str, Any]
    num_samples: Mapping[str, int]
    shards: Mapping[str, int]
    alignment: int
    fingerprint: str
    sample_checksums: bool = False
    memory_bytes: int = 0
    """Most that the plan had a writing process take; 0 in earlier versions."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole data set; `sample_shape` and `dtype` (a numpy name) are the first input's.

    Classes are those of the only class target, if it has one.
    """

    schema: str = SCHEMA
    hpcdl_version: str
    name: str
    source: Mapping[str, str]
    seed: int
    encoding: str
    compression: str | None = None
    sample_shape: Sequence[int]
    dtype: str
    num_classes: int
    class_names: Sequence[str]
    block_samples: int
    splits: Mapping[str, SplitEntry]
    skipped: Sequence[str] = field(default=())
    recipe: Recipe
    fields: Sequence[Field] = field(default=())
    understood: Sequence[str] = field(default=())
    """How the source was read, and what of it was left out, as the plan said it."""

    @property
    def pictures(self) -> bool:
        """Whether samples are pictures with a class, in format 1."""
        return self.schema == SCHEMA

    @property
    def window_sample_bytes(self) -> int:
        """Bytes of a sample that the length of windows, and so the order, follows from; format 1 counts no class."""
        return sum(item.longest_bytes for item in (self.fields[:1] if self.pictures else self.fields))

    def shards(self) -> list[ShardEntry]:
        """Every shard, split by split."""
        return [shard for split in self.splits.values() for shard in split.shards]


def checksum_of(document: Mapping[str, Any]) -> str:
    """XXH3-64 of a manifest's content: its canonical JSON without the key `checksum`."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder`, atomically; what follows from the content follows byte by byte."""
    document = dataclasses.asdict(dataclasses.replace(manifest, fields=()) if manifest.pictures else manifest)
    for name in ("fields", "understood"):
        if not document[name]:
            del document[name]
    for own in document.get("fields", ()):
        if not own["categories"]:
            del own["categories"]
    document["checksum"] = checksum_of(json.loads(json.dumps(document)))
    write_text(folder / FILE_NAME, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest in `folder` and its checksum; CorruptError where it is damaged, of another schema or unsafe."""
    path = folder / FILE_NAME
    document = read_json(path)
    if not isinstance(document, dict) or document.get("schema") not in (SCHEMA, FIELDS_SCHEMA):
        found = document.get("schema") if isinstance(document, dict) else None
        raise CorruptError(f"{path} has schema {found!r}, this hpcdl reads {SCHEMA!r} and {FIELDS_SCHEMA!r}")
    checksum = checksum_of(document)
    if document.get("checksum") != checksum:
        raise CorruptError(f"{path} is damaged: its checksum does not fit its content; shard the data again")
    try:
        manifest = from_json(Manifest, document)
        if bool(manifest.fields) == manifest.pictures or any(item.encoded for item in manifest.fields):
            raise ValueError(f"{manifest.schema} with {len(manifest.fields)} fields")
        if (manifest.pictures and len(manifest.sample_shape) != 3) or min(manifest.sample_shape, default=1) < 1:
            raise ValueError(f"sample_shape is {list(manifest.sample_shape)}")
        if manifest.dtype not in DTYPES:
            raise ValueError(f"dtype is {manifest.dtype!r}")
        if len(manifest.class_names) != manifest.num_classes:
            raise ValueError(f"{len(manifest.class_names)} names for {manifest.num_classes} classes")
        if manifest.pictures:
            encoded = manifest.encoding == "encoded"
            fields = picture_with_class(manifest.sample_shape, manifest.dtype, manifest.class_names, encoded=encoded)
            manifest = dataclasses.replace(manifest, fields=fields)
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged: {error}") from error
    for shard in manifest.shards():
        parts = PurePosixPath(shard.file).parts
        if ".." in parts or PurePosixPath(shard.file).is_absolute() or not shard.file.isprintable():
            raise CorruptError(f"{path} names a shard outside its folder: {shard.file!r}")
    return manifest, checksum
