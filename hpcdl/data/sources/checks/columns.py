"""What is doubtful in columns of a table: that they tell the target, count rows, or are shared by splits."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdl.core.errors import shown
from hpcdl.data.sources.base.labels import FEW_CLASSES
from hpcdl.data.sources.base.names import names_code, names_group, names_time
from hpcdl.data.sources.base.placed import VALUES_AT_ONCE, TableColumn
from hpcdl.data.sources.base.source import Array, SourceFacts
from hpcdl.data.sources.base.splits import some, typed
from hpcdl.data.sources.base.values import MOST_ROWS
from hpcdl.data.sources.base.words import word_chunks
from hpcdl.data.sources.checks.groups import remark_on_groups

_FEWEST_ROWS, _SAME = 10, 1e-4
"""A column is compared with the target if it has this number of rows; and how near, in standard deviations, it is."""
_LEAST_ORDERED, _LEAST_RANKS, _ALIKE = 100, 20, 0.999
"""Rows and different numbers from which on a column's order is compared with the target's, and the rank correlation
from which on these orders are said to be one."""
_MOST_COMBINED, _ROWS_COMBINED, _EXACT, _HIGHEST_POWER = 64, 2000, 0.01, 3
"""Columns and rows in which sums and products that are the target are sought; how near they are to it, in standard
deviations, and their factors to 1; and the highest power of a factor."""
_MOSTLY = 0.85
"""The share of each class, and of each value of a column, from which on the column is said to tell the class."""
_SERIES = re.compile(r"(?:series|session|recording|episode|trajectory|sequence)(?:_?(?:nr|no|number))?")
"""Names of columns of numbers that say which rows are one series."""


def names_series(name: str) -> bool:
    """Return whether a column is named like a series of rows, or what several samples belong to."""
    return names_group(name) or _SERIES.fullmatch(name.lower()) is not None


def remarks_on_groups_shared(tables: Mapping[str, Mapping[str, TableColumn]]) -> list[str]:
    """Return a remark if rows of one patient, or what else a column names, are in several splits."""
    name = next(filter(names_group, next(iter(tables.values()))), None)
    if name is None or len(tables) < 2 or any(columns[name].kind == "other" for columns in tables.values()):
        return []
    chunks = ((split, chunk) for split, columns in tables.items() for chunk in word_chunks(columns[name].place()))
    return remark_on_groups(name, ((split, chunk.tolist()) for split, chunk in chunks))


_ISO = re.compile(r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2}.*)?")


def remarks_on_times_shared(tables: Mapping[str, Mapping[str, TableColumn]]) -> list[str]:
    """Return a remark if the times of another split overlap with those of train."""
    first = next(iter(tables.values()))
    name = next((name for name, column in first.items() if names_time(name) or column.times), None)
    if name is None or len(tables) < 2 or "train" not in tables:
        return []
    train = _bounds(tables["train"][name])
    for split, columns in tables.items():
        own = _bounds(columns[name]) if split != "train" else None
        # One split's times may be numbers, another's texts, which have no common order.
        if train and own and type(train[0]) is type(own[0]) and train[0] < own[1] and own[0] < train[1]:
            return [
                f"{shown(name)} of {split} ({own[0]} to {own[1]}) overlaps with that of train ({train[0]} to "
                f"{train[1]}): if later samples are to be predicted, results are too good; divide by it instead"
            ]
    return []


def _bounds(column: TableColumn) -> tuple[Any, Any] | None:
    """Return the first and the last time in a column; None if its values have no order that is known."""
    if column.times is not None:
        chunks: list[list[Any]] = [list(pair) for pair in column.times()]
    elif column.kind == "number":
        finite = (own[np.isfinite(own)] for own in column.numbers().chunks())
        chunks = [[own.min().item(), own.max().item()] for own in finite if own.size]
    elif column.kind == "text":
        chunks = [chunk.tolist() for chunk in word_chunks(column.place())]
        if not all(_ISO.fullmatch(word) for chunk in chunks for word in chunk):
            return None
    else:
        return None
    pairs = [(min(chunk), max(chunk)) for chunk in chunks if chunk]
    return (min(low for low, _ in pairs), max(high for _, high in pairs)) if pairs else None


def remarks_on_repeated_targets(facts: SourceFacts, packed: Sequence[str]) -> list[str]:
    """Return remarks on columns that are the target but for scale and offset, or tell its classes or its order.

    `packed` names the column of each number of a row.
    """
    # The first split alone, whose first field is the one that combines columns.
    (place, *others), (made, *targets) = facts.arrays[: len(facts.fields)], facts.fields
    width = math.prod(place.shape)
    rows = VALUES_AT_ONCE // max(1, width)
    values = np.fromfile(place.file, place.dtype, rows * width, offset=place.offset).reshape(-1, width)
    remarks = []
    for item, other in zip(targets, others, strict=True):
        if other.offsets or math.prod(other.shape) != 1 or width != len(packed) or made.variable:
            continue
        goal = np.fromfile(other.file, other.dtype, len(values), offset=other.offset).astype(np.float64)
        by_name, classes = list(zip(packed, values.T, strict=True)), item.kind == "class"
        # One column may be several numbers, one-hot, and is named once.
        same = list(dict.fromkeys(name for name, own in by_name if repeats(own, goal, classes=classes)))
        parts = list(dict.fromkeys(name for name, own in by_name if classes and _marks(own, goal)))
        if parts:
            remarks.append(
                f"{item.name}: the column {some(parts)} marks one class alone: a part of the target, one-hot? If so, "
                f"give --leave-out {typed(parts[0])}, and so for each"
            )
        if same:
            what = "names each class by a number" if item.kind == "class" else "is the same but for scale and offset"
            remarks.append(
                f"{item.name}: the column {some(same)} {what}: a copy of the target? If so, give --leave-out "
                f"{typed(same[0])}"
            )
        rest = [pair for pair in by_name if width > 1 and pair[0] not in (*same, *parts)]
        shares = {name: share for name, own in rest if (share := _share_named(own, goal) if classes else 0)}
        remarks += [
            f"{item.name}: the column {shown(name)} names the class of {share:.0%} of the rows: made from the target, "
            f"or known only with it? If so, give --leave-out {typed(name)}"
            for name, share in shares.items()
        ]
        ordered = [name for name, own in rest if _orders(own, goal, classes)]
        if ordered:
            what = "bounds alone tell all classes apart in" if classes else "rank correlation over 0.999 with"
            remarks.append(
                f"{item.name}: {what} the column {some(ordered)}: made from the target, or known only with it? If so, "
                f"give --leave-out {typed(ordered[0])}"
            )
        widths = collections.Counter(packed)
        numbers = {name: own for name, own in rest if widths[name] == 1 and name not in ordered}
        if formula := "" if classes else _formula(numbers, goal):
            remarks.append(
                f"{item.name}: it is {formula} in all rows seen: columns made from the target, or known only with it? "
                "If so, leave them out by --leave-out"
            )
    return remarks


def _formula(columns: Mapping[str, Array], goal: Array) -> str:
    """Return the sum, difference, product or ratio of columns that `goal` is; empty if there is none."""
    if not 2 <= len(columns) <= _MOST_COMBINED:
        return ""
    values, goal = np.stack([*columns.values()], 1)[:_ROWS_COMBINED].astype(np.float64), goal[:_ROWS_COMBINED]
    kept = np.isfinite(values).all(1) & np.isfinite(goal)
    values, goal, names = values[kept], goal[kept], [*columns]
    if len(goal) < max(_FEWEST_ROWS, 3 * len(columns)):
        return ""
    added = dict(zip(names, _weights(values, goal).tolist(), strict=True))
    used = {name: weight for name, weight in added.items() if weight}
    first = next(iter(used.values()), 0.0)
    if len(used) > 1 and all(abs(abs(weight / first) - 1) < _EXACT for weight in used.values()):
        multiple = "" if abs(abs(first) - 1) < _EXACT else "a multiple of "
        signs = [(shown(name), weight > 0) for name, weight in used.items()]
        signs.sort(key=lambda pair: not pair[1])
        terms = "".join(f" {'+' if plus else '-'} {name}" for name, plus in signs)
        return multiple + terms.removeprefix(" + ").strip()
    positive = [at for at in range(len(names)) if (values[:, at] > 0).all()]
    if len(positive) < 2 or not (goal > 0).all():
        return ""
    powers = _weights(np.log(values[:, positive]), np.log(goal))
    used = {names[at]: power for at, power in zip(positive, powers.tolist(), strict=True) if power}
    whole = all(
        abs(power - round(power)) < _EXACT and 0 < abs(round(power)) <= _HIGHEST_POWER for power in used.values()
    )
    if len(used) < 2 or not whole:
        return ""
    by_power = sorted(used.items(), key=lambda pair: -pair[1])
    factors = [shown(name) + (f"^{abs(round(power))}" if abs(round(power)) > 1 else "") for name, power in by_power]
    marks = ["*" if power > 0 else "/" for _, power in by_power]
    product = "".join(f" {mark} {factor}" for mark, factor in zip(marks, factors, strict=True))
    return f"{'1' if marks[0] == '/' else ''}{product}".removeprefix(" * ")


def _weights(values: Array, goal: Array) -> Array:
    """Return the weights of columns (rows, columns) whose sum is `goal` but for an offset; zeros if there are none."""
    with np.errstate(over="ignore", invalid="ignore"):
        spread, own = values.std(0), goal.std()
    if not own or not np.isfinite([*spread, own]).all():
        return np.zeros(values.shape[1])
    scaled = (values - values.mean(0)) / np.where(spread > 0, spread, 1)
    weights = np.linalg.lstsq(scaled, (goal - goal.mean()) / own, rcond=None)[0]
    rest = (goal - goal.mean()) / own - scaled @ weights
    if rest.std() > _EXACT:
        return np.zeros(values.shape[1])
    found: Array = np.where(np.abs(weights) > _EXACT, weights * own / np.where(spread > 0, spread, 1), 0)
    return found


def remarks_on_targets_in_turn(facts: SourceFacts) -> list[str]:
    """Return a remark if one of several targets of 0 and 1 is 1 in each row: one target, one-hot."""
    pairs = [
        (item.name, place)
        for item, place in zip(facts.fields, facts.arrays, strict=False)
        if item.role == "target" and item.kind == "class" and len(item.class_names) == 2 and not place.offsets
    ]
    if len(pairs) < 2 or len(pairs) < sum(item.role == "target" for item in facts.fields):
        return []
    values = [
        np.fromfile(place.file, place.dtype, VALUES_AT_ONCE // len(pairs), offset=place.offset) for _, place in pairs
    ]
    if len({len(own) for own in values}) > 1 or len(values[0]) < _FEWEST_ROWS or not (np.sum(values, 0) == 1).all():
        return []
    return [
        f"one of the targets {some(name for name, _ in pairs)} is 1 in each row: one target of {len(pairs)} classes? "
        "Then write it as one column"
    ]


def remarks_on_totals(facts: SourceFacts, packed: str, coded: Collection[int]) -> list[str]:
    """Return a remark if the last row holds sums or means; `coded` are the places of words in the field `packed`."""
    columns: list[Array] = []
    for field, place in zip(facts.fields, facts.arrays, strict=False):
        width = math.prod(place.shape)
        if field.kind != "numbers" or place.offsets or not width:
            continue
        values = np.fromfile(place.file, place.dtype, VALUES_AT_ONCE // width * width, offset=place.offset)
        if len(values) == VALUES_AT_ONCE // width * width:  # not all of it
            return []
        kept = [number for number in range(width) if field.name != packed or number not in coded]
        columns += [values.reshape(-1, width)[:, kept].astype(np.float64)]
    # Of words alone nothing is left to compare.
    columns = [column for column in columns if column.size]
    if len({len(column) for column in columns}) != 1 or not (what := _last_row(np.concatenate(columns, 1))):
        return []
    return [f"the last row holds {what} of all others, in every column: no sample? If so, take it out"]


def _last_row(values: Array) -> str:
    """Return what the last row of a table (rows, columns) seems to be of all others; empty for a sample."""
    others, last = values[:-1], values[-1]
    # Each row of a constant column is the mean of the others.
    if len(others) < _FEWEST_ROWS or not others.std(0).all():
        return ""
    summaries = {"the sums": others.sum(0), "the means": others.mean(0)}
    return next((what for what, summary in summaries.items() if np.allclose(last, summary, rtol=1e-3, atol=0)), "")


def repeats(values: Array, goal: Array, *, classes: bool) -> bool:
    """Return whether numbers are `goal` but for scale and offset, or one number for each class."""
    kept = np.isfinite(values) & np.isfinite(goal)
    values, goal = values[kept].astype(np.float64), goal[kept]
    if len(goal) < _FEWEST_ROWS or values.std() == 0 or goal.std() == 0:
        return False
    if classes:
        pairs, numbers = np.unique(np.stack([values, goal]), axis=1), len(np.unique(goal))
        return pairs.shape[1] == numbers == len(np.unique(values)) and len(goal) >= _FEWEST_ROWS * numbers
    ours, theirs = ((own - own.mean()) / own.std() for own in (values, goal))
    return bool(min(np.abs(ours - theirs).max(), np.abs(ours + theirs).max()) < _SAME)


def _marks(values: Array, goal: Array) -> bool:
    """Return whether numbers of two values, each often there, are one for a single class of several, else the other."""
    known = np.unique(values)
    if len(known) != 2 or len(np.unique(goal)) < 3:
        return False
    high = values == known[1]
    if min(high.sum(), (~high).sum()) < _FEWEST_ROWS:
        return False
    ours, others = np.unique(goal[high]), np.unique(goal[~high])
    return not np.isin(ours, others).any() and min(len(ours), len(others)) == 1


def _share_named(values: Array, goal: Array) -> float:
    """Return the share of rows whose class a column of as many values tells, if most of each class are; else 0."""
    kept = np.isfinite(values) & np.isfinite(goal)
    known, column = np.unique(values[kept], return_inverse=True)
    classes, own = np.unique(goal[kept], return_inverse=True)
    if not 1 < len(known) == len(classes) <= FEW_CLASSES:
        return 0
    pairs = np.bincount(column * len(classes) + own, minlength=len(classes) ** 2).reshape(len(known), -1)
    named, most = pairs.max(1), pairs.argmax(1)
    each = np.minimum((named / pairs.sum(1)).min(), (named / pairs.sum(0)[most]).min())
    if pairs.sum(0).min() < _FEWEST_ROWS or len({*most.tolist()}) < len(classes) or each < _MOSTLY:
        return 0
    return float(named.sum() / len(own))


def _orders(values: Array, goal: Array, classes: bool) -> bool:
    """Return whether numbers have the order of `goal`, rising or falling, or each class has a range of its own."""
    kept = np.isfinite(values) & np.isfinite(goal)
    values, goal = values[kept], goal[kept]
    if len(goal) < _LEAST_ORDERED or len(np.unique(values)) < _LEAST_RANKS:
        return False
    if classes:
        counts = np.unique(goal, return_counts=True)[1]
        order = np.argsort(values, kind="stable")
        ends = np.flatnonzero(np.diff(goal[order]))
        apart = values[order][ends] < values[order][ends + 1]
        return len(counts) > 1 and counts.min() >= _FEWEST_ROWS and len(ends) == len(counts) - 1 and bool(apart.all())
    if len(np.unique(goal)) < _LEAST_RANKS:
        return False
    return bool(abs(np.corrcoef(_ranks(values), _ranks(goal))[0, 1]) > _ALIKE)


def _ranks(values: Array) -> Array:
    """Return the rank of each value; equal ones share the mean of theirs."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - counts / 2)[numbers]
    return ranks


