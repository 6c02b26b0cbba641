"""HDF5 files: the only file that uses h5py. Shards (docs/reference/shard-format.md), and files of arrays as sources."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import CorruptError, SourceError, UsageError

Array = npt.NDArray[Any]
ATTRIBUTE_LIMIT = 60_000
"""Bytes; HDF5 keeps attributes up to 64 KiB in the object header that every HDF5 version reads."""
_METADATA_BYTES = 65_536
_MOST_CHUNK_BYTES = 256 * 1024**2
_MOST_RATIO = 2000
"""No filter packs better."""
_DAMAGED = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, MemoryError, SystemError)
"""What h5py raises for files that are not as they should be."""
_COPY_BYTES = 32 * 1024**2


@dataclass(frozen=True, kw_only=True)
class ShardFrame:
    """What a shard is made with: everything but the samples. `data_shape` is that of /images, or (bytes,) of /bytes."""

    num_samples: int
    data_name: str
    data_shape: tuple[int, ...]
    dtype: str
    block_samples: int
    attributes: Mapping[str, Any]
    class_names: tuple[str, ...]
    alignment: int = 4096
    filters: Mapping[str, Any] | None = None
    sample_checksums: bool = True
    """Whether each sample has a checksum of its own; compressed samples have none."""


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """Where things lie in a shard, in bytes from the start of the file; `offsets` (within /bytes): encoded data."""

    path: Path
    num_samples: int
    block_samples: int
    data_name: str
    data_shape: tuple[int, ...]
    dtype: str
    compressed: bool
    block_offsets: npt.NDArray[np.int64]
    block_bytes: npt.NDArray[np.int64]
    labels_offset: int
    checksums: npt.NDArray[np.uint64]
    sample_checksums_offset: int | None
    offsets: npt.NDArray[np.int64] | None
    attributes: Mapping[str, Any]

    @property
    def num_blocks(self) -> int:
        """Blocks in the shard."""
        return len(self.block_offsets)

    def block_range(self, block: int) -> tuple[int, int]:
        """First sample of a block, and the one behind its last."""
        return block * self.block_samples, min((block + 1) * self.block_samples, self.num_samples)


@dataclass(frozen=True, kw_only=True)
class NewShardPlaces:
    """Where the parts of a shard just made are to be written, in bytes; `data` is None where HDF5 itself writes."""

    labels: int
    checksums: int
    sample_checksums: int | None
    offsets: int | None
    data: int | None


def create_shard(path: Path, frame: ShardFrame) -> NewShardPlaces:
    """Make a shard whose places are laid out and whose samples are still to be written; the data lies last."""
    blocks = -(-frame.num_samples // frame.block_samples)
    with h5py.File(
        path,
        "w",
        libver=("earliest", "v110"),
        locking=False,
        alignment_threshold=_METADATA_BYTES,
        alignment_interval=frame.alignment,
    ) as file:
        for key, value in frame.attributes.items():
            file.attrs[key] = value
        _add_class_names(file, frame.class_names)
        labels = _add_contiguous(file, "labels", (frame.num_samples,), "<i8")
        checksums = _add_contiguous(file, "block_checksums", (blocks,), "<u8")
        sample_checksums = offsets = data = None
        if frame.sample_checksums and frame.filters is None:
            sample_checksums = _add_contiguous(file, "sample_checksums", (frame.num_samples,), "<u8")
        if frame.data_name == "bytes":
            offsets = _add_contiguous(file, "offsets", (frame.num_samples + 1,), "<i8")
        if frame.filters is None:
            data = _add_contiguous(file, frame.data_name, frame.data_shape, frame.dtype)
        else:
            chunk = (min(frame.block_samples, frame.num_samples), *frame.data_shape[1:])
            file.create_dataset(
                frame.data_name, frame.data_shape, frame.dtype, chunks=chunk, track_times=False, **frame.filters
            )
    return NewShardPlaces(
        labels=labels, checksums=checksums, sample_checksums=sample_checksums, offsets=offsets, data=data
    )


def _add_contiguous(file: h5py.File, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Add a data set whose bytes have a place at once; that place."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    created = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=plist)
    return int(created.get_offset())


def _add_class_names(file: h5py.File, names: tuple[str, ...]) -> None:
    encoded = [name.encode() for name in names]
    width = max((len(name) for name in encoded), default=1) or 1
    table = np.array(encoded, dtype=h5py.string_dtype("utf-8", width))
    if table.nbytes <= ATTRIBUTE_LIMIT:
        file.attrs["class_names"] = table
    else:
        file.create_dataset("class_names", data=table, track_times=False)


def shard_map(path: Path) -> ShardMap:
    """Where things lie in the shard `path`; CorruptError where it is no readable shard."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            _check_self_contained(file)
            return _map(path, file)
    except _DAMAGED as error:
        raise CorruptError(f"shard {path} is damaged: {error}") from error


