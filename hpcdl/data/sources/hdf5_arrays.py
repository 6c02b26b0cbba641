"""Arrays in HDF5 files (also netCDF-4): images (N,C,H,W) or (N,H,W,C) with labels (N), or any named fields."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.hdf5_source import ArrayFile
from hpcdl.data.sources.base.chosen import TARGET_NAMES, remarks_on_unused, unnamed_train, without_split
from hpcdl.data.sources.base.glance import files_of, remedy_for
from hpcdl.data.sources.base.labels import CLASS_LISTS, ask_of_labels, checked_labels, name_classes, names_by_number
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray, shape_text
from hpcdl.data.sources.base.source import Array, Index, IndexWriter, SourceFacts, SourceSpec, UnreadableSample
from hpcdl.data.sources.base.splits import IGNORE, by_names, left_out, some, typed
from hpcdl.data.sources.checks.coordinates import LOOKED_INTO, coordinates_apart
from hpcdl.data.sources.checks.pairing import ask_of_order
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import (
    LAST,
    ArrayFiles,
    axes_remark,
    changed,
    channels_last,
    is_image,
    remarks_on_folders,
    stamp_of,
    stored_dtype,
    turned_remark,
)
from hpcdl.data.sources.layouts.targets import one_enumeration

_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4")
_OTHERS = (".mat", ".nxs", ".h5ad", ".cxi", ".loom", ".dat", ".data", "")
"""Endings of files that may be HDF5; their first bytes decide."""
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LINKS_SHOWN = 3
_SIGNATURE_OFFSETS = (0, 512, 1024, 2048)


class Hdf5Source(FieldSource):
    """One HDF5 file, or a folder of them; names such as train*, val*, test* make splits if all files have one."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._fields = (spec.image_field, spec.label_field)
        self._axes = spec.axes
        self._open: dict[str, ArrayFile] = {}
        self._linked: dict[str, None] = {}
        """Other files that were read, in order."""
        self._unfit: dict[str, None] = {}
        """Remarks on lists of classes that do not fit their labels."""
        self._units: dict[str, dict[str, str]] = {}
        """Where each unit of an array was first found, by the array's name without words for splits."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept files with one of HDF5's usual endings, or with its signature."""
        return bool(_files(location))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Find the arrays of each file and list their samples."""
        paths = _files(self._location)
        if not paths:
            raise SourceError(
                f"{self._location} holds no HDF5 files: neither endings ({', '.join(_SUFFIXES)}) nor HDF5's signature; "
                "MATLAB saves HDF5 with -v7.3"
            )
        if not _is_hdf5(paths[0]) and (remedy := remedy_for(paths[0])):
            raise SourceError(f"{paths[0]} is no HDF5 file; {remedy}")
        facts = self._images(paths, index) if self._holds_images(paths) else self.list_parts(self._parts(paths), index)
        unread = [line for path in paths[:LOOKED_INTO] for line in self._file(str(path)).unread()]
        remarks = [f"not read: {', '.join(dict.fromkeys(unread))}"] if unread else []
        remarks += [
            f"{name}: its units differ, {some([*units])} (in {', '.join([*units.values()][:2])}): write them alike"
            for name, units in self._units.items()
            if len(units) > 1
        ]
        shapes = {tuple(field.shape) for field in facts.fields}
        remarks += coordinates_apart(map(self._coordinates, paths[:LOOKED_INTO]), shapes)
        remarks += [*self._unfit, *self._link_remarks(), *remarks_on_folders(paths, self._location, _files)]
        return dataclasses.replace(facts, linked=[*self._linked], remarks=[*facts.remarks, *remarks])

    def _coordinates(self, path: Path) -> tuple[str, dict[str, tuple[int, ...]], Callable[[str], Array]]:
        """Return a file's name, the shapes of its arrays, and the function that reads one."""
        file = self._file(str(path))
        arrays = file.arrays().items()
        return path.name, {name: own for name, (own, kind) in arrays if kind != "text" or len(own) == 1}, file.whole

    def _images(self, paths: list[Path], index: IndexWriter) -> SourceFacts:
        listed, remarks = ArrayFiles(index), dict[str, None]()
        called: list[dict[int, str]] = []
        for split, path in self._by_split(paths):
            file = self._file(str(path))
            image_name, label_name = self._names(path, file)
            shape, dtype = file.kind(image_name)
            where = f"{path}: {image_name}"
            if len(shape) < 3 or not shape[0]:
                raise SourceError(f"{where} has the shape {shape}; images are (N,H,W), (N,H,W,C) or (N,C,H,W)")
            odd = next(
                ((array_name, why) for array_name in (image_name, label_name) if (why := file.packed(array_name))), None
            )
            if odd is not None:
                raise SourceError(
                    f"{path}: {odd[0]} {odd[1]}, and images with classes are taken as they are stored; take the values "
                    f"as fields: --input {typed(image_name + '=NAME')} --target {typed(label_name + '=NAME')}"
                )
            label_values = file.whole(label_name)
            labels = checked_labels(label_values, shape[0], f"{path}: {label_name}")
            ask_of_labels(label_name, label_values.reshape(-1), self._spec.target_kind, f"{path}: {label_name}")
            sample_shape, first = channels_last(shape[1:], self._axes, where)
            remarks |= dict.fromkeys(axes_remark(sample_shape, first, self._axes))
            self._note_links(path, image_name)
            self._note_links(path, label_name)
            self.named.update(file.arrays())
            called.append(self._called(file, label_name))
            lists = CLASS_LISTS if called[-1] else ()
            unused = [name for name in file.arrays() if name not in (image_name, label_name)]
            unused = [name for name in unused if name.rpartition("/")[2].lower() not in lists]
            remarks |= dict.fromkeys(remarks_on_unused(unused, self._spec))
            places = {name: functools.partial(self._placed_at, path, name) for name in unused}
            ask_of_order(places, (image_name, label_name), self._spec, self.named)
            # Called .npy because the work folder knows such names for its own (write/target.py).
            stored = file.unpacked(image_name, self._work / f"{len(listed)}.npy")
            # Quoted: names of data sets may hold colons.
            kept = f"{'nchw' if first else 'nhwc'}:{quote(image_name, safe='')}:{stored}"
            kind = (sample_shape, stored_dtype(dtype, where))
            listed.add(split, labels, kind, kept, stored)
            if file.turns(image_name):
                remarks[turned_remark(image_name)] = None
            remarks |= dict.fromkeys([*file.doubts(image_name), *file.doubts(label_name)])
        facts = listed.facts(self._location, called=one_enumeration(called, str(self._location)))
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Array:
        """Return one image."""
        number = int(row["file"])
        axes, name, path = facts.files[number].split(":", 2)
        if not Path(path).is_file() or stamp_of(path) != facts.stamps[number]:
            raise changed(path)
        try:
            image = self._file(path).sample(unquote(name), int(row["place"]))
        except SourceError as error:
            raise UnreadableSample(f"{self.describe(row, facts, index)} cannot be read: {error}") from error
        if image.ndim == 2:
            return image[:, :, np.newaxis]
        return image.transpose(1, 2, 0) if axes == "nchw" else image

    def describe_picture(self, index: int, file: str) -> str:
        """Return the number of the image, its file and data set."""
        _, name, path = file.split(":", 2)
        return f"image {index} of {Path(path).name}:{unquote(name)}"

    def _holds_images(self, paths: list[Path]) -> bool:
        """Return whether these are images with a class each, rather than samples of named fields."""
        if self._spec.target_kind == "regression" and any(self._fields):
            images, labels = self._names(paths[0], self._file(str(paths[0])))
            self.inputs, self.targets = (images,), (labels,)
            return False
        if self._spec.inputs or self._spec.targets or any(self._fields):
            return not (self._spec.inputs or self._spec.targets)
        for path in paths:
            file = self._file(str(path))
            if len(paths) == 1 and self._spec.split_names != IGNORE and unnamed_train(self._kept(file)):
                return False
            try:
                images, labels = self._names(path, file)
            except SourceError:
                return False
            shape, dtype = file.kind(images)
            label_values = file.whole(labels)
            if not is_image(images, shape, dtype) or self._spec.target_kind == "regression":
                return False
            if file.packed(images) or file.packed(labels):
                return False
            several = label_values.size > shape[0]  # one-hot rows are fields, which become classes there
            if (several or not self._spec.target_kind) and not name_classes(label_values, shape[0]):
                return False
        return True

    def _kept(self, file: ArrayFile) -> list[str]:
        return [name for name in file.arrays() if not left_out(name, self._spec.leave_out)]

    def _parts(self, paths: list[Path]) -> list[ArrayGroup]:
        parts = []
        for split, path in self._by_split(paths):
            arrays = {
                name: FoundArray(shape_text(shape, dtype), functools.partial(self._placed_at, path, name))
                for name, (shape, dtype) in self._file(str(path)).arrays().items()
            }
            parts.append(ArrayGroup(split=split, arrays=arrays))
        return parts

    def _by_split(self, paths: list[Path]) -> list[tuple[str, Path]]:
        groups = by_names(paths, self._spec) if self._location.is_dir() else {UNSPLIT: paths}
        return [(split, path) for split, group in groups.items() for path in group]

    def _note_links(self, path: Path, name: str) -> None:
        """Record the other files that hold an array's values: a change in them is a change of the source."""
        for other in self._file(str(path)).files_behind(name) if self._spec.follow_links else ():
            self._linked[str(other.absolute())] = None

    def _link_remarks(self) -> list[str]:
        """Describe the links that were followed, for the user."""
        base = (self._location if self._location.is_dir() else self._location.parent).absolute()
        paths = map(Path, self._linked)
        names = [str(path.relative_to(base) if path.is_relative_to(base) else path) for path in paths]
        more = f" and {len(names) - _LINKS_SHOWN} more" if len(names) > _LINKS_SHOWN else ""
        return [f"links followed to {', '.join(map(shown, names[:_LINKS_SHOWN]))}{more}"] if names else []

    def _placed_at(self, path: Path, name: str) -> PlacedArray:
        file = self._file(str(path))
        self._note_links(path, name)
        strings = file.strings(name)
        if strings is not None:
            return self.placed_text(strings, name)
        varying = file.lengths_vary(name)
        if varying is not None:
            return self.placed(*varying)
        shape, dtype = file.kind(name)
        copy = self._work / f"copy{len(list(self._work.glob('copy*')))}"
        called, notes = self._called(file, name), [turned_remark(name)] if file.turns(name) else []
        notes += file.doubts(name)
        if unit := file.unit(name):
            self._units.setdefault(without_split(name), {}).setdefault(unit, f"{path.name}:{name}")
        decoded = file.decoded(name, copy)
        if decoded is not None:
            remarks = "; ".join([f"{name}: {decoded[1]}", *notes])
            return PlacedArray(
                path=copy, shape=shape, dtype=decoded[0], called=called, filled=dtype.kind in "iu", remarks=remarks
            )
        values_path, offset = file.place(name, copy)
        return PlacedArray(
            path=values_path, offset=offset, shape=shape, dtype=dtype, called=called, remarks="; ".join(notes)
        )

    def _called(self, file: ArrayFile, name: str) -> dict[int, str]:
        """Return the names of an array's numbers: of an enumeration, or of a list of classes in the file."""
        shape, dtype = file.kind(name)
        called = file.called(name)
        if called or dtype.kind not in "iu" or math.prod(shape[1:]) != 1 or not shape:
            return called
        words = file.listed_classes(name, CLASS_LISTS)
        values = file.whole(name) if words else np.empty(0, np.int64)
        names = names_by_number(words, values)
        if len(values) and not names:
            self._unfit[
                f"{name}: from {values.min()} to {values.max()}, and a list of {len(words)} classes ({some(words)}): "
                "which name is whose is not known, so classes keep their numbers"
            ] = None
        return names

    def _file(self, path: str) -> ArrayFile:
        if path not in self._open:
            last = self._spec.sample_axis == LAST and self._work not in Path(path).parents  # copies: samples first
            self._open[path] = ArrayFile(Path(path), follow=self._spec.follow_links, last=last)
        return self._open[path]

    def _names(self, path: Path, file: ArrayFile) -> tuple[str, str]:
        """Return the paths of images and labels in a file: the given ones, or the only ones that fit."""
        shapes = file.shapes()
        images, labels = self._fields
        for name in (images, labels):
            if name is not None and name.strip("/") not in shapes:
                if name.strip("/") in file.arrays():  # MATLAB's
                    flags = [
                        f"--{role} {typed(own.strip('/'))}=NAME" if own else f"--{role} PATH=NAME"
                        for role, own in (("input", images), ("target", labels))
                    ]
                    raise SourceError(
                        f"{path}: --image-field and --label-field are not for MATLAB's arrays, whose axes have another "
                        f"order: give {' '.join(flags)}, and --sample-axis last if it counts samples"
                    )
                known = f"it has {', '.join(shapes)}" if shapes else (
                    "it has none that --image-field can name, as MATLAB's, whose axes have another order; give --input "
                    "NAME=image --target NAME=label"
                )  # fmt: skip
                raise SourceError(f"{path} has no data set {name!r}; {known}")
        fitting = [name for name, shape in shapes.items() if len(shape) >= 3]
        images = images or ("images" if "images" in fitting else fitting[0] if len(fitting) == 1 else None)
        if images is not None:
            length = shapes[images.strip("/")][0]
            numbers = [name for name, shape in shapes.items() if shape in ((length,), (length, 1)) and name != images]
            usual = [name for name in numbers if name.rsplit("/", 1)[-1].lower() in TARGET_NAMES]
            labels = labels or ("labels" if "labels" in numbers else usual[0] if len(usual) == 1 else None)
        if images is None or labels is None:
            raise SourceError(
                f"{path}: which data sets? Give --image-field and --label-field of {', '.join(shapes) or 'none'}"
            )
        return images.strip("/"), labels.strip("/")


def _files(location: Path) -> list[Path]:
    """Return the HDF5 files at `location`: by their endings, or by HDF5's signature."""
    if location.is_file():
        usual = location.suffix.lower() in _SUFFIXES
        return [location] if usual or _is_hdf5(location) else []
    paths = [path for path in files_of(location) if path.name[0] != "."]
    matches = [path for path in paths if path.suffix.lower() in _SUFFIXES]
    others = [path for path in paths if path.suffix.lower() in _OTHERS]
    if matches or not others or not _is_hdf5(others[0]):  # check only one: folders may hold many other files
        return matches
    return [path for path in others if _is_hdf5(path)]


def _is_hdf5(path: Path) -> bool:
    """Return whether HDF5's signature is at one of its permitted positions; MATLAB's is after 512 bytes."""
    with open_regular(path) as file:
        return any(file.seek(offset) == offset and file.read(8) == _SIGNATURE for offset in _SIGNATURE_OFFSETS)
