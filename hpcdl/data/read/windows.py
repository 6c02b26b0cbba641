"""A worker's batches as numpy arrays, read in the cheapest of three ways: singly, gathered, or scattered.

A window is a run of consecutive blocks of the epoch's sequence (format/order.py). The current and the next window are
in memory; a separate thread reads ahead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import UsageError
from hpcdl.data.format.dataset import Dataset, Split
from hpcdl.data.format.manifest import Field
from hpcdl.data.format.order import (
    NO_SHIFT,
    Epoch,
    Ids,
    LastTwo,
    Layout,
    NodeShare,
    Shift,
    pass_slice,
    steps_per_epoch,
)
from hpcdl.data.format.prefetch import BufferPool
from hpcdl.data.read.reader import ColumnReader, Reader, SplitReader, SyntheticReader, Values, open_reader

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A worker's part of every step: of the whole global batch, or of its node's part of it."""

    steps_per_epoch: int
    global_batch: int
    rows: range
    """The indices of this worker's samples in a step."""
    shift: Shift = NO_SHIFT

    @property
    def batch_size(self) -> int:
        """The number of this worker's samples in a step."""
        return len(self.rows)

    def positions(self, step: int) -> tuple[int, int, int]:
        """Return the epoch of a step, and the start and stop of the worker's part in the epoch's sequence."""
        epoch, within = divmod(step, self.steps_per_epoch)
        begin = within * self.global_batch + self.shift.of(epoch)
        return epoch, begin + self.rows.start, begin + self.rows.stop


class Epochs:
    """The sequences of the epochs; the last two used are cached."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout, self._seed = layout, seed
        self._kept: LastTwo[Epoch] = LastTwo()

    def get(self, number: int) -> Epoch:
        """Return the sequence of an epoch."""
        return self._kept.get(number, lambda: Epoch(self._layout, self._seed, number))


class BatchSource(Protocol):
    """Provides a worker's batch of one field at a step; cheapest if steps are requested in order."""

    def batch(self, step: int) -> Array:
        """Return the field of a step's samples, (B, *sample_shape); the array is reused once no reference is left."""

    def close(self) -> None:
        """Drop pending reads."""


class OwnSamples:
    """Reads each sample separately."""

    def __init__(self, reader: Reader, share: Share, epochs: Epochs) -> None:
        self._reader, self._share, self._epochs = reader, share, epochs
        self._buffers = BufferPool((share.batch_size, *reader.sample_shape), reader.dtype)

    def batch(self, step: int) -> Array:
        """Return the field of a step's samples."""
        epoch, start, stop = self._share.positions(step)
        samples = self._buffers.take()
        self._reader.read_samples(self._epochs.get(epoch).ids(start, stop), samples)
        return samples

    def close(self) -> None:
        """Do nothing: there are no pending reads."""


class GatheredWindows:
    """Reads windows of whole blocks and copies samples from them: for small samples, and for compressed blocks."""

    def __init__(self, reader: ColumnReader, share: Share, epochs: Epochs) -> None:
        self._reader, self._share, self._epochs = reader, share, epochs
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hpcdl-windows")
        self._under_way: OrderedDict[tuple[int, int], Future[Array]] = OrderedDict()
        self._batches = BufferPool((share.batch_size, *reader.sample_shape), reader.dtype)
        # Buffers of one size, that of the longest window, can be used again for all.
        longest = reader.layout.window_blocks * int(np.diff(reader.layout.starts).max(initial=1))
        self._windows = BufferPool((min(longest, reader.layout.num_samples), *reader.sample_shape), reader.dtype)

    def batch(self, step: int) -> Array:
        """Return the field of a step's samples."""
        number, start, stop = self._share.positions(step)
        epoch = self._epochs.get(number)
        gathered, row = self._batches.take(), 0
        for window, indices in epoch.positions(start, stop):
            samples = self._start(epoch, window).result()
            # With mode="raise" numpy fills a buffer first and copies it to `out`.
            np.take(samples, indices, axis=0, out=gathered[row : row + len(indices)], mode="clip")
            row += len(indices)
            # Read ahead while this step trains.
            self._start(*self._following(epoch, window))
        return gathered

    def close(self) -> None:
        """Drop pending reads."""
        self._under_way.clear()
        self._pool.shutdown(cancel_futures=True)

    def _following(self, epoch: Epoch, window: int) -> tuple[Epoch, int]:
        return (epoch, window + 1) if window + 1 < epoch.num_windows else (self._epochs.get(epoch.epoch + 1), 0)

    def _start(self, epoch: Epoch, window: int) -> Future[Array]:
        key = (epoch.epoch, window)
        if key not in self._under_way:
            # A step may need the end of one window and the start of the next: two are kept.
            while len(self._under_way) > 1:
                self._under_way.popitem(last=False)  # frees the buffer of the oldest window for the next one
            self._under_way[key] = self._pool.submit(self._read, epoch, window)
        return self._under_way[key]

    def _read(self, epoch: Epoch, window: int) -> Array:
        samples, row = self._windows.take(), 0
        for block in epoch.window_blocks(window).tolist():
            row += self._reader.read_block(block, samples[row:])
        return samples[:row]


