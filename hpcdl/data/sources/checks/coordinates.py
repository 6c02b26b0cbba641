"""Coordinates beside arrays (latitudes, wavelengths): whether those of several files are alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping

import numpy as np

from hpcdl.core.errors import shown
from hpcdl.data.sources.base.chosen import without_split
from hpcdl.data.sources.base.labels import CLASS_LISTS
from hpcdl.data.sources.base.source import Array

LOOKED_INTO = 16
"""Files whose coordinates, links and references are looked at: a source may have a file for each sample."""
_SHORTEST, _LONGEST = 3, 1 << 16
"""Lengths of coordinates that are compared between files."""
_SPECTRAL = re.compile(r"wave|wn|lambda|freq|energ|mz|lev|plev|press|depth|height", re.IGNORECASE)
"""Beginnings of names of coordinates that all samples are to share, unlike places of tiles and times of windows."""


def coordinates_apart(
    files: Iterable[tuple[str, Mapping[str, tuple[int, ...]], Callable[[str], Array]]],
    fields: Container[tuple[int, ...]],
) -> list[str]:
    """Describe coordinates and names of the numbers in a sample that are not alike in all files.

    They are arrays of rising or falling numbers, or of words, as long as an axis of a sample; the axis of samples has
    others.
    `files` have a name, the shapes of their arrays, and a function that reads one; `fields` are the shapes of samples.
    """
    first: dict[str, tuple[Array, str]] = {}
    words: dict[str, tuple[list[str], str]] = {}
    remarks: dict[str, str] = {}
    for file, shapes, read in files:
        used = [shape for shape in shapes.values() if len(shape) > 1 and (shape in fields or shape[1:] in fields)]
        sides = {side for shape in used for side in shape[1:]} - {shape[0] for shape in used}
        for name, shape in shapes.items():
            if len(shape) != 1 or shape[0] not in sides or not _SHORTEST <= shape[0] <= _LONGEST:
                continue
            values = np.asarray(read(name))
            key = without_split(name)
            if values.dtype.kind in "OSU":
                if line := _other_words(key, _words(values), f"{file}:{name}", words):
                    remarks.setdefault(key, line)
                continue
            if values.dtype.kind not in "iuf" or not (np.diff(values) > 0).all() | (np.diff(values) < 0).all():
                continue
            other, where = first.setdefault(key, (values, f"{file}:{name}"))
            if other.shape == values.shape and _at_other_places(key, other, values):
                ends = [
                    f"{own[0]:g} to {own[-1]:g} in {place}"
                    for own, place in ((other, where), (values, f"{file}:{name}"))
                ]
                remarks.setdefault(
                    key,
                    f"{key}: {' and '.join(ends)}, so the same index of two samples is not the same place: write them "
                    "in one order, on one grid",
                )
    return [*remarks.values()]


def _words(values: Array) -> list[str]:
    raw = values.reshape(-1).tolist()
    return [(word.decode(errors="replace") if isinstance(word, bytes) else str(word)).strip() for word in raw]


def _other_words(key: str, own: list[str], place: str, first: dict[str, tuple[list[str], str]]) -> str:
    """Describe names of the numbers in a sample that differ from those in the `first` file; empty if they are alike."""
    other, where = first.setdefault(key, (own, place))
    # Lists of classes are compared where they name labels.
    if key.rpartition("/")[2].lower() in CLASS_LISTS or len(other) != len(own) or other == own:
        return ""
    at = next(number for number, pair in enumerate(zip(other, own, strict=True)) if pair[0] != pair[1])
    return (
        f"{key}: {shown(other[at])} at index {at} in {where}, and {shown(own[at])} in {place}: the same index of two "
        "samples is not the same column: write them in one order"
    )


def _at_other_places(name: str, first: Array, other: Array) -> bool:
    """Return whether coordinates of two files seem to differ by mistake: in order, by a turn, or as a spectrum's.

    Tiles and windows of time have coordinates of their own, in one direction.
    """
    near = 1e-5 * float(np.abs(first[-1] - first[0]))  # float32 beside float64
    if np.allclose(first, other, atol=near):
        return False
    here, there = (np.sort(np.round(values.astype(np.float64), 4) % 360) for values in (first, other))
    turned = (first[0] < first[-1]) != (other[0] < other[-1])
    return turned or np.allclose(here, there, atol=near) or bool(_SPECTRAL.match(name.rpartition("/")[2]))
