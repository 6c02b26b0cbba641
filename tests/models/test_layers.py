"""Response normalisation and grouped convolution agree with TensorFlow's own, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy
import pytest
import tensorflow

from hpcdl.models import layers


def values_and_gradients(function: Callable[[Any], Any], x: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    tensor = tensorflow.constant(x)
    with tensorflow.GradientTape() as tape:
        tape.watch(tensor)
        y = function(tensor)
        total = tensorflow.reduce_sum(y * tensorflow.sin(y))
    return y.numpy(), tape.gradient(total, tensor).numpy()


@pytest.mark.parametrize(("size", "channels", "k"), [(5, 12, 1.0), (5, 3, 2.0), (3, 7, 1.0), (5, 1, 1.0)])
def test_across_channels(size: int, channels: int, k: float) -> None:
    x = numpy.random.default_rng(0).normal(size=(2, 4, 5, channels), scale=3).astype("float32")
    alpha = 0.3
    found = values_and_gradients(lambda t: layers.across_channels(t, size=size, alpha=alpha, k=k), x)
    expected = values_and_gradients(lambda t: tensorflow.nn.lrn(t, size // 2, k, alpha / size, 0.75), x)
    for mine, theirs in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_across_channels_takes_an_empty_batch() -> None:
    assert layers.across_channels(numpy.zeros((0, 3, 3, 8), "float32"), size=5, alpha=1e-4).shape == (0, 3, 3, 8)


def test_within_channel() -> None:
    x = numpy.random.default_rng(1).normal(size=(2, 6, 5, 3), scale=3).astype("float32")
    found = keras.ops.convert_to_numpy(layers.within_channel(x, size=3, alpha=0.4))
    padded = numpy.pad(x.astype("float64") ** 2, ((0, 0), (1, 1), (1, 1), (0, 0)))
    mean = sum(padded[:, i : i + 6, j : j + 5] for i in range(3) for j in range(3)) / 9
    numpy.testing.assert_allclose(found, x / (1 + 0.4 * mean) ** 0.75, rtol=1e-5)


def test_two_groups_are_a_grouped_convolution() -> None:
    images = keras.Input((6, 6, 8))
    model = keras.Model(images, layers.two_group_convolution(images, 10, 3, name="conv"))
    x = numpy.random.default_rng(2).normal(size=(2, 6, 6, 8)).astype("float32")
    one, other = (model.get_layer(name).kernel.numpy() for name in ("conv_a", "conv_b"))
    assert one.shape == other.shape == (3, 3, 4, 5)
    grouped = keras.layers.Conv2D(10, 3, padding="same", groups=2, activation="relu")
    grouped.build((None, 6, 6, 8))
    grouped.kernel.assign(numpy.concatenate([one, other], axis=-1))
    numpy.testing.assert_allclose(model(x), grouped(x), rtol=1e-4, atol=1e-5)
