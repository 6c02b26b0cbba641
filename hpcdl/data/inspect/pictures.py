"""Sample pictures of a data folder as PNG files, to look at."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hpcdl.core.files import write_bytes
from hpcdl.data.dataset import Dataset, Split
from hpcdl.data.read.order import mixed, permuted
from hpcdl.data.read.reader import SplitReader


def write_pictures(dataset: Dataset, split: Split, count: int, folder: Path) -> list[Path]:
    """Write `count` samples of `split`, drawn by the data's seed, into `folder`: SPLIT-NUMBER-CLASS.png."""
    assert dataset.folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    reader = SplitReader(dataset.folder, dataset, split)
    positions = np.arange(min(count, split.num_samples), dtype=np.int64)
    ids = permuted(positions, split.num_samples, mixed(dataset.manifest.seed if dataset.manifest else 0, 31))
    written = []
    try:
        for sample, label in zip(ids.tolist(), reader.labels(ids).tolist(), strict=True):
            name = re.sub(r"[^\w.-]", "_", dataset.class_names[label])[:40]
            path = folder / f"{split.name}-{sample:08d}-{name}.png"
            write_bytes(path, _png(_pixels(reader, dataset, sample)))
            written.append(path)
    finally:
        reader.close()
    return written


def _pixels(reader: SplitReader, dataset: Dataset, sample: int) -> Any:
    """An image as PIL takes it: uint8, one or three channels."""
    one = np.array([sample], np.int64)
    if dataset.encoded:
        return np.asarray(Image.open(io.BytesIO(reader.read_encoded(one)[0])).convert("RGB"))
    pixels = np.empty((1, *dataset.sample_shape), dataset.dtype)
    reader.read_samples(one, pixels)
    image = pixels[0]
    if image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        image = ((image.astype(np.float32) - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    return image if image.shape[2] == 3 else image[:, :, 0]


def _png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()
