"""Ids beside inputs and targets (`x_ids`, `y_ids`): whether they say that rows of two arrays belong together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.units import counted
from hpcdl.data.sources.base.chosen import INPUT_NAMES, TARGET_NAMES
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array, SourceSpec
from hpcdl.data.sources.base.splits import left_out, typed

_ID = re.compile(r"(?:id|uid|uuid|index|indice|idx|key|name|filename|file|path)e?s?")
_ROWS_COMPARED = 1 << 16


def ask_of_order(
    places: Mapping[str, Callable[[], PlacedArray]], used: Collection[str], spec: SourceSpec, named: Collection[str]
) -> None:
    """Raise SourceError if ids of an input and of a target, or of two inputs, differ in their order.

    `places` are all arrays of a part by path, `used` the paths of its fields, `named` all names in the source.
    Compares the first rows alone.
    """
    owners = {word for path in used for word in _words(path)} | {*INPUT_NAMES, *TARGET_NAMES}
    ids: dict[str, str] = {}
    for path in places:
        words = _words(path)
        rest = [word for word in words if not _ID.fullmatch(word)]
        of_owner = bool(rest) and len(rest) == len(words) - 1 and owners.issuperset(rest)
        if of_owner and path not in used and not left_out(path, spec.leave_out):
            ids[path] = "_".join(rest)
    for first, second in itertools.combinations(ids, 2) if spec.asks else ():
        if ids[first] == ids[second]:
            continue
        one, other = _keys(places[first]()), _keys(places[second]())
        if one is None or other is None or len(one) != len(other) or one.dtype.kind != other.dtype.kind:
            continue
        if count := int((one != other).sum()):
            # Without the word of its split it is no name in the source, but a part of several.
            flag_value = second if second in named else f"*{second.rpartition('/')[2]}*"
            raise SourceError(
                f"{spec.location}: {shown(first)} and {shown(second)} differ in {count} of {counted(len(one), 'row')} "
                "compared: does each row of the target belong to the same row of the input? Write both in one order, "
                f"or give --leave-out {typed(flag_value)}"
            )


def _words(path: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path).lower()) if word]


def _keys(array: PlacedArray) -> Array | None:
    """Return the first values of an array of different numbers or words, one a sample; None for another array."""
    if array.text:
        values = next(array.string_chunks(), None)
    elif (
        array.offsets is None and array.stored and array.dtype.kind in "iu" and array.num_samples == array.values().size
    ):
        values = array.rows(0, min(array.num_samples, _ROWS_COMPARED)).reshape(-1).astype(np.int64)
    else:
        values = None
    return values if values is not None and len(np.unique(values)) == len(values) > 1 else None
