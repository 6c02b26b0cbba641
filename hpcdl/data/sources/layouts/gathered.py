"""Arrays assembled sample by sample, for formats that store each sample's values separately."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Self

import numpy as np

from hpcdl.core.errors import SourceError
from hpcdl.data.sources.base.placed import PlacedArray, shape_text
from hpcdl.data.sources.base.source import Array, UnreadableSample
from hpcdl.data.sources.base.values import LOOKED_AT
from hpcdl.data.sources.checks.pictures import Palettes


class GatheredArray:
    """Appends one value per sample to the file `path`; `shown` is the array's name in messages.

    Samples of one shape form a plain array; unless `fixed`, the first axis may vary in length, but nothing else.
    """

    def __init__(self, path: Path, shown: str, *, fixed: bool = False) -> None:
        self._path, self._shown, self._fixed = path, shown, fixed
        self._file = path.open("wb")
        self._lengths = array("q")
        self._dtype: np.dtype[np.generic] | None = None
        self._shape: tuple[int, ...] = ()
        self._varies = self._text = False
        self._unreadable: dict[int, str] = {}
        self._palettes = Palettes()
        self._palette_conflict = ""
        self._before = 0
        """Unreadable samples ahead of the first value, whose shape is not yet known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()

    def add(self, value: Array | bytes | str, sample: str) -> None:
        """Append the value of `sample`; SourceError if its type or shape differs from earlier values."""
        text = isinstance(value, bytes | str)
        values = np.frombuffer(self._utf8(value, sample), np.uint8) if isinstance(value, bytes | str) else value
        if self._dtype is None:
            self._dtype, self._shape, self._text = values.dtype, values.shape, text
            for _ in range(self._before):
                self._append(np.zeros_like(values))
        alike = (text, values.dtype, values.ndim) == (self._text, self._dtype, len(self._shape))
        first = 0 if self._fixed else 1
        if not alike or values.shape[first:] != self._shape[first:]:
            raise SourceError(
                f"{self._shown} of {sample} is {shape_text(values.shape, values.dtype)}, those before it "
                f"{shape_text(self._shape, self._dtype)}; make them alike"
            )
        self._varies = self._varies or values.shape != self._shape
        self._append(values)

    def add_picture(self, content: bytes, sample: str, *, mask: bool, skips: bool) -> None:
        """Append the pixels of an image file; with `skips` one that cannot be read is noted, its sample left out."""
        from hpcdl.data.sources.layouts.images import colours_used, picture

        self._fixed = True
        try:
            pixels = picture(content, mask=mask)
            if (
                mask
                and not self._palette_conflict
                and (len(self._lengths) < LOOKED_AT or len(self._lengths) % LOOKED_AT == 0)
            ):
                self._palette_conflict = self._palettes.conflict_of(sample, colours_used(content))
        except UnreadableSample as error:
            if not skips:
                raise SourceError(
                    f"{self._shown} of {sample}: {error}; correct it, or give --on-error skip to leave such samples out"
                ) from error
            self._unreadable[len(self._lengths) + (self._before if self._dtype is None else 0)] = sample
            if self._dtype is None:
                self._before += 1
            else:
                # Keeps the place, so that samples behind it keep their numbers.
                self._append(np.zeros(self._shape, self._dtype))
        else:
            self.add(pixels, sample)

    def _append(self, values: Array) -> None:
        self._lengths.append(len(values) if values.ndim else 1)
        self._file.write(np.ascontiguousarray(values).tobytes())

    def placed(self) -> PlacedArray:
        """Return the whole array at its position in the file."""
        self._file.close()
        if self._before and self._dtype is None:
            raise SourceError(f"{self._shown}: not one image can be read; check the files")
        dtype = self._dtype or np.dtype(np.float32)
        lengths = np.frombuffer(self._lengths, np.int64)
        if not (self._varies or self._text):
            return PlacedArray(
                path=self._path,
                shape=(len(lengths), *self._shape),
                dtype=dtype,
                unreadable=self._unreadable,
                palette=self._palettes.first,
                palette_conflict=self._palette_conflict,
            )
        starts = self._path.with_name(f"{self._path.name}.offsets")
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tofile(starts)
        shape = (int(lengths.sum()), *self._shape[1:])
        return PlacedArray(path=self._path, shape=shape, dtype=dtype, offsets=starts, text=self._text)

    def _utf8(self, value: bytes | str, sample: str) -> bytes:
        try:
            content = value.encode() if isinstance(value, str) else value
            content.decode()
        except UnicodeError as error:
            raise SourceError(
                f"{self._shown} of {sample} is not UTF-8; save text as UTF-8, or bytes as an array of uint8"
            ) from error
        return content
