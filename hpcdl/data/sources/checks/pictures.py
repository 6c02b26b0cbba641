"""Pictures and masks: colours in two orders, masks with gaps or colours as classes, other aspects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.manifest import Field, is_picture
from hpcdl.data.sources.base.glance import IMAGE_SUFFIXES
from hpcdl.data.sources.base.labels import FEW_CLASSES
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.splits import typed
from hpcdl.data.sources.base.values import FEWEST, MOST_ROWS, NUMBERS_SHOWN, is_plain

COLOURS_READ, _SURE = 16 << 20, 5
"""Bytes of a split's pictures whose colours are compared with another's, and the standard errors that make sure."""
_END = 0.15
"""The part of the range of pixels that is an end of it."""
_COLOURS_DRAWN = 1 << 16
"""Most pixels of a piece of masks whose colours are counted."""
_FILES = (*IMAGE_SUFFIXES, ".wav", ".flac", ".mp3", ".mp4", ".npy", ".npz", ".h5", ".dcm", ".nii", ".nii.gz", ".fits")
"""Endings of files that hold a sample."""


def colours_of(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe pictures of two splits whose colours seem to be in two orders; empty if none do."""
    if len({*splits}) < 2 or not is_picture(field.shape) or field.shape[-1] != 3 or not all(map(is_plain, arrays)):
        return ""
    most = max(1, COLOURS_READ // (math.prod(field.shape) * np.dtype(field.dtype).itemsize) // len(arrays))
    means: dict[str, list[Array]] = {}
    for array, split in zip(arrays, splits, strict=True):
        means.setdefault(split, []).append(array.spread(min(most, MOST_ROWS)).mean((1, 2), dtype=np.float64))
    line = swapped_colours({split: np.concatenate(own) for split, own in means.items()})
    return f"{field.name}: {line}" if line else ""


def swapped_colours(means: Mapping[str, Array]) -> str:
    """Describe two splits whose first and last colour seem to be swapped, as in OpenCV's order; empty if none are.

    `means` are the mean colours of each split's pictures, (N, 3). By far more than by chance the two colours differ.
    """
    known: dict[str, tuple[float, float]] = {}
    for split, colours in means.items():
        colours = colours[np.isfinite(colours).all(1)]
        apart = colours[:, 0] - colours[:, 2]
        if len(apart) >= FEWEST:
            known[split] = float(apart.mean()), float(apart.std() / math.sqrt(len(apart)))
    for (one, (first, doubt)), (two, (second, other)) in itertools.combinations(known.items(), 2):
        if first * second < 0 and abs(first) > _SURE * doubt and abs(second) > _SURE * other:
            red, blue = (one, two) if first > 0 else (two, one)
            return (
                f"the first colour is brighter than the last in {red}, and darker in {blue}: is one RGB and the other "
                "BGR, as OpenCV reads? Write them alike"
            )
    return ""


def inverted(drawn: Mapping[str, Array]) -> str:
    """Describe two splits of pictures, one dark on light and the other light on dark; empty if none are.

    Most values, `drawn` from each, are at opposite ends of one range.
    """
    bounds: dict[str, list[float]] = {}
    for split, values in drawn.items():
        finite = values[np.isfinite(values)]
        if len(finite) >= FEWEST:
            # More than the half: of black and white in equal parts, either is the median by chance.
            bounds[split] = np.quantile(finite, (0.01, 0.3, 0.7, 0.99)).tolist()
    for dark, light in itertools.permutations(bounds, 2):
        (low, _, dark_most, high), (lowest, light_most, _, highest) = bounds[dark], bounds[light]
        bottom, span = min(low, lowest), max(high, highest) - min(low, lowest)
        alike = 2 * (high - low) > span < 2 * (highest - lowest)
        if alike and dark_most < bottom + _END * span and light_most > bottom + (1 - _END) * span:
            return (
                f"most pixels are near {bottom:.3g} in {dark}, and near {bottom + span:.3g} in {light}: is one of them "
                "inverted (black on white)? Write both alike"
            )
    return ""


def mask_with_gaps(name: str, chunks: Iterable[Array]) -> str:
    """Describe a mask of few numbers far apart, such as 0 and 255; empty if it numbers its classes from 0 on."""
    found: set[int] = set()
    for chunk in chunks:
        found |= set(np.unique(chunk).tolist())
        if len(found) > FEW_CLASSES:
            return ""
    if len(found) == 1:
        return f"{name}: all values seen are {found.pop()}: is there anything to learn from them?"
    if not found or (min(found) >= 0 and max(found) < 2 * len(found)):
        return ""
    numbers = ", ".join(map(str, sorted(found)[:NUMBERS_SHOWN])) + (", ..." if len(found) > NUMBERS_SHOWN else "")
    outputs = f": as classes they need a network of {max(found) + 1} outputs" if min(found) >= 0 else ""
    return f"{name}: {len(found)} numbers seen ({numbers}){outputs}; for classes write 0 to {len(found) - 1}"


def colours_as_classes(field: Field, chunks: Iterable[Array]) -> str:
    """Describe a mask of few colours, each of which stands for a class; empty for pictures and one-hot masks."""
    found: set[tuple[int, ...]] = set()
    for chunk in chunks:
        colours = chunk.reshape(-1, chunk.shape[-1])
        colours = np.unique(colours[:: len(colours) // _COLOURS_DRAWN + 1], axis=0)
        found |= set(map(tuple, colours.tolist()))
        if len(found) > FEW_CLASSES:
            return ""
    if len(found) < 2 or max(map(max, found)) <= 1:
        return ""
    return (
        f"{field.name}: {len(found)} colours seen, such as {max(found)}: a network learns these as quantities; for "
        f"classes write one channel of numbers, 0 to {len(found) - 1}"
    )


class Palettes:
    """The colours that masks have for their numbers; a number of two colours names another class in each file."""

    def __init__(self) -> None:
        self.first: dict[int, tuple[str, tuple[int, ...]]] = {}
        """By number the first file that has it, and its colour."""

    def conflict(self, colours: Mapping[int, tuple[str, tuple[int, ...]]]) -> str:
        """Add colours by number, each with its file; describe the first that differs from another file's."""
        for number, (file, colour) in colours.items():
            other, expected = self.first.setdefault(number, (file, colour))
            if colour != expected:
                return (
                    f"{number} has the palette's colour {expected} in {other}, and {colour} in {file}: one class or "
                    "two? Masks keep their numbers: save all with one palette"
                )
        return ""

    def conflict_of(self, file: str, colours: Mapping[int, tuple[int, ...]]) -> str:
        """Add the colours of one file."""
        return self.conflict({number: (file, colour) for number, colour in colours.items()})


def is_other_aspect(sides: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether two pictures, (height, width) each, differ in their ratio by more than rounding a side does."""
    (height, width), (own_height, own_width) = sides, others
    return abs(height * own_width - width * own_height) > 2 * max(*sides, *others)


def ask_of_files(path: str, texts: Sequence[str], where: str) -> None:
    """Raise SourceError if all texts of an input are names of files, which hold what a model is to see."""
    if not texts or not all(text.strip().lower().endswith(_FILES) for text in texts):
        return
    raise SourceError(
        f"{where} holds names of files, such as {shown(texts[0])}, and no content of theirs: list images and labels in "
        "a .csv (hpcdl docs own-table), or give a reader of your own (--reader FILE.py:NAME). For the names as text "
        f"give --input {typed(path + '=NAME')}"
    )
