"""What compression leaves over of a worker's gradients, and takes along at the next step; and the largest values alone.

Sources: Karimireddy, Rebjock, Stich and Jaggi 2019 (arXiv 1901.09847), algorithm 2; with momentum left to the user's
optimizer Vogels, Karimireddy and Jaggi 2019 (arXiv 1905.13727), algorithm 2. Gradients come divided by the number of
workers, and so does the rest: what was applied and all workers' rests add up to the sum of all gradients so far.

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


if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

    Reduce = Callable[[Array], None]
    """Sums a float32 buffer over the ranks in place, by the strategy's own all-reduce."""

PREFIX = "rest/"
"""How the names of what a checkpoint keeps begin."""


@dataclass(frozen=True, kw_only=True)
class BucketPart:
    """One variable's gradient in a flat bucket: the variable's number, where it begins, and its shape."""

    variable: int
    start: int
    shape: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Where it lies."""
        return slice(self.start, self.start + prod(self.shape))


class ReducedForm(Protocol):
    """A form in which less than the gradients travels."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape is worth it; the others travel as they are."""

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """What a rank makes of its bucket: the bytes of it that travel."""

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """`values` (n,), float32, become their sum over the ranks, the same bits on each; collective.

        `rest` (n,), float32, gets what of this rank's values is not in it. It is complete before the last message
        leaves: where another rank has the sum, this one has its rest.
        """

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps beside the rest, by names that begin with PREFIX."""

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take back what `state` gave, or begin anew where it is not there."""


class Rests:
    """The rest of each variable, float32, by its number; zero before the first exchange.

    `repeatable`: a step may break off and be repeated. Then what it leaves over counts once `settle` is called.
    """

    def __init__(self, *, repeatable: bool) -> None:
        self._kept: dict[int, Array] = {}
        self._new: dict[int, Array] = {} if repeatable else self._kept

    def add_to(self, values: Array, pieces: Sequence[BucketPart]) -> None:
        """Add them to the gradients in a bucket."""
        for piece in pieces:
            if piece.variable in self._kept:
                values[piece.span] += self._kept[piece.variable]

    def keep(self, rest: Array, pieces: Sequence[BucketPart]) -> None:
        """`rest`, as long as the bucket, is what its exchange leaves over."""
        for piece in pieces:
            part = rest[piece.span]
            if piece.variable in self._new:
                self._new[piece.variable][:] = part
            else:
                self._new[piece.variable] = part.copy()

    def settle(self) -> None:
        """The step is over."""
        if self._new is not self._kept:
            self._kept, self._new = {**self._kept, **self._new}, {}

    def state(self) -> dict[str, Array]:
        """Copies for a checkpoint."""
        return {f"{PREFIX}{variable}": rest.copy() for variable, rest in self._kept.items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take them back; all are zero where there are none."""
        self._kept.clear()
        self._new.clear()
        for name, rest in arrays.items():
            number = name.removeprefix(PREFIX)
            if number != name and number.isdecimal():
                self._kept[int(number)] = rest.astype(numpy.float32)


class Feedback:
    """The exchange of buckets in a `form`, with all that is left over."""

    def __init__(self, form: ReducedForm, *, repeatable: bool) -> None:
        self.form = form
        self._rests = Rests(repeatable=repeatable)
        self._scratch: Array = numpy.zeros(0, numpy.float32)

    def exchange(self, values: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce) -> None:
        """`values` (n,), this rank's gradients, become the sum over the ranks; collective."""
        if self._scratch.size < values.size:
            self._scratch = numpy.zeros(values.size, numpy.float32)
        rest = self._scratch[: values.size]
        # Gradients that are not finite travel on as they are, and are found where the sums are looked at.
        with numpy.errstate(over="ignore", invalid="ignore"):
            self._rests.add_to(values, pieces)
            self.form.exchange(values, rest, pieces, communicator, reduce)
        self._rests.keep(rest, pieces)

    def settle(self) -> None:
        """The step is over: nobody repeats it."""
        self._rests.settle()

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps of this worker."""
        return {**self._rests.state(), **self.form.state()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take it back; of a checkpoint without compression there is nothing to take, and the rest is zero."""
        self._rests.restore(arrays)
        self.form.restore(arrays)


MOST_VALUES = 1 << 32
"""Places are numbers of 32 bits."""


class TopK:
    """The form `topk:P%`: so many of a hundred values of each variable, at least one."""

    def __init__(self, percent: float) -> None:
        self._percent = percent

    def takes(self, shape: Sequence[int]) -> bool:
        """Matrices and kernels; biases begin at zero and are few."""
        return len(shape) > 1 and math.prod(shape) < MOST_VALUES

    def count(self, piece: BucketPart) -> int:
        """How many values of a variable travel."""
        length = math.prod(piece.shape)
        return min(length, max(1, round(length * self._percent / 100)))

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """A float32 and a place of 4 bytes for each value that travels."""
        return 8 * sum(map(self.count, pieces))

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """The sum over the ranks of what each has chosen."""
        places = numpy.concatenate([piece.start + largest(values[piece.span], self.count(piece)) for piece in pieces])
        mine = numpy.empty((2, places.size), numpy.uint32)
        mine[0] = places
        mine[1].view(numpy.float32)[:] = values[places]
        rest[:] = values
        rest[places] = 0
        everybody = [numpy.empty_like(mine) for _ in range(communicator.size)]
        swap_pieces(communicator, [mine] * communicator.size, everybody)
        values[:] = 0
        for theirs in everybody:  # in the order of ranks, the same on each; no place comes twice from one
            values[theirs[0]] += theirs[1].view(numpy.float32)

    def state(self) -> dict[str, Array]:
        """Nothing beside the rest."""
        return {}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Nothing."""


def largest(values: Array, count: int) -> Array:
    """Places of the `count` largest |values| (n,), in rising order. What is no number counts as the largest."""
    if count == values.size:
        return numpy.arange(values.size)
    found: Array = numpy.argpartition(numpy.abs(values), values.size - count)[values.size - count :]
    found.sort()
    return found
