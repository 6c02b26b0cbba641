"""Names that tell which split a part of a source belongs to, and names that are never data.

If the names of a source are ambiguous, the question states both readings and the flag that chooses.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.dataset import UNSPLIT

if TYPE_CHECKING:
    from hpcdl.data.sources.base.source import SourceSpec

AUTO, IGNORE = "auto", "ignore"
SPLIT_WORDS = {
    "train": "train", "training": "train", "trn": "train", "trainval": "train",
    "val": "val", "valid": "val", "validation": "val", "validate": "val", "dev": "val", "holdout": "val",
    "heldout": "val", "eval": "val", "evaluation": "val",
    "test": "test", "testing": "test", "tst": "test",
}  # fmt: skip
"""Usual names of the three splits, in lower case."""
_PLAIN = r"(?:set|sets|data|dataset|images?|imgs?|split|files?|samples?|new|full|final|folder|dir)"
"""Words next to a split's name that add no meaning."""
_WORD = re.compile(rf"({'|'.join(sorted(SPLIT_WORDS, key=len, reverse=True))}){_PLAIN}?")
_DIVISION = re.compile(r"(?:k?folds?|subsets?|partitions?|splits?|sets?)")
"""Words for any division of a data set."""
_MEMBERS = re.compile(r"masks?|idxs?|indices|inds?|flags?")
"""Words for what says which samples are in a split: train_mask, test_idx."""
# Words of a name by case, and its numbers: trainA is train and A, train2017 train and 2017, xtrain x and train.
_PARTS = re.compile(r"[XYxy](?=(?:train|valid|val|test)(?![a-z]))|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_CLUTTER = re.compile(
    r"\..*|__MACOSX|@eaDir|\$RECYCLE\.BIN|System Volume Information|lost\+found|Thumbs\.db|desktop\.ini"
)
_NUMBERED = re.compile(r"(?P<before>.*)-(?P<number>[0-9]{4,6})-of-(?P<count>[0-9]{4,6})(?P<behind>.*)")
_MOST_SHOWN = 5


def is_clutter(name: str) -> bool:
    """Return whether a system or program made a file or folder: hidden, __MACOSX, @eaDir, Thumbs.db."""
    return bool(_CLUTTER.fullmatch(name))


def splits_in(name: str) -> set[str]:
    """Return the splits named by words within a file's or array's name."""
    return {SPLIT_WORDS[word[1]] for part in _PARTS.findall(name) if (word := _WORD.fullmatch(part.lower()))}


def split_in(name: str) -> str | None:
    """Return the split that a name contains; None if there is no such word, or several splits."""
    splits = splits_in(name)
    return splits.pop() if len(splits) == 1 else None


def beside_split(word: str) -> str:
    """Return what a word says beside its split: X of trainX, nothing of train2017; all of a word without a split."""
    if split_in(word) is None:
        return word
    return "".join(part for part in _PARTS.findall(word) if not (part.isdigit() or _WORD.fullmatch(part.lower())))


def names_division(name: str) -> bool:
    """Return whether a column or array is named like a division of the rows: is_test, fold, subset, train_mask.

    Not test_score, nor mask alone, nor valid_mask, which tells what may be used.
    """
    parts = [part.lower() for part in _PARTS.findall(name)]
    if split_in(name) and "valid" not in parts:
        parts = [part for part in parts if not _MEMBERS.fullmatch(part)]
    kept = [part for part in parts if part not in ("is", "in", "cv", "k", "kfold") or part == name.lower()]
    return any(_WORD.fullmatch(part) or _DIVISION.fullmatch(part) for part in kept) and all(
        _WORD.fullmatch(part) or _DIVISION.fullmatch(part) or re.fullmatch(_PLAIN, part) for part in kept
    )


def split_called(name: str) -> str | None:
    """Return the split that a whole folder name means: train, Testing, val_set, train2017; not test_tubes."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    words = [part for part in parts if _WORD.fullmatch(part)]
    others = [part for part in parts if part not in words and not part.isdigit() and not re.fullmatch(_PLAIN, part)]
    return split_in(name) if len(words) == 1 and not others else None


def folder_splits(names: Sequence[str]) -> dict[str, str]:
    """Return the split of each folder named after a split, or like seg_train, seg_test with the same other words."""
    splits = {name: split for name in names if (split := split_called(name))}
    if splits:
        return splits
    alike = _alike(names)
    return alike[0] if len(alike) == 1 else {}


def doubled_splits(names: Sequence[str]) -> list[str]:
    """Return folder names that name the same splits with several other words: trainA, testA, trainB, testB."""
    alike = _alike(names)
    return [name for group in alike for name in group] if len(alike) > 1 else []


def _alike(names: Sequence[str]) -> list[dict[str, str]]:
    """Group names by their words beside a split's, and return the splits of each group with different ones."""
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        if split := split_in(name):
            parts = [part.lower() for part in _PARTS.findall(name)]
            other_words = " ".join(part for part in parts if not _WORD.fullmatch(part))
            groups.setdefault(other_words, {})[name] = split
    return [group for group in groups.values() if len(set(group.values())) == len(group) > 1]


