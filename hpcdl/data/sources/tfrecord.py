"""TFRecord files of tf.train.Example, read without TensorFlow; libraries provide CRC-32C and protobuf.

A record is: length (uint64), masked CRC of the length (uint32), data, masked CRC of the data (uint32).
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import itertools
import math
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import format_bytes
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.arrays import FieldSource
from hpcdl.data.sources.base.chosen import field_name, remarks_on_unused
from hpcdl.data.sources.base.flat import FlatFiles, remarks_on_folders, stamp_of
from hpcdl.data.sources.base.gathered import GatheredArray
from hpcdl.data.sources.base.glance import is_image_head
from hpcdl.data.sources.base.labels import MOST_CLASSES, class_numbers, plausible, sparse
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray
from hpcdl.data.sources.base.source import (
    MOST_SAMPLE_BYTES,
    ROW,
    Array,
    Index,
    IndexWriter,
    SourceFacts,
    SourceSpec,
    UnreadableSample,
)
from hpcdl.data.sources.base.splits import by_names, is_clutter, leaves_out_split, remarks_on_missing, typed

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
_OF = re.compile(r"-of-[0-9]+(?:\.(?:gz|gzip|zlib))?$")
"""The end of file names that TensorFlow numbers; Parquet files and archives have a further ending."""
_NOTHING: Any = {}
_PACKED_WRONG = (EOFError, zlib.error, gzip.BadGzipFile)


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
        kinds, max_label, num_samples = set(), 0, 0
        labels: set[int] = set()
        for number, (path, split) in enumerate(zip(paths, splits, strict=True)):
            batch: list[tuple[int, int, int, int, int]] = []
            for offset, content, sound in records(path):
                label, size = 0, 0  # a damaged record keeps its place: reading it reports the damage or skips it
                if sound:
                    label, size, kind = self._look(content, f"{path} at byte {offset}")
                    kinds.add(kind)
                    max_label = max(max_label, label)
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
        return SourceFacts(
            class_names=self._class_names or class_numbers(max_label + 1),
            samples_are="pixels" if shape else "files",
            sample_shape=shape,
            files=[str(path) for path in paths],
            stamps=[stamp_of(path) for path in paths],
            remarks=remarks_on_unused(self._beside(), self._spec),
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
        length, _ = _HEAD.unpack(self._files.read(path, stamp, offset, _HEAD.size))
        framed = bytes(self._files.read(path, stamp, offset + _HEAD.size, length + 4))
        if not _sound(framed[:-4], framed[-4:]):
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
        features: Any = next(_examples(paths, damaged={}), ("", {}))[1]
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
        for where, features in _examples(paths, damaged={}):
            field = self._label_field or next((name for name in _LABEL_FIELDS if name in features), None)
            if field is None or field not in features or kind_of(features[field]) != "bytes_list":
                return
            if is_image_head((_bytes_of(features, field, StatedType()) or b"")[:12]):
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
        return _examples(paths, damaged=None if self._spec.checks else self._skipped)

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
        packing = _packing(path)
        if not packing:
            return path
        plain = self._work / f"{len(list(self._work.glob('*.plain')))}-{path.name}.plain"
        with open_regular(path) as file, plain.open("wb") as out:
            try:
                shutil.copyfileobj(_unpacked(file, packing), out, 1 << 20)
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


def masked_crc(content: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated by 15 bits, plus a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(content))
    # kMaskDelta of tensorflow/core/lib/hash/crc32c.h.
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _example_class() -> Any:
    """Return the message class tf.train.Example, made from its description in a separate descriptor pool."""
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
    """Return the features of a record by name; SourceError if it is not a tf.train.Example."""
    from google.protobuf.message import DecodeError

    try:
        return _example_class().FromString(content).features.feature
    except DecodeError as error:
        raise SourceError(f"{where}: the record is not a tf.train.Example ({error})") from error


def records(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield offset and data of every record, and whether its checksum is right; SourceError if a length is wrong."""
    with open_regular(path) as file:
        packing = _packing(path)
        # The size of what is packed is known only at its end.
        offset, size = 0, math.inf if packing else os.fstat(file.fileno()).st_size
        stream = _unpacked(file, packing)
        try:
            while head := stream.read(_HEAD.size):
                length = _length(head)
                if length is not None and length > MOST_SAMPLE_BYTES:
                    raise SourceError(
                        f"{path}: the record at byte {offset} has {format_bytes(length)}, and one has at most "
                        f"{format_bytes(MOST_SAMPLE_BYTES)}; write smaller records, or a --reader of your own"
                    )
                # A damaged length takes no memory: no record is longer than the rest of its file.
                content = stream.read(length) if length is not None and length < size - offset else b""
                checksum = stream.read(4)
                if length is None or len(content) != length or len(checksum) != 4:
                    raise SourceError(
                        f"{path}: damaged or cut short at byte {offset}, or compressed by other than gzip or zlib"
                    )
                yield offset, content, _sound(content, checksum)
                offset += _FRAME + length
        except _PACKED_WRONG as error:
            raise SourceError(f"{path}: cannot be unpacked ({packing}) at byte {offset}: {error}") from error


