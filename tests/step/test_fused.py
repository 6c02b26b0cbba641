"""Optimizers that update a variable in one operation: Keras's own numbers, for SGD bit for bit."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from hpcdl.config.schema import OptimizerConfig


def after_steps(optimizer: Any, variables: list[Any], *, loss_scaling: bool) -> list[bytes]:
    """Return the variables and the optimizer's state of each after some steps."""
    import keras
    import tensorflow as tf

    generator = numpy.random.default_rng(5)
    apply = tf.function(lambda gradients: optimizer.apply(gradients, variables))
    for step in range(7):
        scale = keras.ops.convert_to_numpy(optimizer.scale_loss(1.0)) if loss_scaling else 1.0
        gradients = [scale * generator.normal(size=one.shape).astype(numpy.float32) for one in variables]
        if loss_scaling and step == 3:
            gradients[0][:] = numpy.inf  # a skipped step
        apply([tf.constant(one) for one in gradients])
        optimizer.learning_rate = 0.05 / (step + 1)
    return [numpy.asarray(one).tobytes() for one in (*variables, *optimizer.variables)]


@pytest.mark.long
@pytest.mark.parametrize("loss_scaling", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov"])
def test_weights_and_velocities_are_those_of_keras(name: str, decay: float, *, loss_scaling: bool) -> None:
    import keras

    from hpcdl.step.optimizers import build_optimizer

    generator = numpy.random.default_rng(3)
    start = [generator.normal(size=shape).astype(numpy.float32) for shape in ((5, 7, 3), (129,), (33, 65))]
    ours, plain = ([keras.Variable(value) for value in start] for _ in range(2))
    config = OptimizerConfig(optimizer=name, learning_rate=0.05, momentum=0.9, weight_decay=decay)
    own = build_optimizer(config, ours, loss_scaling=loss_scaling)
    of_keras = keras.optimizers.SGD(
        0.05, momentum=0.0 if name == "sgd" else 0.9, nesterov=name == "nesterov", weight_decay=decay or None
    )
    of_keras.exclude_from_weight_decay(var_list=[item for item in plain if len(item.shape) <= 1])
    wrapped = keras.optimizers.LossScaleOptimizer(of_keras) if loss_scaling else of_keras
    wrapped.build(plain)
    found = after_steps(own, ours, loss_scaling=loss_scaling)
    assert found == after_steps(wrapped, plain, loss_scaling=loss_scaling)
    assert found[0] != start[0].tobytes()


@pytest.mark.parametrize("loss_scaling", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_is_that_of_keras_to_rounding(decay: float, *, loss_scaling: bool) -> None:
    import keras

    from hpcdl.step.optimizers import build_optimizer

    generator = numpy.random.default_rng(3)
    start = [generator.normal(size=shape).astype(numpy.float32) for shape in ((5, 7, 3), (129,), (33, 65))]
    ours, plain = ([keras.Variable(value, name=f"w{n}") for n, value in enumerate(start)] for _ in range(2))
    config = OptimizerConfig(optimizer="adam", learning_rate=0.05, weight_decay=decay)
    own = build_optimizer(config, ours, loss_scaling=loss_scaling)
    of_keras = keras.optimizers.Adam(0.05, weight_decay=decay or None)
    of_keras.exclude_from_weight_decay(var_list=[item for item in plain if len(item.shape) <= 1])
    wrapped = keras.optimizers.LossScaleOptimizer(of_keras) if loss_scaling else of_keras
    wrapped.build(plain)
    assert [one.name for one in own.variables] == [one.name for one in wrapped.variables]
    found = after_steps(own, ours, loss_scaling=loss_scaling)
    for one, other in zip(found, after_steps(wrapped, plain, loss_scaling=loss_scaling), strict=True):
        if len(one) > 8:  # not the counters
            values, expected = numpy.frombuffer(one, numpy.float32), numpy.frombuffer(other, numpy.float32)
            numpy.testing.assert_allclose(values, expected, rtol=2e-5, atol=5e-6)
    assert found[0] != start[0].tobytes()
