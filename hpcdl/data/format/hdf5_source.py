"""HDF5 files of a user, netCDF-4 and MATLAB's among them, as sources of arrays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.core.errors import SourceError
from hpcdl.core.storage.disk import remove_file
from hpcdl.core.units import format_bytes
from hpcdl.data.format.hdf5 import DAMAGED, Array, load_filters
from hpcdl.data.format.hdf5_links import StoredOutside, arrays_inside, arrays_linked, files_behind
from hpcdl.data.format.hdf5_packing import ATTRIBUTES, Packing, are_numbers, not_applied, text_of

_MOST_CHUNK_BYTES = 256 * 1024**2
_MOST_RATIO = 2000
"""Arrays with a higher compression ratio are checked for missing chunks."""
_COPY_BYTES = 32 * 1024**2


_MOST_LINKS = 1000
"""Links of a file that are looked at: it may have an array for each sample."""


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
        self._file: Any = None
        try:
            with self._reading():
                self._file = h5py.File(path, "r", locking=False)
                if follow:
                    self._linked = arrays_linked(self._file)
                else:
                    arrays_inside(self._file)
        except SourceError:
            if self._file is not None:
                self._file.close()  # the error's traceback would keep it open
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except StoredOutside as error:
            raise SourceError(f"{self._path}: {error}; {error.remedy}") from error
        except DAMAGED as error:
            # HDF5's messages span lines, and errors of hpcdl are one line.
            reason = " ".join(str(error).split())[:200]
            # HDF5's newer formats mark a file while it is open to write, and a killed writer leaves the mark.
            if "already open for write" in reason:
                raise SourceError(
                    f"{self._path} is being written, or its writer was killed: wait, or type h5clear -s on a copy"
                ) from error
            # Only now, because looking for filters costs a visit of all arrays.
            if self._file and (packed := _packed_by_unknown(self._file)):
                raise SourceError(
                    f"{self._path}: {packed}, which is not installed here: install its plugin (pip install hdf5plugin "
                    "has many), or unpack the file with h5repack -f NONE where it is"
                ) from error
            raise SourceError(f"{self._path} is no HDF5 file that can be read: {reason}") from error

    def unread(self) -> list[str]:
        """Describe what is no array, although its name may be looked for: links that lead nowhere, and references."""
        links: dict[str, Any] = {}

        def note(name: str, link: Any) -> bool | None:
            links[name] = link
            return len(links) >= _MOST_LINKS or None  # anything but None ends the visit

        with self._reading():
            self._file.visititems_links(note)
            lost = [
                f"{name} (a link to {link.path}, which is not there)"
                for name, link in links.items()
                if isinstance(link, h5py.SoftLink) and self._file.get(name) is None
            ]
            found = {
                name: self._file[name]
                for name, link in links.items()
                if isinstance(link, h5py.HardLink) and not name.startswith("#")  # MATLAB's own parts
            }
            references = [
                f"{name} (references)"
                for name, item in found.items()
                if isinstance(item, h5py.Dataset) and h5py.check_ref_dtype(item.dtype)
            ]
        return lost + references

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
            elif text_of(item.attrs.get(_MATLAB)) == "char":
                return  # character codes, as many rows as there are characters
            # Complex and opaque ones too: a message about their type helps more than their absence.
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
            packing = Packing.of(data)
            if packing is None:
                return None
            missing = 0
            with copy.open("wb") as out:
                # Decoding takes float64, whatever the stored type.
                for chunk in self._chunks(data, item_bytes=8):
                    values, absent = packing.decoded(chunk)
                    missing += absent
                    if absent and packing.rounds(chunk, values):
                        raise SourceError(
                            f"{self._path}: {name} has missing values, and whole numbers over 2^53, which the float64 "
                            "that would hold NaN rounds; leave these samples out of the file, or the array"
                        )
                    values.tofile(out)
            # The values are the stored numbers, so they are read where they are.
            if not missing and not packing.scales:
                remove_file(copy)
                return None
            return packing.dtype, packing.remark(missing)

    def unit(self, name: str) -> str:
        """Return an array's attribute `units`; empty if it has none."""
        with self._reading():
            return text_of(self._found(name)[0].attrs.get("units", "")).strip()

    def packed(self, name: str) -> str:
        """Return why an array's values differ from the stored numbers, by netCDF's conventions; empty if they do not.

        They also differ if some stored numbers mark missing values.
        """
        with self._reading():
            data = self._array(name)
            packing = Packing.of(data) if data.dtype.kind in "fiu" else None
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
            # A virtual data set stores nothing itself; its sources are checked when links are followed.
            num_written, num_chunks = (1, 1) if data.is_virtual or not data.size else _written_chunks(data)
            odd = [key for key in ATTRIBUTES if key in data.attrs and not are_numbers(data.attrs[key], key)]
            others = not_applied(data.attrs) if data.dtype.kind in "fiu" else ""
            sentences = [f"{name}: {others}"] if others else []
            if num_written < num_chunks:
                part = f"{num_chunks - num_written} of its {num_chunks} chunks were" if data.chunks else "it was"
                sentences.append(f"{name}: {part} never written, and read as {data.fillvalue}")
            if "flag_masks" in data.attrs:
                sentences.append(f"{name}: its numbers may be sums of flags (flag_masks): several labels, no class")
            words, numbers = _flags_of(data)
            if len(set(words)) != len(numbers):
                sentences.append(
                    f"{name}: {len(set(words))} different flag_meanings for {len(numbers)} flag_values, so its numbers "
                    "have no names"
                )
        if odd and data.dtype.kind in "fiu":
            sentences.append(
                f"{name}: not applied are its attributes {', '.join(odd)}, which are no numbers, or too many"
            )
        return sentences

    def called(self, name: str) -> dict[int, str]:
        """Return the names of an array's numbers, by its enumeration or netCDF's flags; empty for plain numbers."""
        with self._reading():
            data, part = self._found(name)
            names = h5py.check_enum_dtype(data.dtype[part] if part else data.dtype)
            if names is None:
                words, numbers = _flags_of(data)
                names = dict(zip(words, numbers, strict=False)) if len(set(words)) == len(numbers) else None
        return {int(number): label for label, number in (names or {}).items()}

    def listed_classes(self, name: str, called: Sequence[str]) -> list[str]:
        """Return the classes that an attribute of an array or of the file, or a data set beside it, lists."""
        with self._reading():
            data = self._found(name)[0]
            held = [own.attrs[word] for own in (data, self._file) for word in called if word in own.attrs]
            held += [own for word in called if isinstance(own := data.parent.get(word), h5py.Dataset)]
            # One name for each sample is a label, not a list of classes.
            lists = [
                values[:]
                for values in held
                if len(np.shape(values)) == 1
                and np.shape(values) not in ((0,), data.shape[:1])
                and values.dtype.kind in "OSU"
            ]
        return next(([text_of(word) for word in words] for words in lists if isinstance(words[0], str | bytes)), [])

    def place(self, name: str, copy: Path) -> tuple[Path, int]:
        """Return a file that stores an array contiguously, and its offset there: this file, or the new `copy`."""
        with self._reading():
            data, part = self._array(name), self._found(name)[1]
            contiguous = not part and _MATLAB not in data.attrs and not self._turns(data)
            # Compact data sets are stored in the header and have no offset.
            if contiguous and data.chunks is None and data.id.get_offset() is not None and data.size:
                # With links followed, this may be another file.
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
            # With one sample in a chunk, nothing is unpacked in vain.
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
        # A header can state any shape; memory is only given to what the stored bytes make plausible.
        most = max(_MOST_CHUNK_BYTES, _MOST_RATIO * data.id.get_storage_size())
        if data.nbytes <= most or data.is_virtual:  # the sources of a virtual array are already checked
            return
        stored, chunks = _written_chunks(data)
        if stored < chunks:
            raise SourceError(
                f"{self._path}: {name} states the shape {data.shape}, and {stored} of its {chunks} chunks are there; "
                "the file was not written to its end, or is damaged"
            )


