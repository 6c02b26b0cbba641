"""Arrays in .npz archives or in .npy files side by side: images with labels, or any named fields."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import lzma
import math
import shutil
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcdl.core.errors import SourceError
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import format_bytes
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.chosen import (
    TARGET_NAMES,
    path_split,
    remark_on_train,
    remarks_on_unused,
    unnamed_train,
    without_split,
)
from hpcdl.data.sources.base.glance import files_of
from hpcdl.data.sources.base.labels import CLASS_LISTS, ask_of_labels, checked_labels, name_classes, names_by_number
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray, shape_text
from hpcdl.data.sources.base.source import Array, Index, IndexWriter, SourceFacts, SourceSpec
from hpcdl.data.sources.base.splits import IGNORE, by_names, is_clutter, left_out, some
from hpcdl.data.sources.checks.coordinates import LOOKED_INTO, coordinates_apart
from hpcdl.data.sources.checks.pairing import ask_of_order
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import (
    LAST,
    ArrayFiles,
    FlatFiles,
    axes_remark,
    channels_last,
    is_image,
    remarks_on_folders,
    stored_dtype,
    turned_remark,
)
from hpcdl.data.sources.layouts.targets import one_enumeration

_PAIRS = (("images", "labels"), ("x", "y"), ("data", "labels"))
_MOST_HEADER_BYTES = 16_384
_COPY_BYTES = 64 << 20
_DAMAGED = (zipfile.BadZipFile, ValueError, KeyError, EOFError, OverflowError, NotImplementedError, struct.error)
"""What the readers of Python and numpy raise for damaged archives and headers."""


class NumpySource(FieldSource):
    """A .npz file, a folder of them, a .npy file of images with --label-field, or a folder of .npy files.

    Several .npz files hold parts of the same arrays; names such as train*, val*, test* make splits.
    """

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._fields = (spec.image_field, spec.label_field)
        self._axes = spec.axes
        self._files = FlatFiles()
        self._unpacked = itertools.count()
        """Numbers of unpacked members, shared by the archives of a folder."""
        self._found: dict[str, PlacedArray] = {}
        self._headers: dict[int, tuple[int, np.dtype[Any], str, str]] = {}

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a .npz or .npy file, or a folder with such files."""
        if location.is_dir():
            return bool(_array_files(location))
        return location.suffix in (".npy", ".npz")

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Find the arrays and list their samples; compressed members are unpacked into the work folder."""
        facts = self._listed(index)
        files = [] if self._location.is_file() else _array_files(self._location)
        read_npy = bool(files) and files[0].suffix == ".npy"
        beside = sorted(path.name for path in self._location.glob("*.npz")) if read_npy else []
        remarks = [f"not read: {some(beside)} beside the .npy files"] if beside else []
        remarks += remarks_on_folders(files, self._location, _array_files)
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])

    def _listed(self, index: IndexWriter) -> SourceFacts:
        parts = self._parts()
        for _, part in parts:
            part._names()
            self.named.update(part.named)
        if not all(part._holds_images() for _, part in parts):
            groups = [ArrayGroup(split=split, arrays=part._arrays()) for split, part in parts]
            self.inputs, self.targets = parts[0][1].inputs, parts[0][1].targets
            facts = self.list_parts(groups, index)
            shapes = {tuple(field.shape) for field in facts.fields}
            remarks = coordinates_apart((part._coordinates() for _, part in parts[:LOOKED_INTO]), shapes)
            return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])
        listed, noted = ArrayFiles(index), dict[str, None]()
        for split, part in parts:
            noted |= dict.fromkeys(part._add_images(split, listed))
        labels = [part._array(label) for _, part in parts for _, label in part._pairs().values()]
        called = one_enumeration([array.called for array in labels], str(self._location))
        facts = listed.facts(self._location, called=called)
        return dataclasses.replace(facts, remarks=[*facts.remarks, *noted])

    def _coordinates(self) -> tuple[str, dict[str, tuple[int, ...]], Callable[[str], Array]]:
        """Return the file's name, the shapes of its arrays, and a function that reads one."""
        found = {name: self._array(name) for name in self._names()}
        shapes = {name: array.shape for name, array in found.items() if array.dtype.kind in "iufSU"}
        return self._location.name, shapes, lambda name: found[name].values()

    def _parts(self) -> list[tuple[str, NumpySource]]:
        """Return the sources with their splits: one for each archive of a folder of .npz files, else this one."""
        files = [] if self._location.is_file() else _array_files(self._location)
        if not files or files[0].suffix != ".npz":
            return [(UNSPLIT, self)]
        return [(split, self._part(path)) for split, paths in by_names(files, self._spec).items() for path in paths]

    def _part(self, path: Path) -> NumpySource:
        part = NumpySource(dataclasses.replace(self._spec, location=str(path)))
        part._unpacked = self._unpacked
        return part

    def _add_images(self, split: str, listed: ArrayFiles) -> list[str]:
        """Add the images of this file or folder, by the splits of its arrays if they name some; return remarks."""
        pairs = self._pairs()
        used = {name for pair in pairs.values() for name in pair}
        lists = CLASS_LISTS if any(self._array(label).called for _, label in pairs.values()) else ()
        unused = [name for name in self._names() if name not in used and name.lower() not in lists]
        remarks = remarks_on_unused(unused, self._spec)
        if "train" in pairs and pairs["train"][0] in unnamed_train(self._names()):
            remarks.append(remark_on_train(pairs["train"]))
        for own_split, (image_name, label_name) in pairs.items():
            images, labels = self._array(image_name), self._array(label_name)
            where = f"{self._location}: {image_name}"
            if len(images.shape) < 3 or not images.shape[0]:
                raise SourceError(f"{where} has the shape {images.shape}; images are (N,H,W), (N,H,W,C) or (N,C,H,W)")
            if not labels.shape or not labels.shape[0]:
                raise SourceError(f"{self._location}: {label_name} has the shape {labels.shape}; labels are (N)")
            numbers = checked_labels(np.asarray(labels.values()), images.shape[0], f"{self._location}: {label_name}")
            values = np.asarray(labels.values()).reshape(-1)
            ask_of_labels(label_name, values, self._spec.target_kind, f"{self._location}: {label_name}")
            own_names = (name for name in unused if own_split == UNSPLIT or path_split(name) == own_split)
            places = {without_split(name): functools.partial(self._placed_at, name) for name in own_names}
            ask_of_order(places, (image_name, label_name), self._spec, self.named)
            shape, first = channels_last(images.shape[1:], self._axes, where)
            # The path comes last, because it may hold colons itself.
            kept = f"{images.offset}:{images.dtype.str}:{'nchw' if first else 'nhwc'}:{images.path}"
            kind = (shape, stored_dtype(images.dtype, where))
            listed.add(split if own_split == UNSPLIT else own_split, numbers, kind, kept, images.path)
            remarks += [line for line in axes_remark(shape, first, self._axes) if line not in remarks]
            remarks += [images.remarks] if images.remarks and images.remarks not in remarks else []
        return remarks

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Array:
        """Return one image."""
        assert facts.sample_shape is not None
        file = int(row["file"])
        if file not in self._headers:
            begin, kind, order, name = facts.files[file].split(":", 3)
            self._headers[file] = (int(begin), np.dtype(kind), order, name)
        offset, dtype, axes, path = self._headers[file]
        height, width, channels = facts.sample_shape
        size = height * width * channels * dtype.itemsize
        content = self._files.read(path, facts.stamps[file], offset + int(row["place"]) * size, size)
        values = np.frombuffer(content, dtype)
        if axes == "nchw":
            return values.reshape(channels, height, width).transpose(1, 2, 0)
        return values.reshape(height, width, channels)

    def read_fields_block(self, rows: Any, facts: SourceFacts, dtypes: Sequence[str]) -> list[Array] | None:
        """Return the fields of all samples of `rows` at once, as `dtypes`; None if they must be read one by one."""
        if facts.fields or facts.sample_shape is None:
            return super().read_fields_block(rows, facts, dtypes)
        file = int(rows[0]["file"])
        offset, kind, axes, path = facts.files[file].split(":", 3)
        if axes != "nhwc" or np.dtype(kind) != np.dtype(dtypes[0]) or (rows["file"] != file).any():
            return None
        out = np.empty((len(rows), *facts.sample_shape), kind)
        whole = self._files.read_rows(path, facts.stamps[file], int(offset), rows["place"], out)
        return [out, rows["label"]] if whole else None

    def describe_picture(self, index: int, file: str) -> str:
        """Return the number of the image, and its file."""
        return f"image {index} of {Path(file.split(':', 3)[3]).name}"

    def _holds_images(self) -> bool:
        """Return whether these are images with a class each, rather than samples of named fields."""
        if self._spec.target_kind == "regression" and all(self._fields):
            self.inputs, self.targets = ((name or "",) for name in self._fields)
            return False
        if self._spec.inputs or self._spec.targets or any(self._fields):
            return not (self._spec.inputs or self._spec.targets)
        try:
            pairs = self._pairs()
        except SourceError:
            return False
        for image_name, label_name in pairs.values():
            images, labels = self._array(image_name), self._array(label_name)
            if not labels.shape or self._spec.target_kind == "regression":
                return False
            if not is_image(image_name, images.shape, images.dtype):
                return False
            several = (
                int(np.prod(labels.shape)) > images.shape[0]
            )  # one-hot rows are fields, which become classes there
            if (several or not self._spec.target_kind) and not name_classes(
                np.asarray(labels.values()), images.shape[0]
            ):
                return False
        return True

    def _arrays(self) -> dict[str, FoundArray]:
        """Return every array; for a single .npy file, which then is the input, also those beside it."""
        if self._location.suffix == ".npy":
            self.inputs = self._spec.inputs or (self._location.stem,)
            names = sorted(path.stem for path in self._location.parent.glob("*.npy"))
        else:
            names = self._names()
        flag_values = (*self.inputs, *self.targets)
        asked = {self._location.stem, *(value.partition("=")[0].removesuffix(".npy") for value in flag_values)}
        arrays = {}
        for name in names:
            try:
                array = self._array(name)
            except SourceError:
                if self._location.suffix != ".npy" or name in asked or name.lower() in TARGET_NAMES:
                    raise
                continue  # a file beside the one given, which may have nothing to do with it
            parts = f"records of {', '.join(array.dtype.names)}" if array.dtype.names else array.dtype.name
            kind = "text" if array.dtype.kind in "SU" else parts
            arrays[name] = FoundArray(shape_text(array.shape, kind), functools.partial(self._as_field, name, array))
        return arrays

    def _placed_at(self, name: str) -> PlacedArray:
        return self._as_field(name, self._array(name))

    def _as_field(self, name: str, array: PlacedArray) -> PlacedArray:
        if array.dtype.kind not in "SU":
            return array
        if len(array.shape) > 1:
            raise SourceError(
                f"{self._location}: {name} holds strings in the shape {array.shape}; one a sample is needed"
            )
        try:
            values = array.values().reshape(-1).tolist()
        except ValueError as error:  # characters with invalid codes
            raise SourceError(f"{self._location}: {name} holds text that is damaged: {_one_line(error)}") from error
        return self.placed_text(values, name)

    def _names(self) -> list[str]:
        if self._location.is_dir():
            names = sorted(path.stem for path in _array_files(self._location))
        elif self._location.suffix == ".npz":
            with _opened(self._location) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
            if {"format", "shape", "data"} <= set(names) and set(names) & {"indptr", "row", "offsets"}:
                raise SourceError(
                    f"{self._location} is a sparse matrix of SciPy: save its rows (.toarray()) with their targets"
                )
        else:
            return [self._location.stem]
        self.named.update(names)
        return [name for name in names if not left_out(name, self._spec.leave_out)]

    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Return the names of images and labels by split."""
        names, (images, labels) = self._names(), self._fields
        if self._location.suffix == ".npy":
            if labels is None:
                raise SourceError(
                    f"{self._location}: name the file with its labels, for example --label-field labels.npy"
                )
            return {UNSPLIT: (self._location.stem, labels)}
        if images or labels:
            wanted = (images or "images", labels or "labels")
            missing = [name for name in wanted if name not in names]
            if missing:
                raise SourceError(f"{self._location} has no array {missing[0]!r}; it has {', '.join(names)}")
            return {UNSPLIT: wanted}
        divided = self._divided_pairs(names)
        whole = self._spec.split_names == IGNORE or not unnamed_train(names)
        plain = next((pair for pair in _PAIRS if whole and set(pair) <= set(names)), None)
        if not divided and plain is None:
            raise SourceError(
                f"{self._location}: which arrays? Give --image-field and --label-field of {', '.join(names)}"
            )
        return divided or {UNSPLIT: plain or ("", "")}

    def _divided_pairs(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return x and y of each split by their names: x_train beside y_train, x_valid beside y_valid, ..."""
        if self._spec.split_names == IGNORE:
            return {}
        train = unnamed_train(names)
        by_split: dict[str, dict[str, str]] = {"train": {name: name for name in train}, "val": {}, "test": {}}
        for name in names:
            if (split := path_split(name)) in by_split:
                by_split[split].setdefault(without_split(name), name)
        return {split: (arrays["x"], arrays["y"]) for split, arrays in by_split.items() if {"x", "y"} <= set(arrays)}

    def _array(self, name: str) -> PlacedArray:
        if name not in self._found:
            array = self._look(name)
            self._found[name] = dataclasses.replace(array, called=self._called(name, array))
        return self._found[name]

    def _called(self, name: str, array: PlacedArray) -> dict[int, str]:
        """Return the names of an array's numbers if an array beside it lists the classes; empty otherwise."""
        if array.dtype.kind not in "iu" or not array.shape or math.prod(array.shape[1:]) != 1:
            return {}
        listing = next((own for own in self._names() if own.lower() in CLASS_LISTS and own != name), None)
        with contextlib.suppress(SourceError, ValueError):  # of Python objects, or of damaged text
            words = self._look(listing) if listing else array
            if words.dtype.kind in "SU" and len(words.shape) == 1 and words.shape != array.shape[:1]:
                names = [word.decode() if isinstance(word, bytes) else word for word in words.values().tolist()]
                return names_by_number(names, np.asarray(array.values()))
        return {}

    def _look(self, name: str) -> PlacedArray:
        folder = self._location if self._location.is_dir() else self._location.parent
        if self._location.suffix == ".npz":
            return self._member(f"{name}.npy")
        path = folder / (name if name.endswith(".npy") else f"{name}.npy")
        if not path.is_file():
            raise SourceError(f"no such file: {path}; give --label-field")
        stored, column_first = _stored(path, 0, str(path))
        extra_bytes = path.stat().st_size - _end_of(stored)
        array = self._rows_first(name, stored, column_first)
        remarks = [
            array.remarks,
            f"{name}: {extra_bytes:,} bytes behind its array are not read: of a second one?" if extra_bytes else "",
        ]
        return dataclasses.replace(array, remarks="; ".join(filter(None, remarks)))

    def _rows_first(self, name: str, array: PlacedArray, column_first: bool) -> PlacedArray:
        """Return an array with its samples stored contiguously: itself, or a copy in C order with the samples first."""
        turns = self._spec.sample_axis == LAST and len(array.shape) > 1 and array.shape[-1] != 1
        if not turns and (not column_first or len(array.shape) < 2):
            return array
        shape = (array.shape[-1], *array.shape[:-1]) if turns else array.shape
        copy = self._work / f"array{len(list(self._work.glob('array*')))}"
        rows = max(1, _COPY_BYTES // max(1, array.dtype.itemsize * math.prod(shape[1:])))
        order: Literal["F", "C"] = "F" if column_first else "C"
        with copy.open("wb") as out:
            for first in range(0, shape[0], rows):  # mapped again each time: pages already read stop counting as memory
                values = np.memmap(array.path, array.dtype, "r", array.offset, array.shape, order)
                values = np.moveaxis(values, -1, 0) if turns else values
                out.write(np.ascontiguousarray(values[first : first + rows]).data)
        remarks = ["saved in Fortran order, read as numpy reads it"] * column_first + [turned_remark(name)] * turns
        return dataclasses.replace(array, path=copy, offset=0, shape=shape, remarks="; ".join(remarks))

    def _member(self, name: str) -> PlacedArray:
        """Return a member of the archive at its position there, or unpacked."""
        shown = f"{self._location}: {name}"
        with _opened(self._location) as archive:
            if name not in archive.namelist():
                raise SourceError(f"{shown} is not an array: members of an archive end in .npy")
            member = archive.getinfo(name)
            if member.compress_type == zipfile.ZIP_STORED:
                with self._location.open("rb") as file:
                    # A damaged directory may state a position before the file.
                    file.seek(max(0, member.header_offset) + 26)
                    # Name and extra field of the local header; the directory's may have other lengths (APPNOTE.TXT,
                    # section 4.3.7).
                    lengths = struct.unpack("<HH", file.read(4).ljust(4, b"\0"))
                found = _stored(self._location, max(0, member.header_offset) + 30 + sum(lengths), shown)
                _check_sum(archive, member, shown)
                return self._rows_first(name.removesuffix(".npy"), *found)
            if member.compress_type != zipfile.ZIP_DEFLATED:  # for others Python unpacks all to read a part
                raise SourceError(f"{shown} is packed in another way than numpy does; use numpy.savez_compressed")
            unpacked = self._work / f"{next(self._unpacked)}.npy"
            try:
                with archive.open(member) as packed, unpacked.open("wb") as out:
                    out.write(packed.read(_MOST_HEADER_BYTES))
                    out.flush()
                    # read no more than the header says
                    left_bytes = _end_of(_placed(unpacked, 0, shown)[0]) - out.tell() + 1
                    free_bytes = shutil.disk_usage(self._work).free
                    if left_bytes > free_bytes:
                        raise SourceError(
                            f"{shown} unpacks to {format_bytes(left_bytes)}; {format_bytes(free_bytes)} are free in "
                            f"{self._work}"
                        )
                    while left_bytes > 0 and (piece := packed.read(min(left_bytes, 1 << 20))):
                        left_bytes -= out.write(piece)
            except (OSError, EOFError, zlib.error, lzma.LZMAError, RuntimeError, *_DAMAGED) as error:
                raise SourceError(f"{shown} cannot be unpacked: {_one_line(error)}") from error
        return self._rows_first(name.removesuffix(".npy"), *_stored(unpacked, 0, shown))


def _array_files(folder: Path) -> list[Path]:
    """Return the .npy files of a folder, or its .npz files if it has none."""
    paths = [path for path in files_of(folder) if not is_clutter(path.name)]
    arrays = [path for path in paths if path.suffix == ".npy"]
    return arrays or [path for path in paths if path.suffix == ".npz"]


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, *_DAMAGED) as error:
        raise SourceError(f"{path} is not a .npz archive: {_one_line(error)}") from error


