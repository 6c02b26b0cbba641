"""Reads samples of one split: whole blocks in one go, or single samples, straight from the shards' bytes."""

from __future__ import annotations

import bisect
import itertools
import os
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.data.dataset import Dataset, Split
from hpcdl.data.format.hdf5 import ChunkReader, ShardMap, shard_map
from hpcdl.data.format.manifest import ShardEntry
from hpcdl.data.format.shard_file import block_checksum, frame_checksum
from hpcdl.data.read.order import Ids, Layout
from hpcdl.data.synthetic import SyntheticImages

Array = npt.NDArray[Any]
WINDOW_BYTES = 64 * 1024**2
_MOST_VIEWS = 1024
_REMEDY = "; look with `hpcdl inspect DIR --verify`, write it again with --repair"


def read_exactly(descriptor: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` from `offset` on; CorruptError where the file ends first, HpcdlError where the system cannot read."""
    done, size = 0, len(out)
    while done < size:
        count = _read(descriptor, [out[done:] if done else out], offset + done, path)
        if count == 0:
            raise CorruptError(f"{path} ends at byte {offset + done}; check it with `hpcdl inspect --verify`")
        done += count


def _read(descriptor: int, views: list[memoryview], offset: int, path: Path) -> int:
    try:
        return os.preadv(descriptor, views, offset)
    except OSError as error:
        raise HpcdlError(f"cannot read {path} at byte {offset}: {error.strerror}") from error


class OpenShard:
    """A shard being read; its labels and places are kept, its file may be closed and opened again.

    With `verified` all that is read is held against a checksum before anybody gets it: the frame (labels, offsets,
    checksums) when the shard is opened, a whole block by the block's own, a part of a block by its samples' own. Where
    samples have none (compressed blocks, shards of earlier versions) the block is checked, once, before its first part
    is read.
    """

    def __init__(
        self, path: Path, entry: ShardEntry, num_classes: int, *, copy: Path | None = None, verified: bool = True
    ) -> None:
        self.map: ShardMap = shard_map(path)
        self._source = copy or path
        self._verified = verified
        self.base = int(self.map.block_offsets[0]) if self.map.num_blocks else 0
        self._descriptor: int | None = None
        self._chunks: ChunkReader | None = None
        if self.map.num_samples != entry.num_samples:
            raise CorruptError(f"shard {path} does not hold as many samples as the manifest says")
        if verified and frame_checksum(self.descriptor, self.map) != entry.frame_checksum:
            raise CorruptError(f"shard {path}: its header (attributes, labels or checksums) is damaged{_REMEDY}")
        self.labels = self._labels(num_classes)
        self._sample_checksums: Array | None = None
        self._checked = np.zeros(self.map.num_blocks, np.bool_)

    def _labels(self, num_classes: int) -> Array:
        labels = self._numbers("<i8", self.map.labels_offset)
        fits = labels.size == 0 or 0 <= labels.min() <= labels.max() < num_classes
        return labels.astype(np.min_scalar_type(num_classes)) if fits else labels

    def _numbers(self, dtype: str, offset: int) -> Array:
        """One number a sample, from `offset` of the file on."""
        numbers = np.empty(self.map.num_samples, dtype)
        if numbers.size:
            read_exactly(self.descriptor, numbers.data.cast("B"), offset, self.map.path)
        return numbers

    @property
    def descriptor(self) -> int:
        """The file, opened if need be."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._source, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CorruptError(
                    f"cannot open shard {self.map.path}: {error.strerror}; is it still there?"
                ) from error
        return self._descriptor

    def read_block(self, block: int, out: Array) -> None:
        """Read a whole block into `out`."""
        first, _ = self.map.block_range(block)
        if self.map.compressed:
            self._check_stored(block)
            self._decompress(first, out)
            return
        self.read_scattered(block, [out.data.cast("B")])

    def read_scattered(self, block: int, views: list[memoryview]) -> None:
        """Read a whole block, not compressed, into `views`, one behind the other; together they are as long as it."""
        offset = int(self.map.block_offsets[block])
        digest = xxhash.xxh3_64()
        for first in range(0, len(views), _MOST_VIEWS):
            part = views[first : first + _MOST_VIEWS]
            wanted = sum(map(len, part))
            if _read(self.descriptor, part, offset, self.map.path) != wanted:  # rare: once more, view by view
                position = offset
                for view in part:
                    read_exactly(self.descriptor, view, position, self.map.path)
                    position += len(view)
            offset += wanted
            if self._verified:
                for view in part:
                    digest.update(view)
        if self._verified and digest.intdigest() != self.map.checksums[block]:
            raise self._damaged(block)

    def read_sample(self, place: int, out: Array) -> None:
        """Read the sample at `place` of the shard into `out`, shaped (1, H, W, C)."""
        if self.map.compressed:
            self._check_once(place // self.map.block_samples)
            self._decompress(place, out)
            return
        view = out.data.cast("B")
        read_exactly(self.descriptor, view, self.base + place * len(view), self.map.path)
        self._check_sample(place, view)

    def read_encoded(self, place: int) -> bytes:
        """The JPEG or PNG file of the sample at `place` of the shard."""
        if self.map.offsets is None:
            raise CorruptError(f"shard {self.map.path} holds no encoded images")
        begin, end = self.map.offsets[place : place + 2].tolist()
        content = bytearray(end - begin)
        read_exactly(self.descriptor, memoryview(content), self.base + begin, self.map.path)
        self._check_sample(place, memoryview(content))
        return bytes(content)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._chunks is not None:
            self._chunks.close()
        self._descriptor = self._chunks = None

    def _decompress(self, first: int, out: Array) -> None:
        self._chunks = self._chunks or ChunkReader(self.map.path)
        self._chunks.read(first, out)

    def _check_sample(self, place: int, content: memoryview) -> None:
        if not self._verified:
            return
        offset, block = self.map.sample_checksums_offset, place // self.map.block_samples
        if offset is None:
            self._check_once(block)
            return
        if self._sample_checksums is None:
            self._sample_checksums = self._numbers("<u8", offset)
        if xxhash.xxh3_64_intdigest(content) != self._sample_checksums[place]:
            raise self._damaged(block)

    def _check_once(self, block: int) -> None:
        if not self._checked[block]:
            self._check_stored(block)
            self._checked[block] = True

    def _check_stored(self, block: int) -> None:
        """Read a block's bytes as they lie in the file, for their checksum alone."""
        if self._verified and block_checksum(self.descriptor, self.map, block) != self.map.checksums[block]:
            raise self._damaged(block)

    def _damaged(self, block: int) -> CorruptError:
        first, stop = self.map.block_range(block)
        return CorruptError(f"shard {self.map.path}: block {block} (samples {first} to {stop - 1}) is damaged{_REMEDY}")


class Reader(Protocol):
    """Reads samples by id into arrays of the caller."""

    def labels(self, ids: Ids) -> Ids:
        """The labels of samples."""

    def read_samples(self, ids: Ids, out: Array) -> None:
        """Read the samples `ids` into `out`, shaped (len(ids), H, W, C)."""


class SplitReader:
    """The samples of one split of a folder; ids count them over the shards in the manifest's order."""

    def __init__(self, folder: Path, dataset: Dataset, split: Split) -> None:
        if split.entry is None or dataset.manifest is None:
            raise TypeError("a split without shards has no SplitReader")
        self._folder, self._entries = folder, split.entry.shards
        self._copies, self._verified = dataset.copies, dataset.verified
        counts = [entry.num_samples for entry in self._entries]
        self._firsts = [0, *itertools.accumulate(counts)]
        self._shards: dict[int, OpenShard] = {}
        self._open: OrderedDict[int, None] = OrderedDict()
        self._most_open = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._num_classes, self._block_samples = dataset.manifest.num_classes, dataset.manifest.block_samples
        self.sample_shape = dataset.sample_shape
        self.dtype = np.dtype(dataset.dtype)
        self.compressed = dataset.manifest.compression is not None
        self.sample_bytes = int(np.prod(dataset.sample_shape)) * self.dtype.itemsize
        window_blocks = max(1, WINDOW_BYTES // max(1, self.sample_bytes * dataset.manifest.block_samples))
        self.layout = Layout.of_shards(counts, dataset.manifest.block_samples, window_blocks)
        self._blocks: list[int] = self.layout.starts.tolist()

    def shard(self, number: int) -> OpenShard:
        """The shard `number`; the files of those used longest ago are closed."""
        found = self._shards.get(number)
        if found is None:
            entry = self._entries[number]
            path = self._folder / entry.file
            found = OpenShard(path, entry, self._num_classes, copy=self._copies.get(path), verified=self._verified)
            self._shards[number] = found
        self._open[number] = None
        self._open.move_to_end(number)
        if len(self._open) > self._most_open:
            self._shards[self._open.popitem(last=False)[0]].close()
        return found

    def place(self, sample: int) -> tuple[int, int]:
        """Shard number and place in it of a sample id."""
        number = bisect.bisect_right(self._firsts, sample) - 1
        return number, sample - self._firsts[number]

    def labels(self, ids: Ids) -> Ids:
        """The labels of samples."""
        numbers = np.searchsorted(self._firsts, ids, side="right") - 1
        result = np.empty(len(ids), np.int64)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            result[chosen] = self.shard(number).labels[ids[chosen] - self._firsts[number]]
        return result

    def read_samples(self, ids: Ids, out: Array) -> None:
        """Read single samples, each with one request; of compressed data each from its block."""
        for row, sample in enumerate(ids.tolist()):
            number, place = self.place(sample)
            self.shard(number).read_sample(place, out[row : row + 1])

    def read_block(self, block: int, out: Array) -> int:
        """Read a whole block into the head of `out`; the number of samples read."""
        first, stop = self._blocks[block], self._blocks[block + 1]
        number, place = self.place(first)
        self.shard(number).read_block(place // self._block_samples, out[: stop - first])
        return stop - first

    def read_scattered(self, block: int, views: list[memoryview]) -> None:
        """Read a whole block into `views`, one behind the other; together they are as long as the block."""
        number, place = self.place(self._blocks[block])
        self.shard(number).read_scattered(place // self._block_samples, views)

    def read_encoded(self, ids: Ids) -> list[bytes]:
        """The files of samples, in the order of `ids`."""
        return [self.shard(number).read_encoded(place) for number, place in map(self.place, ids.tolist())]

    def close(self) -> None:
        """Close all files."""
        for shard in self._shards.values():
            shard.close()
        self._open.clear()


class SyntheticReader:
    """Samples made from a seed."""

    def __init__(self, dataset: Dataset) -> None:
        if dataset.synthetic is None:
            raise TypeError("not a synthetic data set")
        self._images = SyntheticImages(dataset.synthetic, seed=dataset.seed)
        self.sample_shape, self.dtype = dataset.sample_shape, np.dtype(dataset.dtype)
        self.layout = Layout.uniform(dataset.synthetic.num_samples, 64, 64)

    def labels(self, ids: Ids) -> Ids:
        """The labels of samples."""
        return self._images.labels(ids)

    def read_samples(self, ids: Ids, out: Array) -> None:
        """Make samples."""
        self._images.read_samples(ids, out)

    def close(self) -> None:
        """Nothing is open."""


def open_reader(dataset: Dataset, split: Split) -> SplitReader | SyntheticReader:
    """The reader of a split."""
    if dataset.folder is None:
        return SyntheticReader(dataset)
    return SplitReader(dataset.folder, dataset, split)
