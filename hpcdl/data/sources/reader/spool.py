"""Store samples that arrive one by one as arrays in the work folder: their values, or what listing needs of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpcdl.data.sources.base.placed import PlacedArray, shape_text
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.reader.samples import Roles, UnfitSample, UserSample, Value, item_of, item_text

DIRECT = ".direct"
"""File ending of a field whose values are not stored, but read again from the source."""


def digest_of(values: Mapping[str, Value]) -> int:
    """Return a checksum of a sample's values, names, types and shapes."""
    digest = xxhash.xxh3_64()
    # Sorted: a reader may give a sample's values in another order when it is asked again.
    for name in sorted(values):
        value = values[name]
        kind = "text" if isinstance(value, bytes) else shape_text(value.shape, value.dtype.str)
        digest.update(f"{name}\0{kind}\0".encode())
        digest.update(value if isinstance(value, bytes) else value.reshape(-1).view(np.uint8).data)
    return digest.intdigest()


@dataclass(frozen=True, kw_only=True)
class NotedValue:
    """A value of a sample, as listing needs it: its bytes (`content`) if they are kept, else whether all are finite.

    Text is an array of uint8.
    """

    text: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    content: bytes | memoryview | None
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class NotedSample:
    """A sample, as listing needs it: `digest` is the checksum of all its values."""

    values: Mapping[str, NotedValue]
    split: str
    roles: Roles
    digest: int


def small_values(sample: UserSample) -> frozenset[str]:
    """Return the names of text and single values: they may be classes, which are found from all samples."""
    return frozenset(
        name for name, value in sample.values.items() if isinstance(value, bytes) or math.prod(value.shape) == 1
    )


def noted(sample: UserSample, keep: Collection[str] | None) -> NotedSample:
    """Return what listing needs of a sample; `keep` names the values whose bytes are kept, None means all."""
    return NotedSample(
        values={name: _noted(value, kept=keep is None or name in keep) for name, value in sample.values.items()},
        split=sample.split,
        roles=sample.roles,
        digest=digest_of(sample.values),
    )


def _noted(value: Value, *, kept: bool) -> NotedValue:
    data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    content = None
    if kept:
        content = data.tobytes() if not data.ndim else data.reshape(-1).view(np.uint8).data
    finite = kept or data.dtype.kind != "f" or bool(np.isfinite(data).all())
    return NotedValue(text=isinstance(value, bytes), dtype=data.dtype, shape=data.shape, content=content, finite=finite)


class SampleSpool:
    """The samples of one split, in order of arrival."""

    def __init__(self, work: Path, *, again: bool) -> None:
        """Open a new spool; `again`: the items are kept, because each sample can be read again."""
        self._work, self._again = work, again
        self._columns: dict[str, _Column] = {}
        self._digests = array("Q")
        self._items = array("q", [0])
        self.path = _new(work, ".items")
        self._file = self.path.open("wb")

    @property
    def names(self) -> list[str]:
        """The names of a sample's values."""
        return [*self._columns]

    def add(self, sample: NotedSample, origin: tuple[str, Any]) -> None:
        """Add a sample; `origin` is its stream and its item. Raises UnfitSample if it differs from earlier samples."""
        values = sample.values
        if not self._columns:
            self._columns = {name: _Column(name, value, self._work) for name, value in values.items()}
        if values.keys() != self._columns.keys():
            differing_name = sorted(values.keys() ^ self._columns.keys())[0]
            which_samples = "this one" if differing_name in values else "those before"
            raise UnfitSample(f"only {which_samples} has {differing_name}; every sample needs the same names")
        for name, value in values.items():
            self._columns[name].add(value)
        self._digests.append(sample.digest)
        if self._again:
            self._items.append(self._items[-1] + self._file.write(item_text(origin).encode()))

    def close(self) -> None:
        """Close the files; no more samples can be added."""
        self._file.close()
        for column in self._columns.values():
            column.close()

    def placed(self) -> dict[str, PlacedArray]:
        """Return the arrays by name; the spool must be closed."""
        self.path.with_suffix(".offsets").write_bytes(self._items.tobytes())
        self.path.with_suffix(".digests").write_bytes(self._digests.tobytes())
        return {name: column.placed() for name, column in self._columns.items()}

    def checksum(self) -> bytes:
        """Return one checksum of all samples."""
        return xxhash.xxh3_64_digest(self._digests.tobytes())


