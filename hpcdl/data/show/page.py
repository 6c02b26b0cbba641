"""The HTML page of a data folder: one file with embedded drawings and no script, in the reader's colour scheme."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.pages.page import CURVES, channels, escaped
from hpcdl.core.pages.page import page as shell
from hpcdl.core.units import format_bytes, format_count
from hpcdl.data.format.manifest import Field
from hpcdl.data.show.inspection import DrawnSample, Overview, SplitInspection

Array = npt.NDArray[Any]
_MOST_CLASSES = 50
_MOST_SIDE = 256
_MOST_CURVES = 16
_MOST_POINTS = 1024
_FEW_VALUES = 8
_LONGEST_TEXT = 400
_CURVE_WIDTH, _CURVE_HEIGHT = 220, 90
_STYLE = """.bar{display:inline-block;height:.7em;background:var(--curve-0);margin-right:.4em}
.samples{display:flex;flex-wrap:wrap;gap:1rem}figcaption{color:var(--soft);font-size:.9rem}
.sample{border:1px solid var(--line);border-radius:6px;padding:.6rem;width:min(15rem,calc(50% - .5rem));margin:0}
.sample img{width:100%;max-height:14rem;object-fit:contain;image-rendering:pixelated;display:block}
.sample svg{width:100%;height:auto;display:block}.sample p{margin:.3rem 0}
.sample polyline{fill:none;stroke:var(--curve-0);stroke-width:1.2}
"""


def page(overview: Overview) -> str:
    """Return the whole page as text."""
    name = f"Data: {overview.inspection.name}"
    return shell(name, _body(overview), style=_STYLE, see="docs/reference/data.md")


def _body(overview: Overview) -> Iterator[str]:
    yield "<main>"
    yield from _contents(overview)
    yield from _repeats(overview)
    yield from _balance(overview.inspection.splits)
    yield from _ranges(overview)
    yield from _samples(overview)
    yield "</main>"


def _contents(overview: Overview) -> Iterator[str]:
    about = overview.inspection
    yield "<section><h2>What is in it</h2>"
    yield from _table(("field",), [(field.describe(),) for field in overview.fields])
    yield from _table(
        ("split", "samples", "shards", "bytes"),
        [(s.name, format_count(s.num_samples), str(s.num_shards), format_bytes(s.num_bytes)) for s in about.splits],
    )
    if about.num_skipped:
        yield f'<p class="warn">{about.num_skipped} samples were left out; the manifest names them.</p>'
    yield "</section>"


def _repeats(overview: Overview) -> Iterator[str]:
    yield "<section><h2>Samples that are there twice</h2>"
    if overview.repeats is None:
        yield '<p class="soft">Not looked for: compressed samples have no checksums of their own.</p>'
    elif not overview.repeats:
        yield "<p>None: no two samples have the same inputs, within a split or across splits.</p>"
    else:
        for pair in overview.repeats:
            described_twin = "another sample of it" if pair.split == pair.other else f"a sample of {pair.other}"
            yield (
                f'<p class="warn">{format_count(pair.num_samples)} samples of {escaped(pair.split)} have the inputs of '
                f"{escaped(described_twin)}, bit by bit; the first is sample {pair.example}.</p>"
            )
        if any(pair.split != pair.other for pair in overview.repeats):
            yield "<p>What is in two splits is learnt by heart, and evaluated as if it were new.</p>"
    yield "</section>"


def _balance(splits: Sequence[SplitInspection]) -> Iterator[str]:
    names = list(splits[0].histogram)
    if not names:
        return
    most_samples = max(1, *(count for split in splits for count in split.histogram.values()))
    yield "<section><h2>Classes</h2>"
    empty = [name for name in names if not any(split.histogram[name] for split in splits)]
    if empty:
        yield f'<p class="warn">{len(empty)} classes have no sample: {escaped(", ".join(empty[:10]))}</p>'
    yield '<div class="wide" tabindex="0"><table><thead><tr><th>class</th>'
    yield "".join(f"<th>{escaped(split.name)}</th>" for split in splits) + "</tr></thead><tbody>"
    for name in names[:_MOST_CLASSES]:
        cells = (
            f'<td><span class="bar" style="width:{8 * split.histogram[name] / most_samples:.3f}rem"></span>'
            f"{format_count(split.histogram[name])}</td>"
            for split in splits
        )
        yield f"<tr><th>{escaped(name)}</th>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if len(names) > _MOST_CLASSES:
        yield f'<p class="soft">And {format_count(len(names) - _MOST_CLASSES)} more classes.</p>'
    yield "</section>"


def _ranges(overview: Overview) -> Iterator[str]:
    if not overview.ranges:
        return
    yield "<section><h2>Values</h2>"
    rows = [
        (
            measured.field,
            measured.split,
            *(f"{value:.4g}" for value in (measured.low, measured.high, measured.mean, measured.std)),
            f"{format_count(measured.missing)} of {format_count(measured.count)}" if measured.missing else "none",
            format_count(measured.infinite) if measured.infinite else "none",
            format_count(measured.num_samples),
        )
        for measured in overview.ranges
    ]
    yield from _table(
        ("field", "split", "lowest", "highest", "mean", "deviation", "missing (NaN)", "infinite", "samples read"), rows
    )
    yield "</section>"


def _samples(overview: Overview) -> Iterator[str]:
    if not overview.samples:
        return
    split = escaped(overview.samples[0].split)
    yield f'<section><h2>{len(overview.samples)} samples of {split}, drawn by the seed</h2>\n<div class="samples">'
    for sample in overview.samples:
        yield f'<figure class="sample"><figcaption>sample {sample.number}</figcaption>'
        for field in overview.fields:
            yield from _drawn(field, sample, overview.fields)
        yield "</figure>"
    yield "</div></section>"


def _drawn(field: Field, sample: DrawnSample, fields: Sequence[Field]) -> Iterator[str]:
    """Draw a value by its kind: an image, a mask over its image, a curve, numbers or text."""
    value, name = sample.values[field.name], escaped(field.name)
    if isinstance(value, str):
        text = value if len(value) <= _LONGEST_TEXT else f"{value[: _LONGEST_TEXT - 3]}..."
        yield f"<p><b>{name}</b> {escaped(' '.join(text.split()))}</p>"
        return
    array = np.asarray(value)
    label = f"{field.name} of sample {sample.number}"
    picture, remarks = _as_picture(array)
    under = _picture_below(array, field, sample, fields)
    if under is not None:
        yield f"<p><b>{name}</b> over its image</p>{_image(_masked(under, array), label)}"
    elif picture is not None:
        yield f"<p><b>{name}</b>{remarks}</p>{_image(_scaled(picture), label)}"
    elif array.ndim and array.size > _FEW_VALUES and array.ndim <= 2:
        yield f"<p><b>{name}</b> {_between(array)}</p>{_curves(array, label)}"
    else:
        omission = " ..." if array.size > _FEW_VALUES else ""
        numbers = ", ".join(f"{number:.6g}" for number in array.reshape(-1)[:_FEW_VALUES].astype(np.float64))
        yield f"<p><b>{name}</b> {numbers or 'nothing'}{omission}</p>"


def _as_picture(array: Array) -> tuple[Array | None, str]:
    """Return an array as an image (H, W) or (H, W, 3), if possible, and say which part of it that is."""
    if array.ndim == 2 and min(array.shape) > _MOST_CURVES:
        return array, ""
    if array.ndim == 3 and array.shape[2] in (1, 3, 4) and min(array.shape[:2]) > 1:
        return (array[:, :, 0] if array.shape[2] == 1 else array[:, :, :3]), ""
    if array.ndim >= 3 and min(array.shape) > 0:
        middle = array.shape[0] // 2
        inner, remarks = _as_picture(array[middle])
        if inner is None and array.ndim == 3:
            inner = array[middle]
        return inner, f", slice {middle} of {array.shape[0]}{remarks}"
    return None, ""


def _picture_below(array: Array, field: Field, sample: DrawnSample, fields: Sequence[Field]) -> Array | None:
    """Return the image that a mask belongs to: the first input of the same height and width."""
    flat = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if field.role != "target" or flat.ndim != 2 or flat.dtype.kind not in "bui":
        return None
    for other_field in fields:
        value = sample.values[other_field.name]
        if other_field.role == "input" and isinstance(value, np.ndarray) and value.shape[:2] == flat.shape:
            picture, _ = _as_picture(value)
            if picture is not None and picture.shape[:2] == flat.shape:
                return picture
    return None


def _scaled(picture: Array) -> Array:
    """Return pixels from 0 to 255; values that are not bytes are scaled between lowest and highest finite value."""
    if picture.dtype == np.uint8:
        return picture
    values = picture.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return np.nan_to_num((values - low) / ((high - low) or 1.0) * 255, nan=0, posinf=255, neginf=0).astype(np.uint8)


def _masked(picture: Array, mask: Array) -> Array:
    """Return the image in grey, with colours where the mask is not 0."""
    grey = _scaled(picture)
    grey = grey.mean(2).astype(np.uint8) if grey.ndim == 3 else grey
    colored = np.repeat(grey[:, :, np.newaxis], 3, 2).astype(np.float64)
    # 0 is the background: it has no colour, and class 1 has the first one.
    numbers = mask.reshape(mask.shape[:2]).astype(np.int64)
    colors = np.array([channels(color.dark) for color in CURVES])[(numbers - 1) % len(CURVES)]
    return np.where((numbers != 0)[:, :, np.newaxis], 0.4 * colored + 0.6 * colors, colored).astype(np.uint8)


def _image(pixels: Array, label: str) -> str:
    from PIL import Image

    buffer, image = io.BytesIO(), Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    image.save(buffer, format="PNG")
    return f'<img alt="{escaped(label)}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _curves(array: Array, label: str) -> str:
    """Draw a line for each feature of a series (time first), or a single line."""
    series = array.reshape(len(array), -1).astype(np.float64)
    # Time is the longer axis: such a series has its features first.
    if series.shape[1] > _MOST_CURVES and len(series) <= _MOST_CURVES:
        series = series.T
    series = series[:: math.ceil(len(series) / _MOST_POINTS), :_MOST_CURVES]
    finite = series[np.isfinite(series)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    lines = []
    for column in series.T:
        x = np.linspace(2, _CURVE_WIDTH - 2, len(column))
        y = _CURVE_HEIGHT - 4 - (column - low) / ((high - low) or 1.0) * (_CURVE_HEIGHT - 8)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if math.isfinite(b))
        lines.append(f'<polyline points="{points}"/>')
    box = f"0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}"
    return f'<svg role="img" aria-label="{escaped(label)}" viewBox="{box}">{"".join(lines)}</svg>'


def _between(array: Array) -> str:
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    return f"{float(finite.min()):.4g} to {float(finite.max()):.4g}" if finite.size else "no finite value"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide" tabindex="0"><table><thead><tr>' + "".join(f"<th>{escaped(cell)}</th>" for cell in header)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"
