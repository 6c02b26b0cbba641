"""Read samples of one split directly from the shards' bytes: whole blocks in one request, or single samples."""

from __future__ import annotations

import bisect
import itertools
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.data.format.dataset import Dataset, FileOperationsCounter, Split, SyntheticImages
from hpcdl.data.format.hdf5 import ChunkReader, ColumnMap, ResidentMap, ShardMap, shard_map
from hpcdl.data.format.manifest import IMAGES, Field, ShardEntry
from hpcdl.data.format.order import Ids, Layout, NodeShare
from hpcdl.data.format.prefetch import aligned_empty
from hpcdl.data.format.shard_file import block_checksum, frame_checksum

Array = npt.NDArray[Any]
Values = Array | list[Array] | list[bytes]
# Part of the order of samples: another size would give other batches, and resumed runs other results.
WINDOW_BYTES = 64 * 1024**2
# Linux's limit for one preadv (IOV_MAX).
_MOST_VIEWS = 1024
_OF_HDF5 = {"opens": 1, "stats": 1}
"""HDF5's calls to open a file: one more stat, to see whether the name is a link; a link costs further calls."""
_REMEDY = "; look with `hpcdl inspect DIR --verify`, write it again with --repair"


class OpenFile:
    """A file open for reading; it stays open as long as this object exists."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


def read_exactly(file: OpenFile, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` starting at `offset`; CorruptError if the file ends too early, HpcdlError if the read fails."""
    num_read, size = 0, len(out)
    while num_read < size:
        count = _read(file, [out[num_read:] if num_read else out], offset + num_read, path)
        if count == 0:
            raise CorruptError(f"{path} ends at byte {offset + num_read}; check it with `hpcdl inspect --verify`")
        num_read += count


def _read(file: OpenFile, views: list[memoryview], offset: int, path: Path) -> int:
    try:
        return os.preadv(file.descriptor, views, offset)
    except OSError as error:
        # No CorruptError: the storage fails, and writing the shard again would not help.
        raise HpcdlError(f"cannot read {path} at byte {offset}: {error.strerror}") from error


