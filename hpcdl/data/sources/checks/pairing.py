"""Whether inputs and targets fit: rows of two arrays in one order by the ids beside them, and no target in an input."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.units import counted
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.chosen import INPUT_NAMES, TARGET_NAMES
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array, SourceSpec
from hpcdl.data.sources.base.splits import left_out, typed
from hpcdl.data.sources.base.values import LOOKED_AT
from hpcdl.data.sources.checks.columns import repeats

_ID = re.compile(r"(?:id|uid|uuid|index|indice|idx|key|name|filename|file|path)e?s?")
_ROWS_COMPARED = 1 << 16
_FEWEST_ROWS, _MOST_ROWS, _READ = 20, 1 << 12, 1 << 22
"""Samples, and values of an input, that are searched for a copy of the target."""


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
    single = array.offsets is None and bool(array.shape) and math.prod(array.shape) == array.shape[0]
    if array.text:
        values = next(array.string_chunks(), None)
    elif single and array.stored and array.dtype.kind in "iu":
        values = array.rows(0, min(array.shape[0], _ROWS_COMPARED)).reshape(-1).astype(np.int64)
    else:
        values = None
    return values if values is not None and len(np.unique(values)) == len(values) > 1 else None


def copies_of_targets(fields: Sequence[Field], arrays: Sequence[PlacedArray]) -> list[str]:
    """Return a remark on each input that holds the target at one place, or one number for each class; of some rows.

    `arrays` are those of `fields` in one part of the source.
    """
    pairs = list(zip(fields, arrays, strict=True))
    plain = [(item, array) for item, array in pairs if array.stored and not array.offsets and array.dtype.kind in "fiu"]
    goals = [(item, array) for item, array in plain if item.role == "target" and math.prod(array.shape[1:]) == 1]
    inputs = [(item, array) for item, array in plain if item.role == "input"]
    lines = []
    for (target, goal), (item, array) in itertools.product(goals, inputs):
        width = math.prod(array.shape[1:])
        most = min(_MOST_ROWS, _READ // max(1, width))
        if min(most, array.num_samples) < _FEWEST_ROWS or not width:
            continue
        wanted, values = goal.spread(most).reshape(-1), array.spread(most).reshape(-1, width)
        what = "one number for each class" if target.kind == "class" else "the same numbers"
        if target.kind == "class":
            at = _place_of_classes(values, wanted)
        else:
            same = (values == wanted[:, None]) | (values.astype(np.float32) == wanted[:, None].astype(np.float32))
            at = int(same.all(0).argmax()) if same.all(0).any() and len(np.unique(wanted)) > 1 else None
        if at is None and target.kind != "class" and width <= LOOKED_AT:
            at = next((at for at, own in enumerate(values.T) if repeats(own, wanted, classes=False)), None)
            what = "the same numbers, but for scale and offset,"
        if at is not None:
            place = ", ".join(map(str, np.unravel_index(at, array.shape[1:] or (1,))))
            lines.append(
                f"{target.name}: the input {item.name} holds {what} at index {place}: a copy of the target? If so, "
                "take it out of the input"
            )
    return lines


def _place_of_classes(values: Array, classes: Array) -> int | None:
    """Return the first column of `values` that has one number for each class, and another for each other."""
    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[order], prepend=classes[order[0]] - 1))
    if not 1 < len(starts) <= len(classes) // _FEWEST_ROWS * 2:
        return None
    least, most = (reduce.reduceat(values[order], starts, axis=0) for reduce in (np.minimum, np.maximum))
    numbers = np.sort(least, axis=0)
    found = np.flatnonzero((least == most).all(0) & (numbers[1:] > numbers[:-1]).all(0))
    return int(found[0]) if len(found) else None


def one_of_all(fields: Sequence[Field], arrays: Sequence[PlacedArray]) -> str:
    """Describe the only sample of a source if it seems to be all samples in one; empty for others."""
    lengths = {item.shape[0] if item.shape else 1 for item in fields}
    if len(fields) < 2 or arrays[0].num_samples != 1 or len(lengths) > 1 or lengths <= {1}:
        return ""
    count = lengths.pop()
    return (
        f"there is 1 sample, and all its arrays have {count} rows: are these {count} samples? Then give each by itself"
    )
