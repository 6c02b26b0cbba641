"""Tables from any file format: which columns are inputs and targets, and which are combined.

Columns of words become numbers. Words absent from the training split are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.manifest import NO_TARGET, Categories
from hpcdl.data.sources.base.chosen import INPUT_NAMES, TARGET_NAMES, field_name, has_no_target, weighs
from hpcdl.data.sources.base.labels import NUMBER
from hpcdl.data.sources.base.names import is_id, names_class
from hpcdl.data.sources.base.placed import VALUES_AT_ONCE, ArrayGroup, FoundArray, PlacedArray, TableColumn, shape_text
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceFacts
from hpcdl.data.sources.base.splits import left_out, names_division, some, typed
from hpcdl.data.sources.base.values import EXACT, largest, rounded_away
from hpcdl.data.sources.base.words import WordColumn, asked_codings, remarks_on, word_chunks
from hpcdl.data.sources.checks.columns import (
    names_series,
    remarks_on_codes,
    remarks_on_counters,
    remarks_on_groups_shared,
    remarks_on_repeated_targets,
    remarks_on_targets_in_turn,
    remarks_on_times_shared,
    remarks_on_totals,
)
from hpcdl.data.sources.layouts.arrays import FieldSource

_MEASURED = re.compile(r"[\[(<>=~\u2264\u2265]*[+-]?\.?[0-9].*", re.DOTALL)
"""Text that begins with a number: 5 kg, 12:03, 2024-01-05, 20-29, <0.5, [1, 2]."""
_LOOKED_AT = 10_000
_PACKED = "x"
"""The field that combines all columns of numbers, unless --input is given."""


class ColumnSource(FieldSource):
    """Samples that are rows of columns."""

    def list_columns(self, tables: Mapping[str, Mapping[str, TableColumn]], index: IndexWriter) -> SourceFacts:
        """List the rows of a table for each split; all tables have the same columns."""
        # Before columns are left out: one that tells of patients or times is left out on purpose.
        patterns, shared = self._spec.leave_out, [*remarks_on_groups_shared(tables), *remarks_on_times_shared(tables)]
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
            facts = dataclasses.replace(facts, remarks=[*facts.remarks, *remarks_on_repeated_targets(facts, places)])
            counted = remarks_on_counters(facts, places, field_name(name))
            counted += remarks_on_codes(facts, places, words, field_name(name))
            facts = dataclasses.replace(facts, remarks=[*facts.remarks, *counted])
            fields = [
                dataclasses.replace(field, columns=list(packed)) if field.name == field_name(name) else field
                for field in facts.fields
            ]
            remark = f"{field_name(name)}: the columns {some(packed)}"
            facts = dataclasses.replace(facts, fields=fields, remarks=[remark, *facts.remarks])
        coded = [at for at, column_name in enumerate(np.repeat(packed, widths)) if column_name in words]
        totals = remarks_on_totals(facts, field_name(name) if packed else "", coded)
        facts = dataclasses.replace(facts, remarks=[*facts.remarks, *totals, *remarks_on_targets_in_turn(facts)])
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
        step = max(1, VALUES_AT_ONCE // sum(widths))
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
        targets = self._target_columns(list(columns))
        inputs = [name for name in columns if name not in targets]
        if not inputs:
            raise SourceError(
                f"{self._location}: no column is left for an input beside {', '.join(map(shown, targets))}"
            )
        if len(inputs) == 1 and columns[inputs[0]].kind != "number" and not (self._spec.asks and is_id(inputs[0])):
            if self._spec.asks and columns[inputs[0]].kind == "text":
                self._ask_of_measured(inputs[0], next(word_chunks(columns[inputs[0]].place())).tolist()[:_LOOKED_AT])
            self.inputs = (f"{inputs[0]}={field_name(inputs[0])}",)
            return [], ""
        if self._spec.asks:
            self._ask_of_uses(inputs, targets)
        self._ask_of_words(columns, [name for name in inputs if columns[name].kind != "number"])
        if self._spec.asks:
            self._ask_of_rows(inputs)
        return inputs, _PACKED if _PACKED not in targets else f"{_PACKED}_{INPUT_NAMES[-2]}"

    def _target_columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of targets, by --target or by the one name that says so; SourceError for questions."""
        targets = [flag_value.rpartition("=")[0] or flag_value for flag_value in self._spec.targets]
        if targets:
            return [] if has_no_target(targets, names) else targets
        targets = [name for name in names if name.lower() in TARGET_NAMES]
        if not targets:
            choices = ", ".join(map(shown, names[:20]))
            raise SourceError(
                f"{self._location}: which column is the target? Give --target COLUMN=NAME, one of {choices}; or, for "
                f"hpcdl infer alone, --target {NO_TARGET}"
            )
        candidates = [name for name in names if name in targets or names_class(name)]
        if len(candidates) > 1:
            raise SourceError(
                f"{self._location}: which of the columns {some(candidates)} is the target? Give --target "
                f"{typed(candidates[0])}, or another one, and --leave-out for each that repeats it; those left "
                "become inputs"
            )
        return targets

    def _ask_of_uses(self, inputs: Sequence[str], targets: Sequence[str]) -> None:
        """Raise SourceError for a column that seems to divide the rows, or to weigh them."""
        division = next((name for name in inputs if names_division(name) and name not in self._coded_columns()), None)
        if division is not None:
            raise SourceError(
                f"{self._location}: does the column {shown(division)} divide the rows, or is it a feature? To divide "
                f"them call it split, with the words train, val and test. Else give {_without(division)}"
            )
        for name in inputs:
            if what := weighs(name, targets):
                raise SourceError(
                    f"{self._location}: the column {shown(name)} seems to hold {what}: a feature? Give {_without(name)}"
                )

    def _ask_of_rows(self, inputs: Sequence[str]) -> None:
        """Raise SourceError for a column that seems to number the rows, or to say which belong together."""
        numbers = next((name for name in inputs if is_id(name)), None)
        if numbers is not None:
            raise SourceError(
                f"{self._location}: is the column {shown(numbers)} a feature, or a number of the rows? "
                f"Give {_without(numbers)}"
            )
        group = next((name for name in inputs if names_series(name) and name not in self._coded_columns()), None)
        if group is not None:
            raise SourceError(
                f"{self._location}: is the column {shown(group)} a feature, or does it say which rows belong together? "
                f"Give {_without(group)}"
            )

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
            self._ask_of_measured(name, next(word_chunks(columns[name].place())).tolist()[:_LOOKED_AT])
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


def _without(name: str) -> str:
    """Return what to give so that the column `name` is no feature, or surely one."""
    return f"--leave-out {typed(name)}, or name the inputs, each with --input COLUMN=NAME"
