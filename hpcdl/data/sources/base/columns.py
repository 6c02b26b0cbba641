"""Tables from any file format: which columns are inputs and targets, and which are combined.

Columns of words become numbers. Words absent from the training split are refused.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import CODINGS, Categories
from hpcdl.data.sources.base.arrays import FieldSource
from hpcdl.data.sources.base.chosen import INPUT_NAMES, TARGET_NAMES, field_name, weighs
from hpcdl.data.sources.base.flat import NUMBER, is_id, names_class, names_group, names_time, remark_on_groups
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray, shape_text
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceFacts
from hpcdl.data.sources.base.splits import left_out, names_division, some, typed
from hpcdl.data.sources.base.values import EXACT, largest, rounded_away

MOST_ONE_HOT = 1000
"""The limit on words for one-hot encoding: more would make it larger than any table."""
_MOST_WORDS = 1_000_000
_SHOWN = 20


def asked_codings(flag_values: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the coding by column of `--categories COLUMN=CODING`; UsageError for unknown columns and codings."""
    codings: dict[str, str] = {}
    for flag_value in flag_values:
        column, equals, coding = flag_value.rpartition("=")
        if not equals or coding not in CODINGS:
            name = column if equals and column in columns else flag_value
            raise UsageError(
                f"--categories {flag_value}: how are its words to become numbers? Give --categories "
                f"{typed(name + '=one-hot')} (a 0 or 1 for each word) or --categories {typed(name + '=codes')} (0, 1, "
                "2, ... in the order of the words)"
            )
        if column not in columns or column in codings:
            what = "is named twice" if column in codings else f"is no column; the columns are {some(list(columns))}"
            raise UsageError(f"--categories {flag_value}: {shown(column)} {what}")
        codings[column] = coding
    return codings


@dataclass(frozen=True, kw_only=True)
class WordColumn:
    """A column of words, by split; `words` are those of another data folder, None to use the column's own."""

    where: str
    name: str
    coding: str
    places: Mapping[str, Callable[[], PlacedArray]]
    words: Sequence[str] | None = None

    def settled(self) -> Categories:
        """Return the words in the order of their codes: the training split's, sorted; SourceError for invalid words.

        A word that occurs only in another split is refused: no model would have learnt it.
        """
        placed = {split: load() for split, load in self.places.items()}
        first = "train" if "train" in placed else next(iter(placed))
        words = self._own(placed[first]) if self.words is None else list(self.words)
        if self.coding == "one-hot" and len(words) > MOST_ONE_HOT:
            raise SourceError(
                f"{self.where}: {shown(self.name)} has {len(words)} different words, and one-hot numbers are for at "
                f"most {MOST_ONE_HOT}; give --categories {typed(self.name + '=codes')}, or --leave-out "
                f"{typed(self.name)}"
            )
        for split, array in placed.items():
            self._check(split, first, words, array)
        return Categories(column=self.name, coding=self.coding, words=words)

    def coded(self, split: str, kept: Categories) -> Iterator[Array]:
        """Yield the numbers of a split's words in pieces of rows: (N) int64, or (N, words) float32 of 0 and 1."""
        words = np.array(kept.words, object)
        order = np.argsort(words, kind="stable")
        for chunk in _chunks(self.places[split]()):
            # Words are in the order of their codes, which a binary search cannot use.
            codes = order[np.searchsorted(words[order], chunk)]
            if self.coding == "codes":
                yield codes.astype(np.int64)
                continue
            rows = np.zeros((len(codes), len(words)), np.float32)
            rows[np.arange(len(codes)), codes] = 1
            yield rows

    def _own(self, array: PlacedArray) -> list[str]:
        words: set[str] = set()
        for chunk in _chunks(array):
            words.update(chunk.tolist())
            if len(words) > _MOST_WORDS:
                raise SourceError(
                    f"{self.where}: {shown(self.name)} has over {_MOST_WORDS} different words; leave it out"
                )
        return sorted(words, key=_by_number)

    def _check(self, split: str, first: str, words: Sequence[str], array: PlacedArray) -> None:
        allowed = set(words)
        if "" in allowed:
            raise SourceError(
                f"{self.where}: {shown(self.name)} has rows without a word; write one for them, such as missing, or "
                "take these rows out"
            )
        row = 0
        for chunk in _chunks(array):
            odd = next((at for at, word in enumerate(chunk.tolist()) if word not in allowed), None)
            if odd is not None:
                there = "what --categories-of names" if self.words is not None else first
                word = shown(chunk[odd]) if chunk[odd] else "empty"
                at = f"row {row + odd}{'' if split == UNSPLIT else f' of {split}'}"
                raise SourceError(
                    f"{self.where}: {shown(self.name)} of {at} is {word}, a word that {there} does not have "
                    f"({some(list(words))}); correct it, or take such rows out"
                )
            row += len(chunk)


