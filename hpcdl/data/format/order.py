"""The order of samples: pure functions of the layout, the seed, the epoch and the global batch.

An epoch is one sequence of sample ids. Blocks (the units of reading) are permuted over all shards, `window_blocks`
consecutive ones form a window, and the samples of a window are permuted. Step t of the epoch takes the ids
t * global_batch ... of that sequence, and worker r the r-th slice of them. A step therefore uses the same samples for
every number of workers, and any step can be computed without replaying earlier ones. Samples after the last whole
global batch are dropped; they differ in every epoch.

With `--shuffle local` each node shuffles its own share: consecutive blocks are assigned to the nodes in proportion to
their workers. Each share is such a sequence, sliced among the workers of its node, with its own epochs.

Permutations are Feistel networks with cycle walking (Black and Rogaway 2002, section 4), so they need no memory and
do not depend on numpy's generators.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import UsageError

Ids = npt.NDArray[np.int64]
Item = TypeVar("Item")
_ROUNDS = 6
# Python's integers have no width, and the constants of splitmix64 are for 64 bits.
_MASK = (1 << 64) - 1


def mixed(*values: int) -> int:
    """Return a 64-bit key from integers; other integers give another key (splitmix64, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permuted(positions: Ids, num: int, key: int) -> Ids:
    """Apply the permutation of 0 .. num-1 selected by `key` to each of `positions` (int64, in range)."""
    if num <= 1:
        return positions.copy()
    # The network needs an even number of bits: its range is less than four times `num`, so a few rounds are enough.
    half = max(1, ((num - 1).bit_length() + 1) // 2)
    result = _feistel(positions.astype(np.uint64), half, key)
    # Cycle walking: the network permutes a power of four, and results beyond `num` go through it again.
    outside = result >= num
    while outside.any():
        result[outside] = _feistel(result[outside], half, key)
        outside = result >= num
    return result.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, key: int) -> npt.NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_hashed(right, mixed(key, number)) & mask)
    return left << shift | right


