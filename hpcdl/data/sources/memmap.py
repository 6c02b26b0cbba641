"""Files of plain numbers without a header (numpy.memmap, Fortran, instruments): the user gives type and shape."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray, shape_text
from hpcdl.data.sources.base.source import IndexWriter, SourceFacts
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import is_made_of

_SUFFIXES = (".bin", ".dat", ".raw", ".mmap", ".memmap")
_FLAG_VALUE = re.compile(
    r"(?P<file>[^=]+)=(?P<name>[^:=]+):(?P<dtype>[^:]+)(?::(?P<shape>\d+(?:x\d+)*)?(?::(?P<skip>\d+))?)?"
)
_TABLE = ". For a table of text give --format table"
_FORM = "FILE=NAME:DTYPE:SHAPE, the shape that of one sample (images.bin=x:float32:64x64x3; y:int32 for one value)"


class MemmapSource(FieldSource):
    """A folder of raw files, or one of them; --input and --target give FILE=NAME:DTYPE[:SHAPE[:BYTES-TO-SKIP]]."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept files with an ending that raw numbers often have."""
        return is_made_of(location, _SUFFIXES)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the files that --input and --target name."""
        spec = self._spec
        for flag, requests in (("--input", spec.inputs), ("--target", spec.targets)):
            if not requests:
                raise SourceError(f"{self._location}: raw numbers do not tell their type; give {flag} {_FORM}{_TABLE}")
        arrays: dict[str, FoundArray] = {}
        self.inputs = self._named("--input", spec.inputs, arrays)
        self.targets = self._named("--target", spec.targets, arrays)
        return self.list_parts([ArrayGroup(split=UNSPLIT, arrays=arrays)], index)

    def _named(self, flag: str, flag_values: Sequence[str], arrays: dict[str, FoundArray]) -> Sequence[str]:
        """Return `flag_values` without types and shapes; these go into `arrays`."""
        plain = []
        for request in flag_values:
            match = _FLAG_VALUE.fullmatch(request)
            if match is None:
                raise SourceError(f"{flag} {shown(request)}: write {_FORM}")
            array = self._array(flag, match)
            arrays[match["file"]] = FoundArray(
                shape_text(array.shape, array.dtype.name), functools.partial(_same, array)
            )
            plain.append(f"{match['file']}={match['name']}")
        return plain

    def _array(self, flag: str, flag_value: re.Match[str]) -> PlacedArray:
        folder = self._location if self._location.is_dir() else self._location.parent
        path = folder / flag_value["file"]
        if not path.is_file():
            raise SourceError(f"{flag}: {folder} has no file {shown(flag_value['file'])}")
        try:
            dtype = np.dtype(flag_value["dtype"])
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"{flag}: there is no type {shown(flag_value['dtype'])}; give one such as float32 or >i2"
            ) from error
        if dtype.kind not in "biuf":
            raise SourceError(f"{flag}: {dtype} is not a type of plain numbers; give one such as float32 or >i2")
        shape = tuple(int(side) for side in (flag_value["shape"] or "").split("x") if side)
        sample_bytes, skip = math.prod(shape) * dtype.itemsize, int(flag_value["skip"] or 0)
        size = path.stat().st_size - skip
        if not sample_bytes or size < 0 or size % sample_bytes:
            raise SourceError(
                f"{path} has {path.stat().st_size} bytes, and samples of {shape_text(shape, dtype.name)} have "
                f"{sample_bytes}{f' behind {skip}' if skip else ''}: no whole number of them; correct type or shape"
            )
        return PlacedArray(path=path, offset=skip, shape=(size // sample_bytes, *shape), dtype=dtype)


def _same(array: PlacedArray) -> PlacedArray:
    return array