class ScatteredWindows:
    """Reads whole blocks, each sample directly into its place in its batch: one copy between page cache and batch."""

    def __init__(self, reader: ColumnReader, share: Share, epochs: Epochs) -> None:
        self._reader, self._share, self._epochs = reader, share, epochs
        self._buffers = BufferPool((share.batch_size, *reader.sample_shape), reader.dtype)
        self._scratch = memoryview(bytearray(reader.sample_bytes * int(np.diff(reader.layout.starts).max(initial=1))))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hpcdl-windows")
        self._under_way: dict[tuple[int, int], Future[None]] = {}
        self._batches: dict[int, Array] = {}
        self._first = self._next = -1

    def batch(self, step: int) -> Array:
        """Return the field of a step's samples."""
        if step != self._next:
            self._restart(step)
        self._next = step + 1
        number, start, stop = self._share.positions(step)
        epoch = self._epochs.get(number)
        first, last = epoch.window_of(start), epoch.window_of(stop - 1)
        windows = [self._start(epoch, window) for window in range(first, last + 1)]
        self._start(*self._following(step, epoch, last))  # before the wait, so that the reading thread is never idle
        for window in windows:
            window.result()
        # Earlier windows have given this worker all of their samples.
        for key in [key for key in self._under_way if key < (number, first)]:
            del self._under_way[key]
        return self._batches.pop(step)

    def close(self) -> None:
        """Drop pending reads."""
        self._pool.shutdown(cancel_futures=True)
        self._under_way.clear()
        self._batches.clear()

    def _restart(self, step: int) -> None:
        """Discard all batches begun; those of `step` and later are read again."""
        for future in self._under_way.values():
            if not future.cancel():
                future.exception()  # waits: a read in progress still writes into the batches
        self._under_way.clear()
        self._batches.clear()
        self._first = step

    def _following(self, step: int, epoch: Epoch, window: int) -> tuple[Epoch, int]:
        """Return the next window that holds samples of this worker."""
        _, end = epoch.window_bounds(window)
        share = self._share
        within = (end - share.shift.of(epoch.epoch)) // share.global_batch
        later = epoch.epoch * share.steps_per_epoch + within
        # A window may end within a step, before or after this worker's rows: the next step is looked at too.
        for candidate in range(max(step, later), max(step, later) + 2):
            number, start, stop = share.positions(candidate)
            if number != epoch.epoch:
                break
            if stop > end:
                return epoch, epoch.window_of(max(start, end))
        following = self._epochs.get(epoch.epoch + 1)
        return following, following.window_of(share.positions((epoch.epoch + 1) * share.steps_per_epoch)[1])

    def _start(self, epoch: Epoch, window: int) -> Future[None]:
        key = (epoch.epoch, window)
        if key not in self._under_way:
            self._under_way[key] = self._pool.submit(self._read, epoch, window)
        return self._under_way[key]

    def _read(self, epoch: Epoch, window: int) -> None:
        """Fill this worker's rows from one window; a batch is complete when all its windows are read."""
        steps, rows = self._destinations(epoch, window)
        views: dict[int, memoryview] = {}
        for step in np.unique(steps[steps >= 0]).tolist():
            # Without a lock: the pool's only thread adds batches, and `batch` waits for it before it takes one.
            if step not in self._batches:
                self._batches[step] = self._buffers.take()
            views[step] = self._batches[step].reshape(-1).view(np.uint8).data
        begin = 0
        for block in epoch.window_blocks(window).tolist():
            end = begin + int(self._reader.layout.starts[block + 1] - self._reader.layout.starts[block])
            targets = zip(steps[begin:end].tolist(), rows[begin:end].tolist(), strict=True)
            self._reader.read_scattered(block, list(self._views(targets, views)))
            begin = end

    def _views(self, targets: Iterator[tuple[int, int]], views: dict[int, memoryview]) -> Iterator[memoryview]:
        """Yield the destination of each sample of a block, in order; other workers' samples go to the scratch."""
        size = self._reader.sample_bytes
        for place_in_block, (step, row) in enumerate(targets):
            # Other workers' samples are read too, each to its own place: the checksum covers the whole block.
            into, place_in_view = (views[step], row) if step >= 0 else (self._scratch, place_in_block)
            yield into[place_in_view * size : (place_in_view + 1) * size]

    def _destinations(self, epoch: Epoch, window: int) -> tuple[Ids, Ids]:
        """Return step (-1: not this worker's) and batch row of each sample of the window's blocks, in stored order."""
        share = self._share
        first, last = epoch.window_bounds(window)
        positions = np.arange(first, last, dtype=np.int64) - share.shift.of(epoch.epoch)
        within_step, rows = np.divmod(positions, share.global_batch)
        rows -= share.rows.start
        steps = epoch.epoch * share.steps_per_epoch + within_step
        of_epoch = (within_step >= 0) & (within_step < share.steps_per_epoch)
        # Steps before the requested one are left out: nobody would take their batches.
        is_own = (rows >= 0) & (rows < share.batch_size) & of_epoch & (steps >= self._first)
        order = epoch.window_order(window)
        target_steps, target_rows = np.full(last - first, -1, np.int64), np.zeros(last - first, np.int64)
        # `order` holds, for each element of the sequence, its place in the stored blocks.
        target_steps[order[is_own]], target_rows[order[is_own]] = steps[is_own], rows[is_own]
        return target_steps, target_rows


