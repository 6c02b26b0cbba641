"""What strategies add to a step's graph besides their exchange: Python functions, time stamps, checks for NaN."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.comm.arithmetic import all_finite, not_finite
from hpcdl.comm.observed import BUCKET, UPDATING, Recorder
from hpcdl.core.errors import NOT_FINITE, NotFiniteError, RankError, UsageError, carried
from hpcdl.core.processes.wall import WALL
from hpcdl.core.protocols import Communicator

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Finished

    Exchange = Callable[[Array, Finished], Array]
    """Replaces a buffer by its sum over the ranks, in place, and calls the second argument with each finished part."""

FIRST_WORD_S = 5.0
"""A rank with bad gradients gets this long to report the details it alone knows, before other ranks end the job."""
SAMPLED = 509
"""One in this many elements of a gradient is kept, to tell whether it was finite before the exchange overwrote it."""
LARGEST_SUM = float(numpy.finfo(numpy.float32).max) / 2
"""Sums of float32 that cannot exceed this stay finite, however their partial sums are rounded."""
SQUARED_BOUND = 2.7e19
"""Above the square root of twice the largest float32: half the sum of squares is infinite if any |x| is larger."""


def call_python(function: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Run `function` on numpy arrays as an operation; `errors.original` recovers its errors from TensorFlow's."""
    return tf.numpy_function(carried(_on_kept_thread(function)), inputs, types)


def _on_kept_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the Python state of the calling thread kept between calls.

    TensorFlow's threads are not Python's. Python would discard their state after each call, and set up a new state and
    stack for the next one. That took a fifth to a half of a call's time within a step. The threads live as long as the
    process, so nothing has to be freed.
    """

    def call(*inputs: Any) -> Any:
        if not hasattr(_KEPT, "counted"):
            _KEPT.counted = ctypes.pythonapi.PyGILState_Ensure()  # one more than TensorFlow will release
        return function(*inputs)

    return call


_KEPT = threading.local()


def bucket_recorded(exchange: Exchange, recorder: Recorder, bucket: int, num_bytes: int | None = None) -> Exchange:
    """Return `exchange` of one bucket with a recorded span per call; `num_bytes` if less than the buffer is sent."""

    def call(buffer: Array, finished: Finished) -> Array:
        began_s = time.monotonic()
        result = exchange(buffer, finished)
        sent_bytes = buffer.nbytes if num_bytes is None else num_bytes
        recorder.span(BUCKET, began_s, time.monotonic(), num_bytes=sent_bytes, bucket=bucket)
        recorder.exchanged(bucket, result)
        return result

    return call


def timestamp() -> Any:
    """Return the Unix time in seconds when the graph reaches it (scalar float64); order it by control dependencies.

    Negative if TensorFlow computes it from the system clock, which may be set: `WALL.settled` converts it.
    """
    if has_own_clock():
        return -tf.timestamp()
    # The result of a Python function has no shape for TensorFlow.
    return tf.ensure_shape(call_python(WALL.now_s, [], tf.float64), [])


def seconds_after(stamp: Any, seconds: Any) -> Any:
    """Return the `timestamp` `seconds` after `stamp`; both are scalar float64 tensors."""
    # Stamps of TensorFlow's own clock are negative.
    return stamp - seconds if has_own_clock() else stamp + seconds


@contextlib.contextmanager
def outside_graphs() -> Iterator[None]:
    """Inside, TensorFlow is eager, and the graph being traced does not record reads.

    With tf.init_scope alone, a graph records each variable read while it is traced. It refuses to run once such a
    variable is deleted, even an unrelated one, such as the optimizer of another fold's model.
    """
    with tf.init_scope(), tf.Graph().as_default(), tf.__internal__.eager_context.eager_mode():
        yield


def has_own_clock() -> bool:
    """Whether TensorFlow can read the time itself, at a quarter of the cost; not possible with op determinism.

    Graphs of TensorFlow 1 are excluded: their errors would appear only when they run.
    """
    # Only an eager call raises its error at once; in a graph it would be raised by the steps.
    with tf.init_scope():
        if not tf.executing_eagerly():
            return False
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return False
    return True


def timestamp_beside(value: Any, after: Sequence[Any]) -> Any:
    """Return a `timestamp` of when `after` are available; nothing else waits for it. `value` is a scalar of the step.

    TensorFlow runs the Python functions of a graph one after the other, in trace order. A function that only reads the
    time must not delay the next ones, because buckets are sent during back-propagation. So it is declared free of side
    effects. It needs an input, or it would be called only once for all steps.
    """
    with tf.control_dependencies(after):
        stamp = tf.numpy_function(carried(lambda _: WALL.now_s()), [tf.identity(value)], tf.float64, stateful=False)
    return tf.ensure_shape(stamp, [])


def behind(ready: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return `tensors`, available once `ready` are done."""
    with tf.control_dependencies(ready):
        return [tf.identity(tensor) for tensor in tensors]


