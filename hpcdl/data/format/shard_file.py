"""Write the bytes of a shard block by block with checksums, and verify them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdl.core.errors import CorruptError
from hpcdl.data.format.hdf5 import (
    ChunkWriter,
    ColumnMap,
    ColumnOffsets,
    ShardFrame,
    ShardMap,
    create_shard,
    shard_map,
)
from hpcdl.data.format.manifest import ShardEntry
from hpcdl.data.format.prefetch import aligned_empty

Array = npt.NDArray[Any]
_PIECE_BYTES = 2 << 20
"""Size of one read for checksums: holds most blocks whole, while they are still in the core's own cache."""
_WRITEBACK_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


class _Column:
    """The checksums and write positions of one column of a shard under construction."""

    def __init__(self, frame: ShardFrame, places: ColumnOffsets) -> None:
        self.places = places
        self.checksums = np.zeros(-(-frame.num_samples // frame.block_samples), "<u8")
        self.sample_checksums = np.zeros(frame.num_samples, "<u8")
        self.end = self.started = places.data or 0


class NewShard:
    """A shard under construction; the blocks of each column must be written in order."""

    def __init__(self, path: Path, frame: ShardFrame) -> None:
        self._path = path
        self._block_samples = frame.block_samples
        self._places = create_shard(path, frame)
        self._columns = {name: _Column(frame, places) for name, places in self._places.columns.items()}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._chunks = ChunkWriter(self._descriptor) if frame.filters else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._chunks:
            self._chunks.abandon()  # first: HDF5 still writes to the descriptor
        os.close(self._descriptor)

    def write_block(self, name: str, first: int, block: Array, sizes: Sequence[int]) -> None:
        """Append a block of a column; `first` is its first sample, `sizes` are the bytes of each sample."""
        if self._chunks:
            # HDF5 packs the block: its stored bytes, which checksums are of, are known when the file is closed.
            self._chunks.write(first, block)
            return
        column = self._columns[name]
        content = block.reshape(-1).view(np.uint8).data if block.size else memoryview(b"")
        column.checksums[first // self._block_samples] = xxhash.xxh3_64_intdigest(content)
        if column.places.sample_checksums is not None:
            column.sample_checksums[first : first + len(sizes)] = list(sample_checksums(content, sizes))
        self._write(content, column.end)
        column.end += len(content)
        if column.end - column.started >= _WRITEBACK_BYTES:
            start_writeback(self._descriptor, column.started, column.end - column.started)
            column.started = column.end

    def finish(self, residents: Mapping[str, Array], offsets: Mapping[str, Array]) -> str:
        """Write the resident fields, checksums and `offsets` of ragged columns; return the frame checksum."""
        if self._chunks:
            self._chunks.close()  # first: HDF5 writes the last chunks, whose checksums follow
            self._chunks = None
            written_map = shard_map(self._path)
            for name, column in self._columns.items():
                column.checksums[:] = list(block_checksums(self._descriptor, written_map.columns[name]))
        for name, values in residents.items():
            self._write(values.reshape(-1).view(np.uint8).data, self._places.residents[name])
        for name, column in self._columns.items():
            self._write(column.checksums.data.cast("B"), column.places.checksums)
            if column.places.sample_checksums is not None:
                self._write(column.sample_checksums.data.cast("B"), column.places.sample_checksums)
            if column.places.offsets is not None:
                self._write(offsets[name].astype("<i8").data.cast("B"), column.places.offsets)
        # Read from the file, because HDF5 has written parts of the frame itself.
        return frame_checksum(self._descriptor, shard_map(self._path))

    def _write(self, content: memoryview, offset: int) -> None:
        num_written = 0
        while num_written < len(content):
            # Linux writes at most 2 GiB in one call.
            num_written += os.pwrite(self._descriptor, content[num_written:], offset + num_written)


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Ask the kernel to start writing a range to the device, so that the final fsync has little left to do.

    This is Linux's sync_file_range, a hint: if it is missing or fails, the fsync does all the work.
    """
    with contextlib.suppress(AttributeError, OSError):
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
        # Without these types ctypes would pass offsets as C int, and cut them at 2 GiB.
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        call(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


def sample_checksums(content: memoryview, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the XXH3-64 of samples stored one after another in `content`."""
    start = 0
    for size in sizes:
        yield xxhash.xxh3_64_intdigest(content[start : start + size])
        start += size


def block_checksum(descriptor: int, column: ColumnMap, block: int) -> int:
    """Return the XXH3-64 of a block's bytes as stored in the file."""
    return _block_checksum(descriptor, int(column.block_offsets[block]), int(column.block_bytes[block]), _piece())


def block_checksums(descriptor: int, column: ColumnMap) -> Iterator[int]:
    """Yield `block_checksum` of each block."""
    piece = _piece()
    extents = zip(column.block_offsets.tolist(), column.block_bytes.tolist(), strict=True)
    return (_block_checksum(descriptor, offset, size, piece) for offset, size in extents)


def _piece() -> memoryview:
    """Return a buffer to reuse for all reads: touching fresh memory costs as much as filling it."""
    return aligned_empty((_PIECE_BYTES,), np.uint8).data


def _block_checksum(descriptor: int, offset: int, size: int, piece: memoryview) -> int:
    if 0 < size <= len(piece) and os.preadv(descriptor, [piece[:size]], offset) == size:
        return xxhash.xxh3_64_intdigest(piece[:size])  # one call takes half the time of an incremental digest
    return int(_checksum(descriptor, [(offset, offset + size)], piece).intdigest())


def frame_checksum(descriptor: int, shard: ShardMap) -> str:
    """Return the XXH3-64 of every byte of the file outside the blocks, in order."""
    size = os.fstat(descriptor).st_size
    starts, lengths = shard.block_offsets, shard.block_bytes
    # Compressed blocks are in the order of HDF5's allocation, and columns one after another.
    order = np.argsort(starts, kind="stable")
    gaps, position = [], 0
    for offset, length in zip(starts[order].tolist(), lengths[order].tolist(), strict=True):
        if offset > position:
            gaps.append((position, offset))
        position = max(position, offset + length)
    return str(_checksum(descriptor, [*gaps, (position, size)], _piece()).hexdigest())


def _checksum(descriptor: int, ranges: list[tuple[int, int]], piece: memoryview) -> Any:
    """Return the digest of the concatenated `ranges`, read through the buffer `piece`."""
    digest = xxhash.xxh3_64()
    for start, stop in ranges:
        while start < stop:
            count = os.preadv(descriptor, [piece[: stop - start]], start)
            if count == 0:  # the file is cut short: the digest will differ
                break
            digest.update(piece[:count])
            start += count
    return digest


def faults(folder: Path, entry: ShardEntry, on_bytes: Callable[[int], None] = lambda _: None) -> list[str]:
    """List the faults of a shard, block by block; empty if it is intact. `on_bytes` gets the size of each block."""
    path = folder / entry.file
    try:
        size = path.stat().st_size
        # First: HDF5 reports a file that was cut short as a damaged header.
        if size != entry.num_bytes:
            return [f"{entry.file}: {size} bytes, {entry.num_bytes} were written"]
        frame_map = shard_map(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except CorruptError as error:
        return [f"{entry.file}: header ({error})"]
    except OSError as error:
        return [f"{entry.file}: cannot be read ({error.strerror})"]
    try:
        # A failed read is a fault like others, so that the remaining shards are still checked.
        return _compare(descriptor, frame_map, entry, on_bytes)
    except OSError as error:
        return [f"{entry.file}: cannot be read ({error.strerror})"]
    finally:
        os.close(descriptor)


def _compare(descriptor: int, shard: ShardMap, entry: ShardEntry, on_bytes: Callable[[int], None]) -> list[str]:
    frame_fits = frame_checksum(descriptor, shard) == entry.frame_checksum
    damaged_blocks = []
    for column in shard.columns.values():
        of_column = "" if len(shard.columns) == 1 else f" of {column.name}"
        found_and_written = zip(
            block_checksums(descriptor, column), column.checksums.tolist(), column.block_bytes.tolist(), strict=True
        )
        for block, (checksum, stored_checksum, size) in enumerate(found_and_written):
            if checksum != stored_checksum:
                first, stop = shard.block_range(block)
                damaged_blocks.append(f"{entry.file}: block {block}{of_column} (samples {first} to {stop - 1})")
            on_bytes(size)
    if not frame_fits:
        # The blocks' checksums are in the frame: if it is damaged, they prove nothing about the blocks.
        return [f"{entry.file}: header (attributes, labels or block checksums)"]
    return damaged_blocks