def _hashed(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    state = (values ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)


def steps_per_epoch(num_samples: int, global_batch: int) -> int:
    """Return the number of whole global batches in an epoch; UsageError if there is none."""
    if global_batch > num_samples:
        raise UsageError(
            f"a global batch of {global_batch} needs more than the {num_samples} samples there are; "
            f"lower --batch-size or --ranks so that batch size x workers <= {num_samples}"
        )
    return num_samples // global_batch


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The number of samples by which the steps of one epoch start later, after a change of the global batch."""

    epoch: int
    samples: int

    def of(self, epoch: int) -> int:
        """Return the shift of `epoch` in samples; 0 for every other epoch."""
        return self.samples if epoch == self.epoch else 0


NO_SHIFT = Shift(epoch=0, samples=0)


def continues_at(epoch: int, samples: int, *, num_samples: int, global_batch: int) -> tuple[int, Shift]:
    """Return the step and shift with which a run continues after `samples` of `epoch` in steps of `global_batch`.

    No sample is repeated; the samples omitted at the end of the epoch are fewer than one global batch, as usual.
    """
    # Counted from the epoch's end, so that the next epoch begins at a multiple of its steps.
    per_epoch, after = num_samples // global_batch, (num_samples - samples) // global_batch
    return (epoch + 1) * per_epoch - after, Shift(epoch=epoch, samples=samples - (per_epoch - after) * global_batch)


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The part of the blocks that a node reads, and the index of one of its workers among its `num_workers`."""

    worker: int
    num_workers: int
    workers_before: int
    workers_in_all: int

    @staticmethod
    def of(nodes: Sequence[int], worker: int) -> NodeShare:
        """Return the share of `worker`; `nodes` holds the node number of each worker."""
        node = nodes[worker]
        return NodeShare(
            worker=nodes[:worker].count(node),
            num_workers=nodes.count(node),
            workers_before=sum(other_node < node for other_node in nodes),
            workers_in_all=len(nodes),
        )


def pass_slice(num_samples: int, worker: int, num_workers: int) -> range:
    """Return a worker's slice of an ordered pass or of a step; the slices of all workers cover every sample once."""
    first, stop = (num_samples * part // num_workers for part in (worker, worker + 1))
    return range(first, stop)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The division of samples into blocks: block i holds the ids `starts[i]` to `starts[i+1]` - 1.

    `window_blocks` blocks are shuffled together.
    """

    starts: Ids
    window_blocks: int

    @staticmethod
    def uniform(num_samples: int, block_samples: int, window_blocks: int) -> Layout:
        """Return blocks of equal size, the last one shorter."""
        return Layout.of_shards([num_samples], block_samples, window_blocks)

    @staticmethod
    def of_shards(samples_by_shard: list[int], block_samples: int, window_blocks: int) -> Layout:
        """Return blocks of equal size within each shard, its last one shorter; ids continue from shard to shard."""
        pieces, first = [], 0
        for num_samples in samples_by_shard:
            pieces.append(np.arange(first, first + num_samples, block_samples, dtype=np.int64))
            first += num_samples
        return Layout(starts=np.concatenate([*pieces, np.array([first], np.int64)]), window_blocks=window_blocks)

    def part(self, share: NodeShare) -> Layout:
        """Return the blocks of a node's share; samples keep their ids."""
        ends = (share.workers_before, share.workers_before + share.num_workers)
        # Rounded alike on both sides of a border: shares neither overlap nor leave a block out.
        first, stop = (self.num_blocks * end // share.workers_in_all for end in ends)
        return Layout(starts=self.starts[first : stop + 1], window_blocks=self.window_blocks)

    @property
    def num_samples(self) -> int:
        """The number of samples in all blocks."""
        return int(self.starts[-1] - self.starts[0])

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all shards."""
        return len(self.starts) - 1


class LastTwo(Generic[Item]):
    """A thread-safe cache of the two items made last, by number."""

    def __init__(self) -> None:
        self._kept: dict[int, Item] = {}
        self._lock = threading.Lock()

    def get(self, number: int, make: Callable[[], Item]) -> Item:
        """Return the item `number`, and make it if it is not cached."""
        # Held while the item is made: a second thread waits for it and does not make it again.
        with self._lock:
            if number not in self._kept:
                while len(self._kept) > 1:  # a step may reach from one item into the next: both are needed in turn
                    del self._kept[next(iter(self._kept))]
                self._kept[number] = make()
            return self._kept[number]


@dataclass(frozen=True)
class Epoch:
    """The sequence of sample ids of one epoch."""

    layout: Layout
    seed: int
    epoch: int
    _orders: LastTwo[Ids] = field(default_factory=LastTwo, init=False, repr=False, compare=False)
    _ids: LastTwo[Ids] = field(default_factory=LastTwo, init=False, repr=False, compare=False)

    @cached_property
    def blocks(self) -> Ids:
        """Block numbers in the order of this epoch."""
        num = self.layout.num_blocks
        # A constant in each key keeps uses of one seed apart: 1 blocks, 2 windows, 3 to 6 synthetic samples.
        return permuted(np.arange(num, dtype=np.int64), num, mixed(self.seed, self.epoch, 1))

    @cached_property
    def _ends(self) -> list[int]:
        """The position in the sequence after the end of each window."""
        lengths = np.diff(self.layout.starts)[self.blocks]
        ends = np.cumsum(lengths)
        last = np.arange(self.layout.window_blocks - 1, len(ends), self.layout.window_blocks)
        # The last window may hold fewer blocks; unique removes the second entry where it does not.
        window_ends: list[int] = ends[np.unique(np.append(last, len(ends) - 1))].tolist()
        return window_ends

    @property
    def num_windows(self) -> int:
        """The number of windows in the epoch."""
        return len(self._ends)

    def window_blocks(self, window: int) -> Ids:
        """Return the block numbers of a window, in the order in which its samples are numbered."""
        size = self.layout.window_blocks
        return self.blocks[window * size : (window + 1) * size]

    def positions(self, start: int, stop: int) -> Iterator[tuple[int, Ids]]:
        """Yield (window, indices) for the elements `start` to `stop` - 1 of the sequence, window by window.

        An index counts the samples of the window's blocks, concatenated in the order of `window_blocks`.
        """
        while start < stop:
            window = self.window_of(start)
            first, last = self.window_bounds(window)
            end = min(stop, last)
            yield window, self.window_order(window)[start - first : end - first]
            start = end

    def window_of(self, position: int) -> int:
        """Return the window that contains element `position` of the sequence."""
        return bisect.bisect_right(self._ends, position)

    def window_bounds(self, window: int) -> tuple[int, int]:
        """Return the position of a window's first element in the sequence, and the position after its last."""
        return (self._ends[window - 1] if window else 0), self._ends[window]

    def window_order(self, window: int) -> Ids:
        """Return the permutation of a window, with indices as in `positions`. The last two are cached."""

        def order() -> Ids:
            first, last = self.window_bounds(window)
            length = last - first
            return permuted(np.arange(length, dtype=np.int64), length, mixed(self.seed, self.epoch, 2, window))

        return self._orders.get(window, order)

    def window_ids(self, window: int) -> Ids:
        """Return the sample ids of the window's blocks, concatenated. The last two results are cached."""

        def ids() -> Ids:
            starts = self.layout.starts
            return np.concatenate([np.arange(starts[b], starts[b + 1]) for b in self.window_blocks(window).tolist()])

        return self._ids.get(window, ids)

    def ids(self, start: int, stop: int) -> Ids:
        """Return the sample ids at positions `start` to `stop` - 1 of the sequence."""
        pieces = [self.window_ids(window)[indices] for window, indices in self.positions(start, stop)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