def _examples(paths: Sequence[Path], *, damaged: dict[str, None] | None) -> Iterator[tuple[str, Any]]:
    """Yield each record's message name and features; `damaged` gets the names of bad records, None refuses them."""
    for path in paths:
        for number, (_, content, sound) in enumerate(records(path)):
            where = f"record {number} of {path.name}"
            if sound:
                yield where, example_features(content, where)
            else:
                leave_out(where, damaged, "write the file again")


def leave_out(record: str, damaged: dict[str, None] | None, remedy: str) -> None:
    """Add a record whose checksum is wrong to `damaged`; SourceError with the `remedy` if that is None."""
    if damaged is None:
        raise SourceError(f"{record}: its checksum is wrong; {remedy}, or give --on-error skip to leave it out")
    damaged[record] = None


def _packing(path: Path) -> str:
    """Return the file's compression, gzip or zlib (TFRecordOptions supports both); empty if there is none."""
    with open_regular(path) as file:
        head = file.read(_HEAD.size)
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    # RFC 1950: deflate, 32 KiB window, and a check over these two bytes. A record's length may match; it has a CRC.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2]) % 31 == 0
    return "zlib" if is_zlib and _length(head) is None else ""


def _unpacked(file: Any, packing: str) -> Any:
    """Return the decompressed stream of the open `file`; closing the stream leaves the file open."""
    if packing == "zlib":
        return io.BufferedReader(_Inflated(file), 1 << 20)
    return gzip.open(file) if packing else file


class _Inflated(io.RawIOBase):
    """The decompressed content of a zlib stream; EOFError if it is cut short, zlib.error if it is damaged."""

    def __init__(self, file: Any) -> None:
        self._file, self._inflate = file, zlib.decompressobj()

    def readable(self) -> bool:
        """Return True: the stream is readable."""
        return True

    def readinto(self, out: Any) -> int:
        """Fill the first bytes of `out`; return their number, 0 at the end."""
        unpacked = b""
        # Input may yield no output yet, and 0 bytes would mean the end.
        while not unpacked and not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(1 << 16)
            if not packed:
                raise EOFError("the stream is cut short")
            # Limited, because a few packed bytes may unpack to gigabytes.
            unpacked = self._inflate.decompress(packed, len(out))
        out[: len(unpacked)] = unpacked
        return len(unpacked)


def _sound(content: bytes, checksum: bytes) -> bool:
    return masked_crc(content) == int.from_bytes(checksum, "little")


def _length(head: bytes) -> int | None:
    if len(head) != _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    return length if masked_crc(head[:8]) == crc else None


def _starts_right(path: Path) -> bool:
    with open_regular(path) as file:
        try:
            return _length(_unpacked(file, _packing(path)).read(_HEAD.size)) is not None
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


FORM = "FEATURE=NAME:DTYPE:SHAPE, the shape that of one sample (x=x:int16:128x128x128x4; y::3 for a list of numbers)"
_FLAG_VALUE = re.compile(r"(?P<key>[^=]+)=(?P<name>[^:=]+)(?::(?P<dtype>[^:]*)(?::(?P<shape>\d+(?:x\d+)*)?)?)?")
_LISTS: dict[str, Any] = {
    "float_list": np.dtype(np.float32),
    "int64_list": np.dtype(np.int64),
    "bytes_list": None,
}

Records = Iterator[tuple[str, Any]]
"""Each record's name for messages, and its features."""


@dataclass(frozen=True, kw_only=True)
class StatedType:
    """What the user says about a feature: the type of its bytes, and the shape of a sample."""

    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None


