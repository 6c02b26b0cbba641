"""PowerSGD: approximates each matrix by the product of two thin ones, with one power iteration per step, warm-started.

Source: Vogels, Karimireddy and Jaggi 2019 (arXiv 1905.13727), algorithms 1 and 2, with the warm start of its section 3.
Momentum is that of the user's optimizer. A kernel is a matrix with a row for each input and a column for each output.
Both thin matrices are summed by the strategy's own all-reduce.

Every rank computes the product itself, and all must get the same bits on any processor. So computations after a sum use
numpy's elementwise operations and sums only, in float64 for the directions. The bits of matrix products depend on the
processor and the number of threads, so they are used only for values that are summed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy

from hpcdl.strategies.allreduce.rest import PREFIX, BucketPart

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.strategies.allreduce.rest import Reduce

WARM = f"{PREFIX}right/"
"""Prefix of the names of the right matrices in a checkpoint."""
ROWS_BYTES = 256 << 10
"""Bytes of rows computed at a time in the update, so that they stay in the cache."""
AT_ONCE = 8192
"""Values of a matrix per matrix product.

For more, numpy's OpenBLAS wakes threads, which spin on the cores that TensorFlow needs: on two busy cores an exchange
took 40 times as long.
"""


class PowerSgd:
    """The form `powersgd:R`; `rank` is R, the rank of the matrices."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._right: dict[int, Array] = {}
        """The right matrix of each variable after the last step, (columns, R) float32; the same bits on every rank."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether to compress: matrices that become smaller."""
        if len(shape) < 2:
            return False
        rows, columns = sides(shape)
        return (rows + columns) * self._rank < rows * columns

    def num_bytes(self, pieces: Sequence[BucketPart], num_ranks: int) -> int:
        """Return the bytes of both thin matrices, float32."""
        return 4 * self._rank * sum(sum(sides(piece.shape)) for piece in pieces)

    def exchange(
        self, values: Array, rest: Array, pieces: Sequence[BucketPart], communicator: Communicator, reduce: Reduce
    ) -> None:
        """Replace the sum by the product of the thin matrices; this is exact if the sum has rank R."""
        # Each span is contiguous, so these are views: writing to a matrix writes to `values`.
        matrices = [values[piece.span].reshape(sides(piece.shape)) for piece in pieces]
        # Algorithm 1: P = M Q, summed and orthonormalised, then Q = M^T P, summed. P and Q are called left and right.
        lefts = [times(matrix, self._started(piece)) for matrix, piece in zip(matrices, pieces, strict=True)]
        lefts = [orthonormal(left) for left in summed(lefts, reduce)]
        rights = [transposed_times(matrix, left) for matrix, left in zip(matrices, lefts, strict=True)]
        # Before the second sum: once any rank has that sum, all rests must be complete (`ReducedForm.exchange`).
        for piece, matrix, left, right in zip(pieces, matrices, lefts, rights, strict=True):
            piece_rest = rest[piece.span].reshape(matrix.shape)
            for rows in few_rows(matrix):
                # This rank's own right matrix, not the sum: the rest is its gradient minus its own projection.
                numpy.subtract(matrix[rows], left[rows] @ right.T, out=piece_rest[rows])
        for piece, matrix, left, right in zip(pieces, matrices, lefts, summed(rights, reduce), strict=True):
            multiply(left, right, matrix)
            self._right[piece.variable] = right

    def state(self) -> dict[str, Array]:
        """Return the right matrices."""
        return {f"{WARM}{variable}": right.copy() for variable, right in self._right.items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the right matrices; start again if none has this rank R."""
        rights = {name.removeprefix(WARM): right for name, right in arrays.items() if name.startswith(WARM)}
        self._right = {
            int(number): right.astype(numpy.float32)
            for number, right in rights.items()
            # The rank R of a resumed run may differ from the checkpoint's.
            if right.shape[-1] == self._rank
        }

    def _started(self, piece: BucketPart) -> Array:
        """Return the initial right matrix. A column of zeros would stay zero, so it is drawn again."""
        columns = sides(piece.shape)[1]
        last_right = self._right.get(piece.variable)
        if last_right is not None and last_right.any(axis=0).all():
            return last_right
        # Seeded by the variable, so that every rank draws the same matrix.
        fresh: Array = numpy.random.default_rng(piece.variable).standard_normal((columns, self._rank), numpy.float32)
        return fresh if last_right is None else numpy.where(last_right.any(axis=0), last_right, fresh)


def few_rows(matrix: Array) -> Iterator[slice]:
    """Return slices of all rows of `matrix`, with at most AT_ONCE values, but at least one row."""
    rows = max(1, AT_ONCE // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def times(matrix: Array, right: Array) -> Array:
    """Return `matrix` (rows, columns) times `right` (columns, R)."""
    product = numpy.empty((len(matrix), right.shape[1]), numpy.float32)
    for rows in few_rows(matrix):
        numpy.matmul(matrix[rows], right, out=product[rows])
    return product


def transposed_times(matrix: Array, left: Array) -> Array:
    """Return the transpose of `matrix` (rows, columns) times `left` (rows, R)."""
    product = numpy.zeros((matrix.shape[1], left.shape[1]), numpy.float32)
    for rows in few_rows(matrix):
        # These bits may differ between processors: every rank uses only their sum over the ranks.
        product += matrix[rows].T @ left[rows]
    return product


def sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a gradient as a matrix: the last dimension, a layer's outputs, gives the columns."""
    return math.prod(shape[:-1]), shape[-1]


def summed(matrices: Sequence[Array], reduce: Reduce) -> list[Array]:
    """Return the sums over the ranks, in one all-reduce; collective."""
    flat = numpy.concatenate([matrix.reshape(-1) for matrix in matrices])
    reduce(flat)
    return list(_parts(flat, matrices))


def _parts(flat: Array, like: Sequence[Array]) -> Iterator[Array]:
    start = 0
    for matrix in like:
        yield flat[start : start + matrix.size].reshape(matrix.shape)
        start += matrix.size


def orthonormal(matrix: Array) -> Array:
    """Orthonormalise the columns of `matrix` (rows, R), float32, by Gram-Schmidt, twice; zero columns stay zero.

    The rounding error left of a column that depends on the others is as good as any direction, once orthogonal.
    """
    columns = matrix.T.astype(numpy.float64)
    for number, column in enumerate(columns):
        for _ in range(2):  # once leaves rounding errors along columns that are nearly dependent
            for earlier in columns[:number]:
                column -= (earlier * column).sum() * earlier
            length = math.sqrt(float((column * column).sum()))
            if length > 0:
                column /= length
    result: Array = columns.T.astype(numpy.float32)
    return result


def multiply(left: Array, right: Array, product: Array) -> None:
    """Set `product` (rows, columns) to `left` (rows, R) times the transpose of `right` (columns, R), column by column.

    The result has the same bits on every processor.
    """
    rows = max(1, ROWS_BYTES // (4 * product.shape[1]))
    across = numpy.ascontiguousarray(right.T)
    for start in range(0, product.shape[0], rows):
        part, factors = product[start : start + rows], left[start : start + rows]
        # No matrix product here: all ranks must get the same bits (docs/decisions/0216).
        numpy.multiply(factors[:, :1], across[0], out=part)
        for number in range(1, left.shape[1]):
            part += factors[:, number : number + 1] * across[number]