class OpenShard:
    """A shard open for reading, thread-safe. Labels and positions stay in memory; the file may be closed and reopened.

    With `verified`, everything is checked against a checksum before it is used: the frame (labels, offsets, checksums)
    when the shard is opened, a whole block by the block's checksum, a part of a block by its samples' checksums. If
    samples have none (compressed blocks, shards of earlier versions), the block is checked once, before its first part
    is read.
    """

    def __init__(
        self,
        path: Path,
        entry: ShardEntry,
        *,
        operations: FileOperationsCounter,
        copy: Path | None = None,
        verified: bool = True,
    ) -> None:
        self._operations = operations
        self.map: ShardMap = shard_map(path)
        self._operations.add(**_OF_HDF5)
        # Only bytes are read from the copy: it has no name by which HDF5 could open it.
        self._source = copy or path
        self._verified = verified
        self._opening = threading.Lock()
        self._file: OpenFile | None = None
        self._chunks: ChunkReader | None = None
        # Ids count samples by the manifest: a shard with more or fewer would shift all behind it.
        if self.map.num_samples != entry.num_samples:
            raise CorruptError(f"shard {path} does not hold as many samples as the manifest says")
        if verified and self._frame_checksum() != entry.frame_checksum:
            raise CorruptError(f"shard {path}: its header (attributes, labels or checksums) is damaged{_REMEDY}")
        self.residents = {name: self._resident(resident_map) for name, resident_map in self.map.residents.items()}
        self._sample_checksums: dict[str, Array | None] = {}
        self._firsts: dict[str, int] = {}
        self._checked = {name: np.zeros(self.map.num_blocks, np.bool_) for name in self.map.columns}

    def _frame_checksum(self) -> str:
        file = self.file
        try:
            return frame_checksum(file.descriptor, self.map)
        except OSError as error:
            raise HpcdlError(f"cannot read {self.map.path}: {error.strerror}") from error

    def _resident(self, column: ResidentMap) -> Array:
        values = np.empty(column.shape, column.dtype)
        if values.size:
            read_exactly(self.file, values.reshape(-1).view(np.uint8).data, column.offset, self.map.path)
        # Mixed with another shard's int64, uint64 would become float in numpy, and it is no smaller.
        if column.dtype != np.int64 or not values.size or values.min() < 0 or values.max() >= 1 << 32:
            return values
        return values.astype(np.min_scalar_type(values.max()))  # class numbers in a small type: there are many samples

    @property
    def file(self) -> OpenFile:
        """The file, opened if necessary."""
        with self._opening:
            if self._file is None:
                self._file = self._opened()
            return self._file

    def _opened(self) -> OpenFile:
        try:
            file = OpenFile(self._source)
        except OSError as error:
            raise CorruptError(f"cannot open shard {self.map.path}: {error.strerror}; is it still there?") from error
        if self._source == self.map.path:
            self._operations.add(opens=1)
        return file

    def column(self, name: str) -> ColumnMap:
        """Return the position of a column; CorruptError if the shard has no column of that name."""
        if name not in self.map.columns:
            raise CorruptError(f"shard {self.map.path} holds no {name}, which the manifest lists{_REMEDY}")
        return self.map.columns[name]

    def read_block(self, name: str, block: int, out: Array) -> None:
        """Read a whole block of a column into `out`."""
        first, _ = self.map.block_range(block)
        if self.column(name).compressed:
            self._check_stored(name, block)
            self._decompress(first, out)
            return
        self.read_scattered(name, block, [out.reshape(-1).view(np.uint8).data])

    def read_scattered(self, name: str, block: int, views: list[memoryview]) -> None:
        """Read a whole uncompressed block into `views`, one after another; their total length is the block's."""
        column = self.column(name)
        offset = int(column.block_offsets[block])
        digest = xxhash.xxh3_64()
        for first in range(0, len(views), _MOST_VIEWS):
            part = views[first : first + _MOST_VIEWS]
            part_bytes = sum(map(len, part))
            if _read(self.file, part, offset, self.map.path) != part_bytes:  # rare: read again, view by view
                position = offset
                for view in part:
                    read_exactly(self.file, view, position, self.map.path)
                    position += len(view)
            offset += part_bytes
            if self._verified:
                for view in part:
                    digest.update(view)
        if self._verified and digest.intdigest() != column.checksums[block]:
            raise self._damaged(block)

    def read_sample(self, name: str, index: int, view: memoryview) -> None:
        """Read the sample at `index` of the shard, not compressed, into `view`."""
        first = self._firsts.get(name)
        if first is None:
            first = self._firsts[name] = int(self.column(name).block_offsets[0])
        read_exactly(self.file, view, first + index * len(view), self.map.path)
        self._check_sample(name, index, view)

    def read_compressed(self, name: str, index: int, out: Array) -> None:
        """Read the sample at `index` of the shard from its compressed block into `out`, shaped (1, ...)."""
        self._check_once(name, index // self.map.block_samples)
        self._decompress(index, out)

    def read_variable(self, name: str, index: int) -> bytearray:
        """Return the bytes of the sample at `index` of a column whose samples differ in length."""
        column = self.column(name)
        if column.offsets is None:
            raise CorruptError(f"shard {self.map.path} holds no offsets of {name}{_REMEDY}")
        begin, end = column.offsets[index : index + 2].tolist()
        # Without verification offsets may hold anything, and the next line makes room by them.
        if not 0 <= begin <= end <= column.offsets[-1]:
            raise self._damaged(index // self.map.block_samples)
        content = bytearray(end - begin)
        if content:
            base = int(column.block_offsets[0])
            read_exactly(self.file, memoryview(content), base + begin, self.map.path)
        self._check_sample(name, index, memoryview(content))
        return content

    def close(self) -> None:
        """Close the file once no thread reads from it."""
        with self._opening:
            # Only dropped: a thread that still reads holds its own reference, and the last one closes the file.
            self._file = self._chunks = None

    def _decompress(self, first: int, out: Array) -> None:
        with self._opening:
            if self._chunks is None:
                self._chunks = ChunkReader(self.map.path)
                self._operations.add(**_OF_HDF5)
            chunks = self._chunks
        chunks.read(first, out)

    def _check_sample(self, name: str, index: int, content: memoryview) -> None:
        if not self._verified:
            return
        block, numbers = index // self.map.block_samples, self.sample_checksums(name)
        if numbers is None:
            self._check_once(name, block)
        elif xxhash.xxh3_64_intdigest(content) != numbers.item(index):
            raise self._damaged(block)

    def sample_checksums(self, name: str) -> Array | None:
        """Return the checksum of each sample of a column (uint64); None if samples have no checksums."""
        if name in self._sample_checksums:
            return self._sample_checksums[name]
        offset = self.column(name).sample_checksums_offset
        numbers = None
        if offset is not None:
            # Read when first asked for: whoever reads whole blocks never needs them.
            numbers = np.empty(self.map.num_samples, "<u8")
            read_exactly(self.file, numbers.data.cast("B"), offset, self.map.path)
        self._sample_checksums[name] = numbers
        return numbers

    def _check_once(self, name: str, block: int) -> None:
        if not self._checked[name][block]:
            self._check_stored(name, block)
            self._checked[name][block] = True

    def _check_stored(self, name: str, block: int) -> None:
        """Check a block's stored bytes against its checksum."""
        if not self._verified:
            return
        # The reference keeps the file open, if another thread closes the shard meanwhile.
        column, file = self.column(name), self.file
        if block_checksum(file.descriptor, column, block) != column.checksums[block]:
            raise self._damaged(block)

    def _damaged(self, block: int) -> CorruptError:
        first, stop = self.map.block_range(block)
        return CorruptError(f"shard {self.map.path}: block {block} (samples {first} to {stop - 1}) is damaged{_REMEDY}")


class Reader(Protocol):
    """Reads a field's samples by id into arrays of the caller."""

    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout

    def read_samples(self, ids: Ids, out: Array) -> None:
        """Read the samples `ids` into `out`, shaped (len(ids), *sample_shape)."""


class SplitReader:
    """The samples of one split of a folder; ids count them over the shards in the manifest's order.

    `columns` are the fields stored in blocks with samples of fixed length. With a node's `share`, `layout` covers only
    that share.
    """

    def __init__(self, folder: Path, dataset: Dataset, split: Split, share: NodeShare | None = None) -> None:
        if split.entry is None or dataset.manifest is None:
            raise TypeError("a split without shards has no SplitReader")
        manifest = dataset.manifest
        self._folder, self._entries = folder, split.entry.shards
        self._copies, self._verified, self._operations = dataset.copies, dataset.verified, dataset.operations
        counts = [entry.num_samples for entry in self._entries]
        self._firsts = [0, *itertools.accumulate(counts)]
        self._starts = np.array(self._firsts)
        self._shards: dict[int, OpenShard] = {}
        self._open: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        # Half of the limit: MPI, TensorFlow and other readers open files too.
        self._most_open = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._block_samples = manifest.block_samples
        self.fields = dataset.fields
        self.compressed = manifest.compression is not None
        window_blocks = max(1, WINDOW_BYTES // max(1, manifest.window_sample_bytes * manifest.block_samples))
        layout = Layout.of_shards(counts, manifest.block_samples, window_blocks)
        self.layout = layout.part(share) if share else layout
        self._blocks: list[int] = self.layout.starts.tolist()
        columns = [field for field in dataset.fields if not (field.resident or field.ragged)]
        self.columns = {field.name: ColumnReader(self, field) for field in columns}

    @property
    def shard_numbers(self) -> range:
        """The numbers of the shards that are read, in the manifest's order."""
        return self.shards_of(range(self._blocks[0], self._blocks[-1]))

    def shards_of(self, samples: range) -> range:
        """Return the numbers of the shards that hold `samples`, a range of ids."""
        if not samples:
            return range(0)
        return range(self.place(samples[0])[0], self.place(samples[-1])[0] + 1)

    def shard(self, number: int) -> OpenShard:
        """Return the shard `number`; the files of the least recently used shards are closed."""
        with self._lock:  # a thread for each field reads its windows
            return self._shard(number)

    def _shard(self, number: int) -> OpenShard:
        open_shard = self._shards.get(number)
        if open_shard is None:
            entry = self._entries[number]
            path = self._folder / entry.file
            copy = self._copies.get(path)
            open_shard = OpenShard(path, entry, operations=self._operations, copy=copy, verified=self._verified)
            self._shards[number] = open_shard
        self._open[number] = None
        self._open.move_to_end(number)
        if len(self._open) > self._most_open:
            # The object stays: its labels are needed all the time, its file only for a while.
            self._shards[self._open.popitem(last=False)[0]].close()
        return open_shard

    def place(self, sample: int) -> tuple[int, int]:
        """Return the shard number of a sample id and its place in the shard."""
        number = bisect.bisect_right(self._firsts, sample) - 1
        return number, sample - self._firsts[number]

    def describe(self, sample: int) -> str:
        """Name a sample for messages: its shard, and its place there, from 0."""
        number, number_in_shard = self.place(sample)
        return f"shard {self._folder / self._entries[number].file}: sample {number_in_shard}"

    def read(self, field: Field, ids: Ids) -> Values:
        """Read a field of the samples `ids`, each separately: an array, or a list of arrays or of encoded files."""
        if field.ragged:
            return self._read_ragged(field, ids)
        values = aligned_empty((len(ids), *field.shape), field.dtype)
        if not field.resident:
            self.read_samples(ids, values, field.name)
            return values
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            values[chosen] = self._resident(number, field.name)[ids[chosen] - self._firsts[number]]
        return values

    def resident_of_blocks(self, name: str, blocks: Sequence[int]) -> Array:
        """Return the values of a resident field for the samples of `blocks`, concatenated."""
        block_values = []
        for block in blocks:
            first, stop = self._blocks[block], self._blocks[block + 1]
            number, first_in_shard = self.place(first)
            block_values.append(self._resident(number, name)[first_in_shard : first_in_shard + stop - first])
        return np.concatenate(block_values)

    def _resident(self, number: int, name: str) -> Array:
        """Return a resident field of a whole shard, which needs no open file."""
        # Labels of a closed shard are in memory; asking for the shard would open it and close another.
        shard = self._shards.get(number) or self.shard(number)
        if name not in shard.residents:
            raise CorruptError(f"shard {shard.map.path} holds no {name}, which the manifest lists{_REMEDY}")
        return shard.residents[name]

    def read_samples(self, ids: Ids, out: Array, name: str) -> None:
        """Read single samples of a column, each with one request; compressed samples each from their block."""
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        places_in_shards = zip(numbers.tolist(), (ids - self._starts[numbers]).tolist(), strict=True)
        if self.compressed:
            for row, (number, number_in_shard) in enumerate(places_in_shards):
                self.shard(number).read_compressed(name, number_in_shard, out[row : row + 1])
            return
        view, position = out.reshape(-1).view(np.uint8).data, 0
        size = len(view) // max(1, len(ids))
        for number, number_in_shard in places_in_shards:
            self.shard(number).read_sample(name, number_in_shard, view[position : position + size])
            position += size

    def read_block(self, block: int, out: Array, name: str) -> int:
        """Read a whole block into the first rows of `out`; return the number of samples read."""
        first, stop = self._blocks[block], self._blocks[block + 1]
        number, first_in_shard = self.place(first)
        self.shard(number).read_block(name, first_in_shard // self._block_samples, out[: stop - first])
        return stop - first

    def read_scattered(self, block: int, views: list[memoryview], name: str) -> None:
        """Read a whole block into `views`, one after another; their total length is the block's."""
        number, first_in_shard = self.place(self._blocks[block])
        self.shard(number).read_scattered(name, first_in_shard // self._block_samples, views)

    def _read_ragged(self, field: Field, ids: Ids) -> list[Array] | list[bytes]:
        contents = (self.shard(n).read_variable(field.name, number) for n, number in map(self.place, ids.tolist()))
        if field.encoded:
            return list(map(bytes, contents))
        return [np.frombuffer(content, field.dtype).reshape(-1, *field.shape[1:]) for content in contents]

    def close(self) -> None:
        """Close all files."""
        for shard in self._shards.values():
            shard.close()
        self._open.clear()


class ColumnReader:
    """One field that is stored in blocks and has samples of fixed shape."""

    def __init__(self, split: SplitReader, field: Field) -> None:
        self._split, self._name = split, field.name
        self.sample_shape, self.dtype = tuple(field.shape), np.dtype(field.dtype)
        self.sample_bytes, self.compressed, self.layout = field.row_bytes, split.compressed, split.layout

    def read_samples(self, ids: Ids, out: Array) -> None:
        """Read single samples, each with one request."""
        self._split.read_samples(ids, out, self._name)

    def read_block(self, block: int, out: Array) -> int:
        """Read a whole block into the first rows of `out`; return the number of samples read."""
        return self._split.read_block(block, out, self._name)

    def read_scattered(self, block: int, views: list[memoryview]) -> None:
        """Read a whole block into `views`, one after another."""
        self._split.read_scattered(block, views, self._name)


class SyntheticColumn:
    """One of the two fields of synthetic samples."""

    def __init__(self, images: SyntheticImages, field: Field, layout: Layout) -> None:
        self._images, self._name = images, field.name
        self.sample_shape, self.dtype, self.layout = tuple(field.shape), np.dtype(field.dtype), layout

    def read_samples(self, ids: Ids, out: Array) -> None:
        """Make the samples `ids`."""
        if self._name == IMAGES:
            self._images.read_samples(ids, out)
        else:
            out[...] = self._images.labels(ids)


class SyntheticReader:
    """Reads synthetic samples, made from a seed."""

    def __init__(self, dataset: Dataset, share: NodeShare | None = None) -> None:
        if dataset.synthetic is None:
            raise TypeError("not a synthetic data set")
        images = SyntheticImages(dataset.synthetic, seed=dataset.seed)
        # Fixed, as WINDOW_BYTES is: these sizes are part of the order of samples.
        layout = Layout.uniform(dataset.synthetic.num_samples, 64, 64)
        self.layout = layout.part(share) if share else layout
        self.fields = dataset.fields
        self.columns = {field.name: SyntheticColumn(images, field, self.layout) for field in dataset.fields}

    def read(self, field: Field, ids: Ids) -> Array:
        """Return a field of the samples `ids`."""
        values = aligned_empty((len(ids), *field.shape), field.dtype)
        self.columns[field.name].read_samples(ids, values)
        return values

    def close(self) -> None:
        """Do nothing: no file is open."""


def open_reader(dataset: Dataset, split: Split, share: NodeShare | None = None) -> SplitReader | SyntheticReader:
    """Return the reader of a split, or of a node's `share` of it."""
    if dataset.folder is None:
        return SyntheticReader(dataset, share)
    return SplitReader(dataset.folder, dataset, split, share)
