"""What strategies add to a step's graph: a branch that almost never runs."""

from __future__ import annotations

import logging

import pytest


def test_a_branch_is_chosen_without_a_word_of_tensorflows(caplog: pytest.LogCaptureFixture) -> None:
    """A branch causes no warning: TensorFlow warns users, for each input, of names that begin with an underscore."""
    import tensorflow as tf

    from hpcdl.strategies.base.graph import if_ever

    @tf.function(autograph=False)
    def step(wanted: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        return if_ever(wanted, lambda one, other: one + other, tf.constant(0.0), [numbers, numbers])

    logger = tf.get_logger()
    logger.addHandler(caplog.handler)  # its records do not propagate
    try:
        with caplog.at_level(logging.WARNING, logger=logger.name):
            assert [float(step(tf.constant(wanted), tf.constant(2.0))) for wanted in (True, False)] == [4.0, 0.0]
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records, caplog.text
