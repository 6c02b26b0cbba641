"""Numbers packed by netCDF's conventions (CF 1.11, sections 2.5.1 and 8.1), and marks of missing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.hdf5 import Array

ATTRIBUTES = ("scale_factor", "add_offset", "valid_min", "valid_max", "valid_range", "_FillValue", "missing_value")
"""The attributes that describe packed numbers."""

_OTHER_NAMES = {
    **dict.fromkeys(("scale", "scalefactor", "scalingfactor", "slope", "gain", "multiplier"), 1.0),
    **dict.fromkeys(("offset", "addoffset", "intercept"), 0.0),
    **dict.fromkeys(("fillvalue", "nodata", "nodatavalue", "missing", "missingvalue", "missingdata", "codemissingvalue",
                     "badvalue", "errordn", "undetect"), None),
}  # fmt: skip
"""Names of such attributes elsewhere, in small letters alone, and the number with which one does nothing."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How stored numbers become values of `dtype`; the numbers in `absent` mark missing values."""

    scale: float | None
    offset: float | None
    absent: Array
    unsigned: bool
    least: float | None
    most: float | None
    dtype: np.dtype[Any]

    @staticmethod
    def of(data: Any) -> Packing | None:
        """Return the packing that an array's attributes describe; None if there is none."""
        scale, offset = _scaling(data)
        # netCDF-3 has no unsigned types, so that this attribute says it (NetCDF Users Guide, appendix A).
        unsigned = data.dtype.kind == "i" and str(text_of(data.attrs.get("_Unsigned"))).lower() == "true"
        stored = np.dtype(data.dtype.str.replace("i", "u")) if unsigned else data.dtype
        absent = [
            # A mark is compared with stored numbers, so it takes their type, whatever the attribute's own is.
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
        # float32 holds every number of 16 bits exactly.
        exact = np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)
        return Packing(
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
        # Marks and limits are those of stored numbers, before scaling (CF 1.11, section 2.5.1).
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
    given = {name: _number(data.attrs[name]) for name in ("scale_factor", "add_offset") if name in data.attrs}
    odd = [name for name, number in given.items() if number is None]
    if odd:
        raise SourceError(
            f"{data.file.filename}: {data.name.strip('/')} is packed by {' and '.join(given)}, and its {odd[0]} is not "
            f"one number: {shown(text_of(data.attrs[odd[0]]))}; correct it, or remove {' and '.join(given)} to take "
            "the numbers as they are stored"
        )
    return given.get("scale_factor"), given.get("add_offset")


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


def are_numbers(value: Any, key: str) -> bool:
    """Return whether an attribute fits netCDF: one number, two for valid_range, any count for missing values."""
    if key not in ("valid_range", "_FillValue", "missing_value"):
        return _number(value) is not None
    numbers = np.ravel(np.asarray(value))
    return numbers.dtype.kind in "fiu" and (key != "valid_range" or len(numbers) == 2)


def not_applied(attributes: Mapping[str, Any]) -> str:
    """Describe attributes that scale numbers or mark missing ones by names other than netCDF's; empty if none does."""
    found = []
    for key in attributes:
        plain = "".join(filter(str.isalnum, key.lower()))
        if key not in ATTRIBUTES and plain in _OTHER_NAMES:
            number = _number(attributes[key])
            found += [f"{shown(key)} ({number:g})"] if number is not None and number != _OTHER_NAMES[plain] else []
    return (
        f"not applied are its attributes {', '.join(found)}: if they scale its numbers or mark missing ones, call them "
        "scale_factor, add_offset and _FillValue, as netCDF does"
        if found
        else ""
    )


def _number(value: Any) -> float | None:
    """Return an attribute that is one number, or a text of one; else None."""
    numbers = np.ravel(np.asarray(value))
    if value is None or len(numbers) != 1 or numbers.dtype.kind not in "fiuSUO":
        return None
    try:
        return float(numbers[0])
    except (TypeError, ValueError):
        return None


def text_of(value: Any) -> str:
    """Return an attribute's text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