_REQUEST_BYTES = 256 * 1024
"""The cost of one read request, as the bytes readable in its time: a round trip at 1 GB/s."""
_SCATTERED_FROM_BYTES = 4096
"""Samples of this size and more are read directly into a batch; smaller ones are copied from a window."""


class TrainingStream:
    """Batches by step number, without end over the epochs; any step may be the first.

    A worker that needs a large part of each block reads whole blocks, a window ahead; one among many reads only its own
    samples. `node` is the share with which `reader` was opened. `global_batch` replaces `batch_size` x workers; the
    workers' parts of it differ by one sample at most.
    """

    def __init__(
        self,
        reader: SplitReader | SyntheticReader,
        *,
        batch_size: int,
        worker: int,
        num_workers: int,
        seed: int,
        node: NodeShare | None = None,
        global_batch: int | None = None,
        shift: Shift = NO_SHIFT,
    ) -> None:
        if batch_size < 1 or not 0 <= worker < num_workers:
            raise UsageError(
                f"worker {worker} of {num_workers} with batches of {batch_size}: workers are numbered from 0 to "
                "num_workers - 1 (worker=hpcdl.rank(), num_workers=hpcdl.size()), and a batch has 1 sample or more"
            )
        self.reader, self.worker = reader, worker
        self.global_batch = global_batch or batch_size * num_workers
        self.rows = pass_slice(self.global_batch, worker, num_workers)
        # With a node's share, a step takes its node's samples from that share alone.
        own_rows = pass_slice(batch_size * node.num_workers, node.worker, node.num_workers) if node else self.rows
        samples = batch_size * node.num_workers if node else self.global_batch
        self.share = Share(
            steps_per_epoch=steps_per_epoch(reader.layout.num_samples, samples),
            global_batch=samples, rows=own_rows, shift=shift,
        )  # fmt: skip
        self.epochs = Epochs(reader.layout, seed)
        self._residents: dict[str, LastTwo[Array]] = defaultdict(LastTwo)
        self._sources = {name: _source(column, self.share, self.epochs) for name, column in reader.columns.items()}

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return self.share.steps_per_epoch

    def ids(self, step: int) -> Ids:
        """Return the sample ids of this worker at `step`."""
        epoch, start, stop = self.share.positions(step)
        return self.epochs.get(epoch).ids(start, stop)

    def batch(self, step: int) -> list[Values]:
        """Return the fields of this worker's samples at `step`, as a reader gives them; arrays are reused once free."""
        return [self._field(step, field) for field in self.reader.fields]

    def _field(self, step: int, field: Field) -> Values:
        if field.name in self._sources:
            return self._sources[field.name].batch(step)
        if field.resident and isinstance(self.reader, SplitReader):
            return self._resident(self.reader, field.name, step, np.dtype(field.dtype))
        return self.reader.read(field, self.ids(step))

    def _resident(self, reader: SplitReader, name: str, step: int, dtype: np.dtype[Any]) -> Array:
        """Return a resident field of a step's samples, taken from the values of whole windows."""
        number, start, stop = self.share.positions(step)
        epoch = self.epochs.get(number)

        def of_window(window: int) -> Array:
            # One number for window and epoch: a step at the end of an epoch reads from both.
            key = number * epoch.num_windows + window
            blocks = epoch.window_blocks(window).tolist()
            return self._residents[name].get(key, lambda: reader.resident_of_blocks(name, blocks))

        pieces = [of_window(window)[indices] for window, indices in epoch.positions(start, stop)]
        # Each shard keeps class numbers in the smallest type that holds them; a batch has the field's type.
        return np.concatenate(pieces, dtype=dtype)

    def close(self) -> None:
        """End the background reads and close the files."""
        for source in self._sources.values():
            source.close()
        self.reader.close()


