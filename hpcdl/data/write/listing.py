"""Turn a request into a job: recognise the source, list its samples, split them, determine shape and plan.

Also checks the names and counts of classes: possible duplicates, missing or multiple labels, and empty classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.config.load import flatten
from hpcdl.config.settings import settings_of
from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.hdf5 import filters
from hpcdl.data.format.manifest import FILE_NAME, Field, is_picture, may_be_resident, picture_with_class, read_manifest
from hpcdl.data.format.order import mixed, permuted
from hpcdl.data.sources.base.flat import names_group, names_time, question_of_words
from hpcdl.data.sources.base.glance import HEAD_BYTES, check_is_image
from hpcdl.data.sources.base.groups import remark_on_names
from hpcdl.data.sources.base.images import ImageKinds, check_end, decode
from hpcdl.data.sources.base.source import (
    FILES_LISTED,
    Content,
    Index,
    IndexWriter,
    NotFinite,
    Source,
    SourceFacts,
    SourceSpec,
    UnreadableSample,
    check_flags,
    check_location,
    examining,
    knows,
    open_source,
    recognise,
)
from hpcdl.data.sources.base.splits import leaves_out_split, left_out, some
from hpcdl.data.sources.base.values import is_other_aspect, mark_of_missing, step_of_windows, two_units
from hpcdl.data.sources.reader.source import user_reader
from hpcdl.data.write.journal import source_state
from hpcdl.data.write.lustre import file_system_of
from hpcdl.data.write.neighbours import remark_on_neighbours
from hpcdl.data.write.plan import ShardJob, ShardPlan, make_plan
from hpcdl.data.write.request import LayoutConfig, ShardConfig, ShardRequest, SourceConfig, parse_split

Counts = npt.NDArray[np.int64]
_MISSING = frozenset(
    {"", "nan", "n/a", "#n/a", "<na>", "null", "?", "unlabeled", "unlabelled", "unsup", "unsupervised"}
)
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_JOINT = re.compile(r"(?<=[^\W\d_])[\s_-]+(?=[^\W\d_])")
"""What joins words of a name."""
_MISSING_AS_WRITTEN = frozenset({"NA", "None"})
"""Python's and R's words, case-sensitive; "none" is a usual name for a class."""
_YES, _NO = frozenset({"yes", "y", "true", "t", "1"}), frozenset({"no", "n", "false", "f", "0"})
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
    odd = [name for name in names if name.strip().lower() in _MISSING or name.strip() in _MISSING_AS_WRITTEN]
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
    remarks, total = [], np.sum([*counts.values()], 0)
    empty = np.flatnonzero(total == 0).tolist()
    if empty:
        remarks.append(f"{len(empty)} of {len(names)} classes have no sample: {some(names[at] for at in empty)}")
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
    return remarks + _remarks_on_unseen(names, counts)


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
        for split, unseen in unseen_by_split.items()
        if len(unseen)
    ]


_FEW_SAMPLES, _MANY_SAMPLES, _MOST_OF_ALL = 2, 50, 0.9
"""Samples of a class that are few where the median of classes has many, and the share that makes accuracy useless."""
_TOO_GOOD = "too good"
"""In each remark on samples that several splits share."""
_NAMES = 20_000
"""At most this number of names of a source's samples, the first, are compared."""
_SMALL_CLASS = 16
_LEAST_MASK = 8
"""Sides from which on whole numbers are a mask of a picture, and no boxes or points."""
_LONGEST_NAME = 1000
_DECODED, _MOST_DECODED = 3, 4 << 20
"""Images of a class that are decoded, and the bytes of all of them."""
_HEADERS = 500
"""At most this number of image files of a split are read for size and colours; the writing checks the rest."""


