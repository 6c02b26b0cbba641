"""A model's state as arrays: moving statistics over ranks, copies that reuse memory, weights from another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.comm import threads
from hpcdl.core.errors import UsageError


def array(variable: Any) -> numpy.ndarray:
    import keras

    values: numpy.ndarray = keras.ops.convert_to_numpy(variable)
    return values


def network(classes: int = 3, width: int = 4) -> Any:
    import keras

    inputs = keras.Input((5,))
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(width, name="hidden")(inputs))
    return keras.Model(inputs, keras.layers.Dense(classes, name="last")(keras.layers.Dropout(0.5)(hidden)))


def test_moving_statistics_become_the_mean_over_the_ranks_and_nothing_else_does() -> None:
    from hpcdl.checkpoint import state

    models = [network() for _ in range(3)]
    for rank, model in enumerate(models):
        norm = model.get_layer("norm")
        norm.moving_mean.assign(numpy.arange(4.0) * (rank + 1))
        norm.moving_variance.assign(numpy.full(4, 2.0**rank))
    before = [[array(weight) for weight in model.trainable_weights] for model in models]

    def rank(communicator: Any) -> None:
        model = models[communicator.rank]
        found = state.moving_statistics(model)
        values = {index: array(variable) for index, variable in found.items()}
        means = state.mean_statistics(values, communicator)
        assert {model.weights[index].name for index in means} == {"moving_mean", "moving_variance"}
        own = state.own_statistics(values, means)
        assert [*own] == [f"statistics/{index}" for index in means if communicator.rank != 1 or index == 5]
        state.average_moving_statistics(model, communicator)
        state.assign_own_statistics(model, own)
        numpy.testing.assert_array_equal(array(model.weights[5]), numpy.full(4, 2.0**communicator.rank))
        state.average_moving_statistics(model, communicator)

    threads.run(3, rank)
    for model, weights in zip(models, before, strict=True):
        norm = model.get_layer("norm")
        numpy.testing.assert_allclose(array(norm.moving_mean), 2 * numpy.arange(4.0))
        numpy.testing.assert_allclose(array(norm.moving_variance), 7 / 3, rtol=1e-6)
        for mine, old in zip(model.trainable_weights, weights, strict=True):
            numpy.testing.assert_array_equal(array(mine), old)


def test_copies_stay_what_they_were_until_their_memory_is_used_again() -> None:
    from hpcdl.checkpoint import state

    model = network()
    memory: dict[str, Any] = {}
    read = state.reader(model.weights)
    first = state.copy_of(read(), "weights", memory)
    kernel = first["weights/0"].copy()
    model.weights[0].assign_add(numpy.ones((5, 4)))
    numpy.testing.assert_array_equal(first["weights/0"], kernel)
    second = state.copy_of(read(), "weights", memory)
    assert all(second[name] is first[name] for name in first)
    numpy.testing.assert_allclose(second["weights/0"], kernel + 1, rtol=1e-6)
    other = network()
    state.assign(other.weights, second, "weights")
    for mine, theirs in zip(other.weights, model.weights, strict=True):
        numpy.testing.assert_array_equal(array(mine), array(theirs))
    with pytest.raises(UsageError, match="the checkpoint has 8 weights variables, this model 2"):
        state.assign(model.weights[:2], second, "weights")
    assert len(state.seed_variables(model)) == 1


def test_fine_tuning_takes_the_layers_that_fit(tmp_path: Path) -> None:
    from hpcdl.checkpoint import state

    source, path = network(), tmp_path / "source.keras"
    source.save(path)
    target = network(classes=7)
    last = [array(weight) for weight in target.get_layer("last").weights]
    reported = state.load_weights(target, path)
    assert reported == f"weights of 2 layers from {path}; fresh: last"
    kernels = [array(model.get_layer("hidden").kernel) for model in (target, source)]
    numpy.testing.assert_array_equal(*kernels)
    for mine, old in zip(target.get_layer("last").weights, last, strict=True):
        numpy.testing.assert_array_equal(array(mine), old)
    with pytest.raises(UsageError, match="no layer of it fits this model"):
        state.load_weights(network(classes=7, width=9), path)
    path.write_bytes(b"no model")
    with pytest.raises(UsageError, match="--init-weights"):
        state.load_weights(target, path)
