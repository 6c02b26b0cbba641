"""Metrics of a script's own whose state is a sum are told from others by their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from hpcdl.scripts.fit.metrics import _may_be_no_sum


class Own(keras.metrics.Metric):  # type: ignore[misc]
    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.hits = self.add_weight(shape=(3,), initializer="zeros", name="hits")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")
        self.both = [self.total, self.count]

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(ops.mean(y_true))

    def add_to(self, state: Any, value: Any) -> None:
        state.assign_add(ops.sum(value))

    def put_into(self, state: Any, value: Any) -> None:
        state.assign(ops.sum(value))

    def result(self) -> Any:
        return self.total / self.count


def by_class(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    true = ops.one_hot(ops.cast(y_true, "int32"), self.hits.shape[0])
    self.hits.assign_add(ops.sum(ops.cast(true * y_pred, self.hits.dtype) + ops.zeros_like(self.hits), axis=0))


def by_a_method(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.add_to(self.total, y_true)


def assigned(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.total.assign(self.total + ops.sum(y_true) + ops.sum(y_pred))
    self.count.assign(tf.add(self.count, 1.0))


def in_a_list(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    for state, value in zip(self.both, [ops.sum(y_true), 1.0], strict=True):
        state.assign_add(value)


def running_mean(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.count.assign_add(1.0)
    self.total.assign_add((ops.mean(y_true) - self.total) / self.count)


def running_mean_by_a_local_name(m: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    m.count.assign_add(1.0)
    difference = ops.mean(y_true) - m.both[0]
    m.total.assign_add(difference)


def moving_average(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.total.assign(0.9 * self.total + 0.1 * ops.mean(y_true))


def set_by_a_method(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.put_into(self.total, y_true)


def set_by_a_base_class(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    Own.update_state(self, ops.abs(y_true), y_pred)


def some_places(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.hits.scatter_update(tf.IndexedSlices([1.0], [0]))


@pytest.mark.parametrize("update", [by_class, by_a_method, assigned, in_a_list])
def test_sums_are_no_doubt(update: Callable[..., None]) -> None:
    assert not _may_be_no_sum(type("Sum", (Own,), {"update_state": update, "__module__": __name__})())


@pytest.mark.parametrize(
    "update",
    [
        running_mean,
        running_mean_by_a_local_name,
        moving_average,
        set_by_a_method,
        set_by_a_base_class,
        some_places,
        Own.update_state,
    ],
)
def test_what_is_set_is_doubtful(update: Callable[..., None]) -> None:
    assert _may_be_no_sum(type("Other", (Own,), {"update_state": update, "__module__": __name__})())


class OfClasses(keras.metrics.MeanIoU):  # type: ignore[misc]
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true, ops.argmax(y_pred, axis=-1), sample_weight)


def test_an_intersection_over_union_of_keras_is_a_sum() -> None:
    assert not _may_be_no_sum(OfClasses(num_classes=3))