def remarks_on(kept: Categories, field: str) -> str:
    """Tell the user which word became which number."""
    names = [f"{word} {kept.place + number if kept.coding == 'one-hot' else number}" for number, word in
             enumerate(kept.words[:_SHOWN])]  # fmt: skip
    more = ", ..." if len(kept.words) > _SHOWN else ""
    what = "one-hot, at the places" if kept.coding == "one-hot" else f"codes at the place {kept.place}:"
    return f"{field}: the words of {shown(kept.column)} as {what} {', '.join(names)}{more}"


def _chunks(array: PlacedArray) -> Iterator[Array]:
    """Yield the words of a column in pieces; integers become their digits."""
    if array.text:
        yield from array.string_chunks()
        return
    for chunk in array.chunks():
        yield chunk.reshape(-1).astype(str).astype(object)


def _by_number(word: str) -> tuple[int, int, str]:
    """Sort key: integers by value first, then all other words alphabetically."""
    # isdigit alone accepts characters such as superscripts, which int() refuses.
    return (0, int(word), word) if word.isascii() and word.removeprefix("-").isdigit() else (1, 0, word)


_MEASURED = re.compile(r"[\[(<>=~\u2264\u2265]*[+-]?\.?[0-9].*", re.DOTALL)
"""Text that begins with a number: 5 kg, 12:03, 2024-01-05, 20-29, <0.5, [1, 2]."""
_LOOKED_AT = 10_000
_STACKED = 1 << 21
"""The number of values that are combined at once."""
_FEWEST_ROWS, _SAME = 10, 1e-4
"""A column is compared with the target if it has this number of rows; and how near, in standard deviations, it is."""
_LEAST_ORDERED, _LEAST_RANKS, _ALIKE = 100, 20, 0.999
"""Rows and different numbers from which on a column's order is compared with the target's, and the rank correlation
from which on these orders are said to be one."""
_SERIES = re.compile(r"(?:series|session|recording|episode|trajectory|sequence)(?:_?(?:nr|no|number))?")
"""Names of columns of numbers that say which rows are one series."""
_PACKED = "x"
"""The field that combines all columns of numbers, unless --input is given."""


def _names_series(name: str) -> bool:
    return names_group(name) or _SERIES.fullmatch(name.lower()) is not None


def _groups_shared(tables: Mapping[str, Mapping[str, TableColumn]]) -> list[str]:
    """Return a remark if rows of one patient, or what else a column names, are in several splits."""
    name = next(filter(names_group, next(iter(tables.values()))), None)
    if name is None or len(tables) < 2 or any(columns[name].kind == "other" for columns in tables.values()):
        return []
    chunks = ((split, chunk) for split, columns in tables.items() for chunk in _chunks(columns[name].place()))
    return remark_on_groups(name, ((split, chunk.tolist()) for split, chunk in chunks))


_ISO = re.compile(r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2}.*)?")


def _times_shared(tables: Mapping[str, Mapping[str, TableColumn]]) -> list[str]:
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
        chunks = [chunk.tolist() for chunk in _chunks(column.place())]
        if not all(_ISO.fullmatch(word) for chunk in chunks for word in chunk):
            return None
    else:
        return None
    pairs = [(min(chunk), max(chunk)) for chunk in chunks if chunk]
    return (min(low for low, _ in pairs), max(high for _, high in pairs)) if pairs else None


