"""LARS against numpy, from algorithm 1 of arXiv 1708.03888, and against Keras's operations."""

import numpy
import pytest

from hpcdl.config.schema import OptimizerConfig


def reference(weights: list, gradients: list, *, rate: float, momentum: float, trust: float, decay: float) -> list:
    weights = [weight.astype(numpy.float64) for weight in weights]
    velocities = [numpy.zeros_like(weight) for weight in weights]
    for step in gradients:
        for index, gradient in enumerate(step):
            weight = weights[index]
            if weight.ndim > 1:
                norm = numpy.linalg.norm(gradient) + decay * numpy.linalg.norm(weight)
                local, gradient = trust * numpy.linalg.norm(weight) / norm, gradient + decay * weight
            else:
                local = 1.0
            velocities[index] = momentum * velocities[index] + rate * local * gradient
            weights[index] = weight - velocities[index]
    return weights


def test_lars_moves_as_its_paper_says() -> None:
    import keras

    from hpcdl.step.optimizers import build_optimizer

    generator = numpy.random.default_rng(3)
    start = [generator.normal(size=shape).astype(numpy.float32) for shape in ((4, 3), (3,), (2, 2, 3, 5))]
    gradients = [[generator.normal(size=value.shape).astype(numpy.float32) for value in start] for _ in range(12)]
    variables = [keras.Variable(value) for value in start]
    config = OptimizerConfig(optimizer="lars", learning_rate=0.5, momentum=0.9, lars_trust=0.02, weight_decay=0.01)
    optimizer = build_optimizer(config, variables)
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(value) for value in step], variables)
    expected = reference(start, gradients, rate=0.5, momentum=0.9, trust=0.02, decay=0.01)
    for variable, value in zip(variables, expected, strict=True):
        numpy.testing.assert_allclose(variable.numpy(), value, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss_scaling", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_one_operation_a_variable_is_the_same_to_rounding(decay: float, *, loss_scaling: bool) -> None:
    import keras

    from benchmarks.optimizer_passes import plain_lars
    from hpcdl.step.optimizers import build_optimizer
    from tests.step.test_fused import after_steps

    generator = numpy.random.default_rng(3)
    start = [generator.normal(size=shape).astype(numpy.float32) for shape in ((5, 7, 3), (129,), (33, 65))]
    start.append(numpy.zeros((4, 6), numpy.float32))  # whose norm of zero must not be divided by
    ours, plain = ([keras.Variable(value, name=f"w{n}") for n, value in enumerate(start)] for _ in range(2))
    config = OptimizerConfig(optimizer="lars", learning_rate=0.05, momentum=0.9, lars_trust=2.0, weight_decay=decay)
    own = build_optimizer(config, ours, loss_scaling=loss_scaling)
    other = plain_lars(0.05, momentum=0.9, trust=2.0, decay=decay)
    wrapped = keras.optimizers.LossScaleOptimizer(other) if loss_scaling else other
    wrapped.build(plain)
    assert [one.name for one in own.variables] == [one.name for one in wrapped.variables]
    found = after_steps(own, ours, loss_scaling=loss_scaling)
    for one, expected in zip(found, after_steps(wrapped, plain, loss_scaling=loss_scaling), strict=True):
        if len(one) > 8:  # not the counters
            values = (numpy.frombuffer(kept, numpy.float32) for kept in (one, expected))
            numpy.testing.assert_allclose(*values, rtol=1e-6, atol=1e-6)
    assert found[0] != start[0].tobytes()


def test_weight_decay_spares_vectors() -> None:
    import keras

    from hpcdl.step.optimizers import build_optimizer

    matrix, vector = keras.Variable(numpy.ones((2, 2), "float32")), keras.Variable(numpy.ones(2, "float32"))
    config = OptimizerConfig(optimizer="sgd", learning_rate=0.1, weight_decay=0.5)
    optimizer = build_optimizer(config, [matrix, vector])
    zeros = [keras.ops.zeros((2, 2)), keras.ops.zeros(2)]
    optimizer.apply(zeros, [matrix, vector])
    numpy.testing.assert_allclose(matrix.numpy(), 0.95, rtol=1e-6)
    numpy.testing.assert_allclose(vector.numpy(), 1.0)
