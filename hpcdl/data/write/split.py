"""Dividing a source by class: each split gets its share of every class, chosen by a seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import UsageError
from hpcdl.data.read.order import mixed, permuted
from hpcdl.data.write.index import Index

Counts = npt.NDArray[np.int64]
_SMALL_CLASS = 16


def quotas(class_counts: Counts, fractions: list[float], seed: int) -> Counts:
    """How many samples of each class go to the first k + 1 splits together: shape (splits, classes).

    Rounding is carried over from class to class (in an order drawn by the seed), so that the whole split has its share
    even where each class has a handful of samples.
    """
    order = np.argsort(permuted(np.arange(len(class_counts), dtype=np.int64), len(class_counts), mixed(seed, 11)))
    before = np.concatenate([[0], np.cumsum(class_counts[order])])
    result = np.zeros((len(fractions), len(class_counts)), np.int64)
    cumulative = np.cumsum(fractions)
    for number, fraction in enumerate(cumulative[:-1]):
        result[number, order] = np.diff(np.floor(fraction * before + 0.5).astype(np.int64))
        if number:
            result[number] = np.maximum(result[number], result[number - 1])
    result[-1] = class_counts
    return result


def divide(
    folder: Path, index: Index, whole: str, class_counts: Counts, fractions: Mapping[str, float], seed: int
) -> dict[str, int]:
    """Write the row numbers of each split to `members.SPLIT` in the index's folder; the number of samples by split."""
    limits = quotas(class_counts, list(fractions.values()), seed)
    seen = np.zeros_like(class_counts)
    sizes = dict.fromkeys(fractions, 0)
    files = {name: (folder / f"members.{name}").open("wb") for name in fractions}
    try:
        first = 0
        for rows in index.chunks(whole):
            target = _targets(rows["label"], seen, class_counts, limits, seed)
            for number, name in enumerate(fractions):
                members = first + np.flatnonzero(target == number)
                files[name].write(members.astype("<i8").tobytes())
                sizes[name] += len(members)
            first += len(rows)
    finally:
        for file in files.values():
            file.close()
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        raise UsageError(f"--split leaves {', '.join(empty)} without a sample; there are {first} samples in all")
    return sizes


def _targets(labels: Counts, seen: Counts, class_counts: Counts, limits: Counts, seed: int) -> Counts:
    """The split of each row; `seen` counts the rows of each class so far and is brought up to date."""
    target = np.empty(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")
    values, starts = np.unique(labels[by_class], return_index=True)
    for label, members in zip(values.tolist(), np.split(by_class, starts[1:]), strict=True):
        places = np.arange(seen[label], seen[label] + len(members), dtype=np.int64)
        drawn = _drawn(places, int(class_counts[label]), mixed(seed, 12, label))
        target[members] = np.searchsorted(limits[:, label], drawn, side="right")
        seen[label] += len(members)
    return target


def _drawn(places: Counts, num: int, key: int) -> Counts:
    """The permutation of 0 .. num-1 that `key` names, at `places`; quick for small classes: there may be many."""
    if num == 1:
        return places
    if num > _SMALL_CLASS:
        return permuted(places, num, key)
    return np.argsort([mixed(key, number) for number in range(num)])[places]