def left_out(name: str, patterns: Iterable[str]) -> bool:
    """Return whether `--leave-out` names a file or folder, as a whole or by a pattern with *."""
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern.strip("/")) for pattern in patterns)


def leaves_out_split(split: str, patterns: Iterable[str]) -> bool:
    """Return whether `--leave-out` names a split, by its own name or by any word for it: testing is test."""
    return any(left_out(split, [pattern]) or SPLIT_WORDS.get(pattern.lower()) == split for pattern in patterns)


def typed(name: str) -> str:
    """Return a name, or NAME=WORD, as a value of a flag that takes a list: quoted, with its commas escaped."""
    return shlex.quote(name.replace(",", r"\,"))


def some(names: Iterable[str]) -> str:
    """Return the first few names, for a message."""
    listed = list(names)
    more = f" and {len(listed) - _MOST_SHOWN} more" if len(listed) > _MOST_SHOWN else ""
    return ", ".join(map(shown, listed[:_MOST_SHOWN])) + more


def remarks_on_missing(paths: Iterable[Path]) -> list[str]:
    """Return a remark for each incomplete set of files numbered as NAME-00000-of-00003."""
    sets: dict[tuple[Path, str, str, str], set[int]] = {}
    for path in paths:
        if match := _NUMBERED.fullmatch(path.name):
            key = (path.parent, match["before"], match["count"], match["behind"])
            sets.setdefault(key, set()).add(int(match["number"]))
    remarks = []
    for (_, before, count, behind), numbers in sets.items():
        missing = sorted({*range(int(count))} - numbers)
        # Files that count from 1 reach the count itself, and lack the number 0 alone.
        if missing and max(numbers) < int(count):
            names = some(f"{before}-{number:0{len(count)}d}-of-{count}{behind}" for number in missing)
            remarks.append(f"{len(missing)} of {int(count)} files are not there, as the others' names tell: {names}")
    return remarks


def by_names(paths: Sequence[Path], spec: SourceSpec, root: Path | None = None) -> dict[str, list[Path]]:
    """Group files by the split in their names (or folders below `root`); one group if no name contains a split.

    Raises SourceError if only some names contain a split: held-out files would join the training.
    """
    kept = [path for path in paths if not left_out(path.name, spec.leave_out)]
    if not kept:
        raise SourceError(f"{spec.location}: --leave-out {' '.join(spec.leave_out)} leaves no file; give fewer names")
    labels = _labels([_split_words(path, root) for path in kept])
    if spec.split_names == IGNORE or not any(labels):
        return {UNSPLIT: kept}
    if not all(labels) and spec.split_names == AUTO:
        odd = [path.name for path, label in zip(kept, labels, strict=True) if not label]
        named = [path.name for path, label in zip(kept, labels, strict=True) if label]
        raise SourceError(
            f"{spec.location}: {some(named)} are named after a split, {some(odd)} not: which split are these? Rename "
            f"them, or give --leave-out {typed(odd[0])}, or --split-names keep (a split of their own, other), or "
            "--split-names ignore (all files are one whole)"
        )
    groups: dict[str, list[Path]] = {}
    for path, label in zip(kept, labels, strict=True):
        groups.setdefault(label or "other", []).append(path)
    return groups


def _split_words(path: Path, root: Path | None) -> set[str]:
    """Return the splits in a file's own name, else those in the folders above it below `root`."""
    above = path.relative_to(root).parts[:-1] if root is not None else ()
    # The nearest name counts: train/test-1.csv says test.
    names = [path.name.partition(".")[0], *reversed(above)]
    return next((splits for name in names if (splits := splits_in(name))), set())


def _labels(words_of_paths: Sequence[set[str]]) -> list[str | None]:
    """Return one split per file, ignoring splits that all files name; None if none or several remain."""
    # A word in all names tells nothing: it may belong to the name of the data set.
    common = set.intersection(*words_of_paths)
    distinct = [splits - common for splits in words_of_paths]
    return [next(iter(splits)) if len(splits) == 1 else None for splits in distinct]


def member_splits(names: Sequence[str], spec: SourceSpec) -> list[str | None]:
    """Return the split of each sample of an archive, by the folders in its name; all None if these name no split."""
    folders = [name.split("/")[:-1] for name in names]
    labels = [next((split for part in parts if (split := split_called(part))), None) for parts in folders]
    named_splits = {label for label in labels if label}
    if spec.split_names == IGNORE or len(named_splits) < 2:
        if named_splits and None in labels and spec.split_names == AUTO:
            _ask_of_members(names, labels, spec)
        return [None] * len(labels)
    if None in labels and spec.split_names == AUTO:
        _ask_of_members(names, labels, spec)
    return [label or "other" for label in labels]


def _ask_of_members(names: Sequence[str], labels: Sequence[str | None], spec: SourceSpec) -> None:
    named = next(name for name, label in zip(names, labels, strict=True) if label)
    odd = next(name for name, label in zip(names, labels, strict=True) if not label)
    raise SourceError(
        f"{spec.location}: {shown(named)} is in a folder that is named after a split, {shown(odd)} is not: which "
        "split is it? Give --split-names keep (a split of its own, other) or --split-names ignore (all are one whole)"
    )
