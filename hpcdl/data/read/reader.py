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

from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.data.dataset import Dataset, Split
from hpcdl.data.format.hdf5 import ChunkReader, shard_map
from hpcdl.data.format.layout import ShardMap
from hpcdl.data.read.order import Ids, Layout
from hpcdl.data.synthetic import SyntheticImages

Array = npt.NDArray[Any]
WINDOW_BYTES = 64 * 1024**2
_MOST_VIEWS = 1024


def read_exactly(descriptor: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` from `offset` on; CorruptError where the file ends first, HpcdlError where the system cannot read."""
    done, size = 0, len(out)
    while done < size:
        try:
            count = os.preadv(descriptor, [out[done:] if done else out], offset + done)
        except OSError as error:
            raise HpcdlError(f"cannot read {path} at byte {offset + done}: {error.strerror}") from error
        if count == 0:
            raise CorruptError(f"{path} ends at byte {offset + done}; check it with `hpcdl inspect --verify`")
        done += count


class OpenShard:
    """A shard being read; its labels and places are kept, its file may be closed and opened again."""

    def __init__(self, path: Path, num_classes: int, copy: Path | None = None) -> None:
        self.map: ShardMap = shard_map(path)
        self._source = copy or path
        self.base = int(self.map.block_offsets[0]) if self.map.num_blocks else 0
        self._descriptor: int | None = None
        self._chunks: ChunkReader | None = None
        labels = np.empty(self.map.num_samples, "<i8")
        if self.map.num_samples:
            read_exactly(self.descriptor, labels.data.cast("B"), self.map.labels_offset, path)
        fits = labels.size == 0 or 0 <= labels.min() <= labels.max() < num_classes
        self.labels = labels.astype(np.min_scalar_type(num_classes)) if fits else labels

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

    def read_images(self, first: int, out: Array) -> None:
        """Read the images from sample `first` of the shard on into `out`."""
        if self.map.compressed:
            self._chunks = self._chunks or ChunkReader(self.map.path)
            self._chunks.read(first, out)
        elif out.size:
            offset = self.base + first * (out.nbytes // len(out))
            read_exactly(self.descriptor, out.data.cast("B"), offset, self.map.path)

    def read_encoded(self, first: int, stop: int) -> list[bytes]:
        """The JPEG or PNG files of the samples `first` to `stop` - 1 of the shard."""
        offsets = self.map.offsets
        if offsets is None:
            raise CorruptError(f"shard {self.map.path} holds no encoded images")
        begin = int(offsets[first])
        content = np.empty(int(offsets[stop]) - begin, np.uint8)
        read_exactly(self.descriptor, content.data, self.base + begin, self.map.path)
        view = content.data
        ends = (offsets[first : stop + 1] - begin).tolist()
        return [bytes(view[start:end]) for start, end in itertools.pairwise(ends)]

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        if self._chunks is not None:
            self._chunks.close()
        self._descriptor = self._chunks = None


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
        self._paths = [folder / shard.file for shard in split.entry.shards]
        self._copies = dataset.copies
        counts = [shard.num_samples for shard in split.entry.shards]
        self._firsts = [0, *itertools.accumulate(counts)]
        self._shards: dict[int, OpenShard] = {}
        self._open: OrderedDict[int, None] = OrderedDict()
        self._most_open = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._num_classes = dataset.manifest.num_classes
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
            path = self._paths[number]
            found = OpenShard(path, self._num_classes, self._copies.get(path))
            if found.map.num_samples != self._firsts[number + 1] - self._firsts[number]:
                raise CorruptError(f"shard {self._paths[number]} does not hold as many samples as the manifest says")
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
        if self.compressed:
            for row, sample in enumerate(ids.tolist()):
                number, place = self.place(sample)
                self.shard(number).read_images(place, out[row : row + 1])
            return
        view, size = out.data.cast("B"), self.sample_bytes
        for row, sample in enumerate(ids.tolist()):
            number = bisect.bisect_right(self._firsts, sample) - 1
            shard = self.shard(number)
            offset = shard.base + (sample - self._firsts[number]) * size
            read_exactly(shard.descriptor, view[row * size : (row + 1) * size], offset, shard.map.path)

    def read_block(self, block: int, out: Array) -> int:
        """Read a whole block into the head of `out`; the number of samples read."""
        first, stop = self._blocks[block], self._blocks[block + 1]
        number, place = self.place(first)
        self.shard(number).read_images(place, out[: stop - first])
        return stop - first

    def read_scattered(self, block: int, views: list[memoryview]) -> None:
        """Read a whole block into `views`, one behind the other; together they are as long as the block."""
        number, place = self.place(self._blocks[block])
        shard = self.shard(number)
        offset = shard.base + place * self.sample_bytes
        for first in range(0, len(views), _MOST_VIEWS):
            part = views[first : first + _MOST_VIEWS]
            wanted = sum(map(len, part))
            if os.preadv(shard.descriptor, part, offset) != wanted:  # rare: once more, view by view
                position = offset
                for view in part:
                    read_exactly(shard.descriptor, view, position, shard.map.path)
                    position += len(view)
            offset += wanted

    def read_encoded(self, ids: Ids) -> list[bytes]:
        """The files of samples, in the order of `ids`."""
        return [self.shard(number).read_encoded(place, place + 1)[0] for number, place in map(self.place, ids.tolist())]

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
