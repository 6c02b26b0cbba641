"""A look at samples: some of each split drawn by the seed, the values in them, and which samples are there twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.format.fields import Field
from hpcdl.data.format.order import mixed, permuted
from hpcdl.data.read.reader import SplitReader
from hpcdl.data.show.inspection import Inspection, decoded, inspect

Array = npt.NDArray[Any]
MOST_MEASURED = 256
"""Samples of a split that value ranges are told from."""
MOST_DRAWN = 12
_STREAM = 32
"""Of the data's seed: which samples are looked at."""
_FOLD = np.uint64(0x100000001B3)


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The numbers of a field in `num_samples` samples of a split; `missing` of `count` are NaN, the rest counts."""

    field: str
    split: str
    num_samples: int
    count: int
    missing: int
    infinite: int
    low: float
    high: float
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Samples of `split` whose inputs are, bit by bit, those of another sample, in the split itself or in `other`."""

    split: str
    other: str
    num_samples: int
    example: int


@dataclass(frozen=True, kw_only=True)
class DrawnSample:
    """One sample: its split, its number, and the value of each field (a class by name, text as text)."""

    split: str
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All that the page shows; `repeats` is None where samples have no checksums of their own to tell them by."""

    inspection: Inspection
    fields: Sequence[Field]
    ranges: Sequence[ValueRange]
    repeats: Sequence[Repeats] | None
    samples: Sequence[DrawnSample]


def look(folder: Path) -> Overview:
    """Look at a data folder. UsageError where it is none, CorruptError where what is read of it is damaged."""
    found = inspect(folder)
    dataset = open_dataset(str(folder))
    seed = dataset.manifest.seed if dataset.manifest else 0
    ranges: list[ValueRange] = []
    drawn: list[DrawnSample] = []
    keys: dict[str, Array] = {}
    for split in dataset.splits.values():
        reader = SplitReader(folder, dataset, split)
        try:
            count = min(MOST_MEASURED, split.num_samples)
            ids = permuted(np.arange(count, dtype=np.int64), split.num_samples, mixed(seed, _STREAM))
            values = {item.name: _read(reader, item, ids) for item in dataset.fields}
            numbers = [item for item in dataset.fields if item.kind not in ("class", "text")]
            ranges += [_range(item, split.name, values[item.name]) for item in numbers]
            if split.name == dataset.train_split.name:
                drawn = [
                    DrawnSample(split=split.name, number=number, values={name: own[at] for name, own in values.items()})
                    for at, number in enumerate(ids[:MOST_DRAWN].tolist())
                ]
            own = _keys(reader, dataset.inputs, len(split.entry.shards) if split.entry else 0)
            if own is not None:
                keys[split.name] = own
        finally:
            reader.close()
    repeats = _repeats(keys) if len(keys) == len(dataset.splits) else None
    return Overview(inspection=found, fields=dataset.fields, ranges=ranges, repeats=repeats, samples=drawn)


def _read(reader: SplitReader, item: Field, ids: npt.NDArray[np.int64]) -> list[Any]:
    """A field of samples: arrays, names of classes, text."""
    if item.encoded:
        return [decoded(reader, item, sample) for sample in ids.tolist()]
    values = list(reader.read(item, ids))
    if item.kind == "class":
        names = item.class_names
        return [names[number] if 0 <= number < len(names) else str(number) for number in map(int, values)]
    return [bytes(value).decode("utf-8", "replace") for value in values] if item.kind == "text" else values


def _range(item: Field, split: str, values: Sequence[Array]) -> ValueRange:
    flat = np.concatenate([np.asarray(value).reshape(-1).astype(np.float64) for value in values])
    finite = flat[np.isfinite(flat)]
    some = finite if len(finite) else np.array([np.nan])
    return ValueRange(
        field=item.name,
        split=split,
        num_samples=len(values),
        count=len(flat),
        missing=int(np.isnan(flat).sum()),
        infinite=int(np.isinf(flat).sum()),
        low=float(some.min()),
        high=float(some.max()),
        mean=float(some.mean()),
        std=float(some.std()),
    )


def _keys(reader: SplitReader, inputs: Sequence[Field], num_shards: int) -> Array | None:
    """A number for each sample of a split that follows from its inputs; None where they have no checksums."""
    found = []
    for number in range(num_shards):
        shard = reader.shard(number)
        key = np.zeros(shard.map.num_samples, np.uint64)
        for item in inputs:
            if item.resident:
                own = shard.residents[item.name]
                parts: Array = np.ascontiguousarray(own).reshape(len(own), -1).view(np.uint8)
                columns = [parts[:, at].astype(np.uint64) for at in range(parts.shape[1])]
            else:
                checksums = shard.sample_checksums(item.name)
                if checksums is None:
                    return None
                columns = [checksums]
            for column in columns:
                key = key * _FOLD ^ column
        found.append(key)
    return np.concatenate(found) if found else np.zeros(0, np.uint64)


def _repeats(keys: Mapping[str, Array]) -> list[Repeats]:
    found = []
    names = list(keys)
    for at, name in enumerate(names):
        own, first = np.unique(keys[name], return_index=True)
        twice = np.setdiff1d(np.arange(len(keys[name])), first)
        if len(twice):
            found.append(Repeats(split=name, other=name, num_samples=len(twice), example=int(twice[0])))
        for other in names[at + 1 :]:
            shared = np.flatnonzero(np.isin(keys[other], own))
            if len(shared):
                found.append(Repeats(split=other, other=name, num_samples=len(shared), example=int(shared[0])))
    return found