def stated(flag: str, flag_values: Sequence[str], types: dict[str, StatedType]) -> list[str]:
    """Return `flag_values` as FEATURE=NAME; put their types and shapes into `types`."""
    plain = []
    for flag_value in flag_values:
        if "=" not in flag_value:
            plain.append(f"{flag_value}={field_name(flag_value)}")
            continue
        match = _FLAG_VALUE.fullmatch(flag_value)
        if match is None:
            raise SourceError(f"{flag} {shown(flag_value)} is not understood; write FEATURE=NAME or {FORM}")
        try:
            dtype = np.dtype(match["dtype"]) if match["dtype"] else None
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"{flag}: there is no type {shown(match['dtype'])}; give one such as float32 or >i2"
            ) from error
        if dtype is not None and dtype.kind not in "biuf":
            raise SourceError(f"{flag}: {dtype} is not a type of numbers; give one such as float32 or >i2")
        shape = tuple(int(side) for side in match["shape"].split("x")) if match["shape"] else None
        if shape is not None and min(shape) < 1:
            raise SourceError(f"{flag} {shown(flag_value)}: a shape has sides of 1 and more")
        types[match["key"]] = StatedType(dtype=dtype, shape=shape)
        plain.append(f"{match['key']}={match['name']}")
    return plain


def kind_of(feature: Any) -> str:
    """Return which list a feature has; empty if it has none."""
    return next((name for name in _LISTS if feature.HasField(name)), "")


def described(feature: Any) -> str:
    """Describe a feature for messages."""
    kind = kind_of(feature)
    if not kind:
        return "empty"
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return f"{len(values[0])} bytes" if len(values) == 1 else f"{len(values)} strings"
    return f"{len(values)} {_LISTS[kind]}"


def value_of_feature(features: Any, key: str, stated: StatedType, where: str) -> Array | bytes:
    """Return a feature of a record as an array or as text; SourceError if it is neither."""
    feature = features.get(key)
    kind = kind_of(feature) if feature is not None else ""
    if feature is None or not kind:
        raise SourceError(f"{where} has no value of {shown(key)}; every record needs every field")
    values = getattr(feature, kind).value
    if kind != "bytes_list":
        if stated.dtype not in (None, _LISTS[kind]):
            raise SourceError(
                f"{where}: {shown(key)} is a list of {_LISTS[kind]}, not of {stated.dtype}; leave out the type"
            )
        return _shaped(np.array(values, _LISTS[kind]), stated.shape, key, where)
    if len(values) != 1:
        raise SourceError(f"{where}: {shown(key)} has {len(values)} strings of bytes; a field has one a sample")
    if stated.dtype is not None:
        if len(values[0]) % stated.dtype.itemsize:
            raise SourceError(f"{where}: {shown(key)} has {len(values[0])} bytes, not a whole number of {stated.dtype}")
        return _shaped(np.frombuffer(values[0], stated.dtype), stated.shape, key, where)
    try:
        values[0].decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where}: {shown(key)} is {len(values[0])} bytes that are neither text nor a picture; give their type "
            f"and shape: {FORM}"
        ) from error
    return bytes(values[0])


def _shaped(values: Array, shape: tuple[int, ...] | None, key: str, where: str) -> Array:
    if shape is None:
        return values
    if values.size != math.prod(shape):
        raise SourceError(
            f"{where}: {shown(key)} has {values.size} values, and the shape {'x'.join(map(str, shape))} has "
            f"{math.prod(shape)}; correct type or shape"
        )
    return values.reshape(shape)


def _bytes_of(features: Any, key: str, stated: StatedType) -> bytes | None:
    """Return a feature's only string of bytes whose type is not stated; None for any other value."""
    values: Any = features[key].bytes_list.value if key in features and stated.dtype is None else ()
    return bytes(values[0]) if len(values) == 1 else None


def gather(
    records: Records, types: Mapping[str, StatedType], work: Path, where: str, *, masks: set[str], skips: bool
) -> dict[str, PlacedArray]:
    """Read the features named by `types` of all records in one pass, and store them in the work folder.

    `masks` are those whose pictures keep the files' numbers; `skips` leaves out samples with pictures that are damaged.
    """
    arrays: dict[str, GatheredArray] = {}
    pictures: set[str] = set()
    with ExitStack() as stack:
        for key in types:
            path = work / f"gathered{len(list(work.glob('gathered*')))}"
            arrays[key] = stack.enter_context(GatheredArray(path, f"{where}: {key}"))
        for record, features in records:
            for key, own in types.items():
                content = _bytes_of(features, key, own)
                # Once a picture, always one: a damaged head must not make text of it.
                if content is not None and (key in pictures or is_image_head(content[:12])):
                    pictures.add(key)
                    arrays[key].add_picture(content, record, mask=key in masks, skips=skips)
                else:
                    arrays[key].add(value_of_feature(features, key, own, record), record)
        return {key: _plain(own.placed()) for key, own in arrays.items()}


def _plain(array: PlacedArray) -> PlacedArray:
    """Turn a list with one number in every sample into a plain number."""
    one = array.offsets is None and len(array.shape) == 2 and array.shape[1] == 1
    return dataclasses.replace(array, shape=array.shape[:1]) if one else array