def remarks_on_codes(facts: SourceFacts, packed: Sequence[str], coded: Collection[str], field: str) -> list[str]:
    """Return a remark on columns of the field `field` of several whole numbers that are named like codes.

    `coded` are columns whose numbers --categories has taken for words.
    """
    at = next(number for number, item in enumerate(facts.fields) if item.name == field)
    place, width = facts.arrays[at], math.prod(facts.arrays[at].shape)
    if width != len(packed):
        return []
    rows = np.fromfile(place.file, place.dtype, MOST_ROWS // width * width, offset=place.offset).reshape(-1, width)
    names = [
        name
        for name, own in zip(packed, rows.T, strict=True)
        if name not in coded and names_code(name) and not (own % 1).any() and len(np.unique(own)) > 2
    ]
    if not names:
        return []
    return [
        f"{field}: the column {some(names)} holds whole numbers, and is named like a code: a model takes them for "
        f"quantities. For categories give --categories {typed(names[0] + '=one-hot')}"
    ]


def remarks_on_counters(facts: SourceFacts, packed: Sequence[str], field: str) -> list[str]:
    """Return remarks on columns of the field `field` that count the rows, or hold one number alone."""
    at = next(number for number, item in enumerate(facts.fields) if item.name == field)
    place, width = facts.arrays[at], math.prod(facts.arrays[at].shape)
    if width != len(packed):
        return []
    values = np.fromfile(place.file, place.dtype, VALUES_AT_ONCE // width * width, offset=place.offset).reshape(
        -1, width
    )
    if len(values) < _FEWEST_ROWS:
        return []
    with np.errstate(over="ignore", invalid="ignore"):
        names = [name for name, own in zip(packed, values.T, strict=True) if (np.diff(own) == 1).all()]
    remarks = []
    if names:
        remarks.append(
            f"{field}: the column {some(names)} counts the rows: a feature? If it is their number, give --leave-out "
            f"{typed(names[0])}"
        )
    # A word of a one-hot column that is rare may be in no row seen.
    widths = collections.Counter(packed)
    single = [(name, own) for name, own in zip(packed, values.T, strict=True) if widths[name] == 1]
    alike = [(name, own[0]) for name, own in single if (own == own[0]).all()]
    # Many are pixels at the edge of pictures.
    if 0 < len(alike) < _FEWEST_ROWS and len(alike) < width:
        remarks.append(
            f"{field}: the column {some(name for name, _ in alike)} is {alike[0][1]:g} in all rows seen: is there "
            "anything to learn from it?"
        )
    return remarks
