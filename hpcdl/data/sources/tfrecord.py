"""TFRecord files of tf.train.Example, read without TensorFlow; CRC-32C and protobuf by their libraries.

A record is: length (uint64), masked CRC of the length (uint32), data, masked CRC of the data (uint32).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base import MOST_SAMPLE_BYTES, Array, SourceFacts, SourceSpec, UnreadableSample
from hpcdl.data.sources.flat import MOST_CLASSES, FlatFiles, class_numbers, stamp_of
from hpcdl.data.sources.index import ROW, Index, IndexWriter
from hpcdl.data.sources.splits import by_names

_HEAD = struct.Struct("<QI")
_FRAME = _HEAD.size + 4
_IMAGE_FIELDS = ("image/encoded", "image_raw", "image", "img")
_LABEL_FIELDS = ("image/class/label", "label", "labels", "class")
_SIDES = (
    ("image/height", "image/width", "image/channels"),
    ("height", "width", "depth"),
    ("height", "width", "channels"),
)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")
_BATCH = 4096


class TFRecordSource:
    """One TFRecord file, or a folder of them; files called train*, val*, test* make splits if all are called so."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec, self._location = spec, Path(spec.location)
        self._image_field, self._label_field = spec.image_field, spec.label_field
        self._files = FlatFiles()

    @staticmethod
    def recognises(location: Path) -> bool:
        """Files named as TFRecord files are, or one whose first record has a correct length."""
        return bool(_files(location))

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read every record for its label and the size of its image."""
        paths = _files(self._location)
        if not paths:
            raise SourceError(
                f"{self._location} holds no TFRecord files; their names contain .tfrecord, or -00000-of-00001"
            )
        split_of = {UNSPLIT: paths} if self._location.is_file() else by_names(paths, self._spec)
        paths = [path for own in split_of.values() for path in own]
        splits = [split for split, own in split_of.items() for _ in own]
        kinds, most = set(), 0
        for number, (path, split) in enumerate(zip(paths, splits, strict=True)):
            batch: list[tuple[int, int, int, int, int]] = []
            for offset, content, sound in records(path):
                label, size = 0, 0  # a damaged record keeps its place: reading it says so, or leaves it out
                if sound:
                    label, size, kind = self._look(content, f"{path} at byte {offset}")
                    kinds.add(kind)
                    most = max(most, label)
                batch.append((offset, size, label, 0, number))
                if len(batch) == _BATCH:
                    index.add(split, np.array(batch, ROW))
                    batch = []
            index.add(split, np.array(batch, ROW))
        if len(kinds) > 1:
            raise SourceError(f"{self._location}: records hold images of different kinds: {sorted(map(str, kinds))}")
        shape = kinds.pop() if kinds else None
        return SourceFacts(
            class_names=class_numbers(most + 1),
            samples_are="pixels" if shape else "files",
            sample_shape=shape,
            files=[str(path) for path in paths],
            stamps=[stamp_of(path) for path in paths],
        )

    def read(self, row: Any, facts: SourceFacts, index: Index) -> bytes | Array:
        """The image of a record; its checksum is checked."""
        number, offset = int(row["file"]), int(row["place"])
        path, stamp = facts.files[number], facts.stamps[number]
        length, _ = _HEAD.unpack(self._files.read(path, stamp, offset, _HEAD.size))
        framed = bytes(self._files.read(path, stamp, offset + _HEAD.size, length + 4))
        if not _sound(framed[:-4], framed[-4:]):
            raise UnreadableSample(f"{self.describe(row, facts, index)}: its checksum is wrong")
        content = self._image(example_features(framed[:-4], path), path)
        if facts.sample_shape is None:
            return content
        height, width, channels = facts.sample_shape
        return np.frombuffer(content, np.uint8).reshape(height, width, channels)

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """File and place of the record."""
        return f"record at byte {int(row['place'])} of {Path(facts.files[int(row['file'])]).name}"

    def _look(self, content: bytes, where: str) -> tuple[int, int, tuple[int, int, int] | None]:
        """Label, size of the image in bytes, and its shape where it is raw pixels."""
        features = example_features(content, where)
        image = self._image(features, where)
        field = self._label_field or next((name for name in _LABEL_FIELDS if name in features), None)
        values: Any = features[field].int64_list.value if field and field in features else ()
        if len(values) != 1 or not 0 <= values[0] < MOST_CLASSES:
            found = (
                f"{list(values)[:3]} in {field!r}" if field and field in features else f"the fields {_names(features)}"
            )
            raise SourceError(
                f"{where}: a label is one whole number from 0 to {MOST_CLASSES - 1}; found {found}; give --label-field"
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


def masked_crc(content: bytes) -> int:
    """CRC-32C as TFRecord stores it: rotated by 15 bits, plus a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(content))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _example_class() -> Any:
    """The message class tf.train.Example, made from its description in a pool of its own."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="hpcdl/example.proto", package="hpcdl", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for field, number, label, type_number, type_name in fields:
            made.field.add(name=field, number=number, label=label, type=type_number, type_name=type_name or None)
        return made

    once, many, nested = kind.LABEL_OPTIONAL, kind.LABEL_REPEATED, kind.TYPE_MESSAGE
    message("BytesList", ("value", 1, many, kind.TYPE_BYTES, ""))
    message("FloatList", ("value", 1, many, kind.TYPE_FLOAT, ""))
    message("Int64List", ("value", 1, many, kind.TYPE_INT64, ""))
    message(
        "Feature",
        ("bytes_list", 1, once, nested, ".hpcdl.BytesList"),
        ("float_list", 2, once, nested, ".hpcdl.FloatList"),
        ("int64_list", 3, once, nested, ".hpcdl.Int64List"),
    )
    features = message("Features", ("feature", 1, many, nested, ".hpcdl.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.field.add(name="key", number=1, label=once, type=kind.TYPE_STRING)
    entry.field.add(name="value", number=2, label=once, type=nested, type_name=".hpcdl.Feature")
    entry.options.map_entry = True
    message("Example", ("features", 1, once, nested, ".hpcdl.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("hpcdl.Example"))


def example_features(content: bytes, where: str) -> Any:
    """The features of a record by name; SourceError where it is no tf.train.Example."""
    from google.protobuf.message import DecodeError

    try:
        return _example_class().FromString(content).features.feature
    except DecodeError as error:
        raise SourceError(f"{where}: the record is no tf.train.Example ({error})") from error


def records(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Offset and data of every record, and whether its checksum is right; SourceError where a length is wrong."""
    with open_regular(path) as file:
        offset, size = 0, os.fstat(file.fileno()).st_size
        while head := file.read(_HEAD.size):
            length = _length(head)
            content = file.read(length) if length is not None and length < size - offset else b""
            checksum = file.read(4)
            if length is None or len(content) != length or len(checksum) != 4:
                raise SourceError(
                    f"{path}: damaged or cut short at byte {offset}, or compressed (then gunzip it first)"
                )
            yield offset, content, _sound(content, checksum)
            offset += _FRAME + length


def _sound(content: bytes, checksum: bytes) -> bool:
    return masked_crc(content) == int.from_bytes(checksum, "little")


def _length(head: bytes) -> int | None:
    if len(head) != _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    return length if length <= MOST_SAMPLE_BYTES and masked_crc(head[:8]) == crc else None


def _starts_right(path: Path) -> bool:
    with open_regular(path) as file:
        return _length(file.read(_HEAD.size)) is not None


def _files(location: Path) -> list[Path]:
    if location.is_file():
        return [location] if _named_so(location.name) or _starts_right(location) else []
    with os.scandir(location) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_file() and _named_so(entry.name))


def _named_so(name: str) -> bool:
    return ".tfrecord" in name or ".tfrec" in name or "-of-" in name
