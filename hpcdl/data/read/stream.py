"""The batches of one worker as numpy arrays: from a step's number to its samples, by the way that costs least."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.data.read.order import Ids, steps_per_epoch
from hpcdl.data.read.reader import SplitReader, SyntheticReader
from hpcdl.data.read.windows import BatchSource, Epochs, GatheredWindows, OwnSamples, ScatteredWindows, Share

Array = npt.NDArray[Any]
_REQUEST_BYTES = 256 * 1024
"""What one read request costs, as bytes that could have been read in its time: a round trip at 1 GB/s."""
_SCATTERED_FROM_BYTES = 4096
"""Samples of this size and more are read straight to their place in a batch; smaller ones are picked from a window."""


class TrainingStream:
    """Batches by step number, endless over the epochs; any step may be the first.

    A worker that needs a good part of each block reads whole blocks, a window ahead; one among many reads its own
    samples only.
    """

    def __init__(
        self, reader: SplitReader | SyntheticReader, *, batch_size: int, worker: int, num_workers: int, seed: int
    ) -> None:
        self.reader = reader
        self.share = Share(
            steps_per_epoch=steps_per_epoch(reader.layout.num_samples, batch_size * num_workers),
            batch_size=batch_size, worker=worker, num_workers=num_workers,
        )  # fmt: skip
        self.epochs = Epochs(reader.layout, seed)
        self._source = _source(reader, self.share, self.epochs)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return self.share.steps_per_epoch

    def ids(self, step: int) -> Ids:
        """The sample ids of this worker at `step`."""
        epoch, start, stop = self.share.places(step)
        return self.epochs.get(epoch).ids(start, stop)

    def images(self, step: int) -> tuple[Array, Ids]:
        """Images (B, H, W, C) and labels (B,) of this worker at `step`; the array is used again once it is let go."""
        return self._source.batch(step)

    def files(self, step: int) -> tuple[Array, Ids]:
        """The JPEG or PNG files (an object array of bytes) and labels of this worker at `step`."""
        if not isinstance(self.reader, SplitReader):
            raise TypeError("samples made from a seed are not encoded")
        ids = self.ids(step)
        return np.array(self.reader.read_encoded(ids), object), self.reader.labels(ids)

    def close(self) -> None:
        """End the background reads and close the files."""
        self._source.close()
        self.reader.close()


def _source(reader: SplitReader | SyntheticReader, share: Share, epochs: Epochs) -> BatchSource:
    """The way to read that costs least: whole blocks where dropping what others train on is cheaper than requests."""
    if isinstance(reader, SyntheticReader):
        return OwnSamples(reader, share, epochs)
    if not reader.compressed and reader.sample_bytes * share.num_workers > reader.sample_bytes + _REQUEST_BYTES:
        return OwnSamples(reader, share, epochs)
    if reader.compressed or reader.sample_bytes < _SCATTERED_FROM_BYTES:
        return GatheredWindows(reader, share, epochs)
    return ScatteredWindows(reader, share, epochs)