def _check_self_contained(file: h5py.File) -> None:
    """ValueError where a part of the file lies in another one: HDF5 would open whatever path stands there.

    That is external links, external storage and virtual data sets; soft links alone cannot leave the file.
    """

    links: dict[str, Any] = {}
    file.visititems_links(links.__setitem__)  # h5py takes no error from what it calls: look afterwards
    for name, link in links.items():
        if isinstance(link, h5py.ExternalLink):
            raise ValueError(f"{name} is a link to another file, {link.filename}: a file must be self-contained")
        found = file[name] if isinstance(link, h5py.HardLink) else None
        if isinstance(found, h5py.Dataset):
            made = found.id.get_create_plist()
            if made.get_layout() == h5py.h5d.VIRTUAL or made.get_external_count():
                raise ValueError(f"the data of {name} lie in other files: a file must be self-contained")


def _map(path: Path, file: h5py.File) -> ShardMap:
    attributes = {key: file.attrs[key] for key in file.attrs if key != "class_names"}
    name = "bytes" if "bytes" in file else "images"
    data = file[name]
    num_samples, block_samples = len(file["labels"]), int(attributes["block_samples"])
    offsets = file["offsets"][:] if name == "bytes" else None
    firsts = np.arange(0, num_samples, block_samples, dtype=np.int64)
    ends = np.minimum(firsts + block_samples, num_samples)
    if data.chunks is not None:
        chunks = [data.id.get_chunk_info(number) for number in range(data.id.get_num_chunks())]
        places = {info.chunk_offset[0] // block_samples: (info.byte_offset, info.size) for info in chunks}
        extents = np.array([places[number] for number in range(len(firsts))], np.int64).reshape(-1, 2)
        block_offsets, block_bytes = extents[:, 0], extents[:, 1]
    else:
        base = data.id.get_offset() or 0
        unit = offsets if offsets is not None else np.arange(num_samples + 1) * (data.nbytes // max(1, num_samples))
        block_offsets, block_bytes = base + unit[firsts], unit[ends] - unit[firsts]
    return ShardMap(
        path=path,
        num_samples=num_samples,
        block_samples=block_samples,
        data_name=name,
        data_shape=data.shape,
        dtype=data.dtype.name,
        compressed=data.chunks is not None,
        block_offsets=block_offsets,
        block_bytes=block_bytes,
        labels_offset=file["labels"].id.get_offset(),
        checksums=file["block_checksums"][:],
        sample_checksums_offset=file["sample_checksums"].id.get_offset() if "sample_checksums" in file else None,
        offsets=offsets,
        attributes=attributes,
    )


class ChunkReader:
    """Reads compressed blocks through HDF5's filters; keeps the file open."""

    def __init__(self, path: Path) -> None:
        load_filters()
        self._file = h5py.File(path, "r", locking=False)
        self._data = self._file["images"]

    def read(self, first: int, out: Array) -> None:
        """Read the samples from `first` on into `out`."""
        self._data.read_direct(out, np.s_[first : first + len(out)])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ChunkWriter:
    """Writes compressed blocks through HDF5's filters into a shard made by `create_shard`."""

    def __init__(self, path: Path) -> None:
        self._file = h5py.File(path, "r+", locking=False)
        self._data = self._file["images"]

    def write(self, first: int, block: Array) -> None:
        """Write one whole block whose first sample is `first`."""
        self._data[first : first + len(block)] = block

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


def load_filters() -> None:
    """Make hdf5plugin's filters known to HDF5 where the package is there; gzip needs none."""
    try:
        import hdf5plugin  # noqa: F401
    except ImportError:
        return


class ArrayFile:
    """A user's HDF5 file, open for reading; SourceError for whatever is wrong with it."""

    def __init__(self, path: Path) -> None:
        load_filters()
        self._path = path
        self._arrays: dict[str, Any] = {}
        with self._reading():
            self._file = h5py.File(path, "r", locking=False)
            _check_self_contained(self._file)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as error:
            told = " ".join(str(error).split())[:200]
            raise SourceError(f"{self._path} is no HDF5 file that can be read: {told}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by path of every array of numbers in the file."""
        found: dict[str, tuple[int, ...]] = {}

        def keep(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.shape and item.dtype.kind in "fiub":
                found[name] = item.shape

        with self._reading():
            self._file.visititems(keep)
        return found

    def kind(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of an array."""
        with self._reading():
            return self._array(name).shape, self._array(name).dtype

    def whole(self, name: str) -> Array:
        """All of an array."""
        with self._reading():
            return np.asarray(self._array(name)[()])

    def sample(self, name: str, number: int) -> Array:
        """Element `number` along the first axis."""
        with self._reading():
            return np.asarray(self._array(name)[number])

    def unpacked(self, name: str, copy: Path) -> Path:
        """A file in which any sample of the array can be read alone: this one, or a contiguous `copy` of the array.

        A chunk with several samples would be read and decompressed whole for each of them.
        """
        with self._reading():
            data = self._array(name)
            if data.chunks is None or data.chunks[0] == 1:
                return self._path
            with h5py.File(copy, "w", locking=False) as file:
                out = file.create_dataset(name, data.shape, data.dtype)
                rows = max(
                    1, min(data.chunks[0], _COPY_BYTES // max(1, data.dtype.itemsize * int(np.prod(data.shape[1:]))))
                )
                for first in range(0, len(data), rows):
                    out[first : first + rows] = data[first : first + rows]
        return copy

    def _array(self, name: str) -> Any:
        """A data set whose announced size fits what is stored: checked once, before room is made for it."""
        if name not in self._arrays:
            data = self._file[name]
            most = max(_MOST_CHUNK_BYTES, _MOST_RATIO * data.id.get_storage_size())
            if data.nbytes > most or math.prod(data.chunks or ()) * data.dtype.itemsize > _MOST_CHUNK_BYTES:
                raise ValueError(f"{name} tells of the shape {data.shape}, and is not there")
            self._arrays[name] = data
        return self._arrays[name]


def _plugin() -> Any:
    try:
        import hdf5plugin
    except ImportError:
        raise UsageError("--compression needs hdf5plugin; install hpcdl[compression], or take gzip") from None
    return hdf5plugin


_FILTERS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "gzip": lambda: {"compression": "gzip", "compression_opts": 4},
    "zstd": lambda: dict(_plugin().Zstd(clevel=3)),
    "blosc2": lambda: dict(_plugin().Blosc2(cname="zstd", clevel=5, filters=_plugin().Blosc2.SHUFFLE)),
}


def filters(name: str | None) -> Mapping[str, Any] | None:
    """The arguments that tell h5py of a compression; None for none. UsageError where its package is missing."""
    return None if name is None else _FILTERS[name]()
