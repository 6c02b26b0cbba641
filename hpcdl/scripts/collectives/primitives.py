"""Collectives for scripts, on numpy arrays and TensorFlow tensors, over all ranks or a set of them.

`tensors.py` handles tensors: it puts these collectives into graphs and adds gradients. Every rank of the group makes
the same calls in the same order. If one does not, all ranks end with a message about it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

import numpy

from hpcdl.collectives.slices import gather_pieces
from hpcdl.core.errors import UsageError
from hpcdl.core.records.kept_values import given_back, kept
from hpcdl.scripts.collectives.arrays import (
    ADDS,
    broadcast_arrays,
    equal_splits,
    gather_arrays,
    reduce_arrays,
    swap_rows,
    unconverted,
)
from hpcdl.scripts.process.group import ScriptGroup
from hpcdl.scripts.process.session import session
from hpcdl.scripts.process.undistributed import note_exchange

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class ProcessSet:
    """The ranks with the numbers `ranks`. Every rank of the job creates all sets in the same order. Collective.

    Ranks outside the set create it too, but may not use it in collectives.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        world = session()
        size = world.communicator.size
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))
        if not self.ranks or self.ranks[0] < 0 or self.ranks[-1] >= size:
            raise UsageError(f"ProcessSet({list(ranks)}): name at least one rank, each from 0 to {size - 1}")
        world.group.agree(f"hpcdl.ProcessSet({list(self.ranks)})")
        # Collective over all ranks: those outside the set form a part that nobody uses.
        part = world.communicator.split(int(world.communicator.rank in self.ranks), world.communicator.rank)
        self._group = ScriptGroup(part) if self.included() else None

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return session().communicator.rank in self.ranks

    def rank(self) -> int:
        """Return this rank's number within the set. Raises UsageError if it is not in the set."""
        return self.group.rank

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    @property
    def group(self) -> ScriptGroup:
        """The group for collectives of the set. Raises UsageError on a rank that is not in it."""
        if self._group is None:
            raise UsageError(
                f"rank {session().communicator.rank} is not in ProcessSet({list(self.ranks)}); "
                "call this on the set's ranks alone (if process_set.included())"
            )
        return self._group


def group_of(process_set: ProcessSet | None) -> ScriptGroup:
    """Return the set's group, or that of all ranks if there is no set."""
    return session().group if process_set is None else process_set.group


Value = TypeVar("Value")
Operation = Literal["sum", "mean", "min", "max", "product"]
Sum: Final = "sum"
Mean: Final = "mean"
Average: Final = "mean"  # Horovod's name
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"


