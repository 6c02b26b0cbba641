"""What an array of targets is: classes, which become numbers from 0, or quantities, which stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.manifest import Field
from hpcdl.data.sources.base.labels import (
    MOST_CLASSES,
    NUMBER,
    class_numbers,
    named_labels,
    names_remark,
    plausible,
    question_of_quantities,
    question_of_words,
    sparse,
    words_among_numbers,
)
from hpcdl.data.sources.base.names import names_quantity
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array, SourceSpec
from hpcdl.data.sources.base.splits import some
from hpcdl.data.sources.base.values import (
    LOOKED_AT,
    are_whole,
    different,
    is_one_hot,
    labels_in,
    nearly_one_hot,
    numbers_in,
    values_in,
)


class Target:
    """A field of targets that a source holds at `path`, in one array per part."""

    def __init__(self, name: str, path: str, arrays: Sequence[PlacedArray], spec: SourceSpec) -> None:
        self._name, self._path, self._arrays = name, path, arrays
        self._location = Path(spec.location)
        self._where = f"{self._location}: {path}"
        self._kind, self._nan = spec.target_kind, spec.nan
        self._first = arrays[0]
        self._floats = not self._first.text and self._first.dtype.kind == "f"

    def as_classes(
        self, written: Callable[[Iterable[Array]], PlacedArray], remarks: list[str], *, alone: bool
    ) -> tuple[Field, list[PlacedArray]] | None:
        """Return the field and its class numbers, stored by `written`; None for quantities. `alone`: the only target.

        Raises SourceError with both readings where values may be classes or quantities, unless --target-kind says.
        """
        first = self._first
        if self._kind != "regression":
            _ask_of_lists(self._where, first)
        if not first.text and (first.offsets or int(np.prod(first.shape[1:])) != 1):
            return None if self._kind == "regression" else self._one_hot(written, remarks, alone=alone)
        if self._kind == "regression" and not first.text:
            return None
        # With --nan skip a missing label leaves its sample out, and does not make quantities of the others.
        if self._floats and not all(map(are_whole, values_in(self._arrays, finite=self._nan == "skip"))):
            if self._kind == "class":
                raise SourceError(f"{self._where}: {self._no_class()}")
            return None
        labels, over = different(self._arrays)
        self._check(labels, over)
        return self._numbered(labels, written, remarks)

    def _check(self, labels: Array, over: str) -> None:
        """Raise SourceError for single values that cannot be classes, or that may be something else."""
        if not len(labels):
            raise SourceError(f"{self._where}: no sample has a value; there is nothing to shard")
        if self._first.text:
            self._check_words(labels.tolist())
        if not self._kind:
            self._ask(labels, over)
        if len(labels) > MOST_CLASSES:
            raise SourceError(
                f"{self._where} holds {over}{len(labels)} different values; no data set has over {MOST_CLASSES} classes"
            )

    def _ask(self, labels: Array, over: str) -> None:
        """Raise SourceError if no --target-kind says what values are that may be classes or quantities."""
        text = self._first.text
        num_samples = sum(array.num_samples for array in self._arrays)
        if not plausible(len(labels), num_samples):
            what = "strings" if text else "whole numbers"
            remedy = "--target-kind class" + ("" if text else ", or --target-kind regression for quantities")
            raise SourceError(
                f"{self._where} holds {over}{len(labels)} different {what} in {num_samples} samples: are these "
                f"classes? Give {remedy}"
            )
        # Words, and numbers that have names, are classes.
        coded = text or any(array.called for array in self._arrays)
        if not (self._floats or coded) and (
            (len(labels) > 2 and names_quantity(self._path)) or sparse(labels.tolist())
        ):
            raise SourceError(
                f"{self._where} holds {len(labels)} different whole numbers from {labels[0]} to {labels[-1]}: classes "
                "or quantities? Give --target-kind class or --target-kind regression"
            )
        if self._floats and not any(array.filled for array in self._arrays):
            raise SourceError(
                f"{self._where} is {self._first.dtype.name}, but holds whole numbers only ({labels[0]} to "
                f"{labels[-1]}): classes or quantities? Give --target-kind class or --target-kind regression"
            )

    def _numbered(
        self, labels: Array, written: Callable[[Iterable[Array]], PlacedArray], remarks: list[str]
    ) -> tuple[Field, list[PlacedArray]]:
        """Return the field of the classes `labels`, and the number of each sample's class."""
        if self._first.text:
            names, lines = [str(value) for value in labels.tolist()], ["-"]
        else:
            enumeration = one_enumeration([array.called for array in self._arrays], self._where)
            names, lines = named_labels(labels, enumeration)
            remarks += [names_remark(self._name, names)] if enumeration else [f"{self._name}: {line}" for line in lines]
        remarks += [f"{self._name}: {line}" for line in [self._shifted()] if line]
        sorted_labels = labels if lines else np.arange(len(names))  # labels that keep their numbers may have gaps
        return self._field(names), [
            written(numbers_in(sorted_labels, chunk, floats=self._floats) for chunk in labels_in([array]))
            for array in self._arrays
        ]

    def _shifted(self) -> str:
        """Describe a part whose labels are those of most others plus or minus 1; empty if there is none."""
        if self._first.text or not 2 < len(self._arrays) <= LOOKED_AT:
            return ""
        by_part = [frozenset(different([array])[0].tolist()) for array in self._arrays]
        usual, count = Counter(by_part).most_common(1)[0]
        if len(usual) < 2 or 2 * count < len(by_part):
            return ""
        for at, own in enumerate(by_part):
            for by, sign in ((1, "plus"), (-1, "minus")):
                if own == {label + by for label in usual}:
                    return (
                        f"labels of part {at + 1} of {len(by_part)}, by name, are those of {count} others {sign} 1: do "
                        "some count from 0, and some from 1?"
                    )
        return ""

    def _one_hot(
        self, written: Callable[[Iterable[Array]], PlacedArray], remarks: list[str], *, alone: bool
    ) -> tuple[Field, list[PlacedArray]] | None:
        """Return the classes of one-hot rows if --target-kind asks for them; SourceError if some rows are not so."""
        as_classes = self._kind == "class"
        if is_one_hot(self._arrays):
            if as_classes:
                return self._field(class_numbers(self._first.shape[1])), [
                    written(chunk.argmax(1).astype(np.int64) for chunk in array.chunks()) for array in self._arrays
                ]
            remarks.append(
                f"{self._name}: a 1 among zeros in each row (one-hot): --target-kind class makes it class numbers"
            )
        elif line := nearly_one_hot(self._name, self._arrays):
            if as_classes:
                raise SourceError(f"{self._location}: {line} One class a sample needs a 1 in each row; take them out")
            remarks.append(line)
        vector = len(self._first.shape) == 2 and self._floats and not self._first.offsets
        if vector and as_classes and alone and not all(map(are_whole, values_in(self._arrays))):
            raise SourceError(f"{self._where}: {self._no_class()}")
        return None

    def _field(self, names: Sequence[str]) -> Field:
        return Field(name=self._name, role="target", dtype="int64", kind="class", class_names=names)

    def _check_words(self, labels: list[str]) -> None:
        """Raise SourceError for a target of numbers that a few words make text."""
        measured = [word for word in labels if NUMBER.fullmatch(word)]
        if self._kind != "class" and len(measured) == len(labels) and any(float(word) % 1 for word in labels):
            raise SourceError(
                f"{self._where} holds numbers as text, such as {shown(measured[0])}: classes or quantities? Save "
                "quantities as numbers, or give --target-kind class"
            )
        if self._kind == "regression" and (words := words_among_numbers(labels)):
            raise SourceError(f"{self._where} holds {some(words)} among numbers; correct it, or take such samples out")
        if not self._kind and (question := question_of_words(labels) or question_of_quantities(labels)):
            raise SourceError(f"{self._where} holds {question}")

    def _no_class(self) -> str:
        """Return why the values are not classes, and which flag helps."""
        if all(map(are_whole, values_in(self._arrays, finite=True))):
            return "missing values (NaN or infinity) name no class; --nan skip leaves such samples out"
        return "values that are not whole name no classes; give --target-kind regression"


def _ask_of_lists(where: str, array: PlacedArray) -> None:
    """Raise SourceError for a target of lists of whole numbers: several labels, or a sequence."""
    if array.offsets is not None and len(array.shape) == 1 and array.dtype.kind in "iu" and not array.text:
        raise SourceError(
            f"{where} holds lists of whole numbers, of unequal length: several labels of a sample, or a sequence? "
            "Labels need an array of 0 and 1 for each sample. For sequences, which zeros fill to the longest, give "
            "--target-kind regression"
        )


def one_enumeration(called: Sequence[Mapping[int, str]], where: str) -> Mapping[int, str]:
    """Return the names of numbers that all parts agree on; SourceError if names or numbers conflict between parts."""
    names: dict[int, str] = {}
    for part in called:
        for number, word in part.items():
            conflict = next((entry for entry in names.items() if (entry[0] == number) != (entry[1] == word)), None)
            if conflict is not None:
                raise SourceError(
                    f"{where}: enumerations differ: {conflict[0]} is {shown(conflict[1])} in one file, {number} is "
                    f"{shown(word)} in another; write them alike"
                )
            names[number] = word
    return names