def make_job(request: ShardRequest, work: Path, *, alone: bool = True, asks: bool = True) -> ShardJob:
    """List the source into `work` and plan; SourceError and UsageError say what is unusable.

    `alone`: no other ranks share the cores. `asks`: question ambiguous names, which finished data has settled.
    """
    layout = request.config.layout
    spec = dataclasses.replace(_spec(request, work, workers=request.most_processes(alone=alone)), asks=asks)
    fractions = parse_split(layout.split) if layout.split else None
    filters(layout.compression)  # raises if its package is missing
    source = open_source(spec)
    with examining(request.source), IndexWriter(work) as writer:  # below, samples and state are fixed
        facts = source.scan(writer)
        state, fingerprint, counts = source_state(spec, facts, writer.state()), writer.fingerprint(), {**writer.counts}
        facts = dataclasses.replace(facts, num_samples=sum(counts.values()))
    _check_left_out(spec, {*counts, *facts.left_out, *getattr(source, "named", ())}, request.source)
    counts = _used(counts, spec, request.source)
    _check_names(facts, request.source)
    _check_kind(request.config, facts)
    asks = asks and not spec.target_kind and knows("target_kind", spec.format)  # others have classes of their authors
    if asks:
        _ask_of_classes(facts, request.source, folders=spec.format == "image-folder")
    index = Index(work)
    try:
        by_split, total_size, largest = _tally(index, counts, len(facts.class_names), request.source)
        if spec.format != "synthetic":
            facts = _with_counts(facts, by_split, request.source, asks=asks)
        shape, facts = _shape(layout, spec, source, facts, index, counts)
        _check_finite(spec, source, facts, index, counts)
        facts = _with_marks(spec, source, facts, index, list(counts), shape)
        if fractions:  # below, `counts` are those of the parts
            if list(counts) != [UNSPLIT]:
                raise UsageError(f"{request.source} is already divided into {', '.join(counts)}; leave out --split")
            limits = quotas(by_split[UNSPLIT], list(fractions.values()), mixed(layout.seed, 10))
            counts = divide(work, index, UNSPLIT, limits, list(fractions), mixed(layout.seed, 10))
            facts = _with_groups(_with_division(facts, list(fractions), limits), spec, source)
        facts = _with_sides(_with_names(facts, spec, source, index, work, counts))  # last: it needs the parts
        if fractions:
            facts = _with_neighbours(facts, source, index, sum(counts.values()), shape)
    finally:
        index.close()
    fields = _stored(facts, shape, layout)
    job = ShardJob(
        name=Path(spec.location).name,
        source_name=Path(spec.location).name,
        spec=spec,
        facts=facts,
        plan=_plan(request, fields, facts, counts, total_size, largest),
        fingerprint=fingerprint,
        encoding=layout.encoding,
        compression=layout.compression,
        fields=fields,
        image_size=layout.image_size,
        members=fractions is not None,
        seed=layout.seed,
        on_error=request.config.writing.on_error,
        options=recipe_options(request.config),
        state=state,
    )
    job.write(work)
    return job


def _used(counts: Mapping[str, int], spec: SourceSpec, source: str) -> dict[str, int]:
    """Return the samples of each split that is not left out. Raises SourceError if there are none."""
    used = {name: count for name, count in counts.items() if count and not leaves_out_split(name, spec.leave_out)}
    if not used:
        raise SourceError(f"{source} holds no samples; there is nothing to shard")
    return used


