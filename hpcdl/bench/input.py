"""`hpcdl bench input`: the rate at which a data set feeds ranks, and the fraction of a step spent waiting for it.

`python -m hpcdl.bench.input FOLDER` is one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.bench.ranks import REQUEST_FILE, ReportProgress, as_started, on_fresh_ranks, rank_program
from hpcdl.cluster.environment import placement
from hpcdl.comm.observed import Observed, observe
from hpcdl.comm.threads import alone
from hpcdl.config.load import Layer, ResolvedConfig, as_toml_values, load
from hpcdl.config.schema import InputBenchConfig, InputBenchRun
from hpcdl.core.progress import progress
from hpcdl.core.records.from_json import from_json
from hpcdl.core.statistics import quantiles
from hpcdl.data.format.dataset import Dataset, FileOperations, FileOperationsCounter, open_dataset
from hpcdl.data.format.order import steps_per_epoch
from hpcdl.data.read.staging import staged
from hpcdl.data.read.windows import TrainingStream, open_stream, shared_out

PASS_LINE = 0.9
"""The accelerator utilisation that MLPerf Storage requires."""
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_WARM_UP = 3
_MOST_WAITS = 200
"""With several ranks and more batches than this per rank, this many quantiles represent all waits of a rank."""


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """One rank's rates, from the common start to its own end; `of_median` is its rate over the median rank's."""

    rank: int
    host: str
    samples_per_second: float
    bytes_per_second: float
    of_median: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput of one way of reading, over all ranks: from the common start until the last one is done.

    Bytes are those of the shards for `stored`, of the tensors that hold samples for `delivered`. `batch_seconds` are
    quantiles of the waits for a batch, over all batches of all ranks.
    """

    samples_per_second: float
    bytes_per_second: float
    batch_seconds: Mapping[str, float]
    slowest: RankPace
    median_samples_per_second: float
    fastest: RankPace


@dataclass(frozen=True, kw_only=True)
class RankUtilisation:
    """The accelerator utilisation of one rank."""

    rank: int
    host: str
    accelerator_utilisation: float


@dataclass(frozen=True, kw_only=True)
class OperationCount:
    """Calls that name a file: of the rank with most calls, and of all ranks."""

    most_of_a_rank: FileOperations
    all_ranks: FileOperations


@dataclass(frozen=True, kw_only=True)
class MetadataOperations:
    """Operations on the data set's file system, counted while batches were read as stored, for `epochs` epochs.

    `start`: to open the data set; staging and operations on the copies are not counted. `first_epoch`: to open what is
    read, as far as that epoch was read. `later_epoch`: the same for the second epoch; None if it was not read
    completely.
    """

    epochs: float
    start: OperationCount
    first_epoch: OperationCount
    later_epoch: OperationCount | None


@dataclass(frozen=True, kw_only=True)
class InputResult:
    """`stored`: batches as they are in the shards, without decoding; `delivered`: tensors as training gets them.

    Batch size and steps are those of each rank. With a step time: `accelerator_utilisation` is compute / (compute +
    waiting) over steps that sleep this long after each batch (MLPerf Storage's AU), as the mean over the ranks.
    `waiting_fraction` is the rest. The worst rank's decides whether the input `passes`.
    """

    data: str
    ranks: int
    nodes: int
    batch_size: int
    steps: int
    stored: Rates
    delivered: Rates
    step_seconds: float | None
    accelerator_utilisation: float | None
    waiting_fraction: float | None
    worst_utilisation: RankUtilisation | None
    passes: bool | None
    metadata: MetadataOperations


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One rank's reading in one way: seconds from the common start, and the waits for each batch."""

    seconds: float
    num_bytes: int
    waits: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RankReading:
    """All measurements of one rank; `operations`: at the start, in the first epoch, in the second if it was read."""

    rank: int
    host: str
    stored: Reading
    delivered: Reading
    utilisation: float | None
    operations: Sequence[FileOperations]


def run(resolved: ResolvedConfig[InputBenchConfig], data: str) -> InputResult | None:
    """Measure in this process, on ranks started here, or on those of a launcher, where all but rank 0 get None.

    Raises UsageError if the training split has fewer samples than all ranks read at once.
    """
    rank_place = placement()
    if rank_place is not None:
        from hpcdl.launch.train import with_ranks

        resolved = with_ranks(resolved, rank_place)
        if rank_place.size > 1:
            settings = resolved.config.run
            result = as_started(
                rank_place,
                lambda: _checked(data, settings),
                lambda group: measure_on_rank(settings, data, group, lambda done, what: None),
            )
            return result if rank_place.rank == 0 else None
    if resolved.config.run.ranks > 1:
        return _on_fresh_ranks(resolved.config, data)
    settings = resolved.config.run
    dataset = _checked(data, settings)
    from hpcdl.supervision import runtime

    runtime.import_tensorflow()
    with progress("reading", _num_batches(settings)) as bar:
        return measure_input(dataset, settings, observe(alone()), bar.update)


def _checked(data: str, wanted: InputBenchRun) -> Dataset:
    dataset = open_dataset(data)
    steps_per_epoch(dataset.train_split.num_samples, wanted.batch_size * wanted.ranks)
    return dataset