def _same_as_target(facts: SourceFacts, packed: Sequence[str]) -> list[str]:
    """Return remarks on columns that are the target but for scale and offset, or tell its classes or its order.

    `packed` names the column of each number of a row.
    """
    # The first split alone, whose first field is the one that combines columns.
    (place, *others), (made, *targets) = facts.arrays[: len(facts.fields)], facts.fields
    width = math.prod(place.shape)
    rows = _STACKED // max(1, width)
    values = np.fromfile(place.file, place.dtype, rows * width, offset=place.offset).reshape(-1, width)
    remarks = []
    for item, other in zip(targets, others, strict=True):
        if other.offsets or math.prod(other.shape) != 1 or width != len(packed) or made.variable:
            continue
        goal = np.fromfile(other.file, other.dtype, len(values), offset=other.offset).astype(np.float64)
        by_name, classes = list(zip(packed, values.T, strict=True)), item.kind == "class"
        # One column may be several numbers, one-hot, and is named once.
        same = list(dict.fromkeys(name for name, own in by_name if _repeats(own, goal, classes)))
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
        ordered = [name for name, own in rest if _orders(own, goal, classes)]
        if ordered:
            what = "bounds alone tell all classes apart in" if classes else "rank correlation over 0.999 with"
            remarks.append(
                f"{item.name}: {what} the column {some(ordered)}: made from the target, or known only with it? If so, "
                f"give --leave-out {typed(ordered[0])}"
            )
    return remarks


