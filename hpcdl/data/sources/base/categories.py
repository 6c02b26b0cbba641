"""Columns of words as numbers: which number a word gets, and words that nobody has seen in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.fields import CODINGS, Categories
from hpcdl.data.sources.base.arrays import PlacedArray
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.splits import some

MOST_ONE_HOT = 1000
"""Of more words than these, one-hot numbers would be larger than any table."""
_MOST_WORDS = 1_000_000
_SHOWN = 20


def asked_codings(wishes: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """The coding by column of `--categories COLUMN=CODING`; UsageError for columns and codings that are not there."""
    found: dict[str, str] = {}
    for wish in wishes:
        column, equals, coding = wish.rpartition("=")
        if not equals or coding not in CODINGS:
            name = column if equals and column in columns else wish
            raise UsageError(
                f"--categories {wish}: how are its words to become numbers? Give --categories {name}=one-hot (a 0 or 1 "
                f"for each word) or --categories {name}=codes (0, 1, 2, ... in the order of the words)"
            )
        if column not in columns or column in found:
            what = "is named twice" if column in found else f"is no column; the columns are {some(list(columns))}"
            raise UsageError(f"--categories {wish}: {shown(column)} {what}")
        found[column] = coding
    return found


@dataclass(frozen=True, kw_only=True)
class WordColumn:
    """A column by split whose values are words; `words` are those that it had elsewhere, None where it has its own."""

    where: str
    name: str
    coding: str
    places: Mapping[str, Callable[[], PlacedArray]]
    words: Sequence[str] | None = None

    def settled(self) -> Categories:
        """The words in the order of their codes: those of the training split, sorted; SourceError for unfit ones.

        A word that stands in another split alone is refused: no model would have learnt it.
        """
        placed = {split: place() for split, place in self.places.items()}
        first = "train" if "train" in placed else next(iter(placed))
        words = self._own(placed[first]) if self.words is None else list(self.words)
        if self.coding == "one-hot" and len(words) > MOST_ONE_HOT:
            raise SourceError(
                f"{self.where}: {shown(self.name)} has {len(words)} different words, and one-hot numbers are for at "
                f"most {MOST_ONE_HOT}; give --categories {self.name}=codes, or --leave-out {self.name}"
            )
        for split, array in placed.items():
            self._check(split, first, words, array)
        return Categories(column=self.name, coding=self.coding, words=words)

    def coded(self, split: str, kept: Categories) -> Iterator[Array]:
        """The numbers of a split's words, some rows at a time: (N) int64, or (N, words) float32 of 0 and 1."""
        words = np.array(kept.words, object)
        order = np.argsort(words, kind="stable")
        for own in _chunks(self.places[split]()):
            codes = order[np.searchsorted(words[order], own)]
            if self.coding == "codes":
                yield codes.astype(np.int64)
                continue
            rows = np.zeros((len(codes), len(words)), np.float32)
            rows[np.arange(len(codes)), codes] = 1
            yield rows

    def _own(self, array: PlacedArray) -> list[str]:
        found: set[str] = set()
        for own in _chunks(array):
            found.update(own.tolist())
            if len(found) > _MOST_WORDS:
                raise SourceError(
                    f"{self.where}: {shown(self.name)} has over {_MOST_WORDS} different words; leave it out"
                )
        return sorted(found, key=_by_number)

    def _check(self, split: str, first: str, words: Sequence[str], array: PlacedArray) -> None:
        known = set(words)
        if "" in known:
            raise SourceError(
                f"{self.where}: {shown(self.name)} has rows without a word; write one for them, such as missing, or "
                "take these rows out"
            )
        row = 0
        for own in _chunks(array):
            odd = next((at for at, word in enumerate(own.tolist()) if word not in known), None)
            if odd is not None:
                there = "what --categories-of names" if self.words is not None else first
                word = shown(own[odd]) if own[odd] else "empty"
                at = f"row {row + odd}{'' if split == UNSPLIT else f' of {split}'}"
                raise SourceError(
                    f"{self.where}: {shown(self.name)} of {at} is {word}, a word that {there} does not have "
                    f"({some(list(words))}); correct it, or take such rows out"
                )
            row += len(own)


def remarks_on(kept: Categories, field: str) -> str:
    """Which word became which number, for the user to read."""
    names = [f"{word} {kept.place + number if kept.coding == 'one-hot' else number}" for number, word in
             enumerate(kept.words[:_SHOWN])]  # fmt: skip
    more = ", ..." if len(kept.words) > _SHOWN else ""
    what = "one-hot, at the places" if kept.coding == "one-hot" else f"codes at the place {kept.place}:"
    return f"{field}: the words of {shown(kept.column)} as {what} {', '.join(names)}{more}"


def _chunks(array: PlacedArray) -> Iterator[Array]:
    """The words of a column, some at a time; of whole numbers their digits."""
    if array.text:
        yield from array.string_chunks()
        return
    for chunk in array.chunks():
        yield chunk.reshape(-1).astype(str).astype(object)


def _by_number(word: str) -> tuple[int, int, str]:
    """Digits in the order of their numbers, before all other words in that of their letters."""
    return (0, int(word), word) if word.isascii() and word.removeprefix("-").isdigit() else (1, 0, word)
