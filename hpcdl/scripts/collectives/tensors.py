"""A script's collectives on TensorFlow tensors: in graphs, in a fixed order, with gradients.

TensorFlow runs independent operations in any order, which differs between ranks, but collectives must keep their order.
So each one reads and then changes one variable, which a `tf.function` does in program order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives.arrays import (
    broadcast_arrays,
    equal_splits,
    gather_arrays,
    reduce_arrays,
    swap_rows,
)
from hpcdl.strategies.base.graph import call_python

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup


@functools.cache
def _turn() -> Any:
    """Return the variable that counts the collectives of the process.

    A separate thread creates it: a function that has already run without a collective may create no variable, not even
    in an init_scope.
    """
    with ThreadPoolExecutor(1) as maker:
        return maker.submit(tf.Variable, 0, dtype=tf.int64, trainable=False, name="hpcdl_turn").result()


def turn_begins() -> list[Any]:
    """Return the control dependencies of the next collective: the end of the previous one."""
    return [] if tf.executing_eagerly() else [_turn().read_value()]


def turn_ends(outputs: Sequence[Any]) -> list[Any]:
    """Return the `outputs` of a collective. The next one may begin after them."""
    if tf.executing_eagerly():
        return list(outputs)
    with tf.control_dependencies(outputs):
        _turn().assign_add(1)
    return list(outputs)


def check_no_strategy(strategy: Any) -> None:
    """Raise UsageError for a tf.distribute strategy that distributes work itself."""
    default = type(strategy).__name__.startswith("_Default")  # TensorFlow's name for no strategy
    # One device is what a rank has anyway.
    if not default and not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        raise UsageError(
            f"{type(strategy).__name__} and hpcdl would both deal the work out: leave `with strategy.scope()` out; "
            "under hpcdl each rank has one device"
        )


def check_traceable() -> None:
    """Raise UsageError within a tf.distribute strategy, or if XLA is to compile calls that leave TensorFlow."""
    if tf.distribute.has_strategy():
        check_no_strategy(tf.distribute.get_strategy())
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # XLA may compile any of the functions around this one.
    while graph is not None:
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            raise UsageError(
                "XLA cannot compile what goes over ranks: leave jit_compile=True out of tf.function or model.compile"
            )
        graph = getattr(graph, "outer_graph", None)


def as_tensor(value: Any) -> Any:
    """Convert a tensor, an array, or a TensorFlow or Keras variable. Raises UsageError for ragged or sparse ones."""
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise UsageError(
            "ragged and sparse tensors are not supported: exchange their parts, such as .values and .row_lengths()"
        )
    return tf.convert_to_tensor(value)


def _in_turn(function: Callable[..., Any], inputs: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Call `function` with the inputs as numpy arrays, in order. Return one result per type."""
    if tf.executing_eagerly():
        results = function(*[tensor.numpy() for tensor in inputs])
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, types, strict=True)]
    check_traceable()
    with tf.control_dependencies(turn_begins()):
        return turn_ends(call_python(function, list(inputs), list(types)))


