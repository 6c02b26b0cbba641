"""A script's collectives on numpy arrays. The ranks of a group agree on each collective first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from hpcdl.collectives import auto
from hpcdl.collectives.slices import Workspace, gather_pieces, swap_numbers, swap_pieces
from hpcdl.core.errors import UsageError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array
    from hpcdl.scripts.process.group import ScriptGroup

Called = TypeVar("Called", bound=Callable[..., Any])


def unconverted(function: Called) -> Called:
    """Mark `function` so that AutoGraph does not convert it: in a `tf.function` that would be needless work.

    This is TensorFlow's own mark, set without importing TensorFlow.
    """
    vars(function)["autograph_info__"] = {}
    return function


def _minimum(target: Array, incoming: Array) -> None:
    numpy.minimum(target, incoming, out=target)


def _maximum(target: Array, incoming: Array) -> None:
    numpy.maximum(target, incoming, out=target)


def _product(target: Array, incoming: Array) -> None:
    numpy.multiply(target, incoming, out=target)


ADDS: dict[str, Add | None] = {"sum": None, "mean": None, "min": _minimum, "max": _maximum, "product": _product}
"""Functions that combine two ranks' values, by the operation's name. None is the plain sum."""


def reduce_arrays(group: ScriptGroup, values: Sequence[Array], op: str) -> list[Array]:
    """Return arrays reduced over the group, as new arrays. Raises UsageError for types without such an operation."""
    for value in values:
        # V is bfloat16, which is no type of numpy's own.
        if value.dtype.kind not in "iufcV" or (op == "mean" and value.dtype.kind in "iu"):
            raise UsageError(f"{op} of {value.dtype} values: cast them first, or use op=hpcdl.Sum for whole numbers")
    group.agree(f"allreduce {op}", [_form_of(value) for value in values])
    results: list[Array] = [numpy.array(value) for value in values]
    if group.size == 1:
        return results
    workspace = group.keep("workspace", lambda: Workspace(measure=False))

    def reduce(buffer: Array) -> None:
        auto.allreduce(group.messages, buffer, workspace, ADDS[op])

    # In the order of first use, which all ranks have alike by the agreement above.
    for dtype in dict.fromkeys(value.dtype for value in values):
        same_type = [index for index, value in enumerate(values) if value.dtype == dtype]
        flat = numpy.concatenate([results[index].reshape(-1) for index in same_type]).astype(_wide(dtype), copy=False)
        group.summing(reduce)(flat)
        # Divided in the wide type, before it is rounded to the given one.
        flat = (flat / group.size if op == "mean" else flat).astype(dtype, copy=False)
        parts = numpy.split(flat, numpy.cumsum([results[index].size for index in same_type])[:-1])
        for index, part in zip(same_type, parts, strict=True):
            results[index] = part.reshape(values[index].shape)
    return results


def _wide(dtype: Any) -> Any:
    """Return the type to sum in: half precision would round at every rank, and overflow even if the mean does not."""
    return numpy.float32 if dtype.kind in "fV" and dtype.itemsize < 4 else dtype


def gather_arrays(group: ScriptGroup, values: Sequence[Array]) -> list[Array]:
    """Return every rank's rows, in rank order."""
    rows = [value.reshape(-1) if value.ndim == 0 else value for value in values]
    _check_movable(rows)
    group.agree("allgather", [f"{value.dtype} (rows, {', '.join(map(str, value.shape[1:]))})" for value in rows])
    if group.size == 1:
        return [value.copy() for value in rows]
    return [numpy.concatenate(pieces) for pieces in gather_pieces(group.messages, rows)]


def broadcast_arrays(group: ScriptGroup, values: Sequence[Array], root_rank: int) -> list[Array]:
    """Return the root's values, as new arrays."""
    _check_movable(values)
    group.agree(f"broadcast from rank {root_rank}", [_form_of(value) for value in values])
    results: list[Array] = [numpy.array(value, order="C") for value in values]
    if group.size > 1:
        for result in results:
            if result.size:
                group.messages.broadcast(result.reshape(-1), root_rank)
    return results


def equal_splits(group: ScriptGroup, shape: Sequence[int]) -> Array:
    """Return the number of rows for each rank if all get the same number. Raises UsageError if that is impossible."""
    if not shape or shape[0] % group.size:
        raise UsageError(
            f"alltoall of shape {tuple(shape)} over {group.size} ranks: make the first dimension a multiple, or "
            "give splits"
        )
    return numpy.full(group.size, shape[0] // group.size, numpy.int64)


def swap_rows(group: ScriptGroup, value: Array, splits: Any) -> tuple[Array, Array]:
    """Send rows to each rank. Return the rows received and their number from each rank."""
    counts = numpy.asarray(splits, numpy.int64).reshape(-1)
    _check_movable([value])
    if not value.ndim or counts.size != group.size or counts.sum() != len(value) or (counts < 0).any():
        raise UsageError(
            f"alltoall of shape {value.shape} with splits {counts.tolist()}: give one number for each of "
            f"{group.size} ranks, that sum up to the first dimension"
        )
    group.agree("alltoall", [f"{value.dtype} (rows, {', '.join(map(str, value.shape[1:]))})"])
    if group.size == 1:
        return value.copy(), counts
    # First how many rows come, because buffers to receive must have the right size.
    incoming_counts = swap_numbers(group.messages, counts.reshape(-1, 1))[:, 0]
    outgoing = numpy.split(numpy.ascontiguousarray(value), numpy.cumsum(counts)[:-1])
    incoming = [numpy.empty((count, *value.shape[1:]), value.dtype) for count in incoming_counts]
    swap_pieces(group.messages, outgoing, incoming)
    return numpy.concatenate(incoming), incoming_counts


def _check_movable(values: Sequence[Array]) -> None:
    for value in values:
        if value.dtype.kind in "OSUT":
            raise UsageError(f"arrays of {value.dtype} do not travel; use hpcdl.broadcast_object or allgather_object")


def _form_of(value: Array) -> str:
    return f"{value.dtype} {value.shape}"
