"""What is doubtful in the numbers of a field: mixed units, unlike scales, places never written, and all of the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpcdl.data.format.manifest import Field, is_picture, may_be_picture
from hpcdl.data.sources.base.placed import PlacedArray
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.values import (
    EXACT,
    FEWEST,
    LOOKED_AT,
    MOST_ROWS,
    RARE_FROM,
    READ,
    is_plain,
    largest,
    rounded_away,
)
from hpcdl.data.sources.checks.missing import codes_of_missing, marks_of_missing
from hpcdl.data.sources.checks.pictures import colours_as_classes, colours_of, inverted, mask_with_gaps
from hpcdl.data.sources.checks.series import padding, windows_shared

_APART, _DRAWN, _LEAST_COMPARED = 10, 100_000, 100
"""Splits are compared by about _DRAWN values each, if there are _LEAST_COMPARED."""
_FACTORS, _GAP = (10, 100, 255, 1000, 65535, 1e6), 2
"""Factors between usual units."""
_SHORTEST, _JUMPS = 8, 1.25
"""Series and sides of pictures from which on neighbours are compared, and by how much more they differ as they are."""
_COMPARED, _USUAL, _SWAPPED = 256, 15, 3
"""Samples whose bytes are swapped, the powers of ten that usual floats stay within, and by how much more neighbours
differ in the wrong order of bytes."""
_UNEVEN, _LARGE = 1000, 100
_PICTURES, _BYTES_FROM = 16, 100
"""Pictures that are looked at, and the number from which on floats are not scaled: pixels from 0 to 255."""


def doubts(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> list[str]:
    """Return what is doubtful in the numbers of a field, each in a sentence; `splits` are those of the arrays."""
    return [
        line
        for line in (
            marks_of_missing(field, arrays),
            mixed_units(field, arrays) or scales_apart(field, arrays, splits) or file_apart(field, arrays, splits),
            windows_shared(field, arrays, splits),
            padding(field, arrays),
            codes_of_missing(field, arrays),
            colours_of(field, arrays, splits),
            wrapped(field, arrays) or bytes_swapped(field, arrays),
        )
        if line
    ]


def scales_apart(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe two splits whose numbers spread _APART times as far as each other's, as if only one was normalised.

    The spread is that of 90 % of the values, which a few outliers leave alone.
    """
    if field.kind != "numbers" or field.dtype == "bool" or not all(array.stored for array in arrays):
        return ""
    drawn: dict[str, Array] = {}
    for split in dict.fromkeys(splits):
        own = [array for array, name in zip(arrays, splits, strict=True) if name == split]
        step = max(1, sum(math.prod(array.shape) for array in own) // _DRAWN)
        while math.gcd(step, math.prod(own[0].shape[1:])) > 1:  # else some columns would never be drawn
            step += 1
        chunks = (chunk for array in own for chunk in itertools.islice(array.chunks(), LOOKED_AT))
        drawn[split] = np.concatenate(
            [np.empty(0), *(chunk.reshape(-1)[::step].astype(np.float64) for chunk in chunks)]
        )
    line = spreads_apart(drawn) or (inverted(drawn) if field.role == "input" and len(field.shape) > 1 else "")
    line = line or ranges_apart(drawn) or _columns_apart(field, arrays, splits)
    return f"{field.name}: {line}" if line else ""


def _columns_apart(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe a column of few whose numbers have another range in another split; empty if there is none."""
    width = math.prod(field.shape)
    if not 1 < width <= LOOKED_AT or len(field.shape) > 1 or not all(map(is_plain, arrays)):
        return ""
    most = max(1, min(MOST_ROWS, READ // width) // len(arrays))
    rows: dict[str, list[Array]] = {}
    for array, split in zip(arrays, splits, strict=True):
        rows.setdefault(split, []).append(array.spread(most).reshape(-1, width).astype(np.float64))
    joined = {split: np.concatenate(own) for split, own in rows.items()}
    lines = ((at, ranges_apart({split: own[:, at] for split, own in joined.items()})) for at in range(width))
    return next((f"at index {at} {line}" for at, line in lines if line), "")


def ranges_apart(drawn: Mapping[str, Array]) -> str:
    """Describe two splits between whose values is a gap wider than either range, or one of a single value.

    The range is that of 90 % of the values. Or one is from 0 to 1, and many numbers of the other are negative. Empty if
    there are no such splits.
    """
    signs: dict[str, tuple[float, float, float]] = {}
    bounds: dict[str, tuple[float, float]] = {}
    single: dict[str, float] = {}
    for split, values in drawn.items():
        finite = values[np.isfinite(values)]
        if len(finite) >= _LEAST_COMPARED:
            low, quarter, high = np.quantile(finite, (0.05, 0.25, 0.95)).tolist()
            bounds[split], signs[split] = (low, high), (float(finite.min()), quarter, float(finite.max()))
            single |= {split: low} if finite.min() == finite.max() else {}
    for (one, (low, high)), (two, (lowest, highest)) in itertools.permutations(bounds.items(), 2):
        if one in single and lowest < highest:
            return (
                f"all values seen are {low:.3g} in {one}, and most are {lowest:.3g} to {highest:.3g} in {two}: was "
                f"{one} never filled?"
            )
        if lowest - high > max(high - low, highest - lowest) > 0:
            return (
                f"most values are {low:.3g} to {high:.3g} in {one}, and {lowest:.3g} to {highest:.3g} in {two}: are "
                "there two units, or was one of them shifted? Write both alike"
            )
        if signs[one][0] >= 0 > signs[two][1] and signs[one][2] <= 1 and high > low:
            return (
                f"all values seen are from 0 to 1 in {one}, and many are negative in {two}: was one of them scaled "
                "otherwise? Scale both alike"
            )
    return ""


def spreads_apart(drawn: Mapping[str, Array]) -> str:
    """Describe two splits whose values, `drawn` from each, spread so unlike; empty if none do."""
    bounds: dict[str, list[float]] = {}
    for split, values in drawn.items():
        finite = values[np.isfinite(values)]
        if len(finite) >= _LEAST_COMPARED:
            bounds[split] = np.quantile(finite, (0.05, 0.95, 0.01, 0.99)).tolist()
    by_spread = sorted(bounds, key=lambda split: bounds[split][1] - bounds[split][0])
    if len(by_spread) < 2:
        return ""
    narrow, wide = by_spread[0], by_spread[-1]
    (low, high, *outer), (lowest, highest, *outermost) = bounds[narrow], bounds[wide]
    if not 0 < _APART * (high - low) < highest - lowest:
        return ""
    # Where one value in 20 is not 0, the bounds of most are 0 in one split by chance; those of nearly all are not.
    if _APART * (outer[1] - outer[0]) >= outermost[1] - outermost[0]:
        return ""
    return (
        f"most values are {low:.3g} to {high:.3g} in {narrow}, and {lowest:.3g} to {highest:.3g} in {wide}: was one of "
        "them normalised? Scale both alike"
    )


def mixed_units(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe numbers of one field in two units, in two files for example; empty if there are none.

    Of series and volumes the standard deviations of samples are compared, of short vectors the values at each place.
    """
    dtype, width = np.dtype(field.dtype), math.prod(field.shape)
    if field.kind != "numbers" or dtype.kind not in "fi" or not all(map(is_plain, arrays)):
        return ""
    most = max(1, min(MOST_ROWS, READ // width) // len(arrays))
    rows = np.concatenate([array.spread(most).reshape(-1, width) for array in arrays]).astype(np.float64)
    if len(field.shape) > 1 or width > LOOKED_AT:
        with np.errstate(over="ignore", invalid="ignore"):
            line = two_units(rows.std(1))
        return f"{field.name}: standard deviations of samples are {line}" if line else ""
    for at, column in enumerate(rows.T):
        if line := two_units(column):
            return f"{field.name}: values{f' at index {at}' if width > 1 else ''} are {line}"
    return ""


def wrapped(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe whole numbers that jump between neighbours less as the type with, or without, a sign; empty if none do.

    Bytes of a picture that are stored as int8 jump from 127 to -128.
    """
    dtype, length = np.dtype(field.dtype), field.shape[0] if field.shape else 0
    if field.kind != "numbers" or dtype.name not in ("int8", "int16", "uint16") or length < _SHORTEST:
        return ""
    if not all(map(is_plain, arrays)):
        return ""
    width = math.prod(field.shape)
    most = max(1, min(LOOKED_AT, READ // width) // len(arrays))
    rows = np.concatenate([array.spread(most).astype(dtype).reshape(-1, length, width // length) for array in arrays])
    other = rows.view(f"{'u' if dtype.kind == 'i' else 'i'}{dtype.itemsize}")
    apart = np.unique(rows[rows != other])
    jumps, jumps_of_other = (np.abs(np.diff(own.astype(np.int32), axis=1)).mean() for own in (rows, other))
    # A few such numbers are marks, and without a sign those between are none of negative ones.
    gap = dtype.kind == "i" or np.diff(np.unique(rows)).max(initial=0) > np.iinfo("int16").max
    if len(apart) < FEWEST or not gap or _JUMPS * jumps_of_other >= jumps:
        return ""
    return (
        f"{field.name}: neighbours differ by {jumps:.3g} on average, as {other.dtype} by {jumps_of_other:.3g}: was "
        f"{other.dtype} stored as {dtype}? Then write x.view('{other.dtype}')"
    )


def file_apart(field: Field, arrays: Sequence[PlacedArray], splits: Sequence[str]) -> str:
    """Describe a file whose numbers spread _APART times as far as those of all others, which are alike, or as little.

    Empty if there is none, as in simulations that differ from file to file.
    """
    width = math.prod(field.shape)
    one_split = len({*splits}) == 1 and 2 < len(arrays) <= LOOKED_AT
    if field.kind != "numbers" or not one_split or not all(map(is_plain, arrays)):
        return ""
    most = max(1, READ // width // len(arrays) // 4)
    spreads = []
    for array in arrays:
        values = array.spread(min(most, MOST_ROWS)).astype(np.float64)
        values = values[np.isfinite(values)]
        if len(values) < _LEAST_COMPARED:
            return ""
        spreads.append(float(np.subtract(*np.quantile(values, (0.95, 0.05)))))
    usual = float(np.median(spreads))
    odd = int(np.abs(np.log([max(spread, 1e-300) / max(usual, 1e-300) for spread in spreads])).argmax())
    others = [spread for at, spread in enumerate(spreads) if at != odd]
    ratio = spreads[odd] / usual if usual > 0 else 1.0
    if max(others) > 2 * min(others) or not (ratio >= _APART or 0 < ratio <= 1 / _APART):
        return ""
    return (
        f"{field.name}: in file {odd + 1} of {len(arrays)}, by name, most values spread over {spreads[odd]:.3g}, and "
        f"over {usual:.3g} in the others: is it in another unit? Write all alike"
    )


def bytes_swapped(field: Field, arrays: Sequence[PlacedArray]) -> str:
    """Describe numbers that have a usual size, or neighbours that are alike, in the other order of bytes alone."""
    dtype, width = np.dtype(field.dtype), math.prod(field.shape)
    if field.kind != "numbers" or dtype.kind not in "iuf" or dtype.itemsize < 2 or not all(map(is_plain, arrays)):
        return ""
    most = max(1, min(_COMPARED, READ // width) // len(arrays))
    rows = np.concatenate([array.spread(most).astype(dtype).reshape(-1, width) for array in arrays])
    other = rows.byteswap()
    if dtype.kind == "f":
        odd = _is_usual(other) and not _is_usual(rows) and dtype.itemsize > 2
    else:
        odd = _is_shifted(rows) or _jumps_more(*(own.reshape(-1, *field.shape) for own in (rows, other)))
    if not odd:
        return ""
    most, most_of_other = (np.abs(own[np.isfinite(own)].astype(np.float64)).max(initial=0) for own in (rows, other))
    seen = f"values reach {most:.3g}" if np.isfinite(rows).any() else "no value seen is finite"
    return (
        f"{field.name}: {seen}, and they reach {most_of_other:.3g} with their bytes in the other order: is it that of "
        "another machine? Then write x.byteswap()"
    )


def _is_usual(values: Array) -> bool:
    """Return whether most floats are finite, and within some powers of ten of each other and of 1."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)].astype(np.float64))
    if len(sizes) < FEWEST or len(sizes) < np.isnan(values).sum():
        return False
    low, high = np.log10(np.quantile(sizes, (0.05, 0.95)))
    return bool(-_USUAL < low <= high < _USUAL and high - low < _USUAL)


def _is_shifted(values: Array) -> bool:
    """Return whether whole numbers of 4 bytes or more use the upper half of them alone."""
    half = 1 << 4 * values.itemsize
    return values.itemsize > 2 and len(np.unique(values)) > 2 and not (values % half).any()


def _jumps_more(rows: Array, other: Array) -> bool:
    """Return whether neighbours differ much more in `rows` than in `other`; rows of one byte each tell nothing."""
    if rows.ndim < 2 or rows.shape[1] < _SHORTEST or not (rows % 256).any():
        return False
    jumps, jumps_of_other = (np.abs(np.diff(own.astype(np.float64), axis=1)).mean() for own in (rows, other))
    return bool(jumps > _SWAPPED * jumps_of_other)


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
        or not all(map(is_plain, arrays))
    ):
        return ""
    most = max(1, min(MOST_ROWS, (READ >> 2) // width) // len(arrays))
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
    least = max(FEWEST, len(ordered) // RARE_FROM)
    if len(ordered) < 2 * least + 1:
        return ""
    at = least + int(np.diff(ordered)[least - 1 : -least].argmax())
    low, high = ordered[:at], ordered[at:]
    if min(len(np.unique(low)), len(np.unique(high))) < FEWEST or high[0] - low[-1] <= low[-1] - low[0]:
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


def never_written(split: str, column: Sequence[PlacedArray]) -> str:
    """Describe samples at the end of a split that are 0 in each of its arrays, as rows that were made and not filled.

    Empty if there are fewer than FEWEST of them.
    """
    plain = [array for array in column if is_plain(array)]
    if not plain or any(array.dtype.kind not in "fiu" for array in plain):
        return ""
    most = max(READ // max(1, sum(math.prod(array.shape[1:]) for array in plain)), FEWEST)
    most = min(most, *(array.num_samples for array in plain))
    ends = [array.rows(array.num_samples - most, most) for array in plain]
    filled = np.logical_or.reduce([rows.reshape(most, -1).any(1) for rows in ends])
    count = int(filled[::-1].argmax()) if filled.any() else most
    if not FEWEST <= count < plain[0].num_samples:
        return ""
    return (
        f"the last {'' if filled.any() else 'over '}{count} samples of {split} are 0 in every array: rows that were "
        "never filled? If so, take them out"
    )


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
    elif as_picture and all(map(is_plain, arrays)):
        drawn = min(_PICTURES, READ // math.prod(field.shape))
        rows = [np.abs(array.spread(drawn).astype(np.float64)) for array in arrays if drawn]
        most = max((float(np.fmax.reduce(own, axis=None)) for own in rows), default=0)
    if not as_picture or most < (2 if dtype.kind in "iu" else _BYTES_FROM):
        return ""
    return f"{field.name}: {field.dtype} up to {most:g}, fed as they are; pixels saved as uint8 are scaled to 0..1"