def _like(results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    return [tf.ensure_shape(result, tensor.shape) for result, tensor in zip(results, tensors, strict=True)]


def allreduce(group: ScriptGroup, tensors: Sequence[Any], op: str) -> list[Any]:
    """Return reduced tensors. The gradient of a minimum or maximum is shared equally by all elements that attain it."""
    dtypes = [tensor.dtype for tensor in tensors]

    def forward(given: Sequence[Any], kind: str) -> list[Any]:
        results = _in_turn(
            lambda *arrays: reduce_arrays(group, arrays, kind), given, [tensor.dtype for tensor in given]
        )
        return _like(results, given)

    @tf.custom_gradient
    def call(*given: Any) -> Any:
        reduced = forward(given, op)

        def gradient(*upstream: Any) -> Any:
            # All ranks' results depend on this rank's value, so that their upstream gradients are combined too.
            total = forward(upstream, "mean" if op == "mean" else "sum")
            if op in ("sum", "mean"):
                return total
            if op == "product":
                return [sum_ * _of_others(group, value) for sum_, value in zip(total, given, strict=True)]
            # Several elements may attain the minimum or maximum, and share its gradient.
            hit = [tf.cast(tf.equal(*pair), dtype) for *pair, dtype in zip(given, reduced, dtypes, strict=True)]
            return [
                sum_ * attained / many for sum_, attained, many in zip(total, hit, forward(hit, "sum"), strict=True)
            ]

        return reduced, gradient

    results = call(*[tf.identity(tensor) for tensor in tensors])
    return list(results) if isinstance(results, list | tuple) else [results]


def _of_others(group: ScriptGroup, tensor: Any) -> Any:
    """Return the product of all other ranks' elements, correct also if this rank's own are zero."""

    def product(local: Array) -> list[Array]:
        rows = numpy.zeros((group.size, *local.shape), local.dtype)
        rows[group.rank] = local
        (everybody,) = reduce_arrays(group, [rows], "sum")
        return [numpy.prod(numpy.delete(everybody, group.rank, 0), 0)]

    return _like(_in_turn(product, [tensor], [tensor.dtype]), [tensor])[0]


def allgather(group: ScriptGroup, value: Any) -> Any:
    """Return the rows of all ranks. The gradient of this rank's rows is summed over the ranks."""
    tensor = as_tensor(value)
    tensor = tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor

    @tf.custom_gradient
    def call(rows: Any) -> Any:
        (gathered,) = _in_turn(lambda array: gather_arrays(group, [array]), [rows], [rows.dtype])
        gathered = tf.ensure_shape(gathered, [None, *rows.shape[1:]])

        def gradient(upstream: Any) -> Any:
            (counts,) = _in_turn(lambda n: gather_arrays(group, [n]), [tf.shape(rows, tf.int64)[:1]], [tf.int64])
            (total,) = allreduce(group, [upstream], "sum")
            start = tf.reduce_sum(counts[: group.rank])
            return tf.ensure_shape(total[start : start + counts[group.rank]], rows.shape)

        return gathered, gradient

    return call(tensor)


def broadcast(group: ScriptGroup, value: Any, root: int) -> Any:
    """Return the root's tensor. The gradients of all ranks are summed on the root; other ranks' values get zeros."""

    @tf.custom_gradient
    def call(given: Any) -> Any:
        (sent,) = _like(_in_turn(lambda array: broadcast_arrays(group, [array], root), [given], [given.dtype]), [given])

        def gradient(upstream: Any) -> Any:
            (total,) = allreduce(group, [upstream], "sum")
            return total if group.rank == root else tf.zeros_like(total)

        return sent, gradient

    return call(as_tensor(value))


def alltoall(group: ScriptGroup, value: Any, splits: Any) -> tuple[Any, Any]:
    """Exchange rows with each rank. The gradient's rows travel the reverse way."""
    tensor = as_tensor(value)
    if splits is None:
        rows = tf.shape(tensor, tf.int64)[0]
        if tensor.shape.rank is not None and (not tensor.shape.rank or tensor.shape[0] is not None):
            equal_splits(group, tensor.shape)
        splits = tf.fill([group.size], rows // group.size)
    given_splits = tf.cast(as_tensor(splits), tf.int64)

    @tf.custom_gradient
    def call(rows: Any, counts: Any) -> Any:
        types = [rows.dtype, tf.int64]
        received, received_counts = _in_turn(lambda array, n: swap_rows(group, array, n), [rows, counts], types)
        received = tf.ensure_shape(received, [None, *rows.shape[1:]])

        def gradient(upstream: Any, _: Any) -> Any:
            back, _ = _in_turn(lambda array, n: swap_rows(group, array, n), [upstream, received_counts], types)
            return tf.ensure_shape(back, rows.shape), None

        return (received, tf.ensure_shape(received_counts, [group.size])), gradient

    received, received_counts = call(tensor, given_splits)
    return received, received_counts


def broadcast_variables(group: ScriptGroup, variables: Sequence[Any], root: int) -> None:
    """Assign the root's values to the variables."""
    # `value` of a Keras variable is its tf.Variable, and of a tf.Variable a method.
    handles = [getattr(variable, "value", variable) for variable in variables]
    handles = [
        handle if isinstance(handle, tf.Variable) else one for handle, one in zip(handles, variables, strict=True)
    ]
    values = [tf.convert_to_tensor(handle) for handle in handles]
    sent = _in_turn(lambda *arrays: broadcast_arrays(group, arrays, root), values, [value.dtype for value in values])
    for handle, value in zip(handles, sent, strict=True):
        handle.assign(tf.ensure_shape(value, handle.shape))
