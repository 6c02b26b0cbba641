"""Decoding JPEG files to pixels, as `hpcdl shard` does, beside libraries that call libjpeg-turbo, on one core.

    python -m benchmarks.jpeg_decoding [--jpegs 500] [--repeats 9]

simplejpeg shows libjpeg-turbo's own rate (pip install 'hpcdl[jpeg]', which makes hpcdl use it too); TensorFlow
decodes with the same accurate transform. All decode the same files, of ImageNet's size (500 x 375, about 115 kB), in
turn; the processor time of the whole process counts, so that other work hardly matters. `shard` is all of `hpcdl shard
--encoding raw` by one worker. Ratios of rates are taken within a repeat; the median is printed with minimum and
maximum.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, features

from benchmarks.data_writing import jpegs, sharding
from hpcdl.data.sources.layouts.images import decode

Decode = Callable[[bytes], np.ndarray]


def ways() -> dict[str, Decode]:
    """Return the decoders by name; the others are compared with the first."""
    found: dict[str, Decode] = {}
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        found["simplejpeg"] = lambda content: simplejpeg.decode_jpeg(content, fastdct=False, fastupsample=False)
    found["Pillow"] = lambda content: np.asarray(Image.open(io.BytesIO(content)))
    found["hpcdl"] = lambda content: decode(content, size=None, channels=3)
    if importlib.util.find_spec("tensorflow"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow as tf

        found["TensorFlow"] = lambda content: tf.image.decode_jpeg(content, dct_method="INTEGER_ACCURATE").numpy()
    return found


def main() -> None:
    """Measure in turn, and print a line for each."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--jpegs", type=int, default=500)
    arguments.add_argument("--repeats", type=int, default=9)
    chosen = arguments.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    decoders = ways()
    with tempfile.TemporaryDirectory() as scratch:
        folder = jpegs(Path(scratch), chosen.jpegs)
        files = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))]
        used: dict[str, list[float]] = {name: [] for name in (*decoders, "shard")}
        for _ in range(chosen.repeats):
            for name, one in decoders.items():
                began = time.process_time()
                for content in files:
                    one(content)
                used[name].append(time.process_time() - began)
            began = time.process_time()
            sharding(folder)(Path(scratch) / "shards")
            used["shard"].append(time.process_time() - began)
            shutil.rmtree(Path(scratch) / "shards")
    pixels = {name: [one(content) for content in files[:10]] for name, one in decoders.items()}
    base, *_ = decoders
    print(f"Pillow {Image.__version__} with libjpeg-turbo {features.version_feature('libjpeg_turbo')}")
    for name, seconds in used.items():
        ratios = [own / other for own, other in zip(used[base], seconds, strict=True)]
        told = f"{statistics.median(ratios):.2f} of {base}'s rate ({min(ratios):.2f} to {max(ratios):.2f})"
        alike = name in pixels and all(map(np.array_equal, pixels[name], pixels[base]))
        word = "" if name == "shard" else ", the same pixels" if alike else ", other pixels"
        print(f"{name}: {1000 * statistics.median(seconds) / len(files):.2f} ms an image, {told}{word}")


if __name__ == "__main__":
    main()
