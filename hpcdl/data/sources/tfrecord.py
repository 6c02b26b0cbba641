"""TFRecord files of tf.train.Example: images with a class, or named features."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.chosen import remarks_on_unused
from hpcdl.data.sources.base.glance import is_image_head
from hpcdl.data.sources.base.labels import MOST_CLASSES, numbered, plausible, sparse
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray
from hpcdl.data.sources.base.source import ROW, Array, Index, IndexWriter, SourceFacts, SourceSpec, UnreadableSample
from hpcdl.data.sources.base.splits import by_names, is_clutter, leaves_out_split, remarks_on_missing, typed
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import FlatFiles, remarks_on_folders, stamp_of
from hpcdl.data.sources.layouts.records import (
    _PACKED_WRONG,
    RECORD_HEAD,
    Records,
    StatedType,
    bytes_of,
    described,
    example_features,
    gather,
    is_sound,
    kind_of,
    length_in,
    packing_of,
    read_examples,
    records,
    stated,
    unpacked,
    value_of_feature,
)

_IMAGE_FIELDS = ("image/encoded", "image_raw", "image", "img")
_LABEL_FIELDS = ("image/class/label", "label", "labels", "class")
_SIDES = (
    ("image/height", "image/width", "image/channels"),
    ("height", "width", "depth"),
    ("height", "width", "channels"),
)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")
_BATCH = 4096
_OF = re.compile(r"-of-[0-9]+(?:\.(?:gz|gzip|zlib))?$")
"""The end of file names that TensorFlow numbers; Parquet files and archives have a further ending."""
_NOTHING: Any = {}


class TFRecordSource(FieldSource):
    """One TFRecord file, or a folder of them; names such as train*, val*, test* make splits if all files have one."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__(spec)
        self._image_field, self._label_field = spec.image_field, spec.label_field
        self._files = FlatFiles()
        self._class_names: list[str] = []
        self._features: set[str] = set()
        """The features of all records with images: one may be missing in the first of them."""
        self._gathered: dict[tuple[str, str], PlacedArray] = {}
        self._skipped: dict[str, None] = {}
        """Damaged records that --on-error skip leaves out of samples of named fields, in order."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept files with names of TFRecord files, or a file whose first record has a correct length."""
        return bool(_files(location))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read every record for its label and the size of its image."""
        paths = _files(self._location)
        if not paths:
            raise SourceError(
                f"{self._location} holds no TFRecord files; their names contain .tfrecord, or -00000-of-00001"
            )
        split_of = {UNSPLIT: paths} if self._location.is_file() else by_names(paths, self._spec)
        left = [split for split in split_of if leaves_out_split(split, self._spec.leave_out)]
        self.named.update(left)
        split_of = {split: own for split, own in split_of.items() if split not in left}
        facts = self._listed(split_of, index)
        remarks = [] if self._location.is_file() else remarks_on_missing(paths)
        remarks += remarks_on_folders(paths, self._location, _files)
        remarks += [f"left out: the split {own}" for own in left]
        return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])

    def _listed(self, split_of: dict[str, list[Path]], index: IndexWriter) -> SourceFacts:
        paths = [path for group in split_of.values() for path in group]
        if not paths:
            raise SourceError(f"{self._location}: --leave-out leaves no file; give fewer names")
        if not self._holds_images(paths):
            return self._list_fields(split_of, index)
        splits = [split for split, group in split_of.items() for _ in group]
        paths = [self._plain(path) for path in paths]  # an image is read at its position in the file
        kinds, num_samples = set(), 0
        labels: set[int] = set()
        for number, (path, split) in enumerate(zip(paths, splits, strict=True)):
            batch: list[tuple[int, int, int, int, int]] = []
            for offset, content, sound in records(path):
                label, size = 0, 0  # a damaged record keeps its place: reading it reports the damage or skips it
                if sound:
                    label, size, kind = self._look(content, f"{path} at byte {offset}")
                    kinds.add(kind)
                    labels.add(label)
                    num_samples += 1
                batch.append((offset, size, label, 0, number))
                if len(batch) == _BATCH:
                    index.add(split, np.array(batch, ROW))
                    batch = []
            index.add(split, np.array(batch, ROW))
        if self._spec.asks and not self._class_names and not self._spec.target_kind:
            self._ask_of_numbers(labels, num_samples)
        if len(kinds) > 1:
            raise SourceError(f"{self._location}: records hold images of different kinds: {sorted(map(str, kinds))}")
        shape = kinds.pop() if kinds else None
        ordered = np.array(sorted(labels), np.int64)
        names, remarks = (self._class_names, []) if self._class_names else numbered(ordered)
        if remarks:
            index.renumber(ordered)
        return SourceFacts(
            class_names=names,
            samples_are="pixels" if shape else "files",
            sample_shape=shape,
            files=[str(path) for path in paths],
            stamps=[stamp_of(path) for path in paths],
            remarks=[*remarks, *remarks_on_unused(self._beside(), self._spec)],
        )

    def _ask_of_numbers(self, labels: set[int], num_samples: int) -> None:
        """Raise SourceError for labels that may be quantities or numbers of samples."""
        if labels and (sparse(labels) or not plausible(len(labels), num_samples)):
            raise SourceError(
                f"{self._location}: the labels are {len(labels)} different numbers from {min(labels)} to "
                f"{max(labels)}, of {num_samples} images: classes or quantities? Give --target-kind class, or for "
                "quantities --input IMAGE=image --target LABEL=label --target-kind regression"
            )

    def _beside(self) -> list[str]:
        """Return the features beside the image and its class, and what tells of the image."""
        features = self._features
        image = self._image_field or next((name for name in _IMAGE_FIELDS if name in features), None)
        label = self._label_field or next((name for name in _LABEL_FIELDS if name in features), None)
        known = {image, label, *itertools.chain(*_SIDES)}
        names = [name for name in sorted(features) if name not in known and not name.startswith("image/")]
        self.named.update(names)
        return names

    def read(self, row: Any, facts: SourceFacts, index: Index) -> bytes | Array:
        """Return the image of a record, after checking its checksum."""
        number, offset = int(row["file"]), int(row["place"])
        path, stamp = facts.files[number], facts.stamps[number]
        length, _ = RECORD_HEAD.unpack(self._files.read(path, stamp, offset, RECORD_HEAD.size))
        framed = bytes(self._files.read(path, stamp, offset + RECORD_HEAD.size, length + 4))
        if not is_sound(framed[:-4], framed[-4:]):
            raise UnreadableSample(f"{self.describe(row, facts, index)}: its checksum is wrong")
        content = self._image(example_features(framed[:-4], path), path)
        if facts.sample_shape is None:
            return content
        height, width, channels = facts.sample_shape
        return np.frombuffer(content, np.uint8).reshape(height, width, channels)

    def describe_picture(self, offset: int, file: str) -> str:
        """Return the position of the record and its file."""
        return f"record at byte {offset} of {Path(file).name}"

    def _holds_images(self, paths: list[Path]) -> bool:
        """Return whether records are images with a class each, by flags and the first record; number text labels."""
        spec = self._spec
        if spec.inputs or spec.targets or self._image_field or self._label_field:
            if not (spec.inputs or spec.targets):
                self._name_labels(paths)
            return not (spec.inputs or spec.targets)
        features: Any = next(read_examples(paths, damaged={}), ("", {}))[1]
        if not any(name in features for name in _IMAGE_FIELDS):
            return not features or any(all(name in features for name in sides) for sides in _SIDES)
        label = next((name for name in _LABEL_FIELDS if name in features), None)
        if label and kind_of(features[label]) == "float_list":
            image = next(name for name in _IMAGE_FIELDS if name in features)
            raise SourceError(
                f"{self._location}: the label {shown(label)} is {described(features[label])}: classes or quantities? "
                f"Give --input {typed(image + '=image')} --target {typed(label + '=label')} and --target-kind class "
                "or --target-kind regression"
            )
        self._name_labels(paths)
        return True

    def _name_labels(self, paths: list[Path]) -> None:
        """Number the classes if labels are class names."""
        names: set[str] = set()
        for where, features in read_examples(paths, damaged={}):
            field = self._label_field or next((name for name in _LABEL_FIELDS if name in features), None)
            if field is None or field not in features or kind_of(features[field]) != "bytes_list":
                return
            if is_image_head((bytes_of(features, field, StatedType()) or b"")[:12]):
                raise SourceError(f"{where}: {shown(field)} is a picture, not the name of a class; give --label-field")
            names.add(bytes(value_of_feature(features, field, StatedType(), where)).decode())
        self._class_names = sorted(names)

    def _list_fields(self, parts: dict[str, list[Path]], index: IndexWriter) -> SourceFacts:
        """List records as samples of named fields; --input and --target give type and shape of fields of bytes."""
        types: dict[str, StatedType] = {}
        self.inputs = stated("--input", self._spec.inputs, types)
        self.targets = stated("--target", self._spec.targets, types)
        wanted = [flag_value.rpartition("=")[0] for flag_value in (*self.inputs, *self.targets)]
        groups = []
        for split, paths in parts.items():
            where, features = next(self._records(paths), ("", _NOTHING))
            if not where:
                what = "no record that can be read" if self._skipped else "no records"
                raise SourceError(f"{self._location}: the files of {split} hold {what}; there is nothing to shard")
            arrays = {
                key: FoundArray(
                    described(features[key]), functools.partial(self._placed_feature, split, paths, key, wanted, types)
                )
                for key in sorted(features)
            }
            groups.append(ArrayGroup(split=split, arrays=arrays))
        facts = self.list_parts(groups, index)
        return dataclasses.replace(facts, skipped=[*self._skipped, *facts.skipped])

    def _records(self, paths: Sequence[Path]) -> Records:
        """Yield the records of `paths`; --on-error skip leaves damaged ones out and notes their names."""
        return read_examples(paths, damaged=None if self._spec.checks else self._skipped)

    def _placed_feature(
        self, split: str, paths: list[Path], key: str, wanted: list[str], types: dict[str, StatedType]
    ) -> PlacedArray:
        if (split, key) not in self._gathered:  # read all wanted features at once
            keys = dict.fromkeys([*wanted, key])
            pending = {name: types.get(name, StatedType()) for name in keys if (split, name) not in self._gathered}
            gathered = gather(
                self._records(paths),
                pending,
                self._work,
                str(self._location),
                masks=self.masks,
                skips=not self._spec.checks,
            )
            self._gathered.update({(split, name): array for name, array in gathered.items()})
        return self._gathered[split, key]

    def divided(self, parts: Sequence[ArrayGroup], remarks: list[str]) -> list[ArrayGroup]:
        """Return the parts unchanged: names of features do not say splits."""
        return list(parts)

    def _plain(self, path: Path) -> Path:
        """Return the file itself, or its uncompressed copy in the work folder."""
        packing = packing_of(path)
        if not packing:
            return path
        plain = self._work / f"{len(list(self._work.glob('*.plain')))}-{path.name}.plain"
        with open_regular(path) as file, plain.open("wb") as out:
            try:
                shutil.copyfileobj(unpacked(file, packing), out, 1 << 20)
            except _PACKED_WRONG as error:
                raise SourceError(f"{path} cannot be unpacked ({packing}): {error}") from error
        return plain

    def _look(self, content: bytes, where: str) -> tuple[int, int, tuple[int, int, int] | None]:
        """Return the label, the image's size in bytes, and its shape if it is raw pixels."""
        features = example_features(content, where)
        self._features.update(features)
        image = self._image(features, where)
        field = self._label_field or next((name for name in _LABEL_FIELDS if name in features), None)
        values: Any = features[field].int64_list.value if field and field in features else ()
        if field and field in features and self._class_names and kind_of(features[field]) == "bytes_list":
            values = [self._class_names.index(bytes(value).decode()) for value in features[field].bytes_list.value]
        if len(values) != 1 or not 0 <= values[0] < MOST_CLASSES:
            problem = (
                f"{list(values)[:3]} in {field!r}" if field and field in features else f"the fields {_names(features)}"
            )
            raise SourceError(
                f"{where}: a label is one whole number from 0 to {MOST_CLASSES - 1}; found {problem}; give "
                "--label-field"
            )
        if image.startswith(_MAGIC):
            return values[0], len(image), None
        for names in _SIDES:
            if all(name in features for name in names):
                shape = [int(side) for name in names for side in features[name].int64_list.value[:1]]
                if len(shape) == 3 and min(shape) > 0 and math.prod(shape) == len(image):
                    return values[0], len(image), (shape[0], shape[1], shape[2])
        raise SourceError(
            f"{where}: the image is neither JPEG nor PNG, nor raw pixels with height, width and depth beside"
        )

    def _image(self, features: Any, where: str) -> bytes:
        field = self._image_field or next((name for name in _IMAGE_FIELDS if name in features), None)
        values: Any = features[field].bytes_list.value if field and field in features else ()
        if len(values) != 1:
            raise SourceError(f"{where}: no image in {field!r}; give --image-field, one of {_names(features)}")
        return bytes(values[0])


def _names(features: Any) -> str:
    return ", ".join(shown(name) for name in sorted(features)[:20])


def _starts_right(path: Path) -> bool:
    with open_regular(path) as file:
        try:
            return length_in(unpacked(file, packing_of(path)).read(RECORD_HEAD.size)) is not None
        except _PACKED_WRONG:
            return False


def _files(location: Path) -> list[Path]:
    if location.is_file():
        return [location] if _named_so(location.name) or _starts_right(location) else []
    with os.scandir(location) as entries:
        return sorted(Path(entry.path) for entry in entries if _is_record_file(entry))


def _is_record_file(entry: os.DirEntry[str]) -> bool:
    return _named_so(entry.name) and not is_clutter(entry.name) and entry.is_file()


def _named_so(name: str) -> bool:
    return ".tfrec" in name or _OF.search(name) is not None
