"""Loss scaling: a step whose gradients overflow is skipped and the scale is halved."""

from __future__ import annotations

import numpy

from hpcdl.config.schema import OptimizerConfig


def test_an_overflow_costs_the_step_and_half_of_the_scale() -> None:
    import keras

    from hpcdl.step.optimizers import build_optimizer

    variable = keras.Variable(numpy.ones(3, "float32"))
    config = OptimizerConfig(optimizer="momentum", learning_rate=0.5)
    optimizer = build_optimizer(config, [variable], loss_scaling=True)
    assert float(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))) == 2.0**15
    optimizer.apply([keras.ops.convert_to_tensor(numpy.array([1, numpy.inf, 1], "float32"))], [variable])
    numpy.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), numpy.ones(3))
    assert float(optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))) == 2.0**14
    optimizer.learning_rate = 0.25  # as the loop sets it before each step
    optimizer.apply([keras.ops.full([3], 2.0**14)], [variable])
    numpy.testing.assert_allclose(keras.ops.convert_to_numpy(variable), numpy.full(3, 0.75))
