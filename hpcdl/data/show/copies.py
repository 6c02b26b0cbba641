"""Samples that occur twice: within a split, in several splits, mirrored or turned, or with two classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcdl.core.errors import CorruptError, shown
from hpcdl.data.format.dataset import Dataset, Split
from hpcdl.data.format.manifest import Field
from hpcdl.data.format.order import mixed, permuted
from hpcdl.data.format.shard_file import sample_checksums
from hpcdl.data.read.reader import SplitReader
from hpcdl.data.sources.base.source import Array

INSPECTED = 32
"""Part of the key, with the data's seed, that selects the samples to inspect."""
_FOLD = np.uint64(0x100000001B3)  # the prime of FNV-1a for 64 bits
_MANY = 64
"""Numbers along one axis from which on two samples are not alike by chance."""
MANY_REPEATS = 10
"""Repeats within a split are warned of if they are at least one sample in MANY_REPEATS."""
_MOST_TURNED, _TURNED_BYTES = 128, 1 << 24
"""Samples of a split, and their bytes, that are searched for in train, mirrored and turned."""
MOST_COMPARED = 1 << 24
"""Samples of a data set that are compared without being asked for: it takes some seconds and 0.5 GB."""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Samples of `split` with inputs identical, bit by bit, to another sample's, in the split itself or in `other`."""

    split: str
    other: str
    num_samples: int
    example: int


