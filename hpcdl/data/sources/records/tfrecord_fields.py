"""Features of a tf.train.Example as named fields: numbers, text, pictures, and bytes of a stated type and shape."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.sources.base.arrays import PlacedArray, field_name
from hpcdl.data.sources.base.gathered import GatheredArray
from hpcdl.data.sources.base.glance import is_image_head
from hpcdl.data.sources.base.source import Array

FORM = "FEATURE=NAME:DTYPE:SHAPE, the shape that of one sample (x=x:int16:128x128x128x4; y::3 for a list of numbers)"
_WISH = re.compile(r"(?P<key>[^=]+)=(?P<name>[^:=]+)(?::(?P<dtype>[^:]*)(?::(?P<shape>\d+(?:x\d+)*)?)?)?")
_LISTS: dict[str, Any] = {
    "float_list": np.dtype(np.float32),
    "int64_list": np.dtype(np.int64),
    "bytes_list": None,
}

Records = Iterator[tuple[str, Any]]
"""How a message names a record, and its features."""


@dataclass(frozen=True, kw_only=True)
class StatedType:
    """What the user says of a feature: the type of its bytes, and the shape of a sample."""

    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None


def stated(flag: str, wishes: Sequence[str], types: dict[str, StatedType]) -> list[str]:
    """`wishes` as FEATURE=NAME; the types and shapes in them go to `types`."""
    plain = []
    for wish in wishes:
        if "=" not in wish:
            plain.append(f"{wish}={field_name(wish)}")
            continue
        found = _WISH.fullmatch(wish)
        if found is None:
            raise SourceError(f"{flag} {shown(wish)} is not understood; write FEATURE=NAME or {FORM}")
        try:
            dtype = np.dtype(found["dtype"]) if found["dtype"] else None
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"{flag}: there is no type {shown(found['dtype'])}; give one such as float32 or >i2"
            ) from error
        if dtype is not None and dtype.kind not in "biuf":
            raise SourceError(f"{flag}: {dtype} is not a type of numbers; give one such as float32 or >i2")
        shape = tuple(int(side) for side in found["shape"].split("x")) if found["shape"] else None
        if shape is not None and min(shape) < 1:
            raise SourceError(f"{flag} {shown(wish)}: a shape has sides of 1 and more")
        types[found["key"]] = StatedType(dtype=dtype, shape=shape)
        plain.append(f"{found['key']}={found['name']}")
    return plain


def kind_of(feature: Any) -> str:
    """The list that a feature has; empty where it has none."""
    return next((name for name in _LISTS if feature.HasField(name)), "")


def described(feature: Any) -> str:
    """A feature in a message."""
    kind = kind_of(feature)
    if not kind:
        return "empty"
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return f"{len(values[0])} bytes" if len(values) == 1 else f"{len(values)} strings"
    return f"{len(values)} {_LISTS[kind]}"


def value_of_feature(features: Any, key: str, own: StatedType, where: str) -> Array | bytes:
    """A feature of a record as an array, or as text; SourceError where it is neither."""
    feature = features.get(key)
    kind = kind_of(feature) if feature is not None else ""
    if feature is None or not kind:
        raise SourceError(f"{where} has no value of {shown(key)}; every record needs every field")
    values = getattr(feature, kind).value
    if kind != "bytes_list":
        if own.dtype not in (None, _LISTS[kind]):
            raise SourceError(
                f"{where}: {shown(key)} is a list of {_LISTS[kind]}, not of {own.dtype}; leave out the type"
            )
        return _shaped(np.array(values, _LISTS[kind]), own.shape, key, where)
    if len(values) != 1:
        raise SourceError(f"{where}: {shown(key)} has {len(values)} strings of bytes; a field has one a sample")
    if own.dtype is not None:
        if len(values[0]) % own.dtype.itemsize:
            raise SourceError(f"{where}: {shown(key)} has {len(values[0])} bytes, not a whole number of {own.dtype}")
        return _shaped(np.frombuffer(values[0], own.dtype), own.shape, key, where)
    if is_image_head(values[0][:12]):
        return _picture(values[0], key, where)
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


def _picture(content: bytes, key: str, where: str) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as picture:
            return np.asarray(picture.convert("RGB") if picture.mode in ("P", "RGBA", "CMYK", "YCbCr") else picture)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise SourceError(f"{where}: {shown(key)} is not an image that can be read") from error


def gather(records: Records, types: Mapping[str, StatedType], work: Path, where: str) -> dict[str, PlacedArray]:
    """The features that `types` names of all records, in one reading, kept in the work folder."""
    found: dict[str, GatheredArray] = {}
    with ExitStack() as stack:
        for key in types:
            path = work / f"gathered{len(list(work.glob('gathered*')))}"
            found[key] = stack.enter_context(GatheredArray(path, f"{where}: {key}"))
        for record, features in records:
            for key, own in types.items():
                found[key].add(value_of_feature(features, key, own, record), record)
        return {key: _plain(own.placed()) for key, own in found.items()}


def _plain(array: PlacedArray) -> PlacedArray:
    """A list of one number in every sample is a number."""
    one = array.offsets is None and len(array.shape) == 2 and array.shape[1] == 1
    return dataclasses.replace(array, shape=array.shape[:1]) if one else array