def _check_sum(archive: zipfile.ZipFile, member: zipfile.ZipInfo, shown: str) -> None:
    """Raise SourceError unless a member has its CRC, which reading it in place would not look at."""
    try:
        with archive.open(member) as content:
            while content.read(1 << 20):
                pass
    except (OSError, RuntimeError, *_DAMAGED) as error:
        raise SourceError(f"{shown} is damaged: {_one_line(error)}; fetch or save it again") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _stored(path: Path, offset: int, shown: str) -> tuple[PlacedArray, bool]:
    """Return the array with its .npy header at `offset` of `path`, if complete, and whether in Fortran order."""
    array, column_first = _placed(path, offset, shown)
    if path.stat().st_size < _end_of(array):
        raise SourceError(f"{shown} is cut short: its header says that its shape is {array.shape}")
    return array, column_first


def _end_of(array: PlacedArray) -> int:
    """Return the position in the file of the array's end."""
    return array.offset + math.prod(array.shape) * array.dtype.itemsize


def _placed(path: Path, offset: int, shown: str) -> tuple[PlacedArray, bool]:
    """Return the array described by the .npy header at `offset`, and whether in Fortran order; objects are refused."""
    with open_regular(path) as file:
        file.seek(offset)
        try:
            version = np.lib.format.read_magic(file)
            # Version 3 differs from 2 in how names within records are encoded, and records are refused later.
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about arrays saved by Python 2
                shape, column_first, dtype = read(file)
        except (TypeError, SyntaxError, tokenize.TokenError, RecursionError, *_DAMAGED) as error:
            file.seek(offset)
            pickled = "; it may be a pickle: save plain arrays" if file.read(1) == b"\x80" else ""
            raise SourceError(f"{shown} is not a numpy array{pickled or f': {_one_line(error)}'}") from error
        position = file.tell()
    if dtype.hasobject:
        raise SourceError(f"{shown} holds Python objects; save plain numbers or text, or leave it out with --leave-out")
    if min(shape, default=0) < 0 or not dtype.itemsize:
        raise SourceError(f"{shown} is not a numpy array: it has the shape {shape} of {dtype}")
    return PlacedArray(path=path, offset=position, shape=tuple(shape), dtype=dtype), bool(column_first)
