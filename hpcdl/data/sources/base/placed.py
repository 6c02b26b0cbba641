"""Arrays that a format has found in a source, and where their values are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import SourceError
from hpcdl.data.sources.base.source import Array

_BLOCKS = 128
"""Blocks in which an array is read that is looked at in parts: each costs a request to the file system."""
_ROWS_BYTES = 16 << 20
STRINGS = 1 << 14
"""Strings that are read at once."""


@dataclass(frozen=True, kw_only=True)
class PlacedArray:
    """An array in a file: the offset of its values, and their shape and type.

    With `offsets` (N + 1) sample i is the rows `offsets[i]` to `offsets[i + 1]` - 1; `text` says they are UTF-8.
    `called` are names of numbers: those of an enumeration, or the spelling of codes. `remarks` tell the user how the
    values were processed.
    """

    path: Path
    offset: int = 0
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offsets: Path | None = None
    text: bool = False
    called: Mapping[int, str] = field(default_factory=dict)
    filled: bool = False
    """Whether the type is float only because some of its integers are missing."""
    remarks: str = ""
    unreadable: Mapping[int, str] = field(default_factory=dict)
    """The names of samples, by number, that --on-error skip leaves out: their values are zeros."""
    palette: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Of masks: by number the sample that has it, and its colour."""
    palette_conflict: str = ""
    """What differs between the palettes of masks."""
    stored: bool = True
    """Whether the file holds the values; otherwise the source reads them again."""

    @property
    def num_samples(self) -> int:
        """The number of samples in the array."""
        return len(self.starts) - 1 if self.offsets else self.shape[0] if self.shape else 1

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The offsets, if samples differ in length."""
        assert self.offsets is not None
        return np.fromfile(self.offsets, np.int64)

    def values(self) -> Array:
        """Return the whole array, memory-mapped."""
        # An empty range of a file cannot be mapped.
        if not int(np.prod(self.shape)):
            return np.empty(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)

    def chunks(self) -> Iterator[Array]:
        """Yield the array in pieces of rows: read, not mapped, because mapped pages count as memory in use."""
        if not self.shape:
            yield self.values()
        if not self.shape or not int(np.prod(self.shape)):
            return
        per_row = int(np.prod(self.shape[1:]))
        rows = max(1, _ROWS_BYTES // (per_row * self.dtype.itemsize))
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for first in range(0, self.shape[0], rows):
                count = min(rows, self.shape[0] - first)
                values = np.fromfile(file, self.dtype, count * per_row)
                if len(values) != count * per_row:
                    raise SourceError(f"{self.path} is cut short: {self.shape[0]} rows were announced")
                yield values.reshape(count, *self.shape[1:])

    def rows(self, first: int, count: int) -> Array:
        """Return `count` rows of the array: read, not mapped, as in `chunks`."""
        per_row = int(np.prod(self.shape[1:]))
        begin = self.offset + first * per_row * self.dtype.itemsize
        values = np.fromfile(self.path, self.dtype, count * per_row, offset=begin)
        if len(values) != count * per_row:
            raise SourceError(f"{self.path} is cut short: {self.shape[0]} rows were announced")
        return values.reshape(count, *self.shape[1:])

    def spread(self, most: int) -> Array:
        """Return at most `most` rows of the array, in blocks spread over it."""
        if self.shape[0] <= most:
            return self.rows(0, self.shape[0])
        blocks = min(_BLOCKS, most)
        count, last = most // blocks, self.shape[0] - most // blocks
        firsts = [last * block // max(1, blocks - 1) for block in range(blocks)]
        return np.concatenate([self.rows(first, count) for first in firsts])

    def string_chunks(self) -> Iterator[Array]:
        """Yield the samples of text in pieces."""
        starts = self.starts
        with self.path.open("rb") as file:
            for first in range(0, len(starts) - 1, STRINGS):
                bounds = starts[first : first + STRINGS + 1]
                file.seek(self.offset + int(bounds[0]))
                content = file.read(int(bounds[-1] - bounds[0]))
                ends = (bounds - bounds[0]).tolist()
                yield np.array([content[i:j].decode() for i, j in itertools.pairwise(ends)], object)


@dataclass(frozen=True)
class FoundArray:
    """An array that may become a field: its description for messages, and a function that locates it on demand."""

    shown: str
    place: Callable[[], PlacedArray]


@dataclass(frozen=True, kw_only=True)
class ArrayGroup:
    """Arrays by path that belong together, sample by sample."""

    split: str
    arrays: Mapping[str, FoundArray]


def shape_text(shape: Sequence[int], dtype: object) -> str:
    """Describe shape and type of an array for messages."""
    return f"{'x'.join(map(str, shape)) or 'one'} {dtype}"


VALUES_AT_ONCE = 1 << 21
"""The number of values that are combined at once."""


def _no_numbers() -> PlacedArray:
    raise AssertionError("only columns of kind number are asked for their numbers")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """`kind` is `number` (one per row), `text`, or `other`; `shown` describes the column in messages."""

    shown: str
    kind: str
    place: Callable[[], PlacedArray]
    numbers: Callable[[], PlacedArray] = _no_numbers
    width: int = 1
    """Numbers per row."""
    times: Callable[[], Iterable[tuple[str, str]]] | None = None
    """For a type of dates or times: returns the first and the last of each piece of rows, in ISO 8601."""
