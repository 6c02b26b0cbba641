"""Look at a source's images before the writing: shape and type, and numbers that are missing or were scaled twice."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import SourceError, UsageError
from hpcdl.data.sources.base.glance import HEAD_BYTES, check_is_image
from hpcdl.data.sources.base.source import (
    FILES_LISTED,
    Content,
    Index,
    NotFinite,
    Source,
    SourceFacts,
    SourceSpec,
    UnreadableSample,
)
from hpcdl.data.sources.base.splits import some
from hpcdl.data.sources.checks.missing import mark_of_missing
from hpcdl.data.sources.checks.numbers import ranges_apart, spreads_apart, two_units
from hpcdl.data.sources.checks.pictures import COLOURS_READ, inverted, swapped_colours
from hpcdl.data.sources.layouts.images import ImageKinds, check_end, decode
from hpcdl.data.write.request import LayoutConfig

_DECODED, _MOST_DECODED = 3, 4 << 20
"""Images of a class that are decoded, and the bytes of all of them."""
_COLOURS_SEEN = 400
_COLOURS, _VALUES_SEEN = 3, 250
"""Most pictures of a split that are compared with another's, the channels of colours, and the values drawn of each."""
_HEADERS = 500
"""At most this number of image files of a split are read for size and colours; the writing checks the rest."""


def shape_of(
    layout: LayoutConfig, spec: SourceSpec, source: Source, facts: SourceFacts, index: Index, counts: dict[str, int]
) -> tuple[tuple[int, ...], SourceFacts]:
    """Return (height, width, channels) or the shape of the first field, and the facts with the type of the samples."""
    if facts.sample_shape is not None:
        return tuple(facts.sample_shape), _with_splits(source, facts, index, counts)
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
                kinds.add(content, name, int(row["label"]), split)
                seen = by_class.setdefault(int(row["label"]), [])
                if len(seen) < _DECODED and sum(map(len, itertools.chain(*by_class.values()))) < _MOST_DECODED:
                    seen.append(bytes(content))
    shape, dtype = kinds.settled()
    remarks = [*kinds.lines(facts.class_names), *_remarks_on_black(by_class, facts, shape, dtype)]
    facts = dataclasses.replace(facts, dtype=dtype)
    remarks += _remarks_on_splits(source, facts, index, counts, shape[-1])
    if dtype != "uint8" and layout.encoding == "encoded":
        raise UsageError("--encoding encoded is for images of 8 bits, and these have more; use --encoding raw")
    return shape, dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


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


def _with_splits(source: Source, facts: SourceFacts, index: Index, counts: Mapping[str, int]) -> SourceFacts:
    """Return `facts` with remarks if splits of arrays of pixels seem to have other colours or another scale."""
    if facts.samples_are != "pixels" or facts.fields or facts.sample_shape is None:
        return facts
    remarks = _remarks_on_splits(source, facts, index, counts, facts.sample_shape[-1])
    return dataclasses.replace(facts, remarks=[*facts.remarks, *remarks])


def _remarks_on_splits(
    source: Source, facts: SourceFacts, index: Index, counts: Mapping[str, int], channels: int
) -> list[str]:
    """Return remarks if splits seem to have colours in two orders, or another scale; of each some MiB are read."""
    means: dict[str, npt.NDArray[Any]] = {}
    drawn: dict[str, npt.NDArray[Any]] = {}
    for split, count in counts.items() if len(counts) > 1 else ():
        found, values, num_bytes, random = [], [np.empty(0)], 0, np.random.default_rng(1)
        # In any order: neighbours in a source are alike.
        for number in random.permutation(count)[:_COLOURS_SEEN]:
            with contextlib.suppress(UnreadableSample):  # the writing finds it again and follows --on-error
                content = source.read(index.rows(split, np.array([number], np.int64))[0], facts, index)
                pixels = content
                if not isinstance(pixels, np.ndarray):
                    pixels = decode(pixels, size=None, channels=channels, dtype=facts.dtype)
                found.append(pixels.mean((0, 1), dtype=np.float64))
                values.append(pixels.reshape(-1)[random.integers(0, pixels.size, _VALUES_SEEN)].astype(np.float64))
                num_bytes += pixels.nbytes
            if num_bytes > COLOURS_READ:
                break
        means[split], drawn[split] = np.array(found).reshape(-1, channels), np.concatenate(values)
    scales = spreads_apart(drawn) or inverted(drawn) or ranges_apart(drawn)
    lines = (swapped_colours(means) if channels == _COLOURS else "", scales)
    return [f"images: {line}" for line in lines if line]


def check_finite(spec: SourceSpec, source: Source, facts: SourceFacts, index: Index, counts: Mapping[str, int]) -> None:
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


def with_marks(
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
    # Splits of two scales are said already.
    apart = any("most values are" in line for line in facts.remarks)
    units = "" if remark or apart else two_units(np.array(deviations))
    units = f"images: standard deviations of samples are {units}" if units else ""
    return dataclasses.replace(facts, remarks=[*facts.remarks, *filter(None, [remark, units])])


def _content(source: Source, row: Any, facts: SourceFacts, index: Index) -> Content:
    content = source.read(row, facts, index)
    assert not isinstance(content, np.ndarray)
    return content