def _targets_in_turn(facts: SourceFacts) -> list[str]:
    """Return a remark if one of several targets of 0 and 1 is 1 in each row: one target, one-hot."""
    pairs = [
        (item.name, place)
        for item, place in zip(facts.fields, facts.arrays, strict=False)
        if item.role == "target" and item.kind == "class" and len(item.class_names) == 2 and not place.offsets
    ]
    if len(pairs) < 2 or len(pairs) < sum(item.role == "target" for item in facts.fields):
        return []
    values = [np.fromfile(place.file, place.dtype, _STACKED // len(pairs), offset=place.offset) for _, place in pairs]
    if len({len(own) for own in values}) > 1 or len(values[0]) < _FEWEST_ROWS or not (np.sum(values, 0) == 1).all():
        return []
    return [
        f"one of the targets {some(name for name, _ in pairs)} is 1 in each row: one target of {len(pairs)} classes? "
        "Then write it as one column"
    ]


def _totals(facts: SourceFacts, packed: str, coded: Collection[int]) -> list[str]:
    """Return a remark if the last row holds sums or means; `coded` are the places of words in the field `packed`."""
    columns: list[Array] = []
    for field, place in zip(facts.fields, facts.arrays, strict=False):
        width = math.prod(place.shape)
        if field.kind != "numbers" or place.offsets or not width:
            continue
        values = np.fromfile(place.file, place.dtype, _STACKED // width * width, offset=place.offset)
        if len(values) == _STACKED // width * width:  # not all of it
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


def _repeats(values: Array, goal: Array, classes: bool) -> bool:
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


def _counters(facts: SourceFacts, packed: Sequence[str], field: str) -> list[str]:
    """Return remarks on columns of the field `field` that count the rows, or hold one number alone."""
    at = next(number for number, item in enumerate(facts.fields) if item.name == field)
    place, width = facts.arrays[at], math.prod(facts.arrays[at].shape)
    if width != len(packed):
        return []
    values = np.fromfile(place.file, place.dtype, _STACKED // width * width, offset=place.offset).reshape(-1, width)
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


def _no_numbers() -> PlacedArray:
    raise AssertionError("only columns of kind number are asked for their numbers")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """`kind` is `number` (one per row), `text`, or `other`; `shown` describes the column in messages."""

    shown: str
    kind: str
    place: Callable[[], PlacedArray]
    numbers: Callable[[], PlacedArray] = _no_numbers
    width: int = 1
    """Numbers per row."""
    times: Callable[[], Iterable[tuple[str, str]]] | None = None
    """For a type of dates or times: returns the first and the last of each piece of rows, in ISO 8601."""


class ColumnSource(FieldSource):
    """Samples that are rows of columns."""

    def list_columns(self, tables: Mapping[str, Mapping[str, TableColumn]], index: IndexWriter) -> SourceFacts:
        """List the rows of a table for each split; all tables have the same columns."""
        # Before columns are left out: one that tells of patients or times is left out on purpose.
        patterns, shared = self._spec.leave_out, [*_groups_shared(tables), *_times_shared(tables)]
        self.times = {name for columns in tables.values() for name, column in columns.items() if column.times}
        self.named.update(column_name for columns in tables.values() for column_name in columns)
        tables = {
            split: {
                column_name: column for column_name, column in columns.items() if not left_out(column_name, patterns)
            }
            for split, columns in tables.items()
        }
        tables, words = self._as_numbers(tables)
        packed, name = self._packed(next(iter(tables.values())))
        groups = []
        for split, columns in tables.items():
            arrays = {
                column_name: FoundArray(column.shown, column.place)
                for column_name, column in columns.items()
                if column_name not in packed
            }
            if packed:
                numbers = [columns[column_name].numbers for column_name in packed]
                width = sum(columns[column_name].width for column_name in packed)
                arrays[name] = FoundArray(
                    shape_text((width,), "float32"), functools.partial(self._together, packed, numbers)
                )
            groups.append(ArrayGroup(split=split, arrays=arrays))
        if packed:
            self.inputs = (f"{name}={field_name(name)}",)
        self.compares_columns = bool(packed)
        facts = self.list_parts(groups, index)
        facts = dataclasses.replace(facts, remarks=[*facts.remarks, *shared])
        widths = [next(iter(tables.values()))[column_name].width for column_name in packed]
        if packed:
            places = np.repeat(packed, widths).tolist()
            facts = dataclasses.replace(facts, remarks=[*facts.remarks, *_same_as_target(facts, places)])
            counted = _counters(facts, places, field_name(name))
            facts = dataclasses.replace(facts, remarks=[*facts.remarks, *counted])
            fields = [
                dataclasses.replace(field, columns=list(packed)) if field.name == field_name(name) else field
                for field in facts.fields
            ]
            remark = f"{field_name(name)}: the columns {some(packed)}"
            facts = dataclasses.replace(facts, fields=fields, remarks=[remark, *facts.remarks])
        coded = [at for at, column_name in enumerate(np.repeat(packed, widths)) if column_name in words]
        totals = _totals(facts, field_name(name) if packed else "", coded)
        facts = dataclasses.replace(facts, remarks=[*facts.remarks, *totals, *_targets_in_turn(facts)])
        return self._with_words(facts, words, packed, next(iter(tables.values()))) if words else facts

    def _as_numbers(
        self, tables: Mapping[str, Mapping[str, TableColumn]]
    ) -> tuple[Mapping[str, Mapping[str, TableColumn]], dict[str, Categories]]:
        """Return `tables` with numbers in place of the words of --categories columns, and the words of each column."""
        first = next(iter(tables.values()))
        codings = asked_codings(self._spec.categories, list(first))
        targets = {flag_value.rpartition("=")[0] or flag_value for flag_value in self._spec.targets}
        words: dict[str, Categories] = {}
        made = {split: dict(columns) for split, columns in tables.items()}
        for name, coding in codings.items():
            if name in targets:
                raise UsageError(
                    f"--categories {name}={coding}: words of a target are its classes already; leave it out"
                )
            if first[name].kind == "other" or first[name].shown.startswith(("float", "double", "half")):
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds {first[name].shown}: no words, "
                    "and no whole numbers"
                )
            column = WordColumn(
                where=str(self._location),
                name=name,
                coding=coding,
                # Text costs a pass over the files, and is needed for the words and again for their codes.
                places={split: functools.cache(columns[name].place) for split, columns in tables.items()},
                words=self._spec.known_words.get(name),
            )
            words[name] = column.settled()
            for split in made:
                load = functools.partial(self._coded, column, split, words[name])
                width = len(words[name].words) if coding == "one-hot" else 1
                made[split][name] = TableColumn(shown=coding, kind="number", place=load, numbers=load, width=width)
        return made, words

    def _coded(self, column: WordColumn, split: str, kept: Categories) -> PlacedArray:
        return self.written(column.coded(split, kept))

    def _with_words(
        self,
        facts: SourceFacts,
        words: Mapping[str, Categories],
        packed: Sequence[str],
        columns: Mapping[str, TableColumn],
    ) -> SourceFacts:
        """Return `facts` with fields that say which of their numbers stand for which words."""
        paths = {field_name(name): name for name in words}
        paths |= {
            flag_value.rpartition("=")[2]: flag_value.rpartition("=")[0]
            for flag_value in self.inputs
            if "=" in flag_value
        }
        places = list(itertools.accumulate((columns[own].width for own in packed), initial=0))
        together = [
            dataclasses.replace(words[own], place=place)
            for own, place in zip(packed, places, strict=False)
            if own in words
        ]
        fields = []
        remarks = list(facts.remarks)
        for field in facts.fields:
            alone = [words[paths[field.name]]] if paths.get(field.name) in words else []
            own = [] if field.role != "input" else together if packed else alone
            fields.append(dataclasses.replace(field, categories=own))
            remarks += [remarks_on(kept, field.name) for kept in own]
        return dataclasses.replace(facts, fields=fields, remarks=remarks)

    def _together(self, names: list[str], numbers: list[Callable[[], PlacedArray]]) -> PlacedArray:
        """Return columns of numbers as one array of float32, written in pieces of rows."""
        columns = [load() for load in numbers]
        for name, column in zip(names, columns, strict=True):
            if (most := max(map(largest, column.chunks()), default=0)) > EXACT:
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds whole numbers up to {most}, which float32 "
                    f"rounds: give --leave-out {typed(name)}, or keep types by naming inputs, each with --input "
                    "COLUMN=NAME"
                )
            if column.dtype == np.float64 and (coarse := rounded_away(column.chunks())):
                raise SourceError(
                    f"{self._location}: the column {shown(name)} holds {coarse}: subtract their beginning, give "
                    f"--leave-out {typed(name)}, or keep types by naming inputs, each with --input COLUMN=NAME"
                )
        return self.written(self._stacked(columns))

    def _stacked(self, columns: Sequence[PlacedArray]) -> Iterator[Array]:
        """Yield the combined rows of columns that are stored in separate files."""
        num_rows = columns[0].num_samples
        widths = [math.prod(column.shape[1:]) for column in columns]
        places = list(itertools.accumulate(widths, initial=0))
        step = max(1, _STACKED // sum(widths))
        for first in range(0, num_rows, step):
            rows = np.empty((min(step, num_rows - first), sum(widths)), np.float32)
            for start, width, column in zip(places, widths, columns, strict=False):
                at = column.offset + first * width * column.dtype.itemsize
                values = np.fromfile(column.path, column.dtype, len(rows) * width, offset=at)
                with np.errstate(over="ignore"):  # what float32 cannot hold is refused as not finite
                    rows[:, start : start + width] = values.reshape(len(rows), width)
            yield rows

    def _packed(self, columns: Mapping[str, TableColumn]) -> tuple[list[str], str]:
        """Return the columns of numbers that form an unnamed input, and its path; SourceError for questions."""
        if self._spec.inputs:
            return [], ""
        targets = [flag_value.rpartition("=")[0] or flag_value for flag_value in self._spec.targets]
        if not targets:
            targets = [column for column in columns if column.lower() in TARGET_NAMES]
            candidates = [column for column in columns if column in targets or names_class(column)]
            if targets and len(candidates) > 1:
                raise SourceError(
                    f"{self._location}: which of the columns {some(candidates)} is the target? Give --target "
                    f"{typed(candidates[0])}, or another one, and --leave-out for each that repeats it; those left "
                    "become inputs"
                )
        choices = ", ".join(shown(name) for name in list(columns)[:20])
        if not targets:
            raise SourceError(
                f"{self._location}: which column is the target? Give --target COLUMN=NAME, one of {choices}"
            )
        inputs = [name for name in columns if name not in targets]
        if not inputs:
            raise SourceError(
                f"{self._location}: no column is left for an input beside {', '.join(map(shown, targets))}"
            )
        if len(inputs) == 1 and columns[inputs[0]].kind != "number" and not (self._spec.asks and is_id(inputs[0])):
            if self._spec.asks and columns[inputs[0]].kind == "text":
                self._ask_of_measured(inputs[0], next(_chunks(columns[inputs[0]].place())).tolist()[:_LOOKED_AT])
            self.inputs = (f"{inputs[0]}={field_name(inputs[0])}",)
            return [], ""
        division = next((name for name in inputs if names_division(name) and name not in self._coded_columns()), None)
        if division is not None and self._spec.asks:
            raise SourceError(
                f"{self._location}: does the column {shown(division)} divide the rows, or is it a feature? To divide "
                f"them call it split, with the words train, val and test. Else give --leave-out {typed(division)}, or "
                "name the inputs, each with --input COLUMN=NAME"
            )
        for name, what in ((name, weighs(name, targets)) for name in inputs if self._spec.asks):
            if what:
                raise SourceError(
                    f"{self._location}: the column {shown(name)} seems to hold {what}: a feature? Give --leave-out "
                    f"{typed(name)}, or name the inputs, each with --input COLUMN=NAME"
                )
        self._ask_of_words(columns, [name for name in inputs if columns[name].kind != "number"])
        id_column = next((column for column in inputs if is_id(column)), None)
        if id_column is not None and self._spec.asks:
            raise SourceError(
                f"{self._location}: is the column {shown(id_column)} a feature, or a number of the rows? Give "
                f"--leave-out {typed(id_column)}, or name the inputs, each with --input COLUMN=NAME"
            )
        group = next((own for own in inputs if _names_series(own) and own not in self._coded_columns()), None)
        if group is not None and self._spec.asks:
            raise SourceError(
                f"{self._location}: is the column {shown(group)} a feature, or does it say which rows belong together? "
                f"Give --leave-out {typed(group)}, or name the inputs, each with --input COLUMN=NAME"
            )
        return inputs, _PACKED if _PACKED not in targets else f"{_PACKED}_{INPUT_NAMES[-2]}"

    def _coded_columns(self) -> list[str]:
        return [flag_value.rpartition("=")[0] for flag_value in self._spec.categories]

    def _ask_of_words(self, columns: Mapping[str, TableColumn], odd: Sequence[str]) -> None:
        """Raise SourceError for the columns `odd`, which hold no numbers, and ask how to use them."""
        if not odd:
            return
        text = [name for name in odd if columns[name].kind == "text"]
        if len(text) < len(odd):
            name = next(name for name in odd if name not in text)
            raise SourceError(
                f"{self._location}: the column {shown(name)} holds {columns[name].shown}; name the columns that are "
                f"inputs, each with --input COLUMN=NAME, or give --leave-out {typed(name)}"
            )
        many = len(text) > 1
        for name in text:
            self._ask_of_measured(name, next(_chunks(columns[name].place())).tolist()[:_LOOKED_AT])
        raise SourceError(
            f"{self._location}: the column{'s' * many} {some(text)} hold{'' if many else 's'} text. As numbers? Give "
            f"--categories {typed(text[0] + '=one-hot')} (a 0 or 1 for each word) or --categories "
            f"{typed(text[0] + '=codes')} (0, 1, 2, ...){', and so for each' if many else ''}. Or name the inputs, "
            f"each with --input COLUMN=NAME, or give --leave-out {typed(text[0])}"
        )

    def _ask_of_measured(self, name: str, words: Sequence[str]) -> None:
        """Raise SourceError if all words of a column begin with a number: coded as words they would lose its order."""
        words = [word.strip() for word in words if word.strip()]
        if not words or not all(map(_MEASURED.fullmatch, words)):
            return
        numbers = all(map(NUMBER.fullmatch, words))
        what = "numbers saved as text" if numbers else "text that begins with numbers"
        raise SourceError(
            f"{self._location}: the column {shown(name)} holds {what}, such as {shown(words[0])}: "
            f"{'' if numbers else 'a quantity, a time or a range? '}Write numbers into the source, without units. "
            f"If these are names, give --categories {typed(name + '=codes')} or {typed(name + '=one-hot')}, or "
            f"--leave-out {typed(name)}, or for text name the inputs, each with --input COLUMN=NAME"
        )
