"""Samples that belong together, of one patient, scene, video or original, by names of files or values of a column."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from hpcdl.core.errors import shown
from hpcdl.data.sources.base.splits import left_out, split_called, typed

_OWNER = re.compile(
    r"(?<![a-z])(?:patient|pat|subject|subj|sub|participant|person|donor|animal|mouse|speaker|writer|user|case|scene"
    r"|slide|video|clip|session|sequence|seq)[ _-]?(?:id)?[ _-]?[0-9]+",
    re.IGNORECASE,
)
"""What a file belongs to, by its usual words and a number: patient01, sub-012, scene_3."""
_COPY = re.compile(r" ?\([0-9]+\)$| - [Cc]opy.*$|[ _-]copy(?:[ _-]?[0-9]+)?$|\.copy$")
"""What browsers and file managers write behind the name of a copy."""
_BEHIND = re.compile(r"[ _.-]+[^\W_]*[^\W\d_][^\W_]*$")
"""The last word of a name with the mark before it."""
_LAST = re.compile(r"[ _.-]+([^ _.-]*)$")
_SIDE = re.compile(r"left|right|l|r|od|os", re.IGNORECASE)
"""Last parts of names that may differ in their class, and are still of one patient."""
_MOST_PARTS, _MOST_FILES = 3, 20_000
_FEWEST_GROUPS, _COMPANIONS = 5, 20
"""Groups, or files named like another one, that are said, and the part of all (one in _COMPANIONS) that these are."""


def remark_on_names(names: Mapping[str, Sequence[str]], num_classes: int) -> list[str]:
    """Return a remark if files of one group are in several splits; `names` are paths below the source, by split.

    A group is what a word names (patient01/3.png), else the beginning of names without their last parts, if there are
    many beginnings with a number, of several files each.
    """
    listed = [_within(name) for own in names.values() for name in own]
    rules: list[Callable[[str], str]] = [_owner, *(_beginning(count) for count in range(_MOST_PARTS + 1))]
    rule = next((rule for rule in rules if _has_groups(listed, rule, num_classes)), None)
    if rule is None or len({*listed}) < len(listed):  # names that begin anew in each split tell nothing
        return []
    groups: dict[str, dict[str, str]] = {}
    for split, own in names.items():
        for name in own:
            if group := rule(_within(name)):
                groups.setdefault(group, {}).setdefault(split, name)
    shared = [found for found in groups.values() if len(found) > 1]
    if not shared:
        return []
    (first, one), (second, other) = list(shared[0].items())[:2]
    return [
        f"{len(shared)} of {len(groups)} groups in the names of files are in several splits, such as {shown(one)} in "
        f"{first} and {shown(other)} in {second}: if files of one belong together (a patient, scene or original), "
        "results are too good. Divide them in the source (folders called by splits, or a .csv of file,label,split)"
    ]


def remark_on_companions(names: Sequence[str]) -> list[str]:
    """Return a remark if many files are named like another one of their folder with a word behind it (`_mask`)."""
    paths = [PurePosixPath(name) for name in names]
    known = {(path.parent, path.stem) for path in paths}
    behind: dict[str, list[str]] = {}
    for path in paths:
        found = _BEHIND.search(path.stem)
        if found and (path.parent, path.stem[: found.start()]) in known:
            behind.setdefault(found[0] + path.suffix, []).append(path.as_posix())
    suffix, found_files = max(behind.items(), key=lambda pair: len(pair[1]), default=("", []))
    if len(found_files) < max(_FEWEST_GROUPS, len(names) // _COMPANIONS):
        return []
    return [
        f"{len(found_files)} files are named like another one with {shown(suffix)} at its end, such as "
        f"{shown(found_files[0])}: masks, small or altered copies? They are samples, too; else give --leave-out "
        f"{typed('*' + suffix)}"
    ]


def remark_on_copied_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return a remark if a file of a folder is named like a copy of another one, and has its size.

    `patterns` are those of --leave-out.
    """
    with os.scandir(folder) as entries:
        listed = itertools.islice((entry for entry in entries if entry.is_file()), _MOST_FILES)
        sizes = {entry.name: entry.stat().st_size for entry in listed if not left_out(entry.name, patterns)}
    for name, size in sorted(sizes.items()):
        path = PurePosixPath(name)
        original = _COPY.sub("", path.stem) + path.suffix
        if original != name and sizes.get(original) == size:
            return [
                f"{shown(name)} is named like a copy of {shown(original)}, and has its size: are its samples taken "
                f"twice? If so, give --leave-out {typed(name)}"
            ]
    return []


def _within(name: str) -> str:
    """Return a path without folders called by a split."""
    *folders, base = name.split("/")
    return "/".join([*(folder for folder in folders if split_called(folder) is None), base])


def _owner(name: str) -> str:
    found = _OWNER.search(name)
    return name[: found.end()].lower() if found else ""


def _beginning(count: int) -> Callable[[str], str]:
    """Return a function from a path to the beginning of its name: without its ending and its last `count` parts."""

    def group(name: str) -> str:
        path = PurePosixPath(name)
        stem, last = path.stem, None
        for _ in range(count):
            last = _LAST.search(stem)
            stem = stem[: last.start()] if last else ""
        if count == 0:  # 3.jpg beside 3.png
            return f"{path.parent}/{stem}"
        if last is None or not any(map(str.isdigit, stem)):
            return ""
        return stem if _SIDE.fullmatch(last[1]) else f"{path.parent}/{stem}"

    return group


def _has_groups(names: Sequence[str], rule: Callable[[str], str], num_classes: int) -> bool:
    """Return whether at least half of the files are in groups of several, and a class has several groups."""
    found = Counter(map(rule, names))
    found.pop("", None)
    several = [count for count in found.values() if count > 1]
    return 2 * sum(several) >= len(names) and len(several) >= max(_FEWEST_GROUPS, 2 * num_classes)


_MOST_GROUPS = 1_000_000
"""Most patients, or what else a column names, that are kept in memory to find those in several splits."""


def remark_on_groups(name: str, words_of: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return a remark if values of a column `name` occur in several splits; `words_of` yields splits and values."""
    first: dict[str, str] = {}
    shared: dict[str, str] = {}
    for split, words in words_of:
        for word in words:
            if word and first.setdefault(word, split) != split:
                shared.setdefault(word, split)
        if len(first) > _MOST_GROUPS:
            break
    if not shared:
        unseen = len(first) > _MOST_GROUPS
        return (
            [f"{shown(name)} has over {_MOST_GROUPS:,} values: splits that share one were not found"] if unseen else []
        )
    word, split = next(iter(shared.items()))
    return [
        f"{len(shared)} of {len(first)} values of {shown(name)} are in several splits, such as {shown(word)} in "
        f"{first[word]} and {split}: if samples of one belong together, results are too good; divide by {name} instead"
    ]
