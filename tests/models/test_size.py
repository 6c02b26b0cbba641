"""Sizes counted from layers equal sums done by hand."""

from __future__ import annotations

import keras
from keras import layers

from tests.models.model_size import measure_size


def size(shape: tuple[int, ...], *stack: keras.layers.Layer) -> tuple[int, int, int]:
    counted = measure_size(keras.Sequential([keras.Input(shape), *stack]))
    return counted.parameters, counted.moving_statistics, counted.macs


def test_convolution_counts_every_output_position() -> None:
    assert size((8, 6, 3), layers.Conv2D(5, 3)) == (140, 0, 6 * 4 * 135)
    assert size((8, 6, 3), layers.Conv2D(5, 3, strides=2, padding="same", use_bias=False)) == (135, 0, 4 * 3 * 135)


def test_groups_and_depthwise_cost_their_share() -> None:
    assert size((8, 8, 4), layers.Conv2D(6, 3, groups=2, padding="same", use_bias=False)) == (108, 0, 64 * 108)
    assert size((8, 8, 4), layers.DepthwiseConv2D(3, padding="same", use_bias=False)) == (36, 0, 64 * 36)
    assert size((8, 8, 4), layers.SeparableConv2D(6, 3, padding="same", use_bias=False)) == (60, 0, 64 * 60)


def test_transposed_convolution_counts_every_input_position() -> None:
    assert size((4, 4, 2), layers.Conv2DTranspose(3, 2, strides=2, use_bias=False)) == (24, 0, 16 * 24)


def test_dense_normalisation_and_nested_models() -> None:
    inner = keras.Sequential([keras.Input((10,)), layers.Dense(4), layers.BatchNormalization()])
    assert size((10,), inner, layers.Dense(3)) == (44 + 8 + 15, 8, 40 + 12)


def test_dropout_state_is_no_parameter() -> None:
    assert size((10,), layers.Dropout(0.5), layers.Dense(2)) == (22, 0, 20)


def test_frozen_weights_are_no_parameters() -> None:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(2)])
    model.trainable = False
    assert measure_size(model).gradient_bytes == 0