def _flags_of(data: Any) -> tuple[list[str], list[int]]:
    """Return the words and numbers of netCDF's flags (CF conventions, section 3.5); both empty for plain numbers."""
    if not {"flag_values", "flag_meanings"} <= set(data.attrs):
        return [], []
    return text_of(data.attrs["flag_meanings"]).split(), np.ravel(data.attrs["flag_values"]).tolist()


def _packed_by_unknown(file: Any) -> str:
    """Name a data set packed by a filter that HDF5 does not have here, and the filter; empty if there is none."""
    found: list[str] = []

    def look(name: str, item: Any) -> None:
        settings = item.id.get_create_plist() if isinstance(item, h5py.Dataset) else None
        filter_ids = [settings.get_filter(number)[0] for number in range(settings.get_nfilters())] if settings else []
        found.extend(
            f"{name} is packed by HDF5's filter {filter_id}"
            for filter_id in filter_ids
            if not h5py.h5z.filter_avail(filter_id)
        )

    with contextlib.suppress(*DAMAGED):  # what cannot be looked at is damaged, as the caller says
        file.visititems(look)
    return found[0] if found else ""


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
    logical = text_of(data.attrs.get(_MATLAB, "")) == "logical"
    return np.dtype(np.bool_) if logical else data.dtype


def _is_axis(data: Any) -> bool:
    """Return whether this is the placeholder that netCDF-4 writes for a dimension without values."""
    return bytes(np.bytes_(data.attrs.get("NAME", b""))).startswith(_AXIS_ALONE)


_AXIS_ALONE = b"This is a netCDF dimension but not a netCDF variable"
