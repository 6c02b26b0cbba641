"""What is doubtful in the numbers of a source: marks of missing values, mixed units, shared windows, odd masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdl.core.units import counted
from hpcdl.data.format.manifest import Field, is_picture, may_be_picture
from hpcdl.data.sources.base.labels import FEW_CLASSES
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array, SourceFacts
from hpcdl.data.sources.base.values import EXACT, LOOKED_AT, largest, rounded_away

_MARKS = (-99, -999, -9999, -99999, -999999, 99, 999, 9999, 99999, 999999, 99.9, 999.9, 9999.9, -99.9, -999.9,
          -32768, -(2**31), 1e20, 1e30, 1e36, 9.969209968386869e36, -1e20, -1e30, -1e34,
          -3.4028234663852886e38, 3.4028234663852886e38, -1.7976931348623157e308)  # fmt: skip
"""Numbers that files have for missing ones: of netCDF, CMIP, GDAL, and tables."""
_LOW_MARKS, _LOW_GAP, _FEWEST_MARKED, _LEAST_DIFFERENT = (0, -1), 0.2, 2, 20
"""Numbers for missing ones among positive ones (no glucose of 0, no age of -1): the part of the others' range that they
are below it, how many there must be, and the different numbers that make the others a quantity."""
_NUMBERS_SHOWN = 5
_APART, _DRAWN, _LEAST_COMPARED = 10, 100_000, 100
"""Splits are compared by about _DRAWN values each, if there are _LEAST_COMPARED."""
_WINDOWS, _LEAST_OVERLAP, _LONGEST_WINDOW = 4, 3, 100_000
"""Samples compared to find overlapping windows, the values that they must share, and the longest that are compared."""
_COMPARED, _READ, _FEW = 32, 1 << 22, 10
"""Windows of a split that are searched in train, the values of train that are read, and the part (one in _FEW) that a
border in time may share."""
_LAST_CODES = frozenset({9, 88, 98, 99, 888, 998, 999, 9998, 9999})
_CODES = _LAST_CODES | {7, 8, 66, 77, 96, 97, 666, 777, 996, 997, 7777, 8888, 9996, 9997}
_CODES_BELOW = _CODES | set(range(1, 10))
"""Numbers of surveys for answers that are missing (refused, not known), those that are the last, and negative ones."""
_MOST_ANSWERS, _FEWEST_CODED = 30, 5
_FEWEST_EMPTY = 10
COLOURS_READ, _SURE = 16 << 20, 5
"""Bytes of a split's pictures whose colours are compared with another's, and the standard errors that make sure."""
_PADDED, _SHORTEST_PADDED, _FEWEST_LENGTHS, _RARE = 64, 8, 4, 0.01
"""Series that are looked at for padding, the length from which on they are, the different lengths that they must have,
and the part of their own values that may be like the padding."""
_COLOURS_DRAWN = 1 << 16
"""Most pixels of a piece of masks whose colours are counted."""
_MOST_ROWS = 1 << 14
_FACTORS, _DRAWN_APART, _GAP = (10, 100, 255, 1000, 65535, 1e6), 100, 2
"""Factors between usual units, and the part (one in _DRAWN_APART) of values that makes a range of its own."""
_UNEVEN, _LARGE = 1000, 100
_PICTURES, _BYTES_FROM = 16, 100
"""Pictures that are looked at, and the number from which on floats are not scaled: pixels from 0 to 255."""


def doubts(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> list[str]:
    """Return what is doubtful in the numbers of a field, each in a sentence; `splits` are those of the arrays."""
    return [
        line
        for line in (
            marks_of_missing(field, arrays),
            mixed_units(field, arrays) or scales_apart(field, arrays, splits),
            windows_shared(field, arrays, splits),
            padding(field, arrays),
            codes_of_missing(field, arrays),
            _colours_of(field, arrays, splits),
        )
        if line
    ]


def marks_of_missing(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe a number that often stands for a missing one, far from all others at its place; empty if none does.

    Looks at the first GiB of each array. The pixels of a picture or a volume count as one place.
    """
    if field.kind != "numbers" or not all(array.stored for array in arrays):
        return ""

    def rows() -> Iterator[Array]:
        for chunk in (chunk for array in arrays for chunk in itertools.islice(array.chunks(), LOOKED_AT)):
            yield chunk.reshape(-1, 1) if len(field.shape) > 1 else chunk.reshape(len(chunk), -1)

    return mark_of_missing(field.name, np.dtype(field.dtype), rows, low=len(field.shape) < 2)


