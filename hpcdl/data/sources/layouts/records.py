"""Records of TFRecord files, and the features of a tf.train.Example, read without TensorFlow.

A record is: length (uint64), masked CRC of the length (uint32), data, masked CRC of the data (uint32). Libraries
provide CRC-32C and protobuf.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import math
import os
import re
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
from hpcdl.data.sources.base.chosen import field_name
from hpcdl.data.sources.base.glance import is_image_head
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import MOST_SAMPLE_BYTES, Array
from hpcdl.data.sources.layouts.gathered import GatheredArray

RECORD_HEAD = struct.Struct("<QI")
FRAME = RECORD_HEAD.size + 4
_PACKED_WRONG = (EOFError, zlib.error, gzip.BadGzipFile)


def masked_crc(content: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated by 15 bits, plus a constant."""
    import google_crc32c

    crc = int(google_crc32c.value(content))
    # kMaskDelta of tensorflow/core/lib/hash/crc32c.h.
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def example_class() -> Any:
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
        return example_class().FromString(content).features.feature
    except DecodeError as error:
        raise SourceError(f"{where}: the record is not a tf.train.Example ({error})") from error


def records(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield offset and data of every record, and whether its checksum is right; SourceError if a length is wrong."""
    with open_regular(path) as file:
        packing = packing_of(path)
        # The size of what is packed is known only at its end.
        offset, size = 0, math.inf if packing else os.fstat(file.fileno()).st_size
        stream = unpacked(file, packing)
        try:
            while head := stream.read(RECORD_HEAD.size):
                length = length_in(head)
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
                yield offset, content, is_sound(content, checksum)
                offset += FRAME + length
        except _PACKED_WRONG as error:
            raise SourceError(f"{path}: cannot be unpacked ({packing}) at byte {offset}: {error}") from error


def read_examples(paths: Sequence[Path], *, damaged: dict[str, None] | None) -> Iterator[tuple[str, Any]]:
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


def packing_of(path: Path) -> str:
    """Return the file's compression, gzip or zlib (TFRecordOptions supports both); empty if there is none."""
    with open_regular(path) as file:
        head = file.read(RECORD_HEAD.size)
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    # RFC 1950: deflate, 32 KiB window, and a check over these two bytes. A record's length may match; it has a CRC.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2]) % 31 == 0
    return "zlib" if is_zlib and length_in(head) is None else ""


def unpacked(file: Any, packing: str) -> Any:
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


def is_sound(content: bytes, checksum: bytes) -> bool:
    """Return whether `content` has the checksum that the file states."""
    return masked_crc(content) == int.from_bytes(checksum, "little")


def length_in(head: bytes) -> int | None:
    """Return the bytes of the record behind `head`; None if it is the head of none."""
    if len(head) != RECORD_HEAD.size:
        return None
    length, crc = RECORD_HEAD.unpack(head)
    return length if masked_crc(head[:8]) == crc else None


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


def bytes_of(features: Any, key: str, stated: StatedType) -> bytes | None:
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
                content = bytes_of(features, key, own)
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
