"""HDF5 files: shards (docs/reference/shard-format.md), and files of arrays as sources."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import CorruptError, SourceError, UsageError, shown
from hpcdl.core.storage.disk import cut, remove_file
from hpcdl.core.units import format_bytes
from hpcdl.data.format.hdf5_links import LiesOutside, arrays_inside, arrays_linked, files_behind
from hpcdl.data.format.manifest import IMAGES, LABELS, ROLES, Field

Array = npt.NDArray[Any]
ATTRIBUTE_LIMIT = 60_000
"""In bytes; HDF5 keeps attributes up to 64 KiB in the object header that every HDF5 version reads."""
_METADATA_BYTES = 65_536
_MOST_CHUNK_BYTES = 256 * 1024**2
_MOST_RATIO = 2000
"""Arrays with a higher compression ratio are checked for missing chunks."""
_DAMAGED = (
    OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, MemoryError, SystemError,
    ArithmeticError,
)  # fmt: skip
"""What h5py raises for damaged files."""
_COPY_BYTES = 32 * 1024**2


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
        roles = {f"{role}s": " ".join(part.name for part in self.fields if part.role == role) for role in ROLES}
        return {"schema": FIELDS_SCHEMA, **shared, **roles, **self.place, "num_samples": self.num_samples}

    def shape(self, item: Field) -> tuple[int, ...]:
        """Return the shape of a field's data set."""
        return (self.rows[item.name] if item.ragged else self.num_samples, *item.row_shape)


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
class ColumnPlaces:
    """Where to write the parts of a column of a new shard; `data` is None if HDF5 itself writes the data."""

    checksums: int
    sample_checksums: int | None
    offsets: int | None
    data: int | None


@dataclass(frozen=True, kw_only=True)
class NewShardPlaces:
    """Where to write the parts of a new shard, in bytes."""

    residents: Mapping[str, int]
    columns: Mapping[str, ColumnPlaces]


BYTES = "bytes"
"""The name in format 1 of the data set of `images` that are encoded files."""
SCHEMA = "hpcdl.shard/1"
FIELDS_SCHEMA = "hpcdl.shard/2"
"""Schema of shards with named fields; images with classes have `SCHEMA` (docs/reference/shard-format.md)."""


def _beside(column: str, part: str, schema: Any) -> str:
    """Return the path of a column's `block_checksums`, `sample_checksums` or `offsets`."""
    return f"{part}/{column}" if schema == FIELDS_SCHEMA else part


