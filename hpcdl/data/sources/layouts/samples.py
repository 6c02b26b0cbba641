"""What one sample of a source's arrays is: a row of each, or a whole file; and that all arrays have as many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.placed import ArrayGroup, PlacedArray, shape_text
from hpcdl.data.sources.base.source import SourceSpec
from hpcdl.data.sources.layouts.flat import LAST

Placed = list[tuple[str, list[PlacedArray]]]
"""Each path in use with its arrays, one per part."""


def samples_of(num_parts: int, placed: Placed, spec: SourceSpec, remarks: list[str]) -> Placed:
    """Return `placed`, with one sample per file if requested or the only reading; SourceError if ambiguous."""
    flag_value, files = spec.sample_is, f"{num_parts} files"
    arrays = [array for _, per_part in placed for array in per_part]
    if flag_value == "row" or not any(array.path.is_file() for array in arrays):
        return placed
    scalars = any(not array.shape for array in arrays)
    if scalars and num_parts < 2 and not flag_value:
        single = next(path for path, per_part in placed if not per_part[0].shape)
        raise SourceError(f"{Path(spec.location)}: {single} is a single value; a field has one for each sample")
    if not flag_value and not (scalars and num_parts > 1):
        rows = spec.format not in ("hdf5", "numpy")  # a file of these formats may be one sample; a table not
        if rows or num_parts < 2 or not _may_be_samples(placed):
            return placed
        what = ", ".join(f"{path} {shape_text(per_part[0].shape, per_part[0].dtype.name)}" for path, per_part in placed)
        raise SourceError(
            f"{Path(spec.location)}: is each of its {files} one sample, or is each row of their arrays one ({what})? "
            "Give --sample-is file or --sample-is row"
        )
    remarks.append(f"each of the {files} is one sample")
    return [(path, _one_a_file(per_part, spec)) for path, per_part in placed]


def check_counts(parts: Sequence[ArrayGroup], placed: Placed, spec: SourceSpec) -> None:
    """Raise SourceError for a part without samples, or whose arrays hold unequal numbers of them."""
    for number, part in enumerate(parts):
        counts = {path: per_part[number].num_samples for path, per_part in placed}
        what = "" if part.split == UNSPLIT else f" of the split {part.split}"
        if len(set(counts.values())) != 1:
            totals = ", ".join(f"{path} {count}" for path, count in counts.items())
            remedy = _samples_last({path: per_part[number] for path, per_part in placed}, spec)
            raise SourceError(
                f"{Path(spec.location)}: the arrays{what} hold unequal numbers of samples ({totals}); every field "
                f"needs one value a sample, along its first axis{remedy}"
            )
        if not next(iter(counts.values())):
            raise SourceError(
                f"{Path(spec.location)}: {next(iter(counts))}{what} holds no samples; there is nothing to shard"
            )


def _may_be_samples(placed: Placed) -> bool:
    """Return whether each part may be one sample: arrays of unequal length, or all alike in the first two axes."""
    if any(array.offsets is not None or array.text for _, per_part in placed for array in per_part):
        return False
    firsts = [per_part[0] for _, per_part in placed]
    if len({array.num_samples for array in firsts}) > 1:
        return True
    return all(len(array.shape) > 1 for array in firsts) and len({array.shape[:2] for array in firsts}) == 1


def _one_a_file(arrays: Sequence[PlacedArray], spec: SourceSpec) -> list[PlacedArray]:
    """Return each whole array as one sample; of any length along the first axis if arrays differ only there."""
    if all(array.text and array.num_samples == 1 for array in arrays):
        return list(arrays)
    if any(array.offsets is not None or array.text for array in arrays):
        raise SourceError(f"{Path(spec.location)}: --sample-is file is for arrays of numbers of one length")
    if len({array.shape for array in arrays}) == 1:
        return [dataclasses.replace(array, shape=(1, *array.shape)) for array in arrays]
    samples, work = [], Path(spec.work)
    for array in arrays:
        starts = work / f"array{len(list(work.glob('array*')))}.offsets"
        np.array([0, array.shape[0]], np.int64).tofile(starts)
        samples.append(dataclasses.replace(array, offsets=starts))
    return samples


def _samples_last(arrays: Mapping[str, PlacedArray], spec: SourceSpec) -> str:
    """Say what to do if an array's last axis has as many elements as others have samples; empty otherwise."""
    for path, array in arrays.items():
        others = {other.num_samples for name, other in arrays.items() if name != path}
        if len(array.shape) > 1 and others == {array.shape[-1]}:
            hint = f"; {path} seems to have its samples along the last"
            if spec.format in ("hdf5", "numpy") and spec.sample_axis != LAST:
                return f"{hint}: give --sample-axis last"
            return f"{hint}: save it as np.moveaxis({path}, -1, 0)"
    lasts = {array.shape[-1] for array in arrays.values() if array.offsets is None and len(array.shape) > 1}
    alike = all(array.offsets is None and lasts == {array.shape[-1]} for array in arrays.values())
    if alike and spec.format in ("hdf5", "numpy") and spec.sample_axis != LAST:
        return f"; all have {lasts.pop()} along their last: give --sample-axis last if it counts samples"
    return ""
