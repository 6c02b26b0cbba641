"""What names of classes and their counts say: two that may be one, one that may be none or several, and empty ones."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.sources.base.splits import some

Counts = npt.NDArray[np.int64]
_MISSING = frozenset({"nan", "n/a", "#n/a", "null", "?"})
_MISSING_AS_WRITTEN = frozenset({"NA", "None"})
"""Python's and R's words; "none" is what a class of nothing is called."""


def ask_of_names(names: Sequence[str], where: str) -> None:
    """SourceError where names of classes can be read in two ways; `--target-kind class` says that each is a class."""
    for question in (*_twins(names), *_missing(names), *_joined(names)):
        raise SourceError(f"{where}: {question}")


def ask_of_unlabelled(names: Sequence[str], counts: Mapping[str, Counts], where: str) -> None:
    """SourceError where all labels of a split are -1, which stands for none in many test sets."""
    if "-1" not in names or len(counts) < 2:
        return
    at = list(names).index("-1")
    for split, own in counts.items():
        if own[at] and own[at] == own.sum():
            raise SourceError(
                f"{where}: every label of {split} is -1: a class, or no labels? Give --leave-out {split}, or "
                "--target-kind class for a class"
            )


def _twins(names: Sequence[str]) -> Iterator[str]:
    plain: dict[str, str] = {}
    for name in names:
        other = plain.setdefault(unicodedata.normalize("NFC", " ".join(name.split()).casefold()), name)
        if other != name:
            composed = unicodedata.normalize("NFC", other) == unicodedata.normalize("NFC", name)
            how = "in how Unicode writes their accents (macOS does so)" if composed else "in case or spaces"
            yield (
                f"the classes {shown(other)} and {shown(name)} differ {how} alone: one class or two? Write "
                "them alike, or give --target-kind class to keep both"
            )


def _missing(names: Sequence[str]) -> Iterator[str]:
    odd = [name for name in names if name.strip().lower() in _MISSING or name.strip() in _MISSING_AS_WRITTEN]
    if odd and len(names) > len(odd):
        yield (
            f"{shown(odd[0])} stands among the classes: one of them, or a label that is missing? Take such samples "
            "out, or give --target-kind class to keep it"
        )


def _joined(names: Sequence[str]) -> Iterator[str]:
    """Several labels of one sample, written into one: their parts come again, alone or in other company."""
    for mark in (r"[|;]", ",", r"\s"):
        parts = {name: [own.strip() for own in re.split(mark, name) if own.strip()] for name in names}
        several = [name for name, own in parts.items() if len(own) > 1]
        alone = {own[0] for own in parts.values() if len(own) == 1}
        words = {own for name in several for own in parts[name]}
        known = next((name for name in several if all(own in alone for own in parts[name])), None)
        if mark == r"[|;]":
            known = known or next((name for name in several if any(own in alone for own in parts[name])), None)
        if known is None and several and 2 * len(words | alone) <= len(names):
            known = several[0]
        if known is not None:
            yield (
                f"is {shown(known)} a class, or several labels of one sample? Give --target-kind class for a class; "
                "several labels need an array of 0 and 1 for each sample (in HDF5 or .npz, or by --reader FILE.py:NAME)"
            )


def remarks_on_counts(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    """Lines about classes without a sample, and those that training never sees; `counts` by split and class."""
    remarks = []
    empty = np.flatnonzero(sum(counts.values()) == 0).tolist()
    if empty:
        remarks.append(f"{len(empty)} of {len(names)} classes have no sample: {some(names[at] for at in empty)}")
    return remarks + _remarks_on_unseen(names, counts)


def remarks_on_division(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    """Lines about classes that have too few samples for each part of a division; `counts` by part and class."""
    whole = sum(counts.values())
    remarks = _remarks_on_unseen(names, counts)
    for split, own in counts.items():
        without = np.flatnonzero((whole > 0) & (own == 0)).tolist()
        if without and split != "train":
            remarks.append(
                f"classes that {split} gets no sample of, too few are there: {some(names[at] for at in without)}"
            )
    return remarks


def _remarks_on_unseen(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    found = {split: np.flatnonzero((own > 0) & (counts.get("train", own) == 0)) for split, own in counts.items()}
    return [
        f"classes in {split} that train does not have: {some(names[at] for at in unseen.tolist())}"
        for split, unseen in found.items()
        if len(unseen)
    ]
