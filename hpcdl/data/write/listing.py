"""Turn a request into a job: recognise the source, list its samples, split them, determine shape and plan."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.config.load import flatten
from hpcdl.config.settings import settings_of
from hpcdl.core.errors import SourceError, UsageError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.hdf5 import filters
from hpcdl.data.format.manifest import FILE_NAME, Field, is_picture, may_be_resident, picture_with_class, read_manifest
from hpcdl.data.format.order import mixed
from hpcdl.data.sources.base.names import names_group, names_time
from hpcdl.data.sources.base.source import (
    FILES_LISTED,
    Index,
    IndexWriter,
    Source,
    SourceFacts,
    SourceSpec,
    check_flags,
    check_location,
    examining,
    knows,
    open_source,
    recognise,
)
from hpcdl.data.sources.base.splits import leaves_out_split, left_out, some
from hpcdl.data.sources.checks.groups import remark_on_companions, remark_on_copied_files, remark_on_names
from hpcdl.data.sources.checks.pictures import is_other_aspect
from hpcdl.data.sources.checks.series import step_of_windows
from hpcdl.data.sources.reader.source import user_reader
from hpcdl.data.write.classes import (
    ask_of_names,
    ask_of_sentences,
    ask_of_unlabelled,
    check_names,
    remarks_on_counts,
    remarks_on_division,
    remarks_on_order,
    remarks_on_words,
)
from hpcdl.data.write.division import Counts, divide, quotas
from hpcdl.data.write.journal import source_state
from hpcdl.data.write.lustre import file_system_of
from hpcdl.data.write.neighbours import remark_on_neighbours
from hpcdl.data.write.pixels import check_finite, shape_of, with_marks
from hpcdl.data.write.plan import ShardJob, ShardPlan, make_plan
from hpcdl.data.write.request import LayoutConfig, ShardConfig, ShardRequest, SourceConfig, parse_split

_TOO_GOOD = "too good"
"""In each remark on samples that several splits share."""
_NAMES = 20_000
"""At most this number of names of a source's samples, the first, are compared."""
_LEAST_MASK = 8
"""Sides from which on whole numbers are a mask of a picture, and no boxes or points."""


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
    check_names(facts, request.source)
    _check_kind(request.config, facts)
    asks = asks and not spec.target_kind and knows("target_kind", spec.format)  # others have classes of their authors
    if asks:
        _ask_of_classes(facts, request.source, folders=spec.format == "image-folder")
    index = Index(work)
    try:
        by_split, total_size, largest = _tally(index, counts, len(facts.class_names), request.source)
        if spec.format != "synthetic":
            facts = _with_counts(facts, by_split, request.source, asks=asks)
        shape, facts = shape_of(layout, spec, source, facts, index, counts)
        check_finite(spec, source, facts, index, counts)
        facts = with_marks(spec, source, facts, index, list(counts), shape)
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
    """Return `facts` with remarks if names of files tell of masks, or that splits share a patient or original."""
    known: Mapping[str, Sequence[str]] = getattr(source, "sample_names", {})
    if sum(map(len, known.values())) != facts.num_samples:  # samples were left out
        known = {}
    if spec.format not in FILES_LISTED and knows("leave_out", spec.format) and Path(spec.location).is_dir():
        copied = remark_on_copied_files(Path(spec.location), spec.leave_out)
        facts = dataclasses.replace(facts, remarks=[*facts.remarks, *copied])
    if not (known or spec.format in FILES_LISTED):
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
    remarks = remark_on_names(names, max(1, len(facts.class_names))) if len(counts) > 1 else []
    if spec.format in ("image-folder", "zip") and not facts.fields:
        remarks += remark_on_companions([name for own in names.values() for name in own])
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
    """Return `facts` with remarks on odd class counts, and on odd words of columns."""
    categories = [category for item in facts.fields for category in item.categories]
    lines = [line for category in categories for line in remarks_on_words(category.column, category.words)]
    facts = dataclasses.replace(facts, remarks=[*facts.remarks, *lines])
    if len(facts.class_names) < 2:
        alone = list(facts.class_names) not in ([], ["all"])
        lines = ["all samples are of one class: there is nothing to learn"] if alone else []
        return dataclasses.replace(facts, remarks=[*facts.remarks, *lines])
    if asks:
        ask_of_unlabelled(facts.class_names, by_split, source)
        ask_of_sentences(facts.class_names, by_split, source)
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
