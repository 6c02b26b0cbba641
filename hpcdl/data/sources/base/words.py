"""Columns of words, which become numbers: codes, or a 0 or 1 for each word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import CODINGS, Categories
from hpcdl.data.sources.base.labels import misread, missing_among
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.splits import some, typed

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
        for chunk in word_chunks(self.places[split]()):
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
        for chunk in word_chunks(array):
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
        for chunk in word_chunks(array):
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
    odd = missing_among(kept.words)
    doubt = (
        f"; {some(odd)} among them: a missing value? It counts as a word; if it should not, take such rows out"
        if odd
        else ""
    )
    doubt += f"; {line}" if (line := misread(kept.words)) else ""
    return f"{field}: the words of {shown(kept.column)} as {what} {', '.join(names)}{more}{doubt}"


def word_chunks(array: PlacedArray) -> Iterator[Array]:
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
