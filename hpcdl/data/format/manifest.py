"""The fields of a sample, and the manifest of a data folder: its content and checksums.

An image with its class consists of two fields, `images` and `labels`.

Images with a class have the schema `hpcdl.data/1`, which does not list their two fields. Samples of named fields have
`hpcdl.data/2`.
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
"""Types that a field may have; text is stored as uint8, its UTF-8 bytes."""
RESERVED = ("block_checksums", "sample_checksums", "offsets", "class_names")
"""Names that other parts of a shard use."""
IMAGES, LABELS = "images", "labels"
NO_TARGET = "nothing"
"""The value of --target for samples without any, whose outputs a model shall compute."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESIDENT_BYTES = 16
_LEAST_SIDE = 8


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of a field over the training samples: one number each, or one per element of the last axis."""

    mean: Sequence[float]
    std: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Categories:
    """A column of words encoded as numbers: the number of a word is its index in `words`.

    `coding` is `one-hot` (a 0 or 1 for each word, starting at element `place` of the field) or `codes` (the number
    itself, at `place`).
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
    """One input or target: `shape` is the shape of a sample, or of the longest one if the first axis is `variable`.

    `kind` is `numbers`, `class` (int64, an index into `class_names`), `text` (uint8, variable) or `encoded`: a JPEG or
    PNG file, decoded to `shape` during training (format 1 only). `resident` fields have a few bytes per sample and are
    read whole when a shard is opened; others are stored in blocks.
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
    """The columns of words among the table columns that were combined into this field."""
    columns: Sequence[str] = ()
    """The table columns that were combined into this field, in order."""

    def __post_init__(self) -> None:
        if not is_name(self.name) or self.role not in ROLES or self.kind not in KINDS or self.dtype not in DTYPES:
            raise ValueError(f"no field can be {self.role} {self.name!r} of {self.dtype} ({self.kind})")
        if min(self.shape, default=1) < 1 or (self.variable and (not self.shape or self.resident)):
            raise ValueError(f"the field {self.name!r} cannot have the shape {list(self.shape)}")

    @property
    def encoded(self) -> bool:
        """Whether samples are stored as JPEG or PNG files."""
        return self.kind == "encoded"

    @property
    def ragged(self) -> bool:
        """Whether stored samples differ in length."""
        return self.variable or self.encoded

    @property
    def stored_type(self) -> str:
        """The numpy type string of the stored values, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<").str

    @property
    def row_shape(self) -> Sequence[int]:
        """Shape of a stored row: a sample, one element along a variable first axis, or one byte of an encoded file."""
        return () if self.encoded else self.shape[1:] if self.variable else self.shape

    @property
    def row_bytes(self) -> int:
        """The size of a stored row in bytes."""
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def longest_bytes(self) -> int:
        """The size of a sample in bytes, or of the longest one if lengths vary."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def describe(self) -> str:
        """Describe the field as a plan and an inspection show it."""
        sides = [("up to " if self.variable else "") + str(side) for side in self.shape[:1]]
        shape = "x".join([*sides, *map(str, self.shape[1:])]) or "one"
        of_kind = {
            "text": f"text of up to {math.prod(self.shape)} bytes", "class": f"one of {len(self.class_names)} classes"
        }  # fmt: skip
        described_values = of_kind.get(self.kind, f"{shape} {self.dtype}")
        return f"{self.role} {self.name}: {described_values}"


def picture_with_class(
    shape: Sequence[int], dtype: str, class_names: Sequence[str], *, encoded: bool = False
) -> tuple[Field, Field]:
    """Return the fields of an image (height, width, channels), which may be `encoded`, and of its class."""
    kind = "encoded" if encoded else "numbers"
    return (
        Field(name=IMAGES, role="input", dtype=dtype, shape=tuple(shape), kind=kind),
        Field(name=LABELS, role="target", dtype="int64", kind="class", resident=True, class_names=tuple(class_names)),
    )


def is_name(name: str) -> bool:
    """Return whether `name` is a valid field name."""
    return bool(_NAME.fullmatch(name)) and name not in RESERVED


def is_picture(shape: Sequence[int]) -> bool:
    """Return whether uint8 samples of this shape are images: height, width, and 1, 3 or 4 channels."""
    return len(shape) == 3 and shape[2] in (1, 3, 4)


def may_be_picture(shape: Sequence[int]) -> bool:
    """Return whether uint8 samples of this shape may be either grey images or tables of numbers."""
    return len(shape) == 2 and min(shape) >= _LEAST_SIDE


def may_be_resident(shape: Sequence[int], dtype: str) -> bool:
    """Return whether samples are so small that reading them singly or by block would cost more than keeping all."""
    return math.prod(shape) * np.dtype(dtype).itemsize <= _RESIDENT_BYTES


SCHEMA = "hpcdl.data/1"
FIELDS_SCHEMA = "hpcdl.data/2"
FILE_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard: its file below the data folder, its size in samples and bytes, and the checksum of its frame.

    `frame_checksum` covers every byte outside the blocks. The blocks' own checksums are in the frame, so it covers the
    whole file.
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
    """What is needed to make any shard again from the same source: options, planned sizes, checksum of the list.

    Shards of earlier versions have no checksums of single samples.
    """

    options: Mapping[str, Any]
    num_samples: Mapping[str, int]
    shards: Mapping[str, int]
    alignment: int
    fingerprint: str
    sample_checksums: bool = False
    memory_bytes: int = 0
    """The most memory that the plan expects a writing process to take; 0 in earlier versions."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole data set; `sample_shape` and `dtype` (a numpy name) belong to the first input.

    The classes are those of the only class target, if there is one.
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
    """How the source was read and what was omitted from it, in the words of the plan."""

    @property
    def pictures(self) -> bool:
        """Whether samples are images with a class, in format 1."""
        return self.schema == SCHEMA

    @property
    def untargeted(self) -> bool:
        """Whether samples have no target: the field in its place numbers them as in the source."""
        asked = [*(self.recipe.options.get("target") or ())]
        return asked == [NO_TARGET] and all(item.name != NO_TARGET for item in self.fields)

    @property
    def window_sample_bytes(self) -> int:
        """Bytes of a sample that determine the window length, and so the order; format 1 does not count the class."""
        return sum(field.longest_bytes for field in (self.fields[:1] if self.pictures else self.fields))

    def shards(self) -> list[ShardEntry]:
        """Return every shard, split by split."""
        return [shard for split in self.splits.values() for shard in split.shards]