def _num_batches(wanted: InputBenchRun) -> int:
    return wanted.steps * (3 if wanted.step_ms else 2)


def _on_fresh_ranks(config: InputBenchConfig, data: str) -> InputResult:
    """Measure on ranks that are started here: on this node, or spread evenly over those of the job."""
    _checked(data, config.run)
    request = {"data": data, "settings": as_toml_values(config)}
    with progress("reading", _num_batches(config.run)) as bar:
        return from_json(InputResult, on_fresh_ranks("hpcdl.bench.input", request, config.run.ranks, bar))


def measure_on_rank(wanted: InputBenchRun, data: str, group: Observed, on_progress: ReportProgress) -> InputResult:
    """Do one rank's part, set up as for training; every rank gets the result. Collective."""
    from hpcdl.supervision import runtime

    group.monitor.doing("importing TensorFlow")
    runtime.import_tensorflow()
    runtime.configure(deterministic=False, seed=wanted.seed)
    return measure_input(open_dataset(data), wanted, group, on_progress)


def measure_input(dataset: Dataset, wanted: InputBenchRun, group: Observed, on_progress: ReportProgress) -> InputResult:
    """Measure the training split of `dataset`, with each rank of the group as a worker. Collective."""
    from hpcdl.data.read.pipeline import training_batches  # imported late: it loads TensorFlow

    batch_size, steps = wanted.batch_size, wanted.steps
    step_seconds = (wanted.step_ms or 0) / 1000
    if wanted.shuffle == "local":
        dataset = shared_out(dataset, group.allgather_json(group.host), batch_size)
    with _near(dataset, wanted.stage, group) as near:
        stored, operations, num_epochs = _stored(near, dataset.operations, wanted, group, on_progress)
        batches = training_batches(
            near, batch_size=batch_size, worker=group.rank, num_workers=group.size, seed=wanted.seed
        )
        try:
            sizes = (_delivered_bytes(batch, near) for batch in batches)
            delivered = _timed(sizes, steps, 0.0, group, lambda done: on_progress(steps + done, "as training gets it"))
            utilisation = None
            if step_seconds:
                reading = _timed(
                    sizes, steps, step_seconds, group, lambda done: on_progress(2 * steps + done, "with steps")
                )
                utilisation = 1 - sum(reading.waits) / reading.seconds
        finally:
            batches.close()
    own_reading = RankReading(
        rank=group.rank, host=group.host, stored=_sketched(stored, group), delivered=_sketched(delivered, group),
        utilisation=utilisation, operations=operations,
    )  # fmt: skip
    group.monitor.doing("waiting for the others")
    with group.monitor.patiently():
        every = [from_json(RankReading, reading) for reading in group.allgather_json(dataclasses.asdict(own_reading))]
    return combined(dataset.name, wanted, every, num_epochs)


@contextlib.contextmanager
def _near(dataset: Dataset, stage: Path | None, group: Observed) -> Iterator[Dataset]:
    """Inside, use the data set or its copy on this node; operations on a copy do not count for the data set."""
    if stage is None:
        yield dataset
        return
    group.monitor.doing("staging data")
    with staged(dataset, stage, group if group.size > 1 else None) as near:
        yield near if near.folder == dataset.folder else dataclasses.replace(near, operations=FileOperationsCounter())


def _stored(
    dataset: Dataset,
    operations: FileOperationsCounter,
    wanted: InputBenchRun,
    group: Observed,
    on_progress: ReportProgress,
) -> tuple[Reading, list[FileOperations], float]:
    """Read batches as numpy arrays or files, without TensorFlow. Return times, operations by epoch, and epochs."""
    marks = [FileOperations(), operations.seen]
    stream = open_stream(
        dataset, batch_size=wanted.batch_size, worker=group.rank, num_workers=group.size, seed=wanted.seed
    )

    def sizes() -> Iterator[int]:
        for step in range(wanted.steps + _WARM_UP):
            size = _stored_bytes(stream, dataset, step)
            if (step + 1) % stream.steps_per_epoch == 0 and len(marks) < 4:
                marks.append(operations.seen)
            yield size

    try:
        reading = _timed(sizes(), wanted.steps, 0.0, group, lambda done: on_progress(done, "without decoding"))
    finally:
        stream.close()
    # The first epoch was not read to its end: what was counted so far is its share.
    if len(marks) == 2:
        marks.append(operations.seen)
    num_epochs = (wanted.steps + _WARM_UP) / stream.steps_per_epoch
    # Counts are totals: their differences are the start, the first and the second epoch.
    return reading, [after - before for before, after in itertools.pairwise(marks)], num_epochs


def _stored_bytes(stream: TrainingStream, dataset: Dataset, step: int) -> int:
    """Read this rank's part of a step; return its bytes."""
    values = stream.batch(step)[: _num_counted(dataset)]
    return sum(x.nbytes if isinstance(x, np.ndarray) else sum(map(_size, x)) for x in values)


def _size(sample: npt.NDArray[Any] | bytes) -> int:
    return len(sample) if isinstance(sample, bytes) else sample.nbytes


