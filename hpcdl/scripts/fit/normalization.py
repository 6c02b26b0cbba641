"""`BatchNormalization(synchronized=True)`: mean and variance over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives import tensors
from hpcdl.scripts.collectives.process_set import group_of
from hpcdl.step.keras_internals import replace_moments


def synchronize_normalization() -> None:
    """Have Keras's layer do over the ranks what it says; before any step is traced, and once."""

    def over_ranks(plain: Callable[..., Any]) -> Callable[..., Any]:
        def moments(self: Any, inputs: Any, mask: Any) -> Any:
            if not self.synchronized:
                return plain(self, inputs, mask)
            if mask is not None:
                raise UsageError(f"{self.name}: synchronized=True with a mask is not supported; leave one of them out")
            return moments_over_ranks(inputs, self._reduction_axes)

        return moments

    replace_moments(over_ranks)


def moments_over_ranks(inputs: Any, axes: Any) -> tuple[Any, Any]:
    """Mean and variance of `inputs` over `axes` and all ranks, which gradients go through; batches may differ."""
    values = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    count = tf.cast(tf.size(values) / tf.size(tf.reduce_sum(values, axes)), values.dtype)
    sums = tf.concat([tf.reduce_sum(values, axes), [count]], 0)
    total = _total(sums)
    mean = total[:-1] / total[-1]
    shape = [1 if axis in axes else values.shape[axis] for axis in range(len(values.shape))]
    squares = _total(tf.reduce_sum(tf.math.squared_difference(values, tf.reshape(mean, shape)), axes))
    return tf.cast(mean, inputs.dtype), tf.cast(squares / total[-1], inputs.dtype)


def _total(values: Any) -> Any:
    """The sum over the ranks; not hpcdl.allreduce, which makes a step count as distributed."""
    return tensors.allreduce(group_of(None), [values], "sum")[0]
