"""Names of classes that may be mistakes, and odd counts of their samples: questions before writing, and remarks."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.units import counted
from hpcdl.data.sources.base.labels import misread, missing_among, question_of_words
from hpcdl.data.sources.base.source import SourceFacts
from hpcdl.data.sources.base.splits import some
from hpcdl.data.sources.checks.missing import missing_codes
from hpcdl.data.write.division import Counts

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_JOINT = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])")
"""What joins words of a name."""
_YES, _NO = frozenset({"yes", "y", "true", "t", "1"}), frozenset({"no", "n", "false", "f", "0"})
_SENTENCE = 4
"""Words of a sentence, at least."""
_FEW_FOLDERS = 3
"""A folder is made on purpose, unlike a cell of a table: among so few of them a word is a class."""
_LIST = re.compile(r"\[.*\]|\(.*[, ].*\)|\{.*\}|-?[0-9]+(?:[ ,]+-?[0-9]+)+", re.DOTALL)


def ask_of_names(names: Sequence[str], where: str, *, folders: bool = False) -> None:
    """Raise SourceError if class names are ambiguous; `--target-kind class` declares each of them a class.

    `folders`: the names are those of folders.
    """
    words = () if folders and len(names) <= _FEW_FOLDERS else _words(names)
    for question in (*_twins(names), *_answers(names), *_missing(names), *_joined(names), *words):
        raise SourceError(f"{where}: {question}")


def ask_of_unlabelled(names: Sequence[str], counts: Mapping[str, Counts], where: str) -> None:
    """Raise SourceError if -1 may mean no label: beside 0, 1, 2, ..., or if all labels of a split are -1.

    Labels -1 and 1, and -1, 0 and 1, are usual classes.
    """
    if "-1" not in names:
        return
    at = list(names).index("-1")
    for split, class_counts in counts.items():
        if len(counts) > 1 and class_counts[at] and class_counts[at] == class_counts.sum():
            raise SourceError(
                f"{where}: every label of {split} is -1: a class, or no labels? Give --leave-out {split}, or "
                "--target-kind class for a class"
            )
    if {"0", "1", "2"} <= set(names) and not any(name.startswith("-") for name in names if name != "-1"):
        count = int(sum(class_counts[at] for class_counts in counts.values()))
        raise SourceError(
            f"{where}: {counted(count, 'label')} of -1 beside {some(name for name in names if name != '-1')}: a class, "
            "or no label? Take such samples out of the source, or give --target-kind class for a class"
        )


def ask_of_sentences(names: Sequence[str], counts: Mapping[str, Counts], where: str) -> None:
    """Raise SourceError if most classes are sentences, and few of them occur again: captions, answers, translations."""
    sentence = next((name for name in names if len(name.split()) >= _SENTENCE), None)
    most = 2 * sum(len(name.split()) >= _SENTENCE for name in names) > len(names)
    if sentence is None or not most or 2 * len(names) <= sum(int(split.sum()) for split in counts.values()):
        return
    raise SourceError(
        f"{where}: {len(names)} different texts, such as {shown(sentence)}: captions or answers, or classes? Texts as "
        "targets need numbers of their words (in HDF5 or .npz, or by --reader FILE.py:NAME); for classes give "
        "--target-kind class"
    )


def _twins(names: Sequence[str]) -> Iterator[str]:
    plain: dict[str, str] = {}
    numbers: dict[int, str] = {}
    for name in names:
        if _WHOLE.fullmatch(name) and (number := numbers.setdefault(int(name), name)) != name:
            yield (
                f"the classes {shown(number)} and {shown(name)} are one number, written in two ways: one class or two? "
                "Write them alike, or give --target-kind class to keep both"
            )
        # macOS stores accents decomposed, other systems composed: the same name with other bytes.
        earlier = plain.setdefault(_JOINT.sub(" ", _plain(name)), name)
        if earlier != name:
            composed = unicodedata.normalize("NFC", earlier) == unicodedata.normalize("NFC", name)
            how = "in how Unicode writes their accents (macOS does so)" if composed else "in case or spaces"
            how = how if _plain(earlier) == _plain(name) else "in spaces, _ or -"
            yield (
                f"the classes {shown(earlier)} and {shown(name)} differ {how} alone: one class or two? Write "
                "them alike, or give --target-kind class to keep both"
            )


def remarks_on_words(column: str, words: Sequence[str]) -> list[str]:
    """Return a remark if two words of a column of words differ in case, spaces or accents alone."""
    plain: dict[str, str] = {}
    pairs = [(plain.setdefault(_JOINT.sub(" ", _plain(word)), word), word) for word in words]
    return [
        f"{shown(earlier)} and {shown(word)} of {shown(column)} differ in case, spaces or accents alone: one word or "
        "two? Write them alike"
        for earlier, word in pairs
        if earlier != word
    ][:1]


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", " ".join(name.split()).casefold())


def _answers(names: Sequence[str]) -> Iterator[str]:
    """Find several words for yes or for no: true beside 1."""
    words = {name.strip().lower() for name in names}
    if len(words) > 2 and words <= _YES | _NO:
        yield (
            f"the classes are {some(names)}: several words for yes or no? Write them alike, or give --target-kind "
            "class to keep each"
        )


def _missing(names: Sequence[str]) -> Iterator[str]:
    odd = missing_among(names)
    if odd and len(names) > len(odd):
        yield (
            f"{shown(odd[0])} is among the classes: one of them, or a label that is missing? Take such samples "
            "out, or give --target-kind class to keep it"
        )


def _words(names: Sequence[str]) -> Iterator[str]:
    if question := question_of_words(names):
        yield f"the classes hold {question}"


def _joined(names: Sequence[str]) -> Iterator[str]:
    """Find several labels of one sample joined into one name: their parts occur again, alone or combined.

    A list of numbers (`0 2`) or in brackets (`[0, 2]`, as pandas writes one) is always asked about.
    """
    for mark in (r"[|;]", ",", r"\s"):
        parts = {name: [labels.strip() for labels in re.split(mark, name) if labels.strip()] for name in names}
        several = [name for name, labels in parts.items() if len(labels) > 1]
        alone = {labels[0] for labels in parts.values() if len(labels) == 1}
        joined_labels = {labels for name in several for labels in parts[name]}
        joined = next((name for name in names if _LIST.fullmatch(name.strip())), None)
        joined = joined or next((name for name in several if all(labels in alone for labels in parts[name])), None)
        if mark == r"[|;]":
            joined = joined or next((name for name in several if any(labels in alone for labels in parts[name])), None)
        if joined is None and several and 2 * len(joined_labels | alone) <= len(names):
            joined = several[0]
        if joined is not None:
            yield (
                f"is {shown(joined)} a class, or several labels of one sample? Give --target-kind class for a class; "
                "several labels need an array of 0 and 1 for each sample (in HDF5 or .npz, or by --reader FILE.py:NAME)"
            )


def remarks_on_counts(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    """Return remarks on classes without samples, with very few or most, and absent from training.

    `counts` are by split and class.
    """
    remarks, total = [f"classes: {line}" for line in [misread(names)] if line], np.sum([*counts.values()], 0)
    empty = np.flatnonzero(total == 0).tolist()
    if empty:
        remarks.append(f"{len(empty)} of {len(names)} classes have no sample: {some(names[at] for at in empty)}")
    if not empty and all(map(_WHOLE.fullmatch, names)):  # with classes between, a gap is said above
        numbers, samples = zip(*sorted(zip(map(int, names), total.tolist(), strict=True)), strict=True)
        if odd := missing_codes(numbers, samples):
            remarks.append(
                f"{some(map(str, odd))} among the classes: codes of a survey for missing answers? If so, take such "
                "samples out of the source"
            )
    few = np.flatnonzero((total > 0) & (total <= _FEW_SAMPLES)).tolist()
    if few and np.median(total) >= _MANY_SAMPLES:
        remarks.append(
            f"{len(few)} of {len(names)} classes have 1 or {_FEW_SAMPLES} samples: "
            f"{some(names[at] for at in few)}: misspelled, or too few to learn?"
        )
    if len(names) > 1 and len(empty) < len(names) - 1 and total.max() >= _MOST_OF_ALL * total.sum():
        share = math.floor(100 * total.max() / total.sum())
        remarks.append(
            f"{share} % of the samples are of the class {shown(names[int(total.argmax())])}: a model that always "
            "answers it has that accuracy"
        )
    return remarks + _remarks_on_unseen(names, counts) + _remarks_on_shares(names, counts)


def _remarks_on_shares(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    """Return a remark for each split that lacks classes of train, or has them in quite other shares."""
    train, remarks = counts.get("train", np.zeros(1)), []
    for split, own in counts.items():
        if split == "train" or not train.sum() or own.sum() < _LEAST_COMPARED:
            continue
        shares, theirs = train / train.sum(), own / own.sum()
        lacking = np.flatnonzero((own == 0) & (shares * own.sum() >= _FEW_EXPECTED)).tolist()
        most = int(np.abs(shares - theirs).argmax())
        if (theirs == 1).any() and (train > 0).sum() > 1:
            only = shown(names[int(own.argmax())])
            remarks.append(
                f"all samples of {split} are of the class {only}, and those of train of {(train > 0).sum()}: are they "
                "labels, or was a list that is sorted by class cut in two?"
            )
        elif lacking:
            remarks.append(
                f"classes of train that {split} has no sample of: {some(names[at] for at in lacking)}: was a list that "
                "is sorted by class cut in two?"
            )
        elif abs(shares[most] - theirs[most]) >= _OTHER_SHARE:
            remarks.append(
                f"the class {shown(names[most])} is {shares[most]:.0%} of train, and {theirs[most]:.0%} of {split}: is "
                "that meant?"
            )
    return remarks


def remarks_on_order(names: Sequence[str]) -> list[str]:
    """Return a remark if classes called by whole numbers stand in alphabetical order: 1, 10, 2."""
    if not all(map(_WHOLE.fullmatch, names)) or list(names) != sorted(names):
        return []
    by_number = sorted(names, key=int)
    odd = next((at for at, (name, other) in enumerate(zip(names, by_number, strict=True)) if name != other), None)
    if odd is None:
        return []
    return [f"classes are in alphabetical order, not by number: {shown(names[odd])} is class {odd}, counted from 0"]


def remarks_on_division(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    """Return remarks on classes with too few samples for each part of a split; `counts` by part and class."""
    total = sum(counts.values())
    remarks = _remarks_on_unseen(names, counts)
    for split, class_counts in counts.items():
        without = np.flatnonzero((total > 0) & (class_counts == 0)).tolist()
        if without and split != "train":
            remarks.append(
                f"classes that {split} gets no sample of, too few are there: {some(names[at] for at in without)}"
            )
    return remarks


def _remarks_on_unseen(names: Sequence[str], counts: Mapping[str, Counts]) -> list[str]:
    unseen_by_split = {
        split: np.flatnonzero((class_counts > 0) & (counts.get("train", class_counts) == 0))
        for split, class_counts in counts.items()
    }
    return [
        f"classes in {split} that train does not have: {some(names[at] for at in unseen.tolist())}"
        f"{_shift(names, counts['train'], counts[split])}"
        for split, unseen in unseen_by_split.items()
        if len(unseen)
    ]


def _shift(names: Sequence[str], train: Counts, other: Counts) -> str:
    """Return a question if whole numbers of a split are those of train plus or minus 1; empty for other classes."""
    if not all(map(_WHOLE.fullmatch, names)):
        return ""
    ours, theirs = ({int(names[at]) for at in np.flatnonzero(own).tolist()} for own in (train, other))
    by = next((by for by in (1, -1) if len(ours) > 1 and {number + by for number in ours} == theirs), 0)
    sign = "plus" if by > 0 else "minus"
    return f"; its labels are train's {sign} 1: does one count from 0, and the other from 1?" if by else ""


_FEW_SAMPLES, _MANY_SAMPLES, _MOST_OF_ALL = 2, 50, 0.9
"""Samples of a class that are few where the median of classes has many, and the share that makes accuracy useless."""
_LEAST_COMPARED, _FEW_EXPECTED, _OTHER_SHARE = 20, 10, 0.5
"""Samples of a split from which on its classes are compared with train's, those of a class that are expected where it
has none, and the difference between two shares that is said."""
_LONGEST_NAME = 1000


def check_names(facts: SourceFacts, source: str) -> None:
    """Raise SourceError for a class name that a shard cannot hold."""
    for name in facts.class_names:
        try:
            fits = len(name.encode()) <= _LONGEST_NAME
        except UnicodeEncodeError:
            raise SourceError(f"{source}: the class {shown(name)} has a name that is not UTF-8; rename it") from None
        if not fits or "\0" in name:
            raise SourceError(f"{source}: {shown(name)} cannot be the name of a class; rename it")