def turned(dataset: Dataset) -> list[str]:
    """Return a warning for each split whose pictures are in part those of train, mirrored or turned.

    Draws a few samples of a split, and looks for the checksums of their turned pixels among those of train.
    """
    picture = dataset.inputs[0]
    plain = not (picture.encoded or picture.ragged or picture.resident) and math.prod(picture.shape) >= _MANY
    if dataset.folder is None or len(dataset.inputs) > 1 or not plain or not 1 < len(picture.shape) < 4:
        return []
    lines, learnt = [], _keys_of(dataset, dataset.train_split)
    if learnt is None:
        return []
    others = [split for split in dataset.splits.values() if split.name != dataset.train_split.name]
    for split in others:
        most = max(1, min(_MOST_TURNED, _TURNED_BYTES // (math.prod(picture.shape) * np.dtype(picture.dtype).itemsize)))
        ids = permuted(np.arange(min(most, split.num_samples), dtype=np.int64), split.num_samples, mixed(1, INSPECTED))
        reader = SplitReader(dataset.folder, dataset, split)
        try:
            drawn = [np.array(pixels) for pixels in reader.read(picture, ids)]
        except CorruptError:  # --verify names what is damaged
            continue
        finally:
            reader.close()
        keys = [_keys_of_turned(pixels) for pixels in drawn]
        count = sum(bool(np.isin(turned, learnt).any()) for own, *turned in keys if not np.isin([own], learnt).any())
        if MANY_REPEATS * count >= len(drawn):
            lines.append(
                f"{count} of {len(drawn)} samples of {split.name} looked at are samples of {dataset.train_split.name}, "
                f"mirrored or turned: results on {split.name} are too good. Divide the originals, and mirror samples "
                "of train alone (train --flip)"
            )
    return lines


def _keys_of_turned(pixels: Array) -> list[int]:
    """Return the checksums of a picture, and of each way to mirror and turn it that changes it."""
    forms = [np.rot90(side, turns) for side in (pixels, pixels[:, ::-1]) for turns in range(4)]
    return list(
        dict.fromkeys(
            next(sample_checksums(np.ascontiguousarray(form).reshape(-1).view(np.uint8).data, [form.nbytes]))
            for form in forms
        )
    )


def all_keys(dataset: Dataset) -> dict[str, Array] | None:
    """Return the numbers of all samples by split, training first; None if they have no checksums."""
    keys: dict[str, Array] = {}
    for split in sorted(dataset.splits.values(), key=lambda split: split.name != dataset.train_split.name):
        array = _keys_of(dataset, split)
        if array is None:
            return None
        keys[split.name] = array
    return keys


def shows_two_classes(dataset: Dataset) -> bool:
    """Return whether equal inputs of different classes are a fault: rows of a few numbers may be alike by chance."""
    targets = dataset.targets
    named = len(targets) == 1 and targets[0].kind == "class" and targets[0].resident
    return named and any(map(is_rich, dataset.inputs))


def with_two_classes(dataset: Dataset, keys: Mapping[str, Array]) -> list[str]:
    """Return a warning if samples with the same inputs are of different classes."""
    if not shows_two_classes(dataset):
        return []
    labels = [_labels(dataset, dataset.splits[name]) for name in keys]
    key, label = np.concatenate([*keys.values()]), np.concatenate(labels)
    # Stable: of samples with one key the first in the data comes first, and is the one that is named.
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    odd = np.flatnonzero(same & (label[order][1:] != label[order][:-1]))
    if not len(odd):
        return []
    count = int(np.isin(key, key[order][odd]).sum())
    starts = np.cumsum([0, *map(len, keys.values())])
    names = dataset.class_names or dataset.targets[0].class_names

    def described(at: int) -> str:
        split = int(np.searchsorted(starts, at, side="right")) - 1
        return f"sample {at - starts[split]} of {[*keys][split]} ({shown(names[label[at]])})"

    first, second = (described(int(order[odd[0] + step])) for step in (0, 1))
    return [
        f"{count} samples have the same inputs as samples of another class, such as {first} and {second}. Which class "
        "is right? Correct the source, or take them out"
    ]


def is_rich(field: Field) -> bool:
    """Return whether two samples are not alike by chance: pictures, series, text; no rows of a table."""
    several_axes = len(field.shape) > 1 or math.prod(field.shape) >= _MANY
    return field.kind == "text" or field.encoded or (several_axes and not field.columns)


def _labels(dataset: Dataset, split: Split) -> Array:
    """Return the class number of each sample of a split."""
    assert dataset.folder is not None
    reader = SplitReader(dataset.folder, dataset, split)
    try:
        num_shards = len(split.entry.shards) if split.entry else 0
        shards = [np.asarray(reader.shard(number).residents[dataset.targets[0].name]) for number in range(num_shards)]
    finally:
        reader.close()
    return np.concatenate(shards) if shards else np.zeros(0, np.int64)


def num_trained_on(trained: Dataset, given: Dataset, split: Split) -> int:
    """Return how many samples of `split` of `given` have the inputs of training samples; 0 if that is not known."""
    alike = [[(field.name, field.dtype) for field in dataset.inputs] for dataset in (trained, given)]
    if alike[0] != alike[1] or trained.train_split.num_samples + split.num_samples > MOST_COMPARED:
        return 0
    learnt, keys = _keys_of(trained, trained.train_split), _keys_of(given, split)
    return 0 if learnt is None or keys is None else int(np.isin(keys, learnt).sum())


def _keys_of(dataset: Dataset, split: Split) -> Array | None:
    """Return a number for each sample of a split computed from its inputs; None if they have no checksums."""
    if dataset.folder is None:
        return None
    reader = SplitReader(dataset.folder, dataset, split)
    try:
        return _keys(reader, dataset.inputs, len(split.entry.shards) if split.entry else 0)
    finally:
        reader.close()


def _keys(reader: SplitReader, inputs: Sequence[Field], num_shards: int) -> Array | None:
    shard_keys = []
    for number in range(num_shards):
        shard = reader.shard(number)
        key = np.zeros(shard.map.num_samples, np.uint64)
        for field in inputs:
            if field.resident:
                # In the field's own type: a shard keeps whole numbers in the smallest type that holds its own.
                resident_values = shard.residents[field.name].astype(field.dtype)
                parts: Array = np.ascontiguousarray(resident_values).reshape(len(resident_values), -1).view(np.uint8)
                columns = [parts[:, byte_column].astype(np.uint64) for byte_column in range(parts.shape[1])]
            else:
                checksums = shard.sample_checksums(field.name)
                if checksums is None:
                    return None
                columns = [checksums]
            for column in columns:
                key = key * _FOLD ^ column
        shard_keys.append(key)
    return np.concatenate(shard_keys) if shard_keys else np.zeros(0, np.uint64)


def find_repeats(keys: Mapping[str, Array]) -> list[Repeats]:
    """Return for each split, and each pair of splits, the samples whose keys occur again."""
    repeats = []
    names = list(keys)
    for number, name in enumerate(names):
        own_keys, first = np.unique(keys[name], return_index=True)
        twice = np.setdiff1d(np.arange(len(keys[name])), first)
        if len(twice):
            repeats.append(Repeats(split=name, other=name, num_samples=len(twice), example=int(twice[0])))
        for other_name in names[number + 1 :]:
            shared = np.flatnonzero(np.isin(keys[other_name], own_keys))
            if len(shared):
                repeats.append(Repeats(split=other_name, other=name, num_samples=len(shared), example=int(shared[0])))
    return repeats