@unconverted
def allreduce(
    value: Value,
    op: Operation = Mean,
    *,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Value:
    """Reduce `value` element by element over the ranks; all get the result. Shapes and types are equal on all ranks.

    The value is multiplied by the factors before and after the reduction. NaN wins in every operation.
    """
    return grouped_allreduce(
        [value], op, process_set=process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )[0]


@unconverted
def grouped_allreduce(
    values: Sequence[Value],
    op: Operation = Mean,
    *,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Value]:
    """Apply `allreduce` to several values at once: values of one type travel as one message."""
    if op not in ADDS:
        raise UsageError(f"op={op!r}: a reduction is one of {', '.join(ADDS)}")
    group = group_of(process_set)
    _combines()
    if not all(_is_number(value) for value in values):  # a count of samples does not make training distributed
        note_exchange(shapes=[tuple(getattr(value, "shape", None) or ()) for value in values])

    if _are_tensors(values):
        tensors = _tensors()
        converted = [tensors.as_tensor(value) for value in values]
        reduced = tensors.allreduce(group, _scaled(converted, prescale_factor), op)
    else:
        reduced = reduce_arrays(group, _scaled([numpy.asarray(value) for value in values], prescale_factor), op)
        reduced = [_as_given(array) for array in reduced]
    return _scaled(reduced, postscale_factor)


def _scaled(given: Sequence[Any], factor: float) -> list[Any]:
    """Multiply arrays or tensors by a factor. Raises UsageError if integers would not remain integers."""
    if factor == 1.0:
        return list(given)
    kinds = [numpy.dtype(_dtype_of(value)) for value in given]
    for kind in kinds:
        if kind.kind in "iu" and not (
            factor == int(factor) and numpy.iinfo(kind).min <= factor <= numpy.iinfo(kind).max
        ):
            raise UsageError(f"a factor of {factor} for {kind} values: cast them to floating point first")
    return [value * numpy.asarray(factor, kind) for value, kind in zip(given, kinds, strict=True)]


@unconverted
def allgather(value: Value, *, process_set: ProcessSet | None = None) -> Value:
    """Join all ranks' values along the first dimension, the only one that may differ. Scalars make a vector.

    For strings, lists and the like use `allgather_object`.
    """
    group = group_of(process_set)
    _combines()
    if _are_tensors([value]):
        gathered: Value = _tensors().allgather(group, value)
        return gathered
    (result,) = gather_arrays(group, [numpy.asarray(value)])
    joined: Any = result
    return joined  # type: ignore[no-any-return]


@unconverted
def broadcast(value: Value, root_rank: int = 0, *, process_set: ProcessSet | None = None) -> Value:
    """Return the root's value on every rank. Shapes and types are equal on all ranks."""
    group = group_of(process_set)
    _check_root(group, root_rank)
    if _are_tensors([value]):
        sent: Value = _tensors().broadcast(group, value, root_rank)
        return sent
    (result,) = broadcast_arrays(group, [numpy.asarray(value)], root_rank)
    same: Value = _as_given(result)
    return same


@overload
def alltoall(value: Value, splits: None = None, *, process_set: ProcessSet | None = None) -> Value: ...
@overload
def alltoall(value: Value, splits: Any, *, process_set: ProcessSet | None = None) -> tuple[Value, Any]: ...
@unconverted
def alltoall(value: Any, splits: Any = None, *, process_set: ProcessSet | None = None) -> Any:
    """Send rows of `value` to each rank: `splits[r]` rows to rank r, or the same number to each without `splits`.

    Returns the received rows, in rank order. If `splits` are given, also returns how many rows came from each rank.
    """
    group = group_of(process_set)
    if _are_tensors([value]):
        received, counts = _tensors().alltoall(group, value, splits)
    else:
        array = numpy.asarray(value)
        received, counts = swap_rows(group, array, equal_splits(group, array.shape) if splits is None else splits)
    return received if splits is None else (received, counts)


@unconverted
def reducescatter(value: Value, op: Operation = Mean, *, process_set: ProcessSet | None = None) -> Value:
    """Return this rank's share of the reduced value: its rows along the first dimension, split evenly in rank order.

    If the rows do not divide by the number of ranks, the first ranks get one more.
    """
    reduced: Any = allreduce(value, op, process_set=process_set)
    if not numpy.ndim(reduced):
        raise UsageError("reducescatter of a scalar: give an array, whose rows are dealt out")
    group = group_of(process_set)
    rows, remainder = divmod(int(reduced.shape[0]), group.size)
    start = group.rank * rows + min(group.rank, remainder)
    share: Value = reduced[start : start + rows + (group.rank < remainder)]
    return share


@unconverted
def barrier(*, process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called it."""
    group_of(process_set).agree("hpcdl.barrier")


def join() -> int:
    """Declare that this rank has no more data: it adds zeros to the others' sums until all ranks have joined.

    Returns the last rank to join, whose weights are the most advanced. A mean still divides by all ranks.
    """
    return group_of(None).join()


def broadcast_object(value: Value, root_rank: int = 0, *, process_set: ProcessSet | None = None) -> Value:
    """Return the root's `value`, anything JSON can hold, on all ranks. Others may give None. Tuples become lists."""
    group = group_of(process_set)
    _check_root(group, root_rank)
    text = numpy.frombuffer(_as_json(value if group.rank == root_rank else None), numpy.uint8)
    # Only the root knows how long the text is, and a broadcast needs buffers of one size.
    (length,) = broadcast_arrays(group, [numpy.array([text.size])], root_rank)
    padded = text.copy() if group.rank == root_rank else numpy.zeros(int(length[0]), numpy.uint8)
    (sent,) = broadcast_arrays(group, [padded], root_rank)
    answer: Value = given_back(json.loads(sent.tobytes()))
    return answer


def allgather_object(value: Value, *, process_set: ProcessSet | None = None) -> list[Value]:
    """Return every rank's `value`, anything JSON can hold, in rank order."""
    group = group_of(process_set)
    _combines()
    group.agree("hpcdl.allgather_object")
    texts = gather_pieces(group.messages, [numpy.frombuffer(_as_json(value), numpy.uint8)])[0]
    return [given_back(json.loads(text.tobytes())) for text in texts]


@unconverted
def broadcast_variables(variables: Any, root_rank: int = 0, *, process_set: ProcessSet | None = None) -> None:
    """Give all ranks the root's values of Keras or TensorFlow variables, also inside a `tf.function`."""
    group = group_of(process_set)
    _check_root(group, root_rank)
    to_send = list(variables() if callable(variables) else variables)
    if to_send and group.size > 1:
        _tensors().broadcast_variables(group, to_send, root_rank)


def _combines() -> None:
    """Forget earlier evaluations, whose results the script may combine over the ranks itself."""
    session().evaluations.clear()


def _check_root(group: ScriptGroup, root_rank: int) -> None:
    if not 0 <= root_rank < group.size:
        raise UsageError(f"root_rank={root_rank}: the ranks are 0 to {group.size - 1}")


def _dtype_of(value: Any) -> Any:
    return getattr(value.dtype, "as_numpy_dtype", value.dtype)


def _as_given(array: Array) -> Any:
    """Return a scalar as a scalar, any other array unchanged."""
    return array[()] if array.ndim == 0 else array


def _as_json(value: Any) -> bytes:
    try:
        return json.dumps(kept(value)).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"only what JSON can hold travels as an object ({error}); arrays: hpcdl.broadcast") from error


def _are_tensors(values: Sequence[Any]) -> bool:
    """Return whether any value is a TensorFlow or Keras object. Neither is imported to find out."""
    return any(type(value).__module__.split(".")[0] in ("tensorflow", "keras") for value in values)


def _tensors() -> Any:
    return importlib.import_module("hpcdl.scripts.collectives.tensors")


def _is_number(value: Any) -> bool:
    """Return whether its static shape is that of a scalar; a tensor of unknown rank is not one."""
    shape = getattr(value, "shape", None)
    return (
        not isinstance(value, Sequence)
        if shape is None
        else (shape.rank if hasattr(shape, "rank") else len(shape)) == 0
    )