def _with_neighbours(facts: SourceFacts, source: Source, index: Index, count: int, shape: Sequence[int]) -> SourceFacts:
    """Return `facts` with a remark on neighbours that --split divides, unless one says that splits share samples."""
    if any(_TOO_GOOD in remark for remark in facts.remarks):
        return facts
    remarks = remark_on_neighbours(source, facts, index, count, shape)
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _with_division(facts: SourceFacts, names: Sequence[str], limits: Counts) -> SourceFacts:
    """Return `facts` with remarks on classes too rare for a part of the split, which ends at `limits` in each class."""
    parts = dict(zip(names, np.diff(limits, axis=0, prepend=0), strict=True))
    remarks = remarks_on_division(facts.class_names, parts) if len(facts.class_names) > 1 else []
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _with_groups(facts: SourceFacts, spec: SourceSpec, source: Source) -> SourceFacts:
    """Return `facts` with remarks if samples seem to belong together, which --split does not regard."""
    targets = {spec.label_field, *(flag_value.rpartition("=")[0] or flag_value for flag_value in spec.targets)}
    names = {*getattr(source, "named", ())} - targets
    group = next(filter(names_group, sorted(names)), None)
    typed_times = getattr(source, "times", ())
    time = next((name for name in sorted(names) if names_time(name) or name in typed_times), None)
    too_good = "in several splits, which makes results too good: --split divides sample by sample"
    remedy = "Divide them in the source (a column split, folders or arrays called by splits)"
    remarks = []
    if group is not None:
        remarks.append(f"samples of one {shown(group)} may be {too_good}. {remedy}")
    if step := step_of_windows(facts):
        remarks.append(f"samples are windows of a series, {step} apart: they overlap, and may be {too_good}. {remedy}")
    elif time is not None:
        remarks.append(
            f"samples near each other in {shown(time)} may be {too_good}. To test on later ones: {remedy.lower()}"
        )
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _with_names(
    facts: SourceFacts, spec: SourceSpec, source: Source, index: Index, work: Path, counts: Mapping[str, int]
) -> SourceFacts:
    """Return `facts` with a remark if the names of files say that splits share a patient, scene or original."""
    known: Mapping[str, Sequence[str]] = getattr(source, "sample_names", {})
    if sum(map(len, known.values())) != facts.num_samples:  # samples were left out
        known = {}
    if len(counts) < 2 or not (known or spec.format in FILES_LISTED):
        return facts
    names: dict[str, list[str]] = {}
    for split, count in counts.items():
        members = work / f"members.{split}"
        whole = members.exists()
        numbers = np.fromfile(members, "<i8", _NAMES) if whole else np.arange(min(count, _NAMES))
        numbers, listed = numbers[numbers < _NAMES], UNSPLIT if whole else split
        if known:
            names[split] = [known[listed][number] for number in numbers.tolist()]
        else:
            names[split] = [source.describe(row, facts, index) for row in index.rows(listed, numbers)]
    remarks = remark_on_names(names, max(1, len(facts.class_names)))
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _with_sides(facts: SourceFacts) -> SourceFacts:
    """Return `facts` with a remark if a mask seems to be of another height and width than its picture."""
    sides = [(field, tuple(field.shape[:2])) for field in facts.fields if len(field.shape) > 1 and not field.variable]
    remarks = []
    for (picture, own), (mask, its) in itertools.product(sides, sides) if not facts.decodes else ():
        if (picture.role, mask.role) != ("input", "target") or not is_picture(picture.shape):
            continue
        both = f"{mask.name}: {its[0]}x{its[1]}, and {picture.name} {own[0]}x{own[1]}"
        if own == its[::-1] != its:
            remarks.append(f"{both}: are height and width of one swapped?")
        elif min(its) >= _LEAST_MASK and np.dtype(mask.dtype).kind in "iub" and is_other_aspect(own, its):
            remarks.append(f"{both}: another ratio of height to width, so that their pixels do not lie on each other")
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _ask_of_classes(facts: SourceFacts, source: str, *, folders: bool) -> None:
    for names in [facts.class_names, *(declared.class_names for declared in facts.fields if declared.kind == "class")]:
        ask_of_names(names, source, folders=folders)


def _with_counts(facts: SourceFacts, by_split: Mapping[str, Counts], source: str, *, asks: bool) -> SourceFacts:
    """Return `facts` with remarks on odd class counts."""
    if len(facts.class_names) < 2:
        alone = list(facts.class_names) not in ([], ["all"])
        lines = ["all samples are of one class: there is nothing to learn"] if alone else []
        return dataclasses.replace(facts, remarks=[*facts.remarks, *lines])
    if asks:
        ask_of_unlabelled(facts.class_names, by_split, source)
    remarks = [*remarks_on_order(facts.class_names), *remarks_on_counts(facts.class_names, by_split)]
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _plan(
    request: ShardRequest,
    fields: Sequence[Field],
    facts: SourceFacts,
    counts: Mapping[str, int],
    encoded_bytes: int,
    largest: int,
) -> ShardPlan:
    """Return the plan for these fields; `encoded_bytes` and `largest` are the total and largest size of image files."""
    layout = request.config.layout
    total_bytes, longest = _bytes_of(fields, facts, sum(counts.values()))
    if layout.encoding == "encoded":
        total_bytes = encoded_bytes
    return make_plan(counts, total_bytes, layout, file_system_of(request.target), max(largest, longest))


def _stored(facts: SourceFacts, shape: Sequence[int], layout: LayoutConfig) -> list[Field]:
    """Return the fields as a shard stores them: which are resident, and how training scales them."""
    encoded = layout.encoding == "encoded"
    fields = facts.fields or picture_with_class(shape, facts.dtype, facts.class_names, encoded=encoded)
    small = [not field.ragged and may_be_resident(field.shape, field.dtype) for field in fields]
    if all(small):
        small[0] = False  # at least one field must be stored in blocks
    flag_value = layout.normalise or "none"
    if flag_value != "none" and not any(map(_is_quantity, fields)):
        raise UsageError(f"--normalise {flag_value} scales numbers, and no input has any; leave it out")
    return [
        dataclasses.replace(
            field,
            resident=resident,
            normalise=flag_value if _is_quantity(field) else "none",
        )
        for field, resident in zip(fields, small, strict=True)
    ]


