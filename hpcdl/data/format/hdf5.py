"""HDF5 files of format 1, the shards (docs/reference/shard-format.md)."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.storage.disk import cut
from hpcdl.data.format.hdf5_links import arrays_inside
from hpcdl.data.format.manifest import IMAGES, LABELS, ROLES, Field

Array = npt.NDArray[Any]
ATTRIBUTE_LIMIT = 60_000
"""In bytes; HDF5 keeps attributes up to 64 KiB in the object header that every HDF5 version reads."""
_METADATA_BYTES = 65_536
# A wide list: damage shows anywhere in h5py (tests/fuzz). A header may announce any size, hence MemoryError.
DAMAGED = (
    OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, MemoryError, SystemError,
    ArithmeticError,
)  # fmt: skip
"""What h5py raises for damaged files."""


@dataclass(frozen=True, kw_only=True)
class ShardFrame:
    """The parameters of a new shard: everything except the samples.

    `rows` gives the total length of each ragged field's samples, along the first axis or in bytes. `about` and `place`
    are attributes: those that all shards of a data set share, and those that identify this shard.
    """

    pictures: bool
    """Whether the shard has format 1, for images with a class."""
    num_samples: int
    fields: Sequence[Field]
    rows: Mapping[str, int] = field(default_factory=dict)
    block_samples: int
    about: Mapping[str, str | int]
    place: Mapping[str, str | int]
    alignment: int = 4096
    filters: Mapping[str, Any] | None = None
    sample_checksums: bool = True
    """Whether each sample has its own checksum; compressed samples have none."""

    @property
    def attributes(self) -> Mapping[str, str | int]:
        """The attributes of the file, in the order in which they are stored."""
        shared = {**self.about, "block_samples": self.block_samples}
        if self.pictures:
            image, label = self.fields
            sides = dict(zip(("height", "width", "channels"), image.shape, strict=True))
            picture_facts: dict[str, str | int] = {**sides, "dtype": image.dtype, "num_classes": len(label.class_names)}
            return {"schema": SCHEMA, **shared, **picture_facts, **self.place}
        # A blank separates names: a field's name holds none.
        roles = {f"{role}s": " ".join(part.name for part in self.fields if part.role == role) for role in ROLES}
        # Format 2 may have no resident field, whose length would tell the number of samples.
        return {"schema": FIELDS_SCHEMA, **shared, **roles, **self.place, "num_samples": self.num_samples}

    def shape(self, field: Field) -> tuple[int, ...]:
        """Return the shape of a field's data set."""
        return (self.rows[field.name] if field.ragged else self.num_samples, *field.row_shape)


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """The position of a data set that is read by blocks, in bytes from the start of the file.

    `offsets`: the start of each sample within the data set, in bytes, if samples differ in length.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    compressed: bool
    block_offsets: npt.NDArray[np.int64]
    block_bytes: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]
    sample_checksums_offset: int | None
    offsets: npt.NDArray[np.int64] | None


@dataclass(frozen=True, kw_only=True)
class ResidentMap:
    """The position of a data set that is read whole."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, kw_only=True)
class ShardMap:
    """The positions of all parts of a shard."""

    path: Path
    num_samples: int
    block_samples: int
    columns: Mapping[str, ColumnMap]
    residents: Mapping[str, ResidentMap]

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each column."""
        return -(-self.num_samples // self.block_samples)

    @property
    def block_offsets(self) -> npt.NDArray[np.int64]:
        """The start offsets of the blocks of all columns."""
        return np.concatenate([column.block_offsets for column in self.columns.values()])

    @property
    def block_bytes(self) -> npt.NDArray[np.int64]:
        """The lengths of the blocks of all columns."""
        return np.concatenate([column.block_bytes for column in self.columns.values()])

    def block_range(self, block: int) -> tuple[int, int]:
        """Return the first sample of a block, and the sample after its last."""
        return block * self.block_samples, min((block + 1) * self.block_samples, self.num_samples)


@dataclass(frozen=True, kw_only=True)
class ColumnOffsets:
    """Where to write the parts of a column of a new shard; `data` is None if HDF5 itself writes the data."""

    checksums: int
    sample_checksums: int | None
    offsets: int | None
    data: int | None


@dataclass(frozen=True, kw_only=True)
class NewShardOffsets:
    """Where to write the parts of a new shard, in bytes."""

    residents: Mapping[str, int]
    columns: Mapping[str, ColumnOffsets]


BYTES = "bytes"
"""The name in format 1 of the data set of `images` that are encoded files."""
SCHEMA = "hpcdl.shard/1"
FIELDS_SCHEMA = "hpcdl.shard/2"
"""Schema of shards with named fields; images with classes have `SCHEMA` (docs/reference/shard-format.md)."""


def _beside(column: str, part: str, schema: Any) -> str:
    """Return the path of a column's `block_checksums`, `sample_checksums` or `offsets`."""
    return f"{part}/{column}" if schema == FIELDS_SCHEMA else part


