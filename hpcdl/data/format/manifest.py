"""What a sample consists of, and the manifest of a data folder: what is there, checksums.

A picture with its class is two of them, `images` and `labels`.

Pictures with a class have the schema `hpcdl.data/1`, which does not spell out their two fields; samples of named
fields have `hpcdl.data/2`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash

from hpcdl.core.errors import CorruptError
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.files import read_json, write_text

ROLES = ("input", "target")
KINDS = ("numbers", "class", "text", "encoded")
CODINGS = ("one-hot", "codes")
DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
"""Types that a field may have; text is uint8, its UTF-8 bytes."""
RESERVED = ("block_checksums", "sample_checksums", "offsets", "class_names")
"""Names that parts of a shard have."""
IMAGES, LABELS = "images", "labels"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESIDENT_BYTES = 16
_LEAST_SIDE = 8


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of a field's values over the training samples: one number, or one for each element of the last axis."""

    mean: Sequence[float]
    std: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Categories:
    """A column of words as numbers: the number of a word is its place in `words`.

    `coding` is `one-hot` (for each word a 0 or 1, from element `place` of the field on) or `codes` (the number itself,
    at `place`).
    """

    column: str
    coding: str
    words: Sequence[str]
    place: int = 0

    def __post_init__(self) -> None:
        if self.coding not in CODINGS or self.place < 0 or len(set(self.words)) != len(self.words):
            raise ValueError(f"the words of {self.column!r} cannot be {self.coding!r} at {self.place}")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One input or target: `shape` is that of a sample, of the longest one where the first axis is `variable`.

    `kind` is `numbers`, `class` (int64, a number below the count of `class_names`), `text` (uint8, variable) or
    `encoded`: a JPEG or PNG file, decoded to `shape` while training, which format 1 alone has.
    `resident` fields have a few bytes a sample and are read whole when a shard is opened; the others lie in blocks.
    """

    name: str
    role: str
    dtype: str
    shape: Sequence[int] = ()
    kind: str = "numbers"
    variable: bool = False
    resident: bool = False
    class_names: Sequence[str] = ()
    normalise: str = "none"
    statistics: Statistics | None = field(default=None)
    categories: Sequence[Categories] = ()
    """The columns of words among what a table's columns were put together to."""

    def __post_init__(self) -> None:
        if not is_name(self.name) or self.role not in ROLES or self.kind not in KINDS or self.dtype not in DTYPES:
            raise ValueError(f"no field can be {self.role} {self.name!r} of {self.dtype} ({self.kind})")
        if min(self.shape, default=1) < 1 or (self.variable and (not self.shape or self.resident)):
            raise ValueError(f"the field {self.name!r} cannot have the shape {list(self.shape)}")

    @property
    def encoded(self) -> bool:
        """Whether samples lie as JPEG or PNG files."""
        return self.kind == "encoded"

    @property
    def ragged(self) -> bool:
        """Whether samples differ in length as they lie in a shard."""
        return self.variable or self.encoded

    @property
    def stored_type(self) -> str:
        """The type of its values as they lie in a shard."""
        return np.dtype(self.dtype).newbyteorder("<").str

    @property
    def row_shape(self) -> Sequence[int]:
        """Of what a shard counts: a sample, one element along the first axis where that is variable, a file's byte."""
        return () if self.encoded else self.shape[1:] if self.variable else self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of that."""
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def longest_bytes(self) -> int:
        """Bytes of a sample, of the longest where lengths vary."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def describe(self) -> str:
        """As a plan and an inspection show it."""
        sides = [("up to " if self.variable else "") + str(side) for side in self.shape[:1]]
        shape = "x".join([*sides, *map(str, self.shape[1:])]) or "one"
        of_kind = {
            "text": f"text of up to {math.prod(self.shape)} bytes", "class": f"one of {len(self.class_names)} classes"
        }  # fmt: skip
        what = of_kind.get(self.kind, f"{shape} {self.dtype}")
        return f"{self.role} {self.name}: {what}"


def picture_with_class(
    shape: Sequence[int], dtype: str, class_names: Sequence[str], *, encoded: bool = False
) -> tuple[Field, Field]:
    """The fields of a picture (height, width, channels), which may be `encoded`, and of its class."""
    kind = "encoded" if encoded else "numbers"
    return (
        Field(name=IMAGES, role="input", dtype=dtype, shape=tuple(shape), kind=kind),
        Field(name=LABELS, role="target", dtype="int64", kind="class", resident=True, class_names=tuple(class_names)),
    )


def is_name(name: str) -> bool:
    """Whether a field may be called so."""
    return bool(_NAME.fullmatch(name)) and name not in RESERVED


def is_picture(shape: Sequence[int]) -> bool:
    """Whether bytes of this shape are pixels: height, width, and 1, 3 or 4 channels."""
    return len(shape) == 3 and shape[2] in (1, 3, 4)


def may_be_picture(shape: Sequence[int]) -> bool:
    """Whether bytes of this shape are a grey picture or a table of numbers: nobody can tell."""
    return len(shape) == 2 and min(shape) >= _LEAST_SIDE


def may_be_resident(shape: Sequence[int], dtype: str) -> bool:
    """Whether samples are so small that reading them one by one or by block would cost more than keeping them."""
    return math.prod(shape) * np.dtype(dtype).itemsize <= _RESIDENT_BYTES


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
