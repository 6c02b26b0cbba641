"""Error feedback: a worker keeps the part of its gradients that compression dropped for the next step. Also top-k.

Sources: Karimireddy, Rebjock, Stich and Jaggi 2019 (arXiv 1901.09847), algorithm 2; with momentum left to the user's
optimizer Vogels, Karimireddy and Jaggi 2019 (arXiv 1905.13727), algorithm 2. Gradients, and so the rests, are divided
by the number of workers: the applied updates and all workers' rests add up to the sum of all gradients so far.

Source: Stich, Cordonnier and Jaggi 2018 (arXiv 1809.07599), top-k with memory. Every rank sends its own choice to all
others: (p-1) times 8 bytes for each value that it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy

from hpcdl.collectives.slices import swap_pieces

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

    Reduce = Callable[[Array], None]
    """Sums a float32 buffer over the ranks in place, by the strategy's own all-reduce."""

PREFIX = "rest/"
"""Prefix of the names of its entries in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class BucketPart:
    """One variable's gradient in a flat bucket: the variable's number, its first element, and its shape."""

    variable: int
    start: int
    shape: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Its elements in the bucket."""
        return slice(self.start, self.start + prod(self.shape))


class ReducedForm(Protocol):
    """A form that sends less than the full gradients."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape is compressed; the others are sent unchanged."""

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """Return the bytes that a rank sends of its bucket."""

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """Replace `values` (n,) by their sum over the ranks, the same bits on each; collective.

        `rest` (n,), float32, receives the part of this rank's values that the sum lacks. It is complete before the last
        message is sent: if another rank has the sum, this rank has its rest.
        """

    def state(self) -> dict[str, Array]:
        """Return what a checkpoint holds besides the rest, by names that begin with PREFIX."""

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the result of `state`, or start again if it is missing."""


class Rests:
    """The rest of each variable, float32, by its number; zero before the first exchange.

    `repeatable`: an interrupted step may be repeated, so its rests take effect only when `settle` is called.
    """

    def __init__(self, *, repeatable: bool) -> None:
        self._kept: dict[int, Array] = {}
        # Without repeats both are one dict: a rest is valid as soon as it is kept.
        self._new: dict[int, Array] = {} if repeatable else self._kept

    def add_to(self, values: Array, pieces: Sequence[BucketPart]) -> None:
        """Add the rests to the gradients in a bucket."""
        for piece in pieces:
            if piece.variable in self._kept:
                values[piece.span] += self._kept[piece.variable]

    def keep(self, rest: Array, pieces: Sequence[BucketPart]) -> None:
        """Store `rest`, as long as the bucket, after its exchange."""
        for piece in pieces:
            part = rest[piece.span]
            if piece.variable in self._new:
                self._new[piece.variable][:] = part
            else:
                self._new[piece.variable] = part.copy()

    def settle(self) -> None:
        """Make the step's rests valid: the step is complete."""
        if self._new is not self._kept:
            # A new dict for the next step, because the arrays of this one are the valid rests now.
            self._kept, self._new = {**self._kept, **self._new}, {}

    def state(self) -> dict[str, Array]:
        """Return copies for a checkpoint."""
        return {f"{PREFIX}{variable}": rest.copy() for variable, rest in self._kept.items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the rests; all are zero if `arrays` has none."""
        self._kept.clear()
        self._new.clear()
        for name, rest in arrays.items():
            number = name.removeprefix(PREFIX)
            # The form's own entries share the prefix, as `rest/right/3` of powersgd.
            if number != name and number.isdecimal():
                self._kept[int(number)] = rest.astype(numpy.float32)


class Feedback:
    """The exchange of buckets in a `form`, with error feedback."""

    def __init__(self, form: ReducedForm, *, repeatable: bool) -> None:
        self.form = form
        self._rests = Rests(repeatable=repeatable)
        self._scratch: Array = numpy.zeros(0, numpy.float32)

    def exchange(self, values: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce) -> None:
        """Replace this rank's gradients `values` (n,) by the sum over the ranks; collective."""
        if self._scratch.size < values.size:
            self._scratch = numpy.zeros(values.size, numpy.float32)
        rest = self._scratch[: values.size]
        # Non-finite gradients are sent unchanged, and are detected when the sums are checked.
        with numpy.errstate(over="ignore", invalid="ignore"):
            self._rests.add_to(values, pieces)
            self.form.exchange(values, rest, pieces, communicator, reduce)
        self._rests.keep(rest, pieces)

    def settle(self) -> None:
        """Note that the step is complete and will not be repeated."""
        self._rests.settle()

    def state(self) -> dict[str, Array]:
        """Return this worker's state for a checkpoint."""
        return {**self._rests.state(), **self.form.state()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the state; with a checkpoint without compression the rest is zero."""
        self._rests.restore(arrays)
        self.form.restore(arrays)


MOST_VALUES = 1 << 32
"""Positions are 32-bit numbers."""


class TopK:
    """The form `topk:P%`: sends P percent of the values of each variable, at least one."""

    def __init__(self, percent: float) -> None:
        self._percent = percent

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether to compress: matrices and kernels only. Biases start at zero and are few."""
        return len(shape) > 1 and math.prod(shape) < MOST_VALUES

    def count(self, piece: BucketPart) -> int:
        """Return how many values of a variable are sent."""
        length = math.prod(piece.shape)
        return min(length, max(1, round(length * self._percent / 100)))

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """Return the bytes sent: a float32 and a position of 4 bytes per value."""
        return 8 * sum(map(self.count, pieces))

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """Sum over the ranks the values that each has chosen."""
        indices = numpy.concatenate([piece.start + largest(values[piece.span], self.count(piece)) for piece in pieces])
        # Positions and values are one message: a value travels as the bits of a uint32.
        own_message = numpy.empty((2, indices.size), numpy.uint32)
        own_message[0] = indices
        own_message[1].view(numpy.float32)[:] = values[indices]
        rest[:] = values
        rest[indices] = 0
        everybody = [numpy.empty_like(own_message) for _ in range(communicator.size)]
        swap_pieces(communicator, [own_message] * communicator.size, everybody)
        values[:] = 0
        for message in everybody:  # in the order of ranks, the same on each; positions of one rank are unique
            values[message[0]] += message[1].view(numpy.float32)

    def state(self) -> dict[str, Array]:
        """Return an empty state: only the rest is kept."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Do nothing: there is no state."""


def largest(values: Array, count: int) -> Array:
    """Return the positions of the `count` largest |values| (n,) in ascending order. NaN counts as the largest."""
    if count == values.size:
        return numpy.arange(values.size)
    positions: Array = numpy.argpartition(numpy.abs(values), values.size - count)[values.size - count :]
    positions.sort()
    return positions