def create_shard(path: Path, frame: ShardFrame) -> NewShardOffsets:
    """Create a shard with all space allocated but no samples written; the data comes last in the file."""
    count = frame.num_samples
    blocks = -(-count // frame.block_samples)
    columns = [field for field in frame.fields if not field.resident]
    with h5py.File(
        path,
        "w",
        # The oldest form of each object, which more versions of HDF5 read.
        libver=("earliest", "v110"),
        locking=False,
        # Smaller objects are not aligned: each would waste up to a page or a stripe.
        alignment_threshold=_METADATA_BYTES,
        alignment_interval=frame.alignment,
    ) as file:
        attributes = frame.attributes
        for key, value in attributes.items():
            file.attrs[key] = value
        if frame.pictures:
            _add_class_names(file, frame.fields[-1].class_names)
        residents = {
            field.name: _add_contiguous(file, field.name, frame.shape(field), field.stored_type)
            for field in frame.fields
            if field.resident
        }
        parts: dict[str, dict[str, int]] = {field.name: {} for field in columns}

        def add(name: str, part: str, length: int, dtype: str) -> int:
            return _add_contiguous(file, _beside(name, part, attributes["schema"]), (length,), dtype)

        for name, offsets_by_part in parts.items():
            offsets_by_part["checksums"] = add(name, "block_checksums", blocks, "<u8")
            if frame.sample_checksums and frame.filters is None:
                offsets_by_part["sample_checksums"] = add(name, "sample_checksums", count, "<u8")
        for field in columns:
            if field.ragged:
                parts[field.name]["offsets"] = add(field.name, "offsets", count + 1, "<i8")
        for field in columns:
            name, shape = BYTES if field.encoded else field.name, frame.shape(field)
            if frame.filters is None:
                parts[field.name]["data"] = _add_contiguous(file, name, shape, field.stored_type)
            else:
                # One chunk is one block, so that its stored bytes can be found and have one checksum.
                chunk = (min(frame.block_samples, count), *shape[1:])
                file.create_dataset(name, shape, field.stored_type, chunks=chunk, track_times=False, **frame.filters)
    optional = ("sample_checksums", "offsets", "data")
    places = {
        name: ColumnOffsets(
            checksums=offsets_by_part["checksums"], **{part: offsets_by_part.get(part) for part in optional}
        )
        for name, offsets_by_part in parts.items()
    }
    return NewShardOffsets(residents=residents, columns=places)


def _add_contiguous(file: h5py.File, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Add a data set with space allocated at once; return its offset, 0 if it has no bytes."""
    # The low-level interface: create_dataset has no argument for the time of allocation.
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # its offset is needed now
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # else every byte would be written twice
    plist.set_obj_track_times(False)  # the same content must give the same bytes
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    group, _, name = name.rpartition("/")
    parent = file.require_group(group).id if group else file.id
    created = h5py.h5d.create(parent, name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=plist)
    return int(created.get_offset() or 0)


def _add_class_names(file: h5py.File, names: Sequence[str]) -> None:
    encoded = [name.encode() for name in names]
    if not encoded:
        return
    # HDF5 has no strings of zero bytes.
    width = max(map(len, encoded)) or 1
    table = np.array(encoded, dtype=h5py.string_dtype("utf-8", width))
    if table.nbytes <= ATTRIBUTE_LIMIT:
        file.attrs["class_names"] = table
    else:
        file.create_dataset("class_names", data=table, track_times=False)


def shard_map(path: Path) -> ShardMap:
    """Return the positions of all parts of the shard `path`; CorruptError if it is no readable shard."""
    try:
        with h5py.File(path, "r", locking=False) as file:  # many parallel file systems are mounted without locks
            return _map(path, file)
    except DAMAGED as error:
        raise CorruptError(f"shard {path} is damaged: {error}") from error


def _map(path: Path, file: h5py.File) -> ShardMap:
    arrays = arrays_inside(file)
    attributes = {key: file.attrs[key] for key in ("schema", "block_samples", "num_samples") if key in file.attrs}
    schema = attributes.get("schema")
    classic = schema != FIELDS_SCHEMA
    if classic:
        # Format 1 has one name for pixels and one for files; a reader asks for the field's name.
        if BYTES in arrays:
            arrays[IMAGES] = arrays[BYTES]
        names, small = [IMAGES], {LABELS: arrays[LABELS]}
    else:
        names = list(file["block_checksums"])
        # Checksums and offsets of columns are in groups of their own.
        small = {name: item for name, item in arrays.items() if "/" not in name and name not in names}
    block_samples = int(attributes["block_samples"])
    num_samples = len(small[LABELS]) if classic else int(attributes["num_samples"])
    if min(num_samples, block_samples) < 1 or not names:
        raise ValueError(f"it states {num_samples} samples in blocks of {block_samples}")
    for name, item in small.items():
        # Without an offset it is stored in chunks, and cannot be read by its bytes.
        if len(item) != num_samples or item.id.get_offset() is None:
            raise ValueError(f"{name} has the shape {item.shape}")
    return ShardMap(
        path=path,
        num_samples=num_samples,
        block_samples=block_samples,
        columns={name: _column(arrays, name, num_samples, block_samples, schema) for name in names},
        residents={
            name: ResidentMap(offset=item.id.get_offset(), shape=item.shape, dtype=item.dtype)
            for name, item in small.items()
        },
    )


def _column(
    arrays: Mapping[str, h5py.Dataset], name: str, num_samples: int, block_samples: int, schema: Any
) -> ColumnMap:
    data = arrays[name]
    checksums, sample_checksums, starts = (
        arrays.get(_beside(name, part, schema)) for part in ("block_checksums", "sample_checksums", "offsets")
    )
    firsts = np.arange(0, num_samples, block_samples, dtype=np.int64)
    ends = np.minimum(firsts + block_samples, num_samples)
    offsets = None
    if starts is not None:
        row_bytes = math.prod(data.shape[1:]) * data.dtype.itemsize
        # Stored in rows, needed in bytes.
        offsets = starts[:] * row_bytes
        if len(offsets) != num_samples + 1:
            raise ValueError(f"the offsets of {name} do not fit its samples")
    if data.chunks is not None:
        chunks = [data.id.get_chunk_info(number) for number in range(data.id.get_num_chunks())]
        # By position: HDF5 promises no order of its list of chunks.
        places = {info.chunk_offset[0] // block_samples: (info.byte_offset, info.size) for info in chunks}
        # A chunk that was never written is a KeyError here, which is among DAMAGED.
        extents = np.array([places[number] for number in range(len(firsts))], np.int64).reshape(-1, 2)
        block_offsets, block_bytes = extents[:, 0], extents[:, 1]
    else:
        base = data.id.get_offset() or 0
        unit = offsets if offsets is not None else np.arange(num_samples + 1) * (data.nbytes // max(1, num_samples))
        block_offsets, block_bytes = base + unit[firsts], unit[ends] - unit[firsts]
    if checksums is None or checksums.shape != firsts.shape:
        raise ValueError(f"the checksums of {name} do not fit its blocks")
    return ColumnMap(
        name=name,
        shape=data.shape,
        dtype=data.dtype.name,
        compressed=data.chunks is not None,
        block_offsets=block_offsets,
        block_bytes=block_bytes,
        checksums=checksums[:],
        sample_checksums_offset=sample_checksums.id.get_offset() if sample_checksums is not None else None,
        offsets=offsets,
    )


class ChunkReader:
    """Reads compressed blocks through HDF5's filters; the file stays open as long as this object exists."""

    def __init__(self, path: Path) -> None:
        load_filters()
        file = h5py.File(path, "r", locking=False)
        self._data = file[IMAGES]
        # Readers of other threads may still hold this object when the shard is closed.
        weakref.finalize(self, file.close)

    def read(self, first: int, out: Array) -> None:
        """Read samples into `out`, starting with sample `first`."""
        self._data.read_direct(out, np.s_[first : first + len(out)])


class ChunkWriter:
    """Writes compressed blocks through HDF5's filters into a shard made by `create_shard`, open as `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._sink = _Sink(descriptor)
        self._file = h5py.File(self._sink, "r+", locking=False)
        self._data = self._file[IMAGES]

    def write(self, first: int, block: Array) -> None:
        """Write one whole block whose first sample is `first`; OSError if the disk write fails."""
        self._data[first : first + len(block)] = block
        self._check()

    def close(self) -> None:
        """Flush and close the file; OSError as for `write`."""
        self._file.close()
        self._check()

    def abandon(self) -> None:
        """Close the file and ignore write errors."""
        self._file.close()

    def _check(self) -> None:
        if self._sink.problem is not None:
            raise self._sink.problem


class _Sink:
    """A file object for h5py that accepts every write; `problem` holds the first disk error.

    If a write fails, HDF5 keeps the file open, tries again at process exit, and crashes the process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._place = descriptor, 0
        self.problem: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, counted from the start or the end."""
        self._place = offset + (os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0)
        return self._place

    def tell(self) -> int:
        """Return the current position in bytes."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; return the number of bytes read."""
        return os.preadv(self._descriptor, [buffer], self._place)

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        return os.pread(self._descriptor, size, self._place)

    def write(self, content: Any) -> int:
        """Write, unless an earlier write has failed."""
        unwritten, position = memoryview(content).cast("B"), self._place
        try:
            while unwritten and self.problem is None:
                done = os.pwrite(self._descriptor, unwritten, position)
                unwritten, position = unwritten[done:], position + done
        except OSError as error:
            self.problem = error
        return len(content)

    def truncate(self, size: int) -> None:
        """Set the length of the file."""
        try:
            if self.problem is None:
                cut(self._descriptor, size)
        except OSError as error:
            self.problem = error

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


def load_filters() -> None:
    """Register hdf5plugin's filters with HDF5 if the package is installed; gzip needs none."""
    try:
        import hdf5plugin  # noqa: F401
    except ImportError:
        return


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
    """Return h5py's arguments for a compression; None for no compression. UsageError if its package is missing."""
    return None if name is None else _FILTERS[name]()