def mark_of_missing(name: str, dtype: np.dtype[Any], rows: Callable[[], Iterable[Array]], *, low: bool = False) -> str:
    """Describe such a number among `rows`, which returns pieces of shape (N, places) again at each call.

    With `low` also 0 or -1 below positive numbers; a picture's background is one.
    """
    # No value of a byte is odd among others.
    if dtype.kind not in "if" or dtype.itemsize < 2:
        return ""
    limits = np.iinfo(dtype) if dtype.kind == "i" else np.finfo(dtype)
    fitting = [mark for mark in _MARKS if float(limits.min) <= mark <= float(limits.max)]
    marks = np.array(fitting, np.float64).astype(dtype)
    # Two passes, because most fields have no such number at a bound, and are done after the first.
    bounds = [(np.fmin.reduce(values), np.fmax.reduce(values)) for values in rows() if len(values)]
    if not bounds:
        return ""
    least_seen, most_seen = (
        np.fmin.reduce([smallest for smallest, _ in bounds]),
        np.fmax.reduce([smallest for _, smallest in bounds]),
    )
    if least_seen.min() == most_seen.max() and sum(map(len, rows())) > 1:
        return f"{name}: all values seen are {least_seen[0]:g}: is there anything to learn from them?"
    is_low = np.isin(least_seen, _LOW_MARKS) & low & ~np.isin(most_seen, marks)
    mark = np.where(np.isin(least_seen, marks) | is_low, least_seen, most_seen)
    places = np.flatnonzero(np.isin(mark, marks) | is_low)
    if not len(places):
        return ""
    count, least, most = np.zeros(len(places), np.int64), np.full(len(places), np.inf), np.full(len(places), -np.inf)
    for values in (values[:, places].astype(np.float64) for values in rows() if len(values)):
        is_mark = values == mark[places]
        count += is_mark.sum(0)
        least = np.fmin(least, np.fmin.reduce(np.where(is_mark, np.inf, values)))
        most = np.fmax(most, np.fmax.reduce(np.where(is_mark, -np.inf, values)))
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.minimum(np.abs(mark[places] - least), np.abs(mark[places] - most))
        below = (least > 0) & (gap > _LOW_GAP * (most - least)) & (count >= _FEWEST_MARKED)
        odd = np.flatnonzero((least <= most) & np.where(is_low[places], below, gap > most - least))
    first = next(iter(rows()))[:_MOST_ROWS]
    kept = [at for at in odd.tolist() if not is_low[places[at]] or
            len(np.unique(first[:, places[at]])) >= _LEAST_DIFFERENT]  # fmt: skip
    if not kept:
        return ""
    at, *others = kept
    where = f" at index {places[at]}" if len(least_seen) > 1 else ""
    also = ", ".join(f"{places[other]}" for other in others[:_NUMBERS_SHOWN])
    more = f" (and such at index {also}{', ...' if len(others) > _NUMBERS_SHOWN else ''})" if others else ""
    return (
        f"{name}: {counted(int(count[at]), 'value')} of {mark[places[at]]:g}{where}, all others {least[at]:g} to "
        f"{most[at]:g}{more}: a mark of missing values? It stays a number; if so, write NaN in the source and give "
        "--nan skip"
    )


