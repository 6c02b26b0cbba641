"""Divide the samples of a source into splits, class by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import UsageError
from hpcdl.data.format.order import mixed, permuted
from hpcdl.data.sources.base.source import Index

Counts = npt.NDArray[np.int64]
_SMALL_CLASS = 16


def quotas(class_counts: Counts, fractions: list[float], seed: int) -> Counts:
    """Return how many samples of each class go to the first k + 1 splits together: shape (splits, classes).

    Rounding errors are carried from class to class (in a random order), so that each split gets its share
    even if each class has few samples.
    """
    order = np.argsort(permuted(np.arange(len(class_counts), dtype=np.int64), len(class_counts), mixed(seed, 11)))
    before = np.concatenate([[0], np.cumsum(class_counts[order])])
    result = np.zeros((len(fractions), len(class_counts)), np.int64)
    cumulative = np.cumsum(fractions)
    for number, fraction in enumerate(cumulative[:-1]):
        # Differences of rounded running totals: no rounding is lost, and all classes together get their share.
        result[number, order] = np.diff(np.floor(fraction * before + 0.5).astype(np.int64))
        if number:
            # Carried roundings may give a class less than the part before it: no part may be negative.
            result[number] = np.maximum(result[number], result[number - 1])
    # The last part takes the rest, whatever the rounding of the fractions' sum.
    result[-1] = class_counts
    return result


def divide(folder: Path, index: Index, whole: str, limits: Counts, names: Sequence[str], seed: int) -> dict[str, int]:
    """Write the row numbers of each split to `members.SPLIT` in the index's folder; return the samples by split.

    `limits` are the result of `quotas`.
    """
    class_counts = limits[-1]
    num_seen = np.zeros_like(class_counts)
    sizes = dict.fromkeys(names, 0)
    files = {name: (folder / f"members.{name}").open("wb") for name in names}
    try:
        first = 0
        for rows in index.chunks(whole):
            target = _targets(rows["label"], num_seen, class_counts, limits, seed)
            for number, name in enumerate(names):
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
    """Return the split of each row; `seen` counts the rows of each class so far and is updated."""
    target = np.empty(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")  # stable: rows of a class keep the order that `seen` counts
    values, starts = np.unique(labels[by_class], return_index=True)
    for label, members in zip(values.tolist(), np.split(by_class, starts[1:]), strict=True):
        positions = np.arange(seen[label], seen[label] + len(members), dtype=np.int64)
        drawn = _drawn(positions, int(class_counts[label]), mixed(seed, 12, label))
        # A drawn position below the first limit is in the first split, and so on.
        target[members] = np.searchsorted(limits[:, label], drawn, side="right")
        seen[label] += len(members)
    return target


def _drawn(positions: Counts, num: int, key: int) -> Counts:
    """Apply the permutation of 0 .. num-1 of `key` to `positions`; fast for small classes, which may be many."""
    if num == 1:
        return positions
    if num > _SMALL_CLASS:
        return permuted(positions, num, key)
    return np.argsort([mixed(key, number) for number in range(num)])[positions]