def _is_quantity(field: Field) -> bool:
    """Return whether a field holds numbers to be scaled: neither truth values nor only encoded words."""
    num_one_hot = sum(len(category.words) for category in field.categories if category.coding == "one-hot")
    num_encoded = num_one_hot + sum(category.coding == "codes" for category in field.categories)
    size = int(np.prod(field.shape))
    return field.role == "input" and field.kind == "numbers" and field.dtype != "bool" and num_encoded < size


def _bytes_of(fields: Sequence[Field], facts: SourceFacts, num_samples: int) -> tuple[int, int]:
    """Return the raw bytes of all samples and of the longest; for images without their classes, and 0."""
    if not facts.fields:
        return num_samples * fields[0].row_bytes, 0
    total = 0
    for number, array in enumerate(facts.arrays):
        # Arrays are listed part by part, each with all fields in order.
        field = fields[number % len(fields)]
        if array.offsets:
            total += int(np.fromfile(array.offsets, np.int64)[-1]) * field.row_bytes
    fixed = sum(field.row_bytes for field in fields if not field.variable)
    return total + fixed * facts.num_samples, sum(field.longest_bytes for field in fields)


def recipe_options(config: ShardConfig) -> dict[str, Any]:
    """Return the settings that determine the shards, by key, in JSON types; unset ones are omitted."""
    keys = {setting.key for group in (SourceConfig, LayoutConfig) for setting in settings_of(group)} - {"categories-of"}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(config).items()}
    return {key: value for key, value in plain.items() if key in keys and value is not None}


def _check_left_out(spec: SourceSpec, names: Iterable[str], source: str) -> None:
    """Raise UsageError if a `--leave-out` matches nothing in the source: a typo would leave the data in."""
    unmatched = [pattern for pattern in spec.leave_out if not any(leaves_out_split(name, [pattern]) for name in names)]
    visited: set[tuple[int, int]] = set()
    # Only for a pattern that listing has not met: a source may have millions of files.
    for folder, folders, files in os.walk(spec.location, followlinks=True) if unmatched else ():
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in visited:  # a link to a folder above it would be followed for ever
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        unmatched = [one for one in unmatched if not any(left_out(name, [one]) for name in (*folders, *files))]
        if not unmatched:
            return
    if unmatched:
        raise UsageError(
            f"--leave-out {unmatched[0]}: {source} has no file, folder, array, column or split of that name; "
            "correct it, or leave it out"
        )


def _spec(request: ShardRequest, work: Path, *, workers: int) -> SourceSpec:
    chosen, layout = request.config.source, request.config.layout
    name = recognise(request.source) if chosen.format == "auto" and not request.reader else chosen.format
    if request.reader:
        if chosen.format not in ("auto", "reader"):
            raise UsageError(f"--reader reads the source, so that --format {chosen.format} has no meaning; give one")
        name = "reader"
    if not request.source.startswith("synthetic:"):
        if name == "synthetic":
            raise SourceError(f"--format synthetic needs a source such as synthetic:imagenet, not {request.source}")
        check_location(request.source)
        if chosen.samples is not None:
            raise UsageError("--samples is for synthetic sources; leave it out")
    check_flags(name, chosen)
    location = request.source if name == "synthetic" else str(Path(request.source).expanduser().absolute())
    return SourceSpec(
        format=name,
        location=location,
        samples=chosen.samples,
        image_field=chosen.image_field,
        label_field=chosen.label_field,
        axes=chosen.axes,
        head=chosen.head,
        inputs=chosen.input or (),
        targets=chosen.target or (),
        target_kind=chosen.target_kind or "",
        categories=chosen.categories or (),
        known_words=_known_words(chosen),
        nan=chosen.nan or "stop",
        split_names=chosen.split_names,
        leave_out=chosen.leave_out or (),
        sample_is=chosen.sample_is or "",
        sample_axis=chosen.sample_axis,
        follow_links=chosen.follow_links,
        image_size=layout.image_size,
        channels=layout.channels,
        seed=layout.seed,
        checks=request.config.writing.on_error == "stop",
        normalised=layout.normalise is not None,
        work=str(work),
        reader=request.reader,
        reader_digest=user_reader(request.reader).digest if request.reader else "",
        workers=workers,
    )