def _colours_of(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    if len({*splits}) < 2 or not is_picture(field.shape) or field.shape[-1] != 3 or not all(map(_is_plain, arrays)):
        return ""
    most = max(1, COLOURS_READ // (math.prod(field.shape) * np.dtype(field.dtype).itemsize) // len(arrays))
    means: dict[str, list[Array]] = {}
    for array, split in zip(arrays, splits, strict=True):
        means.setdefault(split, []).append(array.spread(min(most, _MOST_ROWS)).mean((1, 2), dtype=np.float64))
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
        if len(apart) >= _FEWEST_EMPTY:
            known[split] = float(apart.mean()), float(apart.std() / math.sqrt(len(apart)))
    for (one, (first, doubt)), (two, (second, other)) in itertools.combinations(known.items(), 2):
        if first * second < 0 and abs(first) > _SURE * doubt and abs(second) > _SURE * other:
            red, blue = (one, two) if first > 0 else (two, one)
            return (
                f"the first colour is brighter than the last in {red}, and darker in {blue}: is one RGB and the other "
                "BGR, as OpenCV reads? Write them alike"
            )
    return ""


def codes_of_missing(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe columns of few whole numbers with codes for answers that are missing; empty if there is none."""
    width = math.prod(field.shape)
    if (
        field.kind != "numbers"
        or field.role == "target"
        or len(field.shape) > 1
        or width > LOOKED_AT
        or np.dtype(field.dtype).kind not in "fi"
        or not all(map(_is_plain, arrays))
    ):
        return ""
    most = max(1, min(_MOST_ROWS, _READ // width) // len(arrays))
    rows = np.concatenate([array.spread(most).reshape(-1, width) for array in arrays])
    found: dict[int, str] = {}
    for at, column in enumerate(rows.T):
        values, counts = _counts_of(column)
        if odd := missing_codes(values, counts):
            answers = [value for value in values if value not in odd]
            where = f" at index {at}" if width > 1 else ""
            found[at] = f"{', '.join(map(str, odd))}{where} beside {answers[0]} to {answers[-1]}"
    if not found:
        return ""
    also = ", ".join(map(str, [*found][1 : _NUMBERS_SHOWN + 1])) + (", ..." if len(found) > _NUMBERS_SHOWN + 1 else "")
    more = f" (and such at index {also})" if also else ""
    return (
        f"{field.name}: {next(iter(found.values()))}{more}: codes of a survey for missing answers? They stay numbers; "
        "if so, write NaN in the source and give --nan skip"
    )


def _counts_of(column: Array) -> tuple[list[int], list[int]]:
    values, counts = np.unique(column[np.isfinite(column)], return_counts=True)
    if len(values) > _MOST_ANSWERS or (values % 1).any():
        return [], []
    return [int(value) for value in values], counts.tolist()


def missing_codes(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return those of a column's numbers (sorted) that surveys use for missing answers: 1, 2, 3, and then 7, 9.

    The others are 0, 1, 2, ... or 1, 2, ...; between these and the codes numbers are left out.
    """
    answers = [value for value in values if value >= 0]
    if len(answers) < 2 or answers[0] > 1:
        return []
    scale = next((at for at, value in enumerate(answers) if value != answers[0] + at), len(answers))
    low, high = [value for value in values if value < 0], answers[scale:]
    low = low if low and low[-1] < answers[0] - 1 and {-value for value in low} <= _CODES_BELOW else []
    high = high if high and high[-1] in _LAST_CODES and set(high) <= _CODES else []
    few = sum(count for value, count in zip(values, counts, strict=True) if value in (*low, *high))
    single = len(low) + len(high) == 1 and (*low, *high)[0] in _MARKS  # which is said as a mark far from others
    rare = few < max(_FEWEST_CODED, sum(counts) // _DRAWN_APART)
    return [] if scale < 2 or single or rare else [*low, *high]


def scales_apart(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe two splits whose numbers spread _APART times as far as each other's, as if only one was normalised.

    The spread is that of 90 % of the values, which a few outliers leave alone.
    """
    if field.kind != "numbers" or field.dtype == "bool" or not all(array.stored for array in arrays):
        return ""
    bounds: dict[str, tuple[float, float]] = {}
    for split in dict.fromkeys(splits):
        own = [array for array, name in zip(arrays, splits, strict=True) if name == split]
        step = max(1, sum(math.prod(array.shape) for array in own) // _DRAWN)
        while math.gcd(step, math.prod(own[0].shape[1:])) > 1:  # else some columns would never be drawn
            step += 1
        chunks = (chunk for array in own for chunk in itertools.islice(array.chunks(), LOOKED_AT))
        values = np.concatenate([np.empty(0), *(chunk.reshape(-1)[::step].astype(np.float64) for chunk in chunks)])
        values = values[np.isfinite(values)]
        if len(values) >= _LEAST_COMPARED:
            low, high = np.quantile(values, (0.05, 0.95)).tolist()
            bounds[split] = (low, high)
    by_spread = sorted(bounds, key=lambda split: bounds[split][1] - bounds[split][0])
    if len(by_spread) < 2:
        return ""
    narrow, wide = by_spread[0], by_spread[-1]
    (low, high), (lowest, highest) = bounds[narrow], bounds[wide]
    if not 0 < _APART * (high - low) < highest - lowest:
        return ""
    return (
        f"{field.name}: most values are {low:.3g} to {high:.3g} in {narrow}, and {lowest:.3g} to {highest:.3g} in "
        f"{wide}: was one of them normalised? Scale both alike"
    )


def mixed_units(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe numbers of one field in two units, in two files for example; empty if there are none.

    Of series and volumes the standard deviations of samples are compared, of short vectors the values at each place.
    """
    dtype, width = np.dtype(field.dtype), math.prod(field.shape)
    if field.kind != "numbers" or dtype.kind not in "fi" or not all(map(_is_plain, arrays)):
        return ""
    most = max(1, min(_MOST_ROWS, _READ // width) // len(arrays))
    rows = np.concatenate([array.spread(most).reshape(-1, width) for array in arrays]).astype(np.float64)
    if len(field.shape) > 1 or width > LOOKED_AT:
        with np.errstate(over="ignore", invalid="ignore"):
            line = two_units(rows.std(1))
        return f"{field.name}: standard deviations of samples are {line}" if line else ""
    for at, column in enumerate(rows.T):
        if line := two_units(column):
            return f"{field.name}: values{f' at index {at}' if width > 1 else ''} are {line}"
    return ""


def unscaled(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe numbers of an input that reach _LARGE, or are _UNEVEN times as large at one place as at another.

    Of a target those that reach _UNEVEN, or stay below one divided by it.
    """
    dtype, width = np.dtype(field.dtype), math.prod(field.shape)
    # Whole numbers may be words of a text, of which a model has a table.
    columns = field.kind == "numbers" and len(field.shape) < 2
    is_target = field.role == "target"
    if (
        not columns
        or dtype.kind not in ("fiu" if is_target else "f")
        or width > _DRAWN
        or not all(map(_is_plain, arrays))
    ):
        return ""
    most = max(1, min(_MOST_ROWS, (_READ >> 2) // width) // len(arrays))
    rows = np.abs(np.concatenate([array.spread(most).reshape(-1, width) for array in arrays]).astype(np.float64))
    # Of most values, because a few outliers are no scale.
    tops = np.quantile(np.where(np.isfinite(rows), rows, 0), 0.95, axis=0)
    places = np.flatnonzero(tops > 0)
    if not len(places):
        return ""
    least, greatest = int(places[tops[places].argmin()]), int(tops.argmax())
    reached = [f"{tops[at]:.3g}" + (f" at index {at}" if width > 1 else "") for at in (least, greatest)]
    # A thousandth: a thousand times as much may be beyond float64.
    lowest, highest = tops[least], tops[greatest]
    apart = highest / _UNEVEN >= lowest
    if is_target:
        if not apart and 1 / _UNEVEN <= highest < _UNEVEN:
            return ""
        return (
            f"{field.name}: numbers reach {', and '.join(reached if apart else reached[1:])}, and training does not "
            "scale targets: write them in a unit in which they are near 1"
        )
    if width > LOOKED_AT or not apart:
        reached = reached[1:] if highest >= _LARGE else []
    if not reached:
        return ""
    return (
        f"{field.name}: numbers reach {', and '.join(reached)}: unless the model scales them, give --normalise mean-std"
    )


def two_units(values: Array) -> str:
    """Describe numbers of two ranges that are one in two usual units (m and cm); empty if they are not."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _two_units(np.sort(values[np.isfinite(values)]))


def _two_units(ordered: Array) -> str:
    least = max(_FEWEST_EMPTY, len(ordered) // _DRAWN_APART)
    if len(ordered) < 2 * least + 1:
        return ""
    at = least + int(np.diff(ordered)[least - 1 : -least].argmax())
    low, high = ordered[:at], ordered[at:]
    if min(len(np.unique(low)), len(np.unique(high))) < _FEWEST_EMPTY or high[0] - low[-1] <= low[-1] - low[0]:
        return ""
    gaps = np.sort(np.diff(ordered)[least - 1 : -least])
    if len(gaps) > 1 and gaps[-1] < _GAP * gaps[-2]:
        return ""  # of many columns without units one has such a gap by chance
    first, second = (np.quantile(own, (0.1, 0.5, 0.9)) for own in (low, high))
    spread = second[2] - second[0]
    units = {"273.15 more": first + 273.15, **{f"{factor:g} times as much": first * factor for factor in _FACTORS}}
    for what, expected in units.items():
        alike = 0.5 < (expected[2] - expected[0]) / spread < 2 if spread else False
        if alike and (np.abs(expected - second) < spread / 3).all():
            return (
                f"{low[0]:.3g} to {low[-1]:.3g}, and {high[0]:.3g} to {high[-1]:.3g} in {len(high)} of {len(ordered)} "
                f"seen, which is {what}: are there two units? Write them alike"
            )
    return ""


def _is_plain(array: PlacedArray) -> bool:
    return array.stored and not array.offsets and not array.text and bool(array.shape)


def never_written(split: str, column: Sequence[PlacedArray]) -> str:
    """Describe samples at the end of a split that are 0 in each of its arrays, as rows that were made and not filled.

    Empty if there are fewer than _FEWEST_EMPTY of them.
    """
    plain = [array for array in column if _is_plain(array)]
    if not plain or any(array.dtype.kind not in "fiu" for array in plain):
        return ""
    most = max(_READ // max(1, sum(math.prod(array.shape[1:]) for array in plain)), _FEWEST_EMPTY)
    most = min(most, *(array.num_samples for array in plain))
    ends = [array.rows(array.num_samples - most, most) for array in plain]
    filled = np.logical_or.reduce([rows.reshape(most, -1).any(1) for rows in ends])
    count = int(filled[::-1].argmax()) if filled.any() else most
    if not _FEWEST_EMPTY <= count < plain[0].num_samples:
        return ""
    return (
        f"the last {'' if filled.any() else 'over '}{count} samples of {split} are 0 in every array: rows that were "
        "never filled? If so, take them out"
    )


def step_of_windows(facts: SourceFacts) -> int:
    """Return by how many values the first samples are each shifted against the one before; 0 unless they overlap."""
    if not facts.fields or not facts.arrays or facts.arrays[0].offsets or not facts.arrays[0].shape:
        return 0
    place = facts.arrays[0]
    length, width = place.shape[0], math.prod(place.shape[1:])
    if not _LEAST_OVERLAP < length <= _LONGEST_WINDOW or np.dtype(place.dtype).kind not in "fiu":
        return 0
    values = np.fromfile(place.file, place.dtype, _WINDOWS * length * width, offset=place.offset)
    rows = values[: len(values) // (length * width) * length * width].reshape(-1, length, width)
    # Of fewer samples, what was read is in part not theirs. Constant windows would fit at every step.
    if facts.num_samples < _WINDOWS or len(rows) < _WINDOWS or not (rows != rows[:, :1]).any((1, 2)).all():
        return 0
    steps = range(1, length - _LEAST_OVERLAP + 1)
    return next((step for step in steps if np.array_equal(rows[:-1, step:], rows[1:, : length - step])), 0)


def padding(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe the number that fills series of one length behind their own ends, or before; empty if none does.

    Within a series it is rare, and samples have different numbers of it.
    """
    length, width = field.shape[0] if field.shape else 0, math.prod(field.shape[1:])
    if field.kind != "numbers" or len(field.shape) > 2 or length < _SHORTEST_PADDED or not all(map(_is_plain, arrays)):
        return ""
    if np.dtype(field.dtype).kind not in "fiu" or (len(field.shape) > 1 and field.dtype == "uint8"):
        return ""
    most = max(1, min(_PADDED, _READ // (length * width)) // len(arrays))
    rows = np.concatenate([array.spread(most).reshape(-1, length, width) for array in arrays])
    for where, own in (("ends", rows[:, ::-1]), ("beginnings", rows)):
        values, counts = np.unique(own[(own[:, 0] == own[:, 0, :1]).all(1), 0, 0], return_counts=True)
        if not len(values):
            continue
        filler = values[counts.argmax()]
        fills = (own == filler).all(2)
        runs = np.where(fills.all(1), length, fills.argmin(1))
        within = (fills.sum() - runs.sum()) / max(1, fills.size - runs.sum())
        held = np.unique(length - runs[runs > 0])
        uneven = len(held) >= _FEWEST_LENGTHS and held[-1] - held[0] >= length / _FEW
        if uneven and 2 * (runs > 0).sum() >= len(rows) and within < _RARE and len(np.unique(rows[:_COMPARED])) > 2:
            masks = "a model can mask it (keras.layers.Masking, or Embedding with mask_zero)"
            meaning = f"training takes it for values; {masks}" if field.role == "input" else "the loss counts it, too"
            return (
                f"{field.name}: {filler:g} fills the {where} of {(runs > 0).sum()} of {len(rows)} samples looked at "
                f"({held[0]} to {held[-1]} of {length} are others): padding? If so, {meaning}"
            )
    return ""


def windows_shared(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe a split of windows of a series that mostly overlap with those of train; empty if there is none.

    A border that divides a series in time shares few windows, and is usual.
    """
    length, width = field.shape[0] if field.shape else 0, math.prod(field.shape[1:])
    plain = all(array.stored and not array.offsets for array in arrays) and field.kind == "numbers"
    if "train" not in splits or field.role != "input" or not plain or is_picture(field.shape) or width < 1:
        return ""
    if length < 2 * _LEAST_OVERLAP or length * length * width > _READ or np.dtype(field.dtype).kind not in "fiu":
        return ""
    half = length // 2
    factors = np.random.default_rng(1).integers(1, 1 << 63, half * width, np.uint64)

    def keys(values: Array) -> Array:
        """Return a number for each row of `values`, computed from its bits."""
        bits = np.ascontiguousarray(values).view(f"u{values.itemsize}").reshape(len(values), -1)
        summed: Array = (bits * factors).sum(1, dtype=np.uint64)
        return summed

    def later(values: Array) -> Iterator[Array]:
        return (keys(values[:, at : at + half]) for at in range(1, length - half + 1))

    train = [array.values() for array, name in zip(arrays, splits, strict=True) if name == "train"]
    starts = np.concatenate([keys(values[: _READ // (length * width), :half]) for values in train])
    tails = np.concatenate([own for values in train for own in later(values[-_COMPARED:])])
    for split in dict.fromkeys(splits):
        others = [array.values() for array, name in zip(arrays, splits, strict=True) if name == split != "train"]
        drawn = [row for values in others for row in values[:: len(values) // _COMPARED + 1]][:_COMPARED]
        drawn = [row for row in drawn if 2 * len(np.unique(row[:half], axis=0)) >= half]  # others are alike by chance
        if not drawn:
            continue
        rows = np.stack(drawn)
        shared = np.isin(keys(rows[:, :half]), tails) | np.isin(np.stack([*later(rows)]), starts).any(0)
        if _FEW * int(shared.sum()) > len(rows):
            return (
                f"{field.name}: {shared.sum()} of {len(rows)} samples of {split} looked at overlap with samples of "
                f"train, as windows of one series do: results on {split} are too good. Divide it, then cut windows"
            )
    return ""


def as_fed(field: Field, arrays: Sequence[PlacedArray], *, normalised: bool) -> str:
    """Describe how training changes a field's numbers; empty if it does not, or if it scales them by statistics."""
    if field.kind != "numbers" or (normalised and field.role == "input"):
        return ""
    if field.role == "target" and len(field.shape) > 1 and np.dtype(field.dtype).kind in "iu":
        chunks = (itertools.islice(array.chunks(), LOOKED_AT) for array in arrays if array.stored)
        if is_picture(field.shape) and field.shape[-1] > 1:
            return colours_as_classes(field, itertools.chain.from_iterable(chunks))
        return mask_with_gaps(field.name, itertools.chain.from_iterable(chunks))
    if field.dtype == "float64":
        coarse = rounded_away(chunk for array in arrays for chunk in array.chunks())
        scaled = " unless --normalise scales them first" if field.role == "input" else ""
        if coarse:
            return f"{field.name}: {coarse} in training{scaled}"
    if field.role != "input":
        return ""
    if field.dtype == "uint8":
        what = "scaled to 0..1, as pictures are" if is_picture(field.shape) else "fed as they are"
        return f"{field.name}: bytes, {what} in training; train --scale chooses"
    dtype, most = np.dtype(field.dtype), 0.0
    as_picture = is_picture(field.shape) or (dtype.kind in "iu" and may_be_picture(field.shape))
    if dtype.kind in "iu" and dtype.itemsize > 2:  # smaller ones are exact in float32
        most = max(largest(chunk) for array in arrays for chunk in array.chunks())
        if most > EXACT:
            return f"{field.name}: whole numbers up to {most}, and training rounds those over {EXACT} to float32"
    elif as_picture and all(map(_is_plain, arrays)):
        drawn = min(_PICTURES, _READ // math.prod(field.shape))
        rows = [np.abs(array.spread(drawn).astype(np.float64)) for array in arrays if drawn]
        most = max((float(np.fmax.reduce(own, axis=None)) for own in rows), default=0)
    if not as_picture or most < (2 if dtype.kind in "iu" else _BYTES_FROM):
        return ""
    return f"{field.name}: {field.dtype} up to {most:g}, fed as they are; pixels saved as uint8 are scaled to 0..1"


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
    numbers = ", ".join(map(str, sorted(found)[:_NUMBERS_SHOWN])) + (", ..." if len(found) > _NUMBERS_SHOWN else "")
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


def is_other_aspect(sides: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether two pictures, (height, width) each, differ in their ratio by more than rounding a side does."""
    (height, width), (own_height, own_width) = sides, others
    return abs(height * own_width - width * own_height) > 2 * max(*sides, *others)
