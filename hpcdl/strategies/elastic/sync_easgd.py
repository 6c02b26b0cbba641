"""Sync EASGD: all workers exchange with the center at once; deterministic. Also the formats of the workers' sum.

Every rank of sync-easgd 2 and 3 has the center with the same bits, so W_i - W~ can be summed instead of W_i. These
numbers are small: the relative error of 16 bits, 2^-11 (fp16) or 2^-8 (bf16), is one of the distance, not of the
weight. What rounding loses remains for the next exchange. TensorFlow is used for float16 only.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983), Sync EASGD 1 to 3: equation (1) on the workers, equation (2) with
the sum over all of them on the center. Variant 1 keeps the center on rank 0: tree broadcast, tree reduction. Variant 2
keeps it on every rank: one all-reduce. Variant 3 is variant 2 with the all-reduce during forward and backward pass;
since the exchange uses the weights before the update, both give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives import auto
from hpcdl.collectives.slices import Workspace
from hpcdl.comm.arithmetic import add_bfloat16, float16_scale, from_bfloat16, to_bfloat16
from hpcdl.core.processes.wall import WALL
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.elastic.replica import (
    Background,
    Replica,
    attract_center,
    attract_center_by,
    blocks,
    descend,
    elastic_step,
    moving_rate,
)

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array


Reduce = Callable[["Array", "Add | None"], None]
"""Sums a buffer over the workers in place."""
EXPECTED = 4.0
"""Sums of distances are expected to be below this factor times the center's largest weight.

float16 then has its full precision down to 2^-26 of that weight, below the resolution of float32.
"""


class WholeWeights:
    """Weights as they are: 4 bytes each."""

    def start(self, num_weights: int) -> None:
        """Allocate the buffers."""
        self.total: Array = numpy.zeros(num_weights, numpy.float32)

    def exchange(self, weights: Array, center: Array, reduce: Reduce) -> None:
        """Sum the workers' `weights`; collective."""
        self.total[:] = weights
        reduce(self.total, None)

    def attract(self, center: Array, num_workers: int, alpha: float) -> None:
        """Apply equation (2)."""
        attract_center(center, self.total, num_workers, alpha)


class HalfDifferences:
    """Distances from the center, 2 bytes each: float16 scaled into its range by a power of two, or bfloat16."""

    def __init__(self, number_format: str) -> None:
        self._scaled = number_format == "fp16"

    def start(self, num_weights: int) -> None:
        """Allocate the buffers."""
        self.total: Array = numpy.zeros(num_weights, numpy.float32)
        self._sent: Array = numpy.zeros(num_weights, numpy.float16 if self._scaled else numpy.uint16)

    def exchange(self, weights: Array, center: Array, reduce: Reduce) -> None:
        """Sum the workers' W_i - W~ into `total`; collective."""
        # Weights that have diverged overflow here; they are sent as infinity and detected when weights are checked.
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.subtract(weights, center, out=self.total)
            if not self._scaled:
                self._as_bfloat16(reduce)
                return
            # All ranks know the center's range, so no communication is needed: workers are rarely further apart.
            expected = _largest(center) * EXPECTED
            if expected[0]:
                self._as_float16(expected, reduce)
            if not (expected[0] and numpy.isfinite(_largest(self.total)[0])):  # the same on all ranks, as the sum is
                # The first attempt overflowed and has overwritten `total`.
                numpy.subtract(weights, center, out=self.total)
                bound = _largest(self.total)
                # The sum of all ranks' largest distances bounds every partial sum.
                reduce(bound, None)
                self._as_float16(bound, reduce)

    def attract(self, center: Array, num_workers: int, alpha: float) -> None:
        """Apply equation (2)."""
        attract_center_by(center, self.total, alpha)

    def _as_float16(self, bound: Array, reduce: Reduce) -> None:
        """Sum `total` as float16; no partial sum over ranks should exceed `bound`, shape (1,)."""
        from hpcdl.strategies.allreduce.compression import add_float16, cast

        scale = float16_scale(bound)
        self.total *= scale
        cast(self.total, self._sent)
        reduce(self._sent, add_float16)
        cast(self._sent, self.total)
        self.total /= scale

    def _as_bfloat16(self, reduce: Reduce) -> None:
        for part in blocks(self.total.size):
            self._sent[part] = to_bfloat16(self.total[part])
        reduce(self._sent, add_bfloat16)
        for part in blocks(self.total.size):
            self.total[part] = from_bfloat16(self._sent[part])


def _largest(values: Array) -> Array:
    """Return the largest magnitude, shape (1,)."""
    # numpy.abs would allocate as much memory as the values take.
    return numpy.array([max(values.max(), -values.min())], numpy.float32)


def carrier(compress: str) -> WholeWeights | HalfDifferences:
    """Return the format for --compress."""
    return WholeWeights() if compress == "none" else HalfDifferences(compress)


class SyncEasgd:
    """The strategy `sync-easgd`."""

    def replica(self, context: Context) -> Replica:
        """Return one worker's part, without TensorFlow."""
        return _VARIANTS[context.elastic.variant](context)

    def worker(self, context: Context) -> Worker:
        """Return the worker: all ranks are workers."""
        from hpcdl.strategies.elastic.flat import FlatWorker

        return FlatWorker(self.replica(context))

    def server(self, context: Context) -> Server:
        """Fail: there are no servers."""
        raise AssertionError("sync-easgd has no servers")