def _known_words(chosen: SourceConfig) -> dict[str, Sequence[str]]:
    """Return the words by column of the --categories-of folder; UsageError if it lacks a column or coding."""
    if chosen.categories_of is None:
        return {}
    if not (chosen.categories_of / FILE_NAME).is_file():
        raise UsageError(f"--categories-of {chosen.categories_of} is no finished data folder: it has no {FILE_NAME}")
    manifest, _ = read_manifest(chosen.categories_of)  # not its shards: a folder that needs repair has damaged ones
    by_column = {category.column: category for field in manifest.fields for category in field.categories}
    for flag_value in chosen.categories or ():
        column, _, coding = flag_value.rpartition("=")
        if column not in by_column or by_column[column].coding != coding:
            available = (
                some([f"{category.column}={category.coding}" for category in by_column.values()])
                if by_column
                else "no words"
            )
            raise UsageError(f"--categories {flag_value}: {chosen.categories_of} has {available}")
    return {column: list(category.words) for column, category in by_column.items()}


def _check_names(facts: SourceFacts, source: str) -> None:
    for name in facts.class_names:
        try:
            fits = len(name.encode()) <= _LONGEST_NAME
        except UnicodeEncodeError:
            raise SourceError(f"{source}: the class {shown(name)} has a name that is not UTF-8; rename it") from None
        if not fits or "\0" in name:
            raise SourceError(f"{source}: {shown(name)} cannot be the name of a class; rename it")


def _check_kind(config: ShardConfig, facts: SourceFacts) -> None:
    """Raise UsageError for a flag that has no meaning for samples of this kind."""
    layout, source = config.layout, config.source
    if layout.compression and facts.fields:
        raise UsageError("--compression is for images with a class; leave it out for samples of named fields")
    if layout.normalise and not facts.fields:
        raise UsageError(
            "--normalise is for samples of named fields; images of bytes are scaled to 0..1, others keep their values"
        )
    if source.axes != "auto" and facts.samples_are != "pixels":
        raise UsageError(f"--axes {source.axes} is for arrays of images with a class; leave it out here")
    if source.target_kind == "regression" and not any(
        field.role == "target" and field.kind == "numbers" for field in facts.fields
    ):
        raise UsageError("--target-kind regression needs targets that are numbers, and the labels here name classes")
    if layout.channels == 2:
        raise UsageError("--channels 2: images have 1, 3 or 4 channels")
    if facts.samples_are == "files" or facts.decodes:
        return
    for name, flag_value in (("--image-size", layout.image_size), ("--channels", layout.channels)):
        if flag_value is not None:
            raise UsageError(f"{name} is for image files; this source holds arrays, which go through as they are")
    if layout.encoding == "encoded":
        raise UsageError("--encoding encoded packs JPEG and PNG files; this source holds pixels, use --encoding raw")


def _tally(index: Index, counts: dict[str, int], num_classes: int, source: str) -> tuple[dict[str, Counts], int, int]:
    """Return samples by split and class, and encoded bytes in all and of the largest; SourceError for odd labels."""
    by_split, total, largest = {split: np.zeros(num_classes, np.int64) for split in counts}, 0, 0
    for split in counts:
        position = 0
        for rows in index.chunks(split):
            wrong = (rows["label"] < 0) | (rows["label"] >= num_classes)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise SourceError(
                    f"{source}: sample {position + at} has the label {rows['label'][at]}, "
                    f"out of range 0 to {num_classes - 1}; correct the source"
                )
            by_split[split] += np.bincount(rows["label"], minlength=num_classes)
            total += int(rows["size"].sum())
            largest = max(largest, int(rows["size"].max(initial=0)))
            position += len(rows)
    return by_split, total, largest