def _num_counted(dataset: Dataset) -> int | None:
    """Return how many of the fields' bytes count: for pictures only the first, else all (None)."""
    return 1 if dataset.pictures else None


def _delivered_bytes(batch: tuple[Any, Any], dataset: Dataset) -> int:
    """Return the bytes of a batch's tensors; for images with a class, those of the images."""
    parts = batch[: _num_counted(dataset)]
    tensors = [tensor for part in parts for tensor in (part.values() if isinstance(part, dict) else [part])]
    return sum(tensor.dtype.size * tensor.shape.num_elements() for tensor in tensors)


def _timed(
    sizes: Iterator[int], steps: int, step_seconds: float, group: Observed, on_progress: Callable[[int], None]
) -> Reading:
    """Take `steps` batches, each followed by the sleep of a step; starts when all ranks have warmed up."""
    monitor = group.monitor
    for _ in range(_WARM_UP):
        monitor.doing("reading the first batches")
        next(sizes)
    waits, num_bytes = [], 0
    with monitor.patiently():
        group.barrier()
    started = time.perf_counter()
    for number in range(steps):
        monitor.doing("reading", number)
        began = time.perf_counter()
        num_bytes += next(sizes)
        waits.append(time.perf_counter() - began)
        if step_seconds:
            time.sleep(step_seconds)
        on_progress(number)
    # Made-up data may take no time that the clock shows, and rates are divided by it.
    return Reading(seconds=max(time.perf_counter() - started, 1e-9), num_bytes=num_bytes, waits=waits)


def _sketched(reading: Reading, group: Observed) -> Reading:
    if group.size == 1 or len(reading.waits) <= _MOST_WAITS:
        return reading
    levels = [number / (_MOST_WAITS - 1) for number in range(_MOST_WAITS)]
    return dataclasses.replace(reading, waits=quantiles(reading.waits, levels))


def combined(data: str, wanted: InputBenchRun, every: Sequence[RankReading], num_epochs: float) -> InputResult:
    """Combine the measurements of all ranks."""
    samples = wanted.batch_size * wanted.steps
    utilisations = [
        RankUtilisation(rank=worker.rank, host=worker.host, accelerator_utilisation=worker.utilisation)
        for worker in every
        if worker.utilisation is not None
    ]
    worst = min(utilisations, key=lambda worker: worker.accelerator_utilisation, default=None)
    mean = statistics.fmean(worker.accelerator_utilisation for worker in utilisations) if utilisations else None
    counts = [_count([worker.operations[part] for worker in every]) for part in range(len(every[0].operations))]
    return InputResult(
        data=data,
        ranks=len(every),
        nodes=len({worker.host for worker in every}),
        batch_size=wanted.batch_size,
        steps=wanted.steps,
        stored=_rates([(worker, worker.stored) for worker in every], samples),
        delivered=_rates([(worker, worker.delivered) for worker in every], samples),
        step_seconds=wanted.step_ms / 1000 if wanted.step_ms else None,
        accelerator_utilisation=mean,
        waiting_fraction=None if mean is None else 1 - mean,
        worst_utilisation=worst,
        passes=None if worst is None else worst.accelerator_utilisation >= PASS_LINE,
        metadata=MetadataOperations(
            epochs=num_epochs,
            start=counts[0],
            first_epoch=counts[1],
            later_epoch=counts[2] if len(counts) > 2 else None,
        ),
    )


def _rates(every: Sequence[tuple[RankReading, Reading]], samples: int) -> Rates:
    last_s = max(reading.seconds for _, reading in every)
    median_s = statistics.median(samples / reading.seconds for _, reading in every)
    paces = [
        RankPace(
            rank=of_rank.rank,
            host=of_rank.host,
            samples_per_second=samples / reading.seconds,
            bytes_per_second=reading.num_bytes / reading.seconds,
            of_median=samples / reading.seconds / median_s,
        )
        for of_rank, reading in every
    ]
    waits = quantiles([wait for _, reading in every for wait in reading.waits], _QUANTILES)
    return Rates(
        samples_per_second=len(every) * samples / last_s,
        bytes_per_second=sum(reading.num_bytes for _, reading in every) / last_s,
        batch_seconds={f"p{100 * level:g}": value for level, value in zip(_QUANTILES, waits, strict=True)},
        slowest=min(paces, key=lambda pace: pace.samples_per_second),
        median_samples_per_second=median_s,
        fastest=max(paces, key=lambda pace: pace.samples_per_second),
    )


def _count(of_ranks: Sequence[FileOperations]) -> OperationCount:
    return OperationCount(
        most_of_a_rank=max(of_ranks, key=lambda one: one.total), all_ranks=sum(of_ranks, FileOperations())
    )


def _on_rank(request: dict[str, Any], group: Observed, on_progress: ReportProgress) -> dict[str, Any]:
    settings = load(InputBenchConfig, [Layer(origin=REQUEST_FILE, values=request["settings"])]).config.run
    return dataclasses.asdict(measure_on_rank(settings, request["data"], group, on_progress))


if __name__ == "__main__":
    rank_program(_on_rank)