class CenterEverywhere(Replica):
    """Variant 2: each rank has the center; one all-reduce after the backward pass sums the weights."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.group = context.communicator.duplicate()
        self._chip, self._communicator = chips_of(self.group, self.elastic.groups)
        # P of equation (2) is the number of chips: the ranks of one chip count as one worker.
        self.alpha = moving_rate(self.elastic, self._communicator.size)
        # The algorithm depends on size and ranks alone: measured choices could differ between two runs.
        self._workspace = Workspace(measure=False)
        self._chip_workspace = Workspace(measure=False)
        self._exchanging = False
        self._center: Array = self.weights
        self._carried = carrier(context.exchange.compress)
        self._parts: list[slice] = []

    def start(self, weights: Array, sizes: Sequence[int]) -> None:
        """Set every rank's center to `weights`."""
        self.start_weights(weights)
        self._center = weights.copy()
        self._carried.start(weights.size)
        edges = [0, *itertools.accumulate(sizes)] if self.elastic.unpacked else [0, weights.size]
        self._parts = [slice(*pair) for pair in itertools.pairwise(edges)]

    def before_step(self, step: int) -> None:
        """Note whether this step exchanges."""
        self._exchanging = self.exchanges_at(step)
        if self._exchanging:
            self._begin()

    def step(self, gradient: Array) -> tuple[Array, float]:
        """Apply equations (1) and (2), both to the weights before the update; a chip's groups share their gradients."""
        # Before the average over the chip, so that the error names the rank whose gradient it is.
        self.check_finite(gradient, "the gradient")
        self._average_over_groups(gradient)
        if not self._exchanging:
            exchanged = WALL.now_s()
            descend(self.weights, gradient, self.learning_rate)
            return self.weights, exchanged
        self._end()
        exchanged = WALL.now_s()
        self.measure_distance(self._center)
        alpha = self.alpha(self.learning_rate)
        # The sum over the workers is older than this update, so both equations see the same weights.
        elastic_step(self.weights, self._center, gradient, self.learning_rate, alpha)
        if self._holds_center:
            self._carried.attract(self._center, self._communicator.size, alpha)
        return self.weights, exchanged

    def center(self) -> Array:
        """Return the center, the same on every rank."""
        return self._center

    def finish(self, *, early: bool = False) -> None:
        """Free buffers and groups."""
        self._workspace.close()
        self._chip_workspace.close()

    def _average_over_groups(self, gradient: Array) -> None:
        if self._chip.size > 1:
            auto.allreduce(self._chip, gradient, self._chip_workspace)
            gradient /= self._chip.size

    @property
    def _holds_center(self) -> bool:
        return True

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        self._exchange()

    def _exchange(self) -> None:
        self._carried.exchange(self.weights, self._center, self._reduce)

    def _reduce(self, buffer: Array, add: Add | None) -> None:
        # The other buffer is a bound of one number (`HalfDifferences`), which has no layers.
        parts = self._parts if buffer.size == self.weights.size else [slice(None)]
        for part in parts:
            auto.allreduce(self._communicator, buffer[part], self._workspace, add)


class CenterOnRoot(CenterEverywhere):
    """Variant 1: rank 0 has the center, broadcasts it down a tree, and gets the weights' sum up the tree."""

    def start(self, weights: Array, sizes: Sequence[int]) -> None:
        """Set rank 0's center to `weights`."""
        super().start(weights, sizes)
        self._landing = numpy.zeros_like(weights)

    def center(self) -> Array:
        """Return rank 0's center, sent to every rank."""
        broadcast_from_root(self._communicator, self._center)
        return self._center

    @property
    def _holds_center(self) -> bool:
        return self._communicator.rank == 0

    def _reduce(self, buffer: Array, add: Add | None) -> None:
        # Equation (1) needs the center on every rank, so it travels before the sum.
        for part in self._parts:
            broadcast_from_root(self._communicator, self._center[part])
        for part in self._parts:
            reduce_to_root(self._communicator, buffer[part], self._landing[part])


class Overlapped(CenterEverywhere):
    """Variant 3: as variant 2, during the computation of the gradient."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._background = Background()

    def abandon(self) -> None:
        """End the exchange thread."""
        self._background.close()

    def finish(self, *, early: bool = False) -> None:
        """End the exchange thread, and free the rest."""
        self._background.close()
        super().finish(early=early)

    def _begin(self) -> None:
        self._background.start(self._exchange)

    def _end(self) -> None:
        self._background.wait()


_VARIANTS: dict[str, Callable[[Context], Replica]] = {"1": CenterOnRoot, "2": CenterEverywhere, "3": Overlapped}


def chips_of(communicator: Communicator, groups: int) -> tuple[Communicator, Communicator]:
    """Return the ranks of this rank's chip, `groups` of them in a row, and its peers, one on each chip."""
    chip = communicator.split(communicator.rank // groups)
    return chip, communicator.split(communicator.rank % groups)


def reduce_to_root(communicator: Communicator, buffer: Array, landing: Array) -> None:
    """Sum `buffer` onto rank 0; `landing`, of the same length, receives."""
    rank = communicator.rank
    # A binomial tree: the lowest bit set in a rank is the distance to its parent.
    distance = 1
    while distance < communicator.size:
        if rank & distance:
            communicator.isend(buffer, rank - distance).wait()
            return
        if rank + distance < communicator.size:
            communicator.irecv(landing, rank + distance).wait()
            buffer += landing
        distance *= 2


def broadcast_from_root(communicator: Communicator, buffer: Array) -> None:
    """Fill `buffer` with rank 0's values."""
    rank = communicator.rank
    # The tree of `reduce_to_root`, from the root downwards.
    distance = 1 << (communicator.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == distance:
            communicator.irecv(buffer, rank - distance).wait()
        elif rank % (2 * distance) == 0 and rank + distance < communicator.size:
            communicator.isend(buffer, rank + distance).wait()