def checksum_of(document: Mapping[str, Any]) -> str:
    """Return the XXH3-64 of a manifest's content: its canonical JSON without the key `checksum`."""
    content = {key: value for key, value in document.items() if key != "checksum"}
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def document_of(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON document of a manifest, with its checksum."""
    document = dataclasses.asdict(dataclasses.replace(manifest, fields=()) if manifest.pictures else manifest)
    # Empty ones are omitted: data of earlier versions, which lack them, keep their checksum.
    for name in ("fields", "understood"):
        if not document[name]:
            del document[name]
    for field_document in document.get("fields", ()):
        for name in ("categories", "columns"):
            if not field_document[name]:
                del field_document[name]
    # Through JSON and back: the checksum is of exactly what a reader gets.
    document["checksum"] = checksum_of(json.loads(json.dumps(document)))
    return document


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into `folder` atomically; the same content gives the same bytes."""
    write_text(folder / FILE_NAME, json.dumps(document_of(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Read the manifest in `folder` and its checksum; CorruptError if it is damaged, unsafe or of another schema."""
    return manifest_in(read_json(folder / FILE_NAME), folder / FILE_NAME)


def manifest_in(document: Any, path: Path) -> tuple[Manifest, str]:
    """Return the manifest in a document that was read from `path`, and its checksum; CorruptError as above."""
    if not isinstance(document, dict) or document.get("schema") not in (SCHEMA, FIELDS_SCHEMA):
        schema = document.get("schema") if isinstance(document, dict) else None
        raise CorruptError(f"{path} has schema {schema!r}, this hpcdl reads {SCHEMA!r} and {FIELDS_SCHEMA!r}")
    checksum = checksum_of(document)
    # First: what a person or a bad disk has changed gets this message, whatever else it breaks.
    if document.get("checksum") != checksum:
        raise CorruptError(f"{path} is damaged: its checksum does not fit its content; shard the data again")
    try:
        manifest = from_json(Manifest, document)
        # Format 1 implies its two fields, which are added below; format 2 lists them.
        if bool(manifest.fields) == manifest.pictures or any(field.encoded for field in manifest.fields):
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
        # A manifest may come from anybody, and its shards are opened, written again and named on terminals.
        if ".." in parts or PurePosixPath(shard.file).is_absolute() or not shard.file.isprintable():
            raise CorruptError(f"{path} names a shard outside its folder: {shard.file!r}")
    return manifest, checksum
