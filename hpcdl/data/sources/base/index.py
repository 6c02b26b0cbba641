"""The list of a source's samples, kept on disk so that memory stays small whatever the number of samples.

Folder of files: `rows.SPLIT` holds one fixed-size row per sample, `names` the files' names, each ended by a zero byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import xxhash

ROW = np.dtype([("place", "<i8"), ("size", "<i8"), ("label", "<i8"), ("stamp", "<i8"), ("file", "<i8")])
"""place: where the sample is (in `names`, or its number or offset in file `file`); size: encoded bytes, or 0;
stamp: modification time in ns of a file of its own, or 0."""
Rows = npt.NDArray[Any]
_CHUNK = 1 << 16
_AT_ONCE, _FEW = 32 << 20, 64
"""A list of up to so many bytes is read whole where more than one row in so many is wanted."""


class IndexWriter:
    """Takes rows split by split; a split exists once it was named."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = (folder / "names").open("wb")
        self._files: dict[str, BinaryIO] = {}
        self._digest, self._state = xxhash.xxh3_64(), xxhash.xxh3_64()
        self.counts: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._names.close()
        for file in self._files.values():
            file.close()

    def add(self, split: str, rows: Rows) -> None:
        """Append rows (dtype ROW)."""
        if split not in self._files:
            self._files[split] = (self._folder / f"rows.{split}").open("wb")
            self.counts[split] = 0
        content = rows.tobytes()
        self._files[split].write(content)
        self.counts[split] += len(rows)
        stable = rows.copy()
        stable["stamp"] = 0
        self._digest.update(split.encode() + b"\0" + stable.tobytes())

    def add_files(
        self,
        split: str,
        file: int | list[int],
        label: int | list[int],
        entries: Sequence[tuple[bytes, os.stat_result]],
    ) -> None:
        """Append samples that are files, name and state each, of one `file` and label or one each."""
        rows = np.zeros(len(entries), ROW)
        place = self._names.tell()
        for row, (name, stat) in zip(rows, entries, strict=True):
            row["place"], row["size"], row["stamp"] = place, stat.st_size, stat.st_mtime_ns
            place += len(name) + 1
            self.note(stat)
        rows["label"], rows["file"] = label, file
        content = b"".join(name + b"\0" for name, _ in entries)
        self._names.write(content)
        self._digest.update(content)
        self.add(split, rows)

    def note(self, stat: os.stat_result) -> None:
        """Have the state of one more file count in `state`."""
        self._state.update(b"%d %d %d\0" % (stat.st_size, stat.st_mtime_ns, stat.st_ino))

    def state(self) -> str:
        """A checksum of the files' sizes, times and inodes."""
        return self._state.hexdigest()

    def include(self, content: bytes) -> None:
        """Let the fingerprint stand for this, too."""
        self._digest.update(content)

    def fingerprint(self) -> str:
        """A checksum of the list: names, sizes and labels."""
        return self._digest.hexdigest()


class Index:
    """Reads rows and names by number, with pread: nothing is held in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[name]

    def rows(self, split: str, numbers: npt.NDArray[np.int64]) -> Rows:
        """The rows with these numbers."""
        descriptor, size = self._descriptor(f"rows.{split}"), ROW.itemsize
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes <= _AT_ONCE and len(numbers) * _FEW >= num_bytes // size:
            return np.frombuffer(os.pread(descriptor, num_bytes, 0), ROW)[numbers]
        found = np.empty(len(numbers), ROW)  # filled in place: of millions of rows a list would be five times as large
        if len(numbers) * _FEW < num_bytes // size:
            into = found.view(np.uint8).data
            for at, number in enumerate(numbers):
                os.preadv(descriptor, [into[at * size : (at + 1) * size]], int(number) * size)
            return found
        order, first = np.argsort(numbers), 0
        wanted = numbers[order]
        for rows in self.chunks(split):
            begin, end = np.searchsorted(wanted, (first, first + len(rows)))
            found[order[begin:end]] = rows[wanted[begin:end] - first]
            first += len(rows)
        return found

    def chunks(self, split: str) -> Iterator[Rows]:
        """All rows in order, some thousand at once."""
        descriptor, offset = self._descriptor(f"rows.{split}"), 0
        while content := os.pread(descriptor, _CHUNK * ROW.itemsize, offset):
            offset += len(content)
            yield np.frombuffer(content, ROW)

    def name(self, place: int) -> bytes:
        """The name that starts at `place`."""
        content = os.pread(self._descriptor("names"), 4096, place)
        return content.partition(b"\0")[0]

    def numbers(self, split: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Row numbers at `positions` of a divided split (`members.SPLIT`, int64)."""
        descriptor = self._descriptor(f"members.{split}")
        return np.frombuffer(b"".join(os.pread(descriptor, 8, at * 8) for at in positions.tolist()), "<i8")

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
