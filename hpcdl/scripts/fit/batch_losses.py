"""Warn of a loss that is one number for a batch, but no mean over its samples.

Each rank computes it from its own share of a batch, and the mean over the ranks is another number. A sum, a contrast
with the other samples, and a division by what a batch holds are examples. No type or shape says which one it is: the
loss of a batch is compared with those of its halves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.scripts.process.session import warn_once
from hpcdl.strategies.base.graph import call_python, outside_graphs

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup

_ROUNDING = 1e-4
"""Relative difference that rounding may make; losses are in float32."""

_MOST_LOOKS = 7
_MOST_VALUES = 1_000_000
"""In the outputs for a batch of which more than the first is looked at."""


@contextlib.contextmanager
def batch_losses_checked(group: ScriptGroup) -> Iterator[None]:
    """Trace a training step inside this context: its losses are looked at in its first batch."""
    plain = keras.losses.Loss.__call__

    @functools.wraps(plain)
    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        group.keep(f"the loss {loss.name}", lambda: BatchLoss(group, loss)).trace(y_true, y_pred)
        return plain(loss, y_true, y_pred, sample_weight)

    vars(call)["autograph_info__"] = {}  # TensorFlow's mark of functions that AutoGraph does not convert
    keras.losses.Loss.__call__ = call
    try:
        yield
    finally:
        keras.losses.Loss.__call__ = plain


class BatchLoss:
    """One loss, in its batches 1, 3, 7, ...: before a network has learnt, all samples may have nearly the same loss."""

    def __init__(self, group: ScriptGroup, loss: Any) -> None:
        self._group, self._loss, self._done, self._num_looks = group, loss, False, 0
        with outside_graphs():  # a function that is traced again refuses new variables
            self._on = tf.Variable(True, trainable=False, name="looks_at_loss")
            self._waits = tf.Variable(0, trainable=False, name="batches_before_next_look")

    def trace(self, y_true: Any, y_pred: Any) -> None:
        """Add what looks at a batch to the training step; it does nothing in later steps."""
        rows = [y_true, y_pred]
        if self._done or not all(isinstance(values, tf.Tensor) and values.shape.rank for values in rows):
            return

        def wait() -> Any:
            with tf.control_dependencies([self._waits.assign_sub(1)]):
                return tf.constant(True)

        def look_or_wait() -> Any:
            return tf.cond(tf.equal(self._waits, 0), lambda: call_python(self.look, rows, tf.bool), wait)

        tf.cond(self._on, look_or_wait, lambda: tf.constant(True))

    def look(self, y_true: Array, y_pred: Array) -> bool:
        """Warn if the loss of a batch is neither one value for each sample nor their mean."""
        number, half = len(y_pred), len(y_pred) // 2
        if half and not self._done and len(y_true) == number:
            self._num_looks += 1
            self._waits.assign(2**self._num_looks - 1)
            more = False
            with contextlib.suppress(Exception):  # the loss may need a whole batch, or tensors of the graph
                whole, *halves = (
                    self._of(y_true[rows], y_pred[rows]) for rows in (slice(None), slice(half), slice(half, None))
                )
                if text := verdict(whole, *halves, share=half / number):
                    warn_once(self._group, f"said what {self._loss.name} is", f"the loss {self._loss.name} {text}")
                is_one = not whole.ndim  # else a value for each sample
                more = is_one and not text and self._num_looks < _MOST_LOOKS and y_pred.size < _MOST_VALUES
            if not more:
                self._done = True
                self._on.assign(False)
                self._loss = None  # its function may hold a model
        return True

    def _of(self, y_true: Array, y_pred: Array) -> Array:
        given = (keras.ops.convert_to_tensor(one, dtype=self._loss.dtype) for one in (y_true, y_pred))
        return numpy.asarray(self._loss.call(*given), numpy.float64)


def verdict(whole: Array, first: Array, second: Array, *, share: float) -> str:
    """Return the warning that a loss deserves by its values for a batch and its two parts, or nothing.

    `share`: how much of the samples the first part has.
    """
    if whole.ndim or not numpy.isfinite([whole, first, second]).all():
        return ""
    near = _ROUNDING * max(abs(whole), abs(first), abs(second))
    if abs(whole - (share * first + (1 - share) * second)) <= near:
        return ""
    if abs(whole - (first + second)) <= near:
        return (
            "adds up the samples of a batch: the mean over the ranks is a part of the sum that one process has; return "
            "a value for each sample, or give hpcdl.DistributedOptimizer op='sum'"
        )
    return (
        "is no mean over the samples of a batch: each rank computes it from its own share, so that results depend on "
        "the number of ranks; return a value for each sample where there is one"
    )
