"""What a sample consists of: named inputs and targets.

A picture with its class is two of them, `images` and `labels`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
