"""Where a learning rate schedule of a script's own ends, which shows if it was made for the steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from hpcdl.scripts.fit.learning_rate import _length_of


class Own(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the script's own class."""

    def __init__(self, rate: Callable[[Any], Any]) -> None:
        self._rate = rate

    def __call__(self, step: Any) -> Any:
        return self._rate(step)


def falling(step: Any) -> Any:
    """Return a rate that rises over 100 steps and then falls to 0 at step 1000."""
    now = tf.cast(step, tf.float32)
    return tf.where(now < 100, now / 100, tf.maximum(0.0, (1000 - now) / 900))


@pytest.mark.parametrize(
    ("schedule", "taken", "length"),
    [
        (Own(falling), 500, 1000),
        (Own(falling), 480, 960),
        (Own(falling), 1000, 0),  # for the steps of a rank
        (Own(falling), 50, 0),
        (Own(lambda step: tf.minimum(tf.cast(step, tf.float32) / 1000, 1.0)), 500, 0),  # a warm-up
        (Own(lambda step: 0.9 ** (int(step) / 100)), 500, 0),
        (Own(lambda step: 1 / 0), 500, 0),
        (keras.optimizers.schedules.CosineDecay(0.1, 700, warmup_target=0.2, warmup_steps=300), 500, 1000),
        (keras.optimizers.schedules.PiecewiseConstantDecay([990], [0.1, 0.01]), 500, 0),
    ],
)
def test_a_schedule_ends_where_its_rate_stays(schedule: Any, taken: int, length: int) -> None:
    assert _length_of(schedule, taken, 2 * taken) == length
