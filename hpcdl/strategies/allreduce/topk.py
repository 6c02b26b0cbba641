"""The largest values of each gradient with their places; all others stay in the rest.

Source: Stich, Cordonnier and Jaggi 2018 (arXiv 1809.07599), top-k with memory. Every rank sends its own choice to all
others: (p-1) times 8 bytes for each value that it sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives.pieces import swap_pieces

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.strategies.allreduce.rest import BucketPart, Reduce

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
