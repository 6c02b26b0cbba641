"""Several steps in one call: a loop in the graph takes a batch, steps, and asks whether to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.core.errors import originals
from hpcdl.strategies.base.graph import call_python

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

CALL_S = 0.1
"""No step begins in a call that has taken this long: signals, for one, are answered between calls."""


def build_several(
    step: Callable[..., Any],
    optimizer: Any,
    got_batch: Callable[[], float],
    step_over: Callable[[Array, Array], tuple[bool, float]],
) -> Callable[[Any, Any], Any]:
    """A compiled function of an iterator of batches and the first step's learning rate.

    It takes steps as `step` (of build_step) does, the same numbers bit for bit, however many. `got_batch` is called
    when a step has its batch and returns the time. `step_over` gets what a step has left, float64: loss, number of
    samples, the times at which it had its batch, its gradients, and had exchanged them; and the objective's sums. It
    returns whether another step follows, and that one's learning rate.
    """

    def asked(facts: Array, sums: Array) -> tuple[Any, Any]:
        continues, rate = step_over(facts, sums)
        return numpy.bool_(continues), numpy.float32(rate)

    @tf.function(autograph=False, reduce_retracing=True)
    def several(iterator: Any, rate: Any) -> Any:
        def body(_: Any, rate: Any) -> tuple[Any, Any]:
            optimizer.learning_rate = rate
            images, labels = iterator.get_next()
            tensors = tf.nest.flatten((images, labels))
            with tf.control_dependencies(tensors):
                began = tf.ensure_shape(call_python(got_batch, [], tf.float64), [])
            with tf.control_dependencies([began]):
                loss, sums, had_gradients, exchanged = step(images, labels)
            samples = tf.shape(tf.nest.flatten(labels)[0])[0]
            facts = tf.stack([tf.cast(value, tf.float64) for value in (loss, samples, began, had_gradients, exchanged)])
            continues, next_rate = call_python(asked, [facts, sums], [tf.bool, tf.float32])
            return tf.ensure_shape(continues, []), tf.ensure_shape(next_rate, [])

        continues, _ = tf.while_loop(
            lambda continues, _: continues, body, (tf.constant(True), rate), parallel_iterations=1
        )
        return continues

    compiled: Callable[[Any, Any], Any] = originals()(several)
    return compiled