def update_recorded(recorder: Recorder, bucket: int, began: Any, variables: Sequence[Any]) -> Any:
    """Return zero (scalar float64) once each of `variables` has its last value; `recorder` gets the span.

    `began`: a `timestamp_beside`. The zero must be added to a result of the step: an operation without side effects
    that is only a control dependency is pruned from the graph.
    """

    def keep(began: Array) -> Array:
        now_s = time.monotonic()
        # `began` is a Unix time; spans are on the monotonic clock.
        recorder.span(UPDATING, now_s - max(WALL.now_s() - float(began), 0.0), now_s, bucket=bucket)
        return numpy.zeros_like(began)

    with tf.control_dependencies([variable.value.read_value() for variable in variables]):
        zero = tf.numpy_function(carried(keep), [tf.identity(began)], tf.float64, stateful=False)
    return tf.ensure_shape(zero, [])


def bounds_of(gradients: Sequence[Any]) -> Any:
    """Return a bound of each float32 gradient's |x|, shape (number of gradients,); infinite if it is not finite.

    The sum of squares is the cheapest check: if it is finite, no |x| exceeds SQUARED_BOUND. The exact bounds are
    computed only if it is not.
    """
    squares = tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients])

    def exactly(*gradients: Any) -> Any:
        sizes = [tf.where(tf.math.is_finite(gradient), tf.abs(gradient), float("inf")) for gradient in gradients]
        return tf.stack([tf.reduce_max(size) for size in sizes])

    doubtful = tf.logical_not(tf.reduce_all(tf.math.is_finite(squares)))
    return if_ever(doubtful, exactly, tf.fill([len(gradients)], SQUARED_BOUND), gradients)


def if_ever(condition: Any, then: Callable[..., Any], otherwise: Any, inputs: Sequence[Any] = ()) -> Any:
    """Return the tensor `then(*inputs)` if the scalar `condition` is true; else `otherwise`, of equal type and shape.

    For rare conditions. tf.cond would make an operation per input, a tenth of the step time of a network with 50 small
    variables. This is one operation. It cannot call Python on a GPU, nor in a graph of TensorFlow 1.
    """
    older = not tf.compat.v1.executing_eagerly_outside_functions()
    if tf.executing_eagerly() or older or any(one.device_type != "CPU" for one in tf.config.list_physical_devices()):
        return tf.cond(condition, lambda: then(*inputs), lambda: otherwise)
    # Both branches of an If take the same inputs, so `otherwise` is one of them.
    inputs = [otherwise, *inputs]
    kinds = [tf.TensorSpec(one.shape, one.dtype) for one in inputs]
    chosen, otherwise_graph = (
        tf.function(branch, autograph=False).get_concrete_function(*kinds)
        # TensorFlow warns of parameters whose names begin with an underscore.
        for branch in (lambda value, *those: then(*those), lambda value, *those: tf.identity(value))
    )
    # TensorFlow runs stateful operations in trace order: checking gradients must not delay a bucket.
    stateful = any(operation.op_def.is_stateful for operation in chosen.graph.get_operations())
    outputs = (tf.raw_ops.If if stateful else tf.raw_ops.StatelessIf)(
        cond=condition, input=inputs, Tout=[otherwise.dtype], then_branch=chosen, else_branch=otherwise_graph,
        output_shapes=[otherwise.shape],
    )  # fmt: skip
    return outputs[0]


