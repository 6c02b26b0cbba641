"""Synthetic samples, made from a seed, to be sharded like real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.data.format.dataset import UNSPLIT, SyntheticImages, parse_spec
from hpcdl.data.sources.base.source import ROW, Array, Index, IndexWriter, SourceFacts, SourceSpec

_BATCH = 1 << 14


class SyntheticSource:
    """`synthetic:NAME`, any number of samples."""

    def __init__(self, spec: SourceSpec) -> None:
        text = spec.location if spec.samples is None else f"{spec.location.partition('@')[0]}@{spec.samples}"
        self._spec = parse_spec(text)
        self._images = SyntheticImages(self._spec, seed=spec.seed)

    @staticmethod
    def recognises(location: Path) -> bool:
        """Return False: this format is selected by its prefix."""
        return False

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the numbers of the samples."""
        for first in range(0, self._spec.num_samples, _BATCH):
            numbers = np.arange(first, min(first + _BATCH, self._spec.num_samples), dtype=np.int64)
            rows = np.zeros(len(numbers), ROW)
            rows["place"], rows["label"] = numbers, self._images.labels(numbers)
            index.add(UNSPLIT, rows)
        return SourceFacts(
            class_names=[str(number) for number in range(self._spec.num_classes)],
            samples_are="pixels",
            sample_shape=self._spec.sample_shape,
            dtype=self._spec.dtype,
        )

    def read(self, row: Any, facts: SourceFacts, index: Index) -> Array:
        """Make one sample."""
        samples = np.empty((1, *self._spec.sample_shape), self._spec.dtype)
        self._images.read_samples(np.array([row["place"]], np.int64), samples)
        return np.asarray(samples[0])

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """Return the number of the sample."""
        return f"sample {int(row['place'])}"
