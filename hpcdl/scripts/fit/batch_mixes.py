"""Warn of losses in which the samples of a batch meet: each rank computes them from its own share of the batch.

The graph of a step shows them. A product of a batch with itself, transposed, compares its samples (a contrast). A
ratio, root or other non-linear function of means over a batch is not the mean of what the ranks get.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.scripts.process.session import warn_once
from hpcdl.strategies.base.graph import call_python, outside_graphs

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

MOST_TENSORS = 2000
"""Tensors to look at between a loss and what is searched, and from there to the batch."""
ROUNDING = 1e-4
PASSING = ("Identity", "Cast", "Neg", "StopGradient")
SCALING = ("Mul", "RealDiv", "DivNoNan")
ADDING = ("Add", "AddV2", "AddN", "Sub")
EXACT = "exact_over_ranks"
"""Name of a tensor whose mean over the ranks is what one process has, however it is computed."""
_REDUCING = ("Sum", "Mean", "Max", "Min", "Prod")
_DIVIDING = ("RealDiv", "DivNoNan")
_BENDING = ("Sqrt", "Rsqrt", "Square", "Pow", "SquaredDifference", "Log", "Log1p", "Exp", "Abs", "Maximum", "Minimum")
_ABOUT_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_OWN = "each rank has those of its own share alone, so that results depend on the number of ranks"
COMPARES = f"compares the samples of a batch: {_OWN}"
_BENDS = f"is no mean over the samples of a batch: {_OWN}"
_DIVIDES = (
    f"divides by a sum over the samples of a batch: {_OWN}; where no weight changes that sum, give it to "
    "hpcdl.DistributedGradientTape(..., average_over='samples') as tape.gradient(..., num_samples=...)"
)


def look_for_mixes(group: ScriptGroup, what: str, loss: Any, rows: Any) -> None:
    """Look at a loss of the graph that is being traced when its first batch, of which `rows` is a tensor, comes."""
    number = rows.shape[0]
    shown: Any
    if (product := _contrast(loss, number)) is not None:
        text, shown = COMPARES, tf.shape(product)
    elif (found := _not_linear(loss, number)) is not None:
        operation, divisor = found
        text, shown = (_BENDS, tf.shape(operation)[:0]) if divisor is None else (_DIVIDES, divisor)
        if divisor is not None and divisor.shape.rank != 0:
            return
    else:
        return
    judge = functools.partial(_warn_if_met, group, f"{what} {text}")
    group.keep(f"looks if {what} {text}", lambda: FirstBatch(judge)).trace(rows, shown)


def _contrast(loss: Any, number: int | None) -> Any:
    """Return a product in a loss of the batch with the transposed batch, or None."""
    waiting, seen = deque([loss]), set[int]()
    while waiting and len(seen) < MOST_TENSORS:  # the nearest first: a network behind the loss may be large
        current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        operation = current.op
        inputs = list(operation.inputs)
        if operation.type == "MatMul" and not operation.get_attr("transpose_a"):
            first, second = inputs
            if not operation.get_attr("transpose_b"):
                second = second.op.inputs[0] if second.op.type == "Transpose" else None
            if second is not None and all(has_rows(one, number, times=True) for one in (first, second)):
                return current
        if operation.type == "Einsum" and len(inputs) == 2:
            left, _, result = operation.get_attr("equation").decode().partition("->")
            labels = {term[:1] for term in left.split(",")}
            if len(labels) == 2 and labels == set(result) and all(has_rows(one, number, times=True) for one in inputs):
                return current
        waiting.extend(inputs)
    return None


def _not_linear(loss: Any, number: int | None) -> tuple[Any, Any] | None:
    """Return a tensor of a loss that is a non-linear function of means or sums over the batch, and what divides it."""
    waiting, seen = [loss], set[int]()
    while waiting and len(seen) < MOST_TENSORS:
        current = waiting.pop()
        if id(current) in seen or is_exact(current) or _over_batch(current, number):
            continue
        seen.add(id(current))
        kind, inputs = current.op.type, _passed_by(current)
        if kind in SCALING or kind in _BENDING:
            of_batch = [_reaches_batch(one, number) for one in inputs]
            if kind in _BENDING and any(of_batch):
                return current, None
            if kind in _DIVIDING and of_batch[1]:
                return current, inputs[1]
            if all(of_batch):
                return current, None
        waiting += inputs
    return None


def _reaches_batch(tensor: Any, number: int | None) -> bool:
    """Return whether a mean or sum over the batch is among what `tensor` is computed from."""
    waiting, seen = [tensor], set[int]()
    while waiting and len(seen) < MOST_TENSORS:
        current = waiting.pop()
        if id(current) not in seen:
            if _over_batch(current, number):
                return True
            seen.add(id(current))
            waiting += _passed_by(current)
    return False


def _passed_by(tensor: Any) -> Sequence[Any]:
    """Return the tensors without rows of samples that one without them is computed from; none if that is unknown."""
    operation = tensor.op
    if operation.type in (*PASSING, *SCALING, *ADDING, *_BENDING, "Pack"):
        return list(operation.inputs)
    return list(operation.inputs)[:1] if operation.type in _REDUCING else []


def _over_batch(tensor: Any, number: int | None) -> bool:
    """Return whether an operation takes the mean, sum or another number over the samples of the batch."""
    operation = tensor.op
    if operation.type in _REDUCING:
        return takes_rows(operation) and has_rows(operation.inputs[0], number)
    if operation.type != "MatMul":
        return False
    first = operation.inputs[0]
    turned = (
        first if operation.get_attr("transpose_a") else first.op.inputs[0] if first.op.type == "Transpose" else None
    )
    return turned is not None and has_rows(turned, number)


def is_exact(tensor: Any) -> bool:
    """Return whether hpcdl has weighed a part of a loss over the ranks."""
    return str(tensor.op.name).rpartition("/")[2].startswith(EXACT)


def takes_rows(operation: Any) -> bool:
    """Return whether an operation reduces over the first dimension."""
    values, axes, *_ = operation.inputs
    known = tf.get_static_value(axes)
    # Modulo the rank, because axes may be negative.
    return known is not None and bool(values.shape.rank) and 0 in known.reshape(-1) % values.shape.rank


def has_rows(tensor: Any, number: int | None, *, times: bool = False) -> bool:
    """Return whether the first dimension of a tensor is that of the batch, which has `number` samples (None: unknown).

    It is followed through operations back to the batch itself, since weights may have as many rows. `times`: it may
    also be a multiple, as of two views of each sample, one set after the other.
    """
    waiting, seen, sizes = [tensor], set[int](), {number}
    if times and number and tensor.shape.rank and (tensor.shape[0] or 0) % number == 0:
        sizes.add(tensor.shape[0])
    while waiting and len(seen) < MOST_TENSORS:
        current = waiting.pop()
        if id(current) in seen or not current.shape.rank or current.shape[0] not in sizes:
            continue
        seen.add(id(current))
        operation = current.op
        if operation.type == "Placeholder" or operation.type.startswith("Iterator"):
            return True
        changes = operation.type in _REDUCING and takes_rows(operation)
        # A product with a transposed batch sums over its samples: the rows of the result are others.
        turns = operation.type == "MatMul" and operation.get_attr("transpose_a")
        if not changes and not turns and operation.type not in ("ReadVariableOp", *_ABOUT_SHAPES):
            waiting += operation.inputs
    return False


class FirstBatch:
    """What is looked at in the first batch of two samples or more, and never again.

    `judge` takes the number of the batch's samples, and the values of what `trace` is given besides.
    """

    def __init__(self, judge: Callable[..., None]) -> None:
        self._judge, self._done = judge, False
        with outside_graphs():  # a function that is traced again refuses new variables
            self._on = tf.Variable(True, trainable=False, name="looks_at_batch")

    def trace(self, rows: Any, *shown: Any) -> None:
        """Add what looks at a batch, of which `rows` is a tensor, to the step; it does nothing in later steps."""
        if not self._done:
            inputs = [tf.shape(rows)[0], *shown]
            tf.cond(self._on, lambda: call_python(self._look, inputs, tf.bool), lambda: tf.constant(True))

    def _look(self, number: Array, *shown: Array) -> bool:
        if number > 1 and not self._done:
            self._done = True
            self._on.assign(False)
            self._judge(int(number), *shown)
        return True


def _warn_if_met(group: ScriptGroup, text: str, number: int, shown: Array) -> None:
    """Warn if what a batch shows does not speak against it: see `meet`."""
    if meet(number, shown):
        warn_once(group, text, text)


def meet(number: int, shown: Array) -> bool:
    """Return whether the samples of a batch of `number` meet.

    `shown`: the shape of a product of the batch with itself, what divides the loss, or nothing.
    """
    if shown.ndim:
        return all(length == shown[0] and length % number == 0 for length in shown)
    # A number of values that each sample has (a mask without gaps) is the same on all ranks.
    times = float(shown) / number
    return math.isfinite(times) and not math.isclose(times, round(times), abs_tol=ROUNDING)