def connected(
    gradients: Sequence[Any], variables: Sequence[Any], names: Sequence[str], log: Callable[[str], None]
) -> list[Any]:
    """Return `gradients` as dense tensors, with zeros for variables unrelated to the loss; `log` gets their names.

    Raises UsageError if the loss depends on none of the variables.
    """
    idle = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    if len(idle) == len(names):
        raise UsageError("the loss depends on none of the model's trainable variables; there is nothing to train")
    if idle:
        omission = f" and {len(idle) - _MOST_LISTED} more" if len(idle) > _MOST_LISTED else ""
        log(f"the loss does not depend on {', '.join(idle[:_MOST_LISTED])}{omission}: no gradient moves that")
    return [
        # The gradient of an embedding comes as IndexedSlices; a bucket is flat memory.
        tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


_MOST_LISTED = 5
"""Variables named in a message; more are only counted."""


class FiniteGuard:
    """Ends a step before the weights are updated if gradients hold NaN or infinity; names the rank and the variables.

    `group`: the ranks that get the same sums; None if each rank checks its own gradients before sending. A quick check
    reads data once; the gradients themselves are checked only if it fails.
    """

    def __init__(self, rank: int, group: Communicator | None = None) -> None:
        self.step: int | None = None
        self._rank, self._group = rank, group
        self._suspicious = False
        self._overwritten: dict[str, bool] = {}

    def watched(
        self,
        exchange: Exchange,
        *,
        first: bool,
        alone: str = "",
        exponent: int | None = None,
        sampled: int = SAMPLED,
    ) -> Callable[[Array], tuple[Array, bool]]:
        """Return `exchange` with a check of its result, part by part while the part is in the cache.

        The check returns, besides the buffer, whether this buffer or one since the `first` of a step must be checked
        again. `alone`: the variable whose gradient is that buffer itself and is overwritten; one in `sampled` of its
        elements is kept to tell whether it was finite.
        """

        def call(buffer: Array) -> tuple[Array, bool]:
            sample = buffer[::sampled].copy() if alone else buffer[:0]
            if first:
                self._suspicious = False
                self._overwritten.clear()
            finite = True

            def look(part: Array) -> None:
                nonlocal finite
                finite = finite and all_finite(part, exponent)

            exchange(buffer, look)
            if not finite:
                self._suspicious = True
                # Sticky over the buckets of a step: the last bucket's flag speaks for all.
                if alone:
                    self._overwritten[alone] = all_finite(sample, exponent)
            return buffer, self._suspicious

        return call

    def before_exchange(self, gradients: Sequence[Any], names: Sequence[str]) -> Any:
        """Return an operation to wait for before this rank's own `gradients` are sent; `names` are their variables'."""
        squares = tf.add_n([tf.cast(tf.nn.l2_loss(gradient), tf.float32) for gradient in gradients])
        return self.verdict(tf.logical_not(tf.math.is_finite(squares)), gradients, names)

    def agreed(self, bounds: Any, names: Sequence[str], total: Callable[[Array], None]) -> Any:
        """Return an operation to wait for before the weights are updated; it may finish before the exchange.

        `bounds` are `bounds_of` this rank's own gradients, `names` their variables'; `total` sums over the group in
        place. If the sum of the bounds is finite, so are the sums of the gradients.
        """

        def agree(bounds: Array) -> bool:
            # float64: the sum over many ranks must not overflow by itself.
            largest = numpy.max(bounds, keepdims=True).astype(numpy.float64)
            total(largest)
            # Every rank has the same sum, so either all enter the collective `_judge` or none. NaN also enters.
            if not largest[0] <= LARGEST_SUM:
                self._judge([name for name, bound in zip(names, bounds, strict=True) if not numpy.isfinite(bound)])
            return True

        return tf.ensure_shape(call_python(agree, [bounds], tf.bool), [])

    def verdict(self, suspicious: Any, gradients: Sequence[Any], names: Sequence[str]) -> Any:
        """Return an operation to wait for before the weights are updated; `gradients` are this rank's, with `names`.

        `suspicious`, bool: whether the result of the exchange must be checked; the same on every rank.
        """

        def judge(finite: Array) -> bool:
            # An overwritten gradient now is the sum; its sample tells about this rank's own values.
            flags = dict(zip(names, finite, strict=True)) | self._overwritten
            self._judge([name for name, fine in flags.items() if not fine])
            return True

        def look_again(*gradients: Any) -> Any:
            finite = tf.stack([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            return tf.ensure_shape(call_python(judge, [finite], tf.bool), [])

        return if_ever(tf.ensure_shape(suspicious, []), look_again, tf.constant(True), gradients)

    def unspoilt(self, suspicious: Any) -> Any:
        """Return an operation to wait for at the end of a step whose gradients were `agreed` to be finite.

        `suspicious` as in `verdict`: since the gradients were finite before the exchange, it then corrupted the sums.
        """

        def judge() -> bool:
            self._judge([])
            return True

        is_suspicious = tf.ensure_shape(suspicious, [])
        return if_ever(is_suspicious, lambda: tf.ensure_shape(call_python(judge, [], tf.bool), []), tf.constant(True))

    def _judge(self, bad_names: list[str]) -> None:
        """Raise the error that applies; collective over the group."""
        at_step = "" if self.step is None else f" at step {self.step}"
        if bad_names:
            own_error = not_finite(bad_names, "the gradient", self.step, self._rank)
        if self._group is None:
            if bad_names:
                raise own_error
            return  # large, but finite: their squares overflowed
        # Before this rank raises: the others learn the cause here.
        messages = self._group.allgather_json(str(own_error) if bad_names else "")
        if bad_names:
            raise own_error
        bad = next((rank for rank, word in enumerate(messages) if word), None)
        if bad is None:
            raise NotFiniteError(
                f"the sum of all ranks' gradients is not finite{at_step}, though none of them seems to be"
            )
        time.sleep(FIRST_WORD_S)
        raise RankError(messages[bad], rank=bad, kind=NOT_FINITE)