def open_stream(
    dataset: Dataset,
    *,
    batch_size: int,
    worker: int,
    num_workers: int,
    seed: int,
    split: Split | None = None,
    global_batch: int | None = None,
    shift: Shift = NO_SHIFT,
) -> TrainingStream:
    """Open a worker's batches of `split`, by default the training split; UsageError if it is smaller than a step."""
    node = NodeShare.of(dataset.nodes, worker) if dataset.nodes else None
    reader = open_reader(dataset, split or dataset.train_split, node)
    worker_settings: dict[str, int] = {"batch_size": batch_size, "worker": worker, "num_workers": num_workers}
    try:
        return TrainingStream(reader, seed=seed, node=node, global_batch=global_batch, shift=shift, **worker_settings)
    except UsageError:
        reader.close()
        raise


def shared_out(dataset: Dataset, hosts: Sequence[str], batch_size: int) -> Dataset:
    """Return `dataset` with a share of the training split for each node; `hosts` are the workers', in rank order.

    Raises UsageError if a node's share is smaller than one step of its workers, `batch_size` samples each.
    """
    numbers: dict[str, int] = {}
    nodes = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
    reader = open_reader(dataset, dataset.train_split)
    layout = reader.layout
    reader.close()
    before = 0
    for num_workers in Counter(nodes).values():
        share = NodeShare(worker=0, num_workers=num_workers, workers_before=before, workers_in_all=len(nodes))
        share_samples, step_samples = layout.part(share).num_samples, num_workers * batch_size
        if share_samples < step_samples:
            raise UsageError(
                f"--shuffle local: a node's share is {share_samples} samples here, and its {num_workers} workers take "
                f"{step_samples} a step; use --shuffle global, or a smaller --batch-size"
            )
        before += num_workers
    return dataclasses.replace(dataset, nodes=nodes)


def _source(reader: Reader, share: Share, epochs: Epochs) -> BatchSource:
    """Choose the cheapest way to read: whole blocks if reading unneeded samples costs less than separate requests."""
    if not isinstance(reader, ColumnReader):
        return OwnSamples(reader, share, epochs)
    samples_of_others_per_own = share.global_batch / share.batch_size - 1
    if not reader.compressed and reader.sample_bytes * samples_of_others_per_own > _REQUEST_BYTES:
        return OwnSamples(reader, share, epochs)
    if reader.compressed or reader.sample_bytes < _SCATTERED_FROM_BYTES:
        return GatheredWindows(reader, share, epochs)
    return ScatteredWindows(reader, share, epochs)
