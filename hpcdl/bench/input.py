"""How fast a data set feeds a rank, and how much of a training step would be spent waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.core.progress import progress
from hpcdl.core.statistics import quantiles
from hpcdl.data.dataset import Dataset
from hpcdl.data.read.reader import SplitReader, open_reader
from hpcdl.data.read.windows import TrainingStream

PASS_LINE = 0.9
"""Accelerator utilisation that MLPerf Storage asks for."""
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput of one way of reading; bytes are those of the shards for `stored`, of the pixels for `delivered`."""

    samples_per_second: float
    bytes_per_second: float
    batch_seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class InputResult:
    """`stored`: batches as they lie in the shards, without decoding; `delivered`: tensors as training gets them.

    With a step time: `accelerator_utilisation` is compute / (compute + waiting) over steps that sleep so long after
    each batch (MLPerf Storage's AU); `waiting_fraction` is the rest.
    """

    data: str
    batch_size: int
    steps: int
    stored: Rates
    delivered: Rates
    step_seconds: float | None
    accelerator_utilisation: float | None
    waiting_fraction: float | None
    passes: bool | None


def measure_input(
    dataset: Dataset, *, batch_size: int, steps: int, step_seconds: float | None, seed: int = 0
) -> InputResult:
    """Measure the training split of `dataset`; UsageError where it has fewer samples than a batch."""
    from hpcdl.data.read.pipeline import training_batches  # imported late: it loads TensorFlow

    phases = 3 if step_seconds else 2
    with progress("reading", phases * steps) as bar:
        stored = _stored(dataset, batch_size, steps, seed, lambda done: bar.update(done, "without decoding"))
        batches = training_batches(dataset, batch_size=batch_size, seed=seed)
        try:
            seconds, _ = _timed(batches, steps, 0.0, lambda done: bar.update(steps + done, "as training gets it"))
            pixels = batch_size * int(np.prod(dataset.sample_shape)) * np.dtype(dataset.dtype).itemsize
            delivered = _rates(seconds, batch_size, pixels)
            utilisation = None
            if step_seconds:
                waits, total = _timed(
                    batches, steps, step_seconds, lambda done: bar.update(2 * steps + done, "with steps")
                )
                utilisation = 1 - sum(waits) / total
        finally:
            batches.close()
    return InputResult(
        data=dataset.name,
        batch_size=batch_size,
        steps=steps,
        stored=stored,
        delivered=delivered,
        step_seconds=step_seconds,
        accelerator_utilisation=utilisation,
        waiting_fraction=None if utilisation is None else 1 - utilisation,
        passes=None if utilisation is None else utilisation >= PASS_LINE,
    )


def _stored(dataset: Dataset, batch_size: int, steps: int, seed: int, told: Any) -> Rates:
    """Batches as numpy arrays or files, without TensorFlow."""
    reader = open_reader(dataset, dataset.train_split)
    stream = TrainingStream(reader, batch_size=batch_size, worker=0, num_workers=1, seed=seed)
    sizes = []

    def read() -> Iterator[None]:
        for step in range(steps + _WARM_UP):
            if dataset.encoded and isinstance(reader, SplitReader):
                sizes.append(sum(map(len, stream.files(step)[0])))
            else:
                sizes.append(stream.images(step)[0].nbytes)
            yield

    try:
        seconds, _ = _timed(read(), steps, 0.0, told)
    finally:
        stream.close()
    return _rates(seconds, batch_size, sum(sizes) / len(sizes))


def _timed(batches: Iterator[Any], steps: int, step_seconds: float, told: Any) -> tuple[list[float], float]:
    """Seconds that each of `steps` batches was waited for, with a sleep of a step in between; and seconds in all."""
    for _ in range(_WARM_UP):
        next(batches)
    waits = []
    started = time.perf_counter()
    for done in range(steps):
        began = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - began)
        if step_seconds:
            time.sleep(step_seconds)
        told(done)
    return waits, time.perf_counter() - started


def _rates(seconds: list[float], batch_size: int, batch_bytes: float) -> Rates:
    total = max(sum(seconds), 1e-9)
    found = quantiles(seconds, _QUANTILES)
    return Rates(
        samples_per_second=len(seconds) * batch_size / total,
        bytes_per_second=len(seconds) * batch_bytes / total,
        batch_seconds={f"p{100 * level:g}": value for level, value in zip(_QUANTILES, found, strict=True)},
    )