def _shape(
    layout: LayoutConfig, spec: SourceSpec, source: Source, facts: SourceFacts, index: Index, counts: dict[str, int]
) -> tuple[tuple[int, ...], SourceFacts]:
    """Return (height, width, channels) or the shape of the first field, and the facts with the type of the samples."""
    if facts.sample_shape is not None:
        return tuple(facts.sample_shape), facts
    if layout.compression and layout.encoding == "encoded":
        raise UsageError("--compression is for raw data; JPEG and PNG are compressed already")
    checks = spec.checks and spec.format in FILES_LISTED
    kinds = ImageKinds(size=layout.image_size, channels=layout.channels)
    by_class: dict[int, list[bytes]] = {}
    for split, count in counts.items():
        step = -(-count // _HEADERS)  # spread over the split: neighbours in a folder are alike
        for number in range(0, count, step):
            row = index.rows(split, np.array([number], np.int64))[0]
            with contextlib.suppress(UnreadableSample):  # the writing finds it again and follows --on-error
                content, name = _content(source, row, facts, index), source.describe(row, facts, index)
                if checks:
                    check_is_image(bytes(content[:HEAD_BYTES]), name)
                if spec.checks:
                    _check_whole(content, name)
                kinds.add(content, name, int(row["label"]))
                seen = by_class.setdefault(int(row["label"]), [])
                if len(seen) < _DECODED and sum(map(len, itertools.chain(*by_class.values()))) < _MOST_DECODED:
                    seen.append(bytes(content))
    shape, dtype = kinds.settled()
    remarks = [*kinds.lines(facts.class_names), *_remarks_on_black(by_class, facts, shape, dtype)]
    if dtype != "uint8" and layout.encoding == "encoded":
        raise UsageError("--encoding encoded is for images of 8 bits, and these have more; use --encoding raw")
    return shape, dataclasses.replace(facts, dtype=dtype, remarks=[*facts.remarks, *remarks])


def _check_whole(content: Content, name: str) -> None:
    try:
        check_end(content)
    except UnreadableSample as error:
        raise SourceError(f"{name}: {error}; take it away, or give --on-error skip") from error


def _remarks_on_black(
    by_class: Mapping[int, Sequence[bytes]], facts: SourceFacts, shape: Sequence[int], dtype: str
) -> list[str]:
    """Return a remark if images of a class look black: numbers from 0 to 1 that were saved as bytes."""
    black = []
    for label, contents in by_class.items() if dtype == "uint8" else ():
        with contextlib.suppress(UnreadableSample):
            tops = [decode(content, size=None, channels=shape[-1]).max(initial=0) for content in contents]
            if len(tops) == _DECODED and max(tops) <= 1:
                black.append(facts.class_names[label])
    if not black:
        return []
    return [
        f"images seen of {some(black)} hold 0 and 1 alone, and look black: were they numbers from 0 to 1 before they "
        "were saved as bytes? Then save 255 times as much"
    ]


def _check_finite(
    spec: SourceSpec, source: Source, facts: SourceFacts, index: Index, counts: Mapping[str, int]
) -> None:
    """Raise SourceError if arrays of pixels hold NaN or infinity and no `--nan` was given.

    Image files are checked later, when the writing decodes them. Raises UsageError if `--nan` has no meaning here.
    """
    pictures = facts.decodes or not facts.fields
    if pictures and spec.nan != "stop" and not facts.dtype.startswith("float"):
        raise UsageError(f"--nan {spec.nan} is for numbers that may be NaN or infinity, and these are {facts.dtype}")
    if facts.samples_are != "pixels" or spec.nan != "stop" or not facts.dtype.startswith("float"):
        return
    first, bad = "", 0
    for split in counts:
        for rows in index.chunks(split):
            for row in rows:
                with contextlib.suppress(UnreadableSample):
                    if not np.isfinite(source.read(row, facts, index)).all():
                        first, bad = first or source.describe(row, facts, index), bad + 1
    if bad:
        raise SourceError(f"{first}: {NotFinite(bad)}")


_MARKS_READ, _MARKS_DECODED = 1 << 30, 1 << 26
"""Most bytes of pixels that are searched for marks of missing values: of arrays, and of image files."""


def _with_marks(
    spec: SourceSpec, source: Source, facts: SourceFacts, index: Index, splits: Sequence[str], shape: Sequence[int]
) -> SourceFacts:
    """Return `facts` with a remark if float pixels hold a number that often stands for a missing one.

    Raises SourceError if an image file among them holds NaN or infinity, as the writing does.
    """
    if facts.samples_are not in ("pixels", "files") or not facts.dtype.startswith("float"):
        return facts
    as_array, stops = facts.samples_are == "pixels", spec.nan == "stop" and spec.checks
    most = max(1, (_MARKS_READ if as_array else _MARKS_DECODED) // (4 * max(1, math.prod(shape))))
    deviations: list[float] = []

    def rows() -> Iterator[npt.NDArray[Any]]:
        listed = (row for split in splits for chunk in index.chunks(split) for row in chunk)
        counted_rows = itertools.count()
        for row in itertools.islice(listed, most):
            with contextlib.suppress(UnreadableSample):
                content = source.read(row, facts, index)
                if not isinstance(content, np.ndarray):
                    content = decode(content, size=None, channels=shape[-1], dtype=facts.dtype)
                    if stops and not np.isfinite(content).all():
                        raise SourceError(f"{source.describe(row, facts, index)}: {NotFinite()}")
                if next(counted_rows) == len(deviations):  # else they are read again
                    with np.errstate(over="ignore", invalid="ignore"):
                        deviations.append(float(content.std(dtype=np.float64)))
                yield content.astype(facts.dtype).reshape(-1, 1)

    remark = mark_of_missing("images", np.dtype(facts.dtype), rows)
    units = "" if remark else two_units(np.array(deviations))
    units = f"images: standard deviations of samples are {units}" if units else ""
    return dataclasses.replace(facts, remarks=[*facts.remarks, *filter(None, [remark, units])])


def _content(source: Source, row: Any, facts: SourceFacts, index: Index) -> Content:
    content = source.read(row, facts, index)
    assert not isinstance(content, np.ndarray)
    return content


def quotas(class_counts: Counts, fractions: list[float], seed: int) -> Counts:
    """Return how many samples of each class go to the first k + 1 splits together: shape (splits, classes).

    Rounding errors are carried from class to class (in a random order), so that each split gets its share
    even if each class has few samples.
    """
    order = np.argsort(permuted(np.arange(len(class_counts), dtype=np.int64), len(class_counts), mixed(seed, 11)))
    before = np.concatenate([[0], np.cumsum(class_counts[order])])
    result = np.zeros((len(fractions), len(class_counts)), np.int64)
    cumulative = np.cumsum(fractions)
    for number, fraction in enumerate(cumulative[:-1]):
        # Differences of rounded running totals: no rounding is lost, and all classes together get their share.
        result[number, order] = np.diff(np.floor(fraction * before + 0.5).astype(np.int64))
        if number:
            # Carried roundings may give a class less than the part before it: no part may be negative.
            result[number] = np.maximum(result[number], result[number - 1])
    # The last part takes the rest, whatever the rounding of the fractions' sum.
    result[-1] = class_counts
    return result


def divide(folder: Path, index: Index, whole: str, limits: Counts, names: Sequence[str], seed: int) -> dict[str, int]:
    """Write the row numbers of each split to `members.SPLIT` in the index's folder; return the samples by split.

    `limits` are the result of `quotas`.
    """
    class_counts = limits[-1]
    num_seen = np.zeros_like(class_counts)
    sizes = dict.fromkeys(names, 0)
    files = {name: (folder / f"members.{name}").open("wb") for name in names}
    try:
        first = 0
        for rows in index.chunks(whole):
            target = _targets(rows["label"], num_seen, class_counts, limits, seed)
            for number, name in enumerate(names):
                members = first + np.flatnonzero(target == number)
                files[name].write(members.astype("<i8").tobytes())
                sizes[name] += len(members)
            first += len(rows)
    finally:
        for file in files.values():
            file.close()
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        raise UsageError(f"--split leaves {', '.join(empty)} without a sample; there are {first} samples in all")
    return sizes


def _targets(labels: Counts, seen: Counts, class_counts: Counts, limits: Counts, seed: int) -> Counts:
    """Return the split of each row; `seen` counts the rows of each class so far and is updated."""
    target = np.empty(len(labels), np.int64)
    by_class = np.argsort(labels, kind="stable")  # stable: rows of a class keep the order that `seen` counts
    values, starts = np.unique(labels[by_class], return_index=True)
    for label, members in zip(values.tolist(), np.split(by_class, starts[1:]), strict=True):
        positions = np.arange(seen[label], seen[label] + len(members), dtype=np.int64)
        drawn = _drawn(positions, int(class_counts[label]), mixed(seed, 12, label))
        # A drawn position below the first limit is in the first split, and so on.
        target[members] = np.searchsorted(limits[:, label], drawn, side="right")
        seen[label] += len(members)
    return target


def _drawn(positions: Counts, num: int, key: int) -> Counts:
    """Apply the permutation of 0 .. num-1 of `key` to `positions`; fast for small classes, which may be many."""
    if num == 1:
        return positions
    if num > _SMALL_CLASS:
        return permuted(positions, num, key)
    return np.argsort([mixed(key, number) for number in range(num)])[positions]