class SpooledItems:
    """The items that a spool has stored for its samples."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._starts = np.fromfile(self._path.with_suffix(".offsets"), np.int64)
        self._digests = np.fromfile(self._path.with_suffix(".digests"), np.uint64)

    def digest(self, number: int) -> int:
        """Return the checksum of sample `number` when it was listed."""
        return int(self._digests[number])

    def origin(self, number: int) -> tuple[str, Any]:
        """Return the stream of sample `number`, and its item."""
        first, stop = self._starts[number : number + 2].tolist()
        with self._path.open("rb") as file:
            file.seek(first)
            stream, item = item_of(file.read(stop - first).decode())
        return stream, item


class _Column:
    """One field of all samples."""

    def __init__(self, name: str, first: NotedValue, work: Path) -> None:
        self._name = name
        self._text = first.text
        self._kept = first.content is not None
        self._kind: tuple[np.dtype[Any], int, tuple[int, ...]] | None = None
        self._lengths = array("q")
        self._path = _new(work, "" if self._kept else DIRECT)
        self._file = self._path.open("wb")

    def add(self, value: NotedValue) -> None:
        """Add the value of a sample."""
        if value.text != self._text:
            raise UnfitSample(f"{self._name} is text in some samples, but not in all of them")
        self._lengths.append(value.shape[0] if value.shape else 1)
        if value.shape != (0,):  # an empty list fits arrays of every type
            kind = (value.dtype, len(value.shape), value.shape[1:])
            self._kind = self._kind or kind
            if kind != self._kind:
                dtype, axes, other_sides = self._kind
                before = "x".join(["N"] * bool(axes) + list(map(str, other_sides))) or "one"
                raise UnfitSample(
                    f"{self._name} is {shape_text(value.shape, value.dtype.name)}, and was {before} {dtype.name} in "
                    "the samples before; only the length of the first axis may vary, and the type stays: "
                    "use numpy.float32(...) or the like"
                )
        if value.content is not None:
            self._file.write(value.content)
        elif value.dtype.kind == "f":
            self._file.write(bytes([not value.finite]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def placed(self) -> PlacedArray:
        """Return the values of all samples; if they are not stored, a byte for each says whether it is not finite."""
        dtype, axes, other_sides = self._kind or (np.dtype(np.float64), 1, ())
        lengths = np.frombuffer(self._lengths, np.int64)
        if not axes:
            return PlacedArray(path=self._path, shape=(len(lengths),), dtype=dtype, stored=self._kept)
        # Text always varies in length, also where all texts happen to be as long.
        if not self._text and (lengths == lengths[0]).all() and lengths[0]:
            shape = (len(lengths), int(lengths[0]), *other_sides)
            return PlacedArray(path=self._path, shape=shape, dtype=dtype, stored=self._kept)
        offsets = self._path.with_name(f"{self._path.name}.offsets")
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tofile(offsets)
        shape = (int(lengths.sum()), *other_sides)
        return PlacedArray(
            path=self._path, shape=shape, dtype=dtype, offsets=offsets, text=self._text, stored=self._kept
        )


def fitting(value: Value, shape: tuple[int, ...]) -> Array:
    """Return a value as a field of samples of `shape` needs it: an empty list gets the shape of an empty array."""
    data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    return np.empty((0, *shape[1:])) if data.shape == (0,) else data


def _new(work: Path, suffix: str) -> Path:
    return work / f"array{len(list(work.glob('array*')))}{suffix}"