def create_shard(path: Path, frame: ShardFrame) -> NewShardPlaces:
    """Create a shard with all space allocated but no samples written; the data comes last in the file."""
    count = frame.num_samples
    blocks = -(-count // frame.block_samples)
    columns = [item for item in frame.fields if not item.resident]
    with h5py.File(
        path,
        "w",
        libver=("earliest", "v110"),
        locking=False,
        alignment_threshold=_METADATA_BYTES,
        alignment_interval=frame.alignment,
    ) as file:
        attributes = frame.attributes
        for key, value in attributes.items():
            file.attrs[key] = value
        if frame.pictures:
            _add_class_names(file, frame.fields[-1].class_names)
        residents = {
            item.name: _add_contiguous(file, item.name, frame.shape(item), item.stored_type)
            for item in frame.fields
            if item.resident
        }
        parts: dict[str, dict[str, int]] = {item.name: {} for item in columns}

        def add(name: str, part: str, length: int, dtype: str) -> int:
            return _add_contiguous(file, _beside(name, part, attributes["schema"]), (length,), dtype)

        for name, offsets_by_part in parts.items():
            offsets_by_part["checksums"] = add(name, "block_checksums", blocks, "<u8")
            if frame.sample_checksums and frame.filters is None:
                offsets_by_part["sample_checksums"] = add(name, "sample_checksums", count, "<u8")
        for item in columns:
            if item.ragged:
                parts[item.name]["offsets"] = add(item.name, "offsets", count + 1, "<i8")
        for item in columns:
            name, shape = BYTES if item.encoded else item.name, frame.shape(item)
            if frame.filters is None:
                parts[item.name]["data"] = _add_contiguous(file, name, shape, item.stored_type)
            else:
                chunk = (min(frame.block_samples, count), *shape[1:])
                file.create_dataset(name, shape, item.stored_type, chunks=chunk, track_times=False, **frame.filters)
    optional = ("sample_checksums", "offsets", "data")
    places = {
        name: ColumnPlaces(
            checksums=offsets_by_part["checksums"], **{part: offsets_by_part.get(part) for part in optional}
        )
        for name, offsets_by_part in parts.items()
    }
    return NewShardPlaces(residents=residents, columns=places)


def _add_contiguous(file: h5py.File, name: str, shape: tuple[int, ...], dtype: str) -> int:
    """Add a data set with space allocated at once; return its offset, 0 if it has no bytes."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    group, _, name = name.rpartition("/")
    parent = file.require_group(group).id if group else file.id
    created = h5py.h5d.create(parent, name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=plist)
    return int(created.get_offset() or 0)


def _add_class_names(file: h5py.File, names: Sequence[str]) -> None:
    encoded = [name.encode() for name in names]
    if not encoded:
        return
    width = max(map(len, encoded)) or 1
    table = np.array(encoded, dtype=h5py.string_dtype("utf-8", width))
    if table.nbytes <= ATTRIBUTE_LIMIT:
        file.attrs["class_names"] = table
    else:
        file.create_dataset("class_names", data=table, track_times=False)


def shard_map(path: Path) -> ShardMap:
    """Return the positions of all parts of the shard `path`; CorruptError if it is no readable shard."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _map(path, file)
    except _DAMAGED as error:
        raise CorruptError(f"shard {path} is damaged: {error}") from error


def _map(path: Path, file: h5py.File) -> ShardMap:
    arrays = arrays_inside(file)
    attributes = {key: file.attrs[key] for key in ("schema", "block_samples", "num_samples") if key in file.attrs}
    schema = attributes.get("schema")
    classic = schema != FIELDS_SCHEMA
    if classic:
        if BYTES in arrays:
            arrays[IMAGES] = arrays[BYTES]
        names, small = [IMAGES], {LABELS: arrays[LABELS]}
    else:
        names = list(file["block_checksums"])
        small = {name: item for name, item in arrays.items() if "/" not in name and name not in names}
    block_samples = int(attributes["block_samples"])
    num_samples = len(small[LABELS]) if classic else int(attributes["num_samples"])
    if min(num_samples, block_samples) < 1 or not names:
        raise ValueError(f"it states {num_samples} samples in blocks of {block_samples}")
    for name, item in small.items():
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
        offsets = starts[:] * row_bytes
        if len(offsets) != num_samples + 1:
            raise ValueError(f"the offsets of {name} do not fit its samples")
    if data.chunks is not None:
        chunks = [data.id.get_chunk_info(number) for number in range(data.id.get_num_chunks())]
        places = {info.chunk_offset[0] // block_samples: (info.byte_offset, info.size) for info in chunks}
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


class ArrayFile:
    """A user's HDF5 file, open for reading; every problem with it raises SourceError.

    With `follow`, links to other files are followed and virtual data sets read; otherwise both are refused. With
    `last`, samples are along the last axis of arrays with several axes, and are returned along the first.
    """

    def __init__(self, path: Path, *, follow: bool = False, last: bool = False) -> None:
        load_filters()
        self._path, self._last = path, last
        self._arrays: dict[str, Any] = {}
        self._linked: dict[str, Any] = {}
        with self._reading():
            self._file = h5py.File(path, "r", locking=False)
            if follow:
                self._linked = arrays_linked(self._file)
            else:
                arrays_inside(self._file)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except LiesOutside as error:
            raise SourceError(f"{self._path}: {error}; {error.remedy}") from error
        except _DAMAGED as error:
            reason = " ".join(str(error).split())[:200]
            raise SourceError(f"{self._path} is no HDF5 file that can be read: {reason}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every array of numbers in the file, by path."""
        shapes_by_path: dict[str, tuple[int, ...]] = {}

        def keep(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.shape and item.dtype.kind in "fiub" and not _is_axis(item):
                if _MATLAB in item.attrs:
                    return  # MATLAB stores images with another order of axes
                shapes_by_path[name] = self._shape(item)

        with self._reading():
            self._visit(keep)
        return shapes_by_path

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and type of all arrays of numbers, text or records, by path; references are omitted."""
        entries: dict[str, tuple[tuple[int, ...], str]] = {}

        def keep(name: str, item: Any) -> None:
            if not isinstance(item, h5py.Dataset) or item.shape is None or _is_axis(item):
                return
            if item.dtype.names:
                for part in item.dtype.names:
                    part_type = item.dtype[part]
                    kind = "text" if h5py.check_string_dtype(part_type) else part_type.base.name
                    entries[f"{name}/{part}"] = ((*item.shape, *part_type.shape), kind)
            elif h5py.check_string_dtype(item.dtype):
                entries[name] = (item.shape, "text")
            elif _text(item.attrs.get(_MATLAB)) == "char":
                return  # character codes, as many rows as there are characters
            elif item.dtype.kind in "fiubcV" or h5py.check_vlen_dtype(item.dtype):
                entries[name] = (self._shape(item), _dtype(item).name)

        with self._reading():
            self._visit(keep)
        return entries

    def strings(self, name: str) -> list[bytes] | None:
        """Return the strings of an array with one axis; None if it does not hold strings."""
        with self._reading():
            data, part = self._found(name)
            if h5py.check_string_dtype(data.dtype[part] if part else data.dtype) is None:
                return None
            if not data.shape:
                return [bytes(data[()])]
            if len(data.shape) != 1:
                raise ValueError(f"{name} holds strings in the shape {data.shape}; one a sample is needed")
            return [bytes(value) for value in (data[part] if part else data[()])]

    def lengths_vary(self, name: str) -> tuple[Array, Array] | None:
        """Return the values of an array of variable-length samples, and each sample's start; None for other arrays."""
        with self._reading():
            data, part = self._found(name)
            kind = None if part else h5py.check_vlen_dtype(data.dtype)
            if kind is None:
                return None
            if len(data.shape) > 1:
                raise SourceError(
                    f"{self._path}: {name} holds lists of any length in the shape {data.shape}; one list a sample is "
                    "needed: save each column as an array of its own"
                )
            # h5py keeps the file's byte order, but claims that it is the machine's
            samples = [np.asarray(value).view(kind) for value in data[()].reshape(-1)]
            return np.concatenate(samples), np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])

    def decoded(self, name: str, copy: Path) -> tuple[np.dtype[Any], str] | None:
        """Write the decoded values of an array into `copy`; return their type and a remark, None if not encoded.

        By netCDF's conventions (CF 1.11, sections 2.5.1 and 8.1): value = stored x scale_factor + add_offset. Missing
        values (_FillValue, missing_value) and values that are not valid (valid_range) become NaN.
        """
        with self._reading():
            data = self._array(name)
            if data.dtype.kind not in "fiu" or not data.shape or _MATLAB in data.attrs:
                return None
            packing = _Packing.of(data)
            if packing is None:
                return None
            missing = 0
            with copy.open("wb") as out:
                for chunk in self._chunks(data, item_bytes=8):
                    values, absent = packing.decoded(chunk)
                    missing += absent
                    if absent and packing.rounds(chunk, values):
                        raise SourceError(
                            f"{self._path}: {name} has missing values, and whole numbers over 2^53, which the float64 "
                            "that would hold NaN rounds; leave these samples out of the file, or the array"
                        )
                    values.tofile(out)
            if not missing and not packing.scales:
                remove_file(copy)
                return None
            return packing.dtype, packing.remark(missing)

    def packed(self, name: str) -> str:
        """Return why an array's values differ from the stored numbers, by netCDF's conventions; empty if they do not.

        They also differ if some stored numbers mark missing values.
        """
        with self._reading():
            data = self._array(name)
            packing = _Packing.of(data) if data.dtype.kind in "fiu" else None
            if packing is None:
                return ""
            if packing.scales:
                return "is packed (scale_factor, add_offset or _Unsigned)"
            missing = sum(packing.absent_in(chunk) for chunk in self._chunks(data))
        return f"has {missing} values that mean missing (_FillValue, missing_value or valid_range)" if missing else ""

    def doubts(self, name: str) -> list[str]:
        """List doubts about an array's values for the user: chunks never written, attributes that cannot be applied."""
        with self._reading():
            data = self._found(name)[0]
            num_written, num_chunks = (1, 1) if data.is_virtual or not data.size else _written_chunks(data)
            odd = [key for key in _PACKING if key in data.attrs and not _are_numbers(data.attrs[key], key)]
            sentences = []
            if num_written < num_chunks:
                part = f"{num_chunks - num_written} of its {num_chunks} chunks were" if data.chunks else "it was"
                sentences = [f"{name}: {part} never written, and read as {data.fillvalue}"]
        if odd and data.dtype.kind in "fiu":
            sentences.append(
                f"{name}: not applied are its attributes {', '.join(odd)}, which are no numbers, or too many"
            )
        return sentences

    def called(self, name: str) -> dict[int, str]:
        """Return the enumeration names of an array's numbers; empty for plain numbers."""
        with self._reading():
            data, part = self._found(name)
            names = h5py.check_enum_dtype(data.dtype[part] if part else data.dtype)
        return {int(number): label for label, number in (names or {}).items()}

    def place(self, name: str, copy: Path) -> tuple[Path, int]:
        """Return a file that stores an array contiguously, and its offset there: this file, or the new `copy`."""
        with self._reading():
            data, part = self._array(name), self._found(name)[1]
            contiguous = not part and _MATLAB not in data.attrs and not self._turns(data)
            if contiguous and data.chunks is None and data.id.get_offset() is not None and data.size:
                return Path(data.file.filename), int(data.id.get_offset())
            with copy.open("wb") as out:
                for chunk in self._chunks(data, part):
                    np.ascontiguousarray(chunk).tofile(out)
        return copy, 0

    def turns(self, name: str) -> bool:
        """Return whether the samples of an array are along its last axis."""
        with self._reading():
            data, part = self._found(name)
            return not part and self._turns(data)

    def kind(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and type of an array."""
        with self._reading():
            data, part = self._array(name), self._found(name)[1]
            if part:
                part_type = data.dtype[part]
                return (*data.shape, *part_type.shape), part_type.base
            return self._shape(data), _dtype(data)

    def whole(self, name: str) -> Array:
        """Return all values of an array."""
        with self._reading():
            data = self._array(name)
            values = np.asarray(data[()])
            return np.moveaxis(values, -1, 0) if self._turns(data) else values

    def sample(self, name: str, number: int) -> Array:
        """Return element `number` along the first axis."""
        with self._reading():
            return np.asarray(self._array(name)[number])

    def unpacked(self, name: str, copy: Path) -> Path:
        """Return a file that gives quick access to single samples: this one, or a contiguous `copy` of the array.

        A chunk with several samples would be read and decompressed whole for each of them.
        """
        with self._reading():
            data = self._array(name)
            in_file = not self._turns(data) and not files_behind(data, self._path)
            if in_file and (data.chunks is None or data.chunks[0] == 1):
                return self._path
            with h5py.File(copy, "w", locking=False) as file:
                out, first = file.create_dataset(name, self._shape(data), data.dtype), 0
                for chunk in self._chunks(data):
                    out[first : first + len(chunk)] = chunk
                    first += len(chunk)
        return copy

    def _turns(self, data: Any) -> bool:
        """Return whether an array's samples are along its last axis; an N x 1 array is a list and is not turned."""
        sides = _shape(data) if self._last and not data.dtype.names else ()
        return len(sides) > 1 and sides[-1] != 1

    def _shape(self, data: Any) -> tuple[int, ...]:
        """Return the shape of an array, samples first."""
        sides = _shape(data)
        return (sides[-1], *sides[:-1]) if self._turns(data) else sides

    def _chunks(self, data: Any, part: str = "", *, item_bytes: int = 1) -> Iterator[Array]:
        """Yield the values of an array, or of a part of its records, in pieces, samples first.

        `item_bytes` is the size of a value after the caller's processing, if larger than its size in the file.
        """
        if not data.shape:
            yield np.asarray(data[part] if part else data[()])
            return
        matlab, turns = _MATLAB in data.attrs and not part, self._turns(data)
        axis = -1 if matlab != turns else 0  # MATLAB stores its axes in the opposite order
        count, chunk = data.shape[axis], data.chunks[axis] if data.chunks else 1
        row_bytes = data.size // max(1, count) * max(data.dtype.itemsize, item_bytes)
        rows = max(1, _COPY_BYTES // max(1, row_bytes))
        rows = rows // chunk * chunk or rows  # whole chunks: HDF5 unpacks a whole chunk even for a part of it
        for first in range(0, count, rows):
            values = data[first : first + rows] if axis == 0 else data[..., first : first + rows]
            if part:
                values = values[part]
            elif matlab:
                values = (np.moveaxis(values, 0, -1) if turns else values).transpose().astype(_dtype(data))
            elif turns:
                values = np.moveaxis(values, -1, 0)
            yield values

    def _visit(self, keep: Callable[[str, Any], None]) -> None:
        self._file.visititems(keep)
        for name, item in self._linked.items():
            keep(name, item)

    def files_behind(self, name: str) -> list[Path]:
        """Return the other files that hold values of an array."""
        with self._reading():
            return files_behind(self._found(name)[0], self._path)

    def _found(self, name: str) -> tuple[Any, str]:
        """Return the data set at a path, and the name of the record part if the path continues into its records."""
        folder, _, part = name.rpartition("/")
        if folder and isinstance(self._file.get(folder), h5py.Dataset):
            return self._file[folder], part
        return self._file[name], ""

    def _array(self, name: str) -> Any:
        """Return a data set; check once, before memory is allocated, that its announced size fits the stored data."""
        if name not in self._arrays:
            data = self._found(name)[0]
            self._check_stored(name, data)
            self._arrays[name] = data
        return self._arrays[name]

    def _check_stored(self, name: str, data: Any) -> None:
        """Raise SourceError for chunks too large to unpack, and for an array of which most was never written."""
        chunk_bytes = math.prod(data.chunks or ()) * data.dtype.itemsize
        if chunk_bytes > _MOST_CHUNK_BYTES:
            raise SourceError(
                f"{self._path}: {name} is stored in chunks of {format_bytes(chunk_bytes)}, and one of at most "
                f"{format_bytes(_MOST_CHUNK_BYTES)} is unpacked at once; store it again in smaller ones: h5repack -l "
                f"{name}:CHUNK=..."
            )
        most = max(_MOST_CHUNK_BYTES, _MOST_RATIO * data.id.get_storage_size())
        if data.nbytes <= most or data.is_virtual:  # the sources of a virtual array are already checked
            return
        stored, chunks = _written_chunks(data)
        if stored < chunks:
            raise SourceError(
                f"{self._path}: {name} states the shape {data.shape}, and {stored} of its {chunks} chunks are there; "
                "the file was not written to its end, or is damaged"
            )


def _written_chunks(data: Any) -> tuple[int, int]:
    """Return how many chunks of an array are stored and how many it has; an array without chunks counts as one."""
    if not data.chunks:
        return int(data.id.get_storage_size() > 0), 1
    num_chunks = math.prod(-(-side // of_chunk) for side, of_chunk in zip(data.shape, data.chunks, strict=True))
    return data.id.get_num_chunks(), num_chunks


_MATLAB = "MATLAB_class"
"""The attribute that holds the MATLAB class of an array; such arrays have their axes in the opposite order."""


def _shape(data: Any) -> tuple[int, ...]:
    """Return an array's shape as the user knows it: MATLAB's axes in MATLAB's order, and its vectors with one axis."""
    if _MATLAB not in data.attrs:
        return tuple(data.shape)
    sides = tuple(data.shape[::-1])
    return (max(sides),) if math.prod(sides) == max(sides) else sides


def _dtype(data: Any) -> np.dtype[Any]:
    logical = _text(data.attrs.get(_MATLAB, "")) == "logical"
    return np.dtype(np.bool_) if logical else data.dtype


def _is_axis(data: Any) -> bool:
    """Return whether this is the placeholder that netCDF-4 writes for a dimension without values."""
    return bytes(np.bytes_(data.attrs.get("NAME", b""))).startswith(_AXIS_ALONE)


_AXIS_ALONE = b"This is a netCDF dimension but not a netCDF variable"


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """How stored numbers become values of `dtype`; the numbers in `absent` mark missing values."""

    scale: float | None
    offset: float | None
    absent: Array
    unsigned: bool
    least: float | None
    most: float | None
    dtype: np.dtype[Any]

    @staticmethod
    def of(data: Any) -> _Packing | None:
        """Return the packing that an array's attributes describe; None if there is none."""
        scale, offset = _scaling(data)
        unsigned = data.dtype.kind == "i" and str(_text(data.attrs.get("_Unsigned"))).lower() == "true"
        stored = np.dtype(data.dtype.str.replace("i", "u")) if unsigned else data.dtype
        absent = [
            np.ravel(np.asarray(data.attrs[name])).astype(data.dtype).view(stored)
            for name in ("_FillValue", "missing_value")
            if name in data.attrs and np.asarray(data.attrs[name]).dtype.kind in "fiu"
        ]
        if _is_default_fill(data):
            absent.append(np.asarray([data.fillvalue], data.dtype).view(stored))
        numbers = np.concatenate(absent) if absent else np.empty(0, stored)
        numbers = numbers[numbers == numbers]  # NaN needs no mark
        least, most = _valid(data)
        if (scale, offset, least, most) == (None,) * 4 and not len(numbers) and not unsigned:
            return None
        exact = np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)
        return _Packing(
            scale=scale,
            offset=offset,
            absent=numbers,
            unsigned=unsigned,
            least=least,
            most=most,
            dtype=data.dtype if data.dtype.kind == "f" and scale is None and offset is None else exact,
        )

    @property
    def scales(self) -> bool:
        """Whether values differ from the stored numbers even if none is missing."""
        return self.scale is not None or self.offset is not None or self.unsigned

    def absent_in(self, stored: Array) -> int:
        """Return how many of the stored numbers mark missing values."""
        return int(self._nothing(self._raw(stored)).sum())

    def rounds(self, stored: Array, values: Array) -> bool:
        """Return whether decoding rounds integers, which float64 does above 2^53."""
        if self.scales or stored.dtype.kind not in "iu":
            return False
        present = values[np.isfinite(values)]
        return bool((np.abs(present) > 2**53).any())

    def _raw(self, stored: Array) -> Array:
        raw = np.ascontiguousarray(stored)
        return raw.view(raw.dtype.str.replace("i", "u")) if self.unsigned else raw  # in the file's byte order

    def _nothing(self, raw: Array) -> Array:
        nothing: Array = np.isin(raw, self.absent)
        if self.least is not None:
            nothing |= raw < self.least
        if self.most is not None:
            nothing |= raw > self.most
        return nothing

    def decoded(self, stored: Array) -> tuple[Array, int]:
        """Return the values, and how many are missing."""
        raw = self._raw(stored)
        nothing = self._nothing(raw)
        values = raw.astype(np.float64) * (1.0 if self.scale is None else self.scale) + (self.offset or 0.0)
        values[nothing] = np.nan
        return values.astype(self.dtype), int(nothing.sum())

    def remark(self, missing: int) -> str:
        """Describe the decoding for the user."""
        rules = {"scale_factor": self.scale, "add_offset": self.offset}
        done = [f"{name} {value:g}" for name, value in rules.items() if value is not None]
        done += ["_Unsigned"] if self.unsigned else []
        limits = [("from", self.least), ("to", self.most)]
        valid = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
        done += [f"valid {' '.join(valid)}"] if valid and missing else []
        done += [f"{missing} missing values as NaN"] if missing else []
        return f"read as {self.dtype.name} by its attributes: {', '.join(done)}"


def _scaling(data: Any) -> tuple[float | None, float | None]:
    """Return scale_factor and add_offset; SourceError if one of them cannot be applied."""
    found = {name: _number(data.attrs[name]) for name in ("scale_factor", "add_offset") if name in data.attrs}
    odd = [name for name, number in found.items() if number is None]
    if odd:
        raise SourceError(
            f"{data.file.filename}: {data.name.strip('/')} is packed by {' and '.join(found)}, and its {odd[0]} is not "
            f"one number: {shown(_text(data.attrs[odd[0]]))}; correct it, or remove {' and '.join(found)} to take the "
            "numbers as they are stored"
        )
    return found.get("scale_factor"), found.get("add_offset")


def _valid(data: Any) -> tuple[float | None, float | None]:
    """Return the smallest and largest valid stored value: valid_range, or valid_min and valid_max."""
    both = np.ravel(np.asarray(data.attrs.get("valid_range", ())))
    if len(both) == 2 and both.dtype.kind in "fiu":
        return float(both[0]), float(both[1])
    return _number(data.attrs.get("valid_min")), _number(data.attrs.get("valid_max"))


_DEFAULT_FILLS = {
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": -9223372036854775806,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}
"""Fill values of the netCDF library for elements never written, without an attribute (netcdf.h, NC_FILL_*).
Bytes have none: all their values are valid."""


def _is_default_fill(data: Any) -> bool:
    """Return whether the array's HDF5 fill value is netCDF's default; HDF5's own is 0."""
    fill = _DEFAULT_FILLS.get(data.dtype.str[1:])
    return fill is not None and data.fillvalue is not None and data.fillvalue == data.dtype.type(fill)


_PACKING = ("scale_factor", "add_offset", "valid_min", "valid_max", "valid_range", "_FillValue", "missing_value")


def _are_numbers(value: Any, key: str) -> bool:
    """Return whether an attribute fits netCDF: one number, two for valid_range, any count for missing values."""
    if key not in ("valid_range", "_FillValue", "missing_value"):
        return _number(value) is not None
    numbers = np.ravel(np.asarray(value))
    return numbers.dtype.kind in "fiu" and (key != "valid_range" or len(numbers) == 2)


def _number(value: Any) -> float | None:
    """Return an attribute that is one number, or a text of one; else None."""
    numbers = np.ravel(np.asarray(value))
    if value is None or len(numbers) != 1 or numbers.dtype.kind not in "fiuSUO":
        return None
    try:
        return float(numbers[0])
    except (TypeError, ValueError):
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


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
