"""Losses that are means over something else than samples: each rank's counts as much as its denominator does.

A rank's loss is S_r / D_r, with D_r the sum of its sample weights or the number of its values that no mask hides. One
process with the whole batch has sum(S_r) / sum(D_r), which is the mean over the ranks of S_r / D_r * w_r with
w_r = D_r * size / sum(D_r). Loss and gradients are multiplied with w_r, loss by loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.scripts.collectives import tensors
from hpcdl.step.keras_internals import losses_weighed

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup


@contextlib.contextmanager
def weighed_over_ranks(group: ScriptGroup) -> Iterator[None]:
    """Inside, a training step is traced: its losses that have a denominator of their own are weighed by it."""

    def weigh(loss: Any, denominator: Any) -> Any:
        mine = tf.stop_gradient(tf.cast(denominator, tf.float64))
        (total,) = tensors.allreduce(group, [mine], "sum")
        weight = tf.math.divide_no_nan(mine * group.size, tf.stop_gradient(total))
        return loss * tf.cast(weight, loss.dtype)

    with losses_weighed(weigh):
        yield
