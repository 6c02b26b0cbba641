"""Images made from a seed: for benchmarks without a data set, and as a source to shard.

Sample i is a slice of a fixed pool of noise plus its class's own slice, each at half strength, so that making one costs
no more than copying it, sample i is the same on every rank, and a network can learn the classes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import UsageError
from hpcdl.data.format.order import Ids, mixed

PREFIX = "synthetic:"
_POOL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """What is made: `sample_shape` is (height, width, channels), `dtype` uint8, float16 or float32 (in [0, 1])."""

    name: str
    num_samples: int
    sample_shape: tuple[int, int, int]
    num_classes: int
    dtype: str = "uint8"


KNOWN = {
    spec.name: spec
    for spec in (
        SyntheticSpec(name="mnist", num_samples=60_000, sample_shape=(28, 28, 1), num_classes=10),
        SyntheticSpec(name="cifar10", num_samples=50_000, sample_shape=(32, 32, 3), num_classes=10),
        SyntheticSpec(name="imagenet", num_samples=1_281_167, sample_shape=(224, 224, 3), num_classes=1000),
        SyntheticSpec(name="hep", num_samples=400_000, sample_shape=(224, 224, 3), num_classes=2, dtype="float32"),
    )
}
_OWN = re.compile(r"(\d+)x(\d+)x(\d+):(\d+)(?::(uint8|float16|float32))?")


def parse_spec(text: str) -> SyntheticSpec:
    """The spec of `synthetic:NAME` or `synthetic:HxWxC:CLASSES[:DTYPE]`, each with `@SAMPLES` behind it if wanted."""
    body, at, count = text.removeprefix(PREFIX).partition("@")
    own = _OWN.fullmatch(body)
    if body in KNOWN:
        spec = KNOWN[body]
    elif own:
        shape = (int(own[1]), int(own[2]), int(own[3]))
        dtype = own[5] or "uint8"
        spec = SyntheticSpec(name=body, num_samples=100_000, sample_shape=shape, num_classes=int(own[4]), dtype=dtype)
    else:
        spec = None
    if spec is None or (at and not count.isdigit()) or min(*spec.sample_shape, spec.num_classes) < 1:
        known = ", ".join(PREFIX + name for name in KNOWN)
        raise UsageError(f"unknown data {text!r}; known: {known}, or your own shape: synthetic:HxWxC:CLASSES[:float32]")
    if not at:
        return spec
    if int(count) < 1:
        raise UsageError(f"{text!r} asks for no samples; write for example {PREFIX}{body}@1000")
    return SyntheticSpec(**{**spec.__dict__, "num_samples": int(count)})


class SyntheticImages:
    """Makes the samples of a spec; the same ids and seed give the same bytes everywhere."""

    def __init__(self, spec: SyntheticSpec, *, seed: int = 0) -> None:
        self.spec = spec
        self._size = int(np.prod(spec.sample_shape))
        self._seed = seed
        length = _POOL + self._size
        words = np.arange(-(-length // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mixed(seed, 3))
        words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        noise = (words ^ words >> np.uint64(31)).astype("<u8").view(np.uint8)[:length]
        if spec.dtype == "uint8":
            self._pool: npt.NDArray[Any] = noise >> np.uint8(1)
        else:
            self._pool = (noise.astype(np.float32) / np.float32(510)).astype(spec.dtype)

    def labels(self, ids: Ids) -> Ids:
        """The class of each sample."""
        return np.array([mixed(self._seed, 4, int(i)) % self.spec.num_classes for i in ids], np.int64)

    def read_samples(self, ids: Ids, out: npt.NDArray[Any]) -> None:
        """Make the samples `ids` into `out`, shaped (len(ids), H, W, C)."""
        rows = out.reshape(len(ids), self._size)
        for row, sample, label in zip(rows, ids, self.labels(ids), strict=True):
            noise = mixed(self._seed, 5, int(sample)) % _POOL
            template = mixed(self._seed, 6, int(label)) % _POOL
            np.add(self._pool[noise : noise + self._size], self._pool[template : template + self._size], out=row)
