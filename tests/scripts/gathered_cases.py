"""Runs on every rank: metrics that are no sums, gathered over ranks, equal one process with whole batches."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import keras
import numpy
import tensorflow as tf
from optimizer_cases import RANK, SIZE, main, refused

import hpcdl

ROWS, BATCH = 24, 12
generator = numpy.random.default_rng(3)
x = generator.normal(size=(ROWS, 4)).astype("float32")
y = (x.sum(1, keepdims=True) > 0).astype("float32")
w = generator.uniform(0.1, 3, ROWS).astype("float32")


class Median(keras.metrics.Metric):  # type: ignore[misc]
    """The median of all absolute errors, which are kept in Python's memory."""

    def __init__(self, name: str = "median", **rest: Any) -> None:
        super().__init__(name=name, **rest)
        self.errors: list[Any] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.errors.append(numpy.abs(numpy.asarray(y_true) - numpy.asarray(y_pred)).reshape(-1))

    def result(self) -> Any:
        return float(numpy.median(numpy.concatenate(self.errors))) if self.errors else 0.0

    def reset_state(self) -> None:
        self.errors = []


class Slots(keras.metrics.Metric):  # type: ignore[misc]
    """The largest of the last predictions, in a ring of slots."""

    def __init__(self, name: str = "slots", **rest: Any) -> None:
        super().__init__(name=name, **rest)
        self.ring = self.add_weight(shape=(16,), initializer="zeros", name="ring")
        self.end = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="end")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = tf.reshape(y_pred, [-1])
        places = (self.end + tf.range(tf.size(values))) % 16
        self.ring.assign(tf.tensor_scatter_nd_update(self.ring, places[:, None], values))
        self.end.assign_add(tf.size(values))

    def result(self) -> Any:
        return tf.reduce_max(self.ring)


class Highest(keras.metrics.Metric):  # type: ignore[misc]
    """The largest error so far, in one number."""

    def __init__(self, name: str = "highest", **rest: Any) -> None:
        super().__init__(name=name, **rest)
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.most


class Total(Highest):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(self.most + tf.reduce_sum(tf.abs(y_true - y_pred)))


def spread(y_true: Any, y_pred: Any) -> Any:
    """Return a number of each batch that is not a mean over its samples."""
    return tf.math.reduce_std(tf.cast(y_pred, tf.float32))


def histories(make: Callable[[], Any], **fit: Any) -> list[dict[str, Any]]:
    found = []
    share = BATCH // SIZE
    mine = [row for start in range(0, ROWS, BATCH) for row in range(start + RANK * share, start + (RANK + 1) * share)]
    for distributed, rows in ((False, list(range(ROWS))), (True, mine)):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        plain = keras.optimizers.SGD(0.1)
        model.compile(hpcdl.DistributedOptimizer(plain) if distributed else plain, "mse", metrics=[make()])
        own = {name: value[rows] if name == "sample_weight" else value for name, value in fit.items()}
        settings: dict[str, Any] = {"batch_size": share if distributed else BATCH, "shuffle": False, "epochs": 2}
        history = model.fit(x[rows], y[rows], validation_data=(x[rows], y[rows]), verbose=0, **settings, **own)
        found.append(history.history)
    return found


def same(make: Callable[[], Any], **fit: Any) -> None:
    one, ranks = histories(make, **fit)
    assert set(one) == set(ranks)
    for name, values in one.items():
        assert numpy.allclose(values, ranks[name], rtol=1e-5, atol=1e-6), f"{name}: {values}, on ranks {ranks[name]}"


def is_warned(make: Callable[[], Any], warned: bool) -> None:
    """Check whether a metric causes the warning, which is given once for each metric; this case must run first."""
    reported = io.StringIO()
    with contextlib.redirect_stderr(reported):
        histories(make)
    assert ("hpcdl.Gathered(metric)" in reported.getvalue()) == (warned and RANK == 0), reported.getvalue()


class Holds(keras.metrics.Metric):  # type: ignore[misc]
    """A metric of two others, as an F1 that people write."""

    def __init__(self, kind: Callable[[], Any], name: str = "holds", **rest: Any) -> None:
        super().__init__(name=name, **rest)
        self.first, self.second = kind(), keras.metrics.Recall()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.first.update_state(y_true > 0.5, y_pred)
        self.second.update_state(y_true > 0.5, y_pred)

    def result(self) -> Any:
        return self.first.result() * self.second.result()


class Sums(Slots):
    over_ranks = "sum"


class Largest(Slots):
    over_ranks = "max"

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.ring.assign(tf.maximum(self.ring, tf.reduce_max(y_pred)))


def gathers_in_a_loop() -> None:
    metric = hpcdl.Gathered(Median())
    for start in range(0, ROWS, BATCH):
        rows = slice(start + RANK, start + BATCH, SIZE)
        metric.update_state(y[rows], x[rows, :1])
    metric.gather()
    assert abs(float(metric.result()) - float(numpy.median(numpy.abs(y - x[:, :1])))) < 1e-6


def gathers_unequal_steps() -> None:
    metric = hpcdl.Gathered(Median())
    for row in range(RANK + 1):  # rank 0 has one batch, rank 1 two
        metric.update_state(y[row : row + 1] + RANK, x[row : row + 1, :1])
    metric.gather()
    errors = [abs(float(y[row, 0]) + rank - float(x[row, 0])) for rank in range(SIZE) for row in range(rank + 1)]
    assert abs(float(metric.result()) - float(numpy.median(errors))) < 1e-6


def is_saved() -> None:
    metric = hpcdl.Gathered(keras.metrics.AUC(num_thresholds=7))
    again = hpcdl.Gathered.from_config(metric.get_config())
    assert again.name == metric.name and again.metric.num_thresholds == 7


def refuses_what_is_no_metric() -> None:
    with refused("hpcdl.Gathered takes a Keras metric or a function"):
        hpcdl.Gathered(3)
    with refused("is no single number"):
        metric = hpcdl.Gathered(keras.metrics.F1Score())
        metric.update_state(numpy.eye(3, dtype="float32"), numpy.eye(3, dtype="float32"))
        metric.result()


CASES: dict[str, Callable[[], None]] = {
    "sums that say so leave no warning": lambda: is_warned(Sums, False),
    "slots leave a warning": lambda: is_warned(Slots, True),
    "a maximum in one number leaves a warning": lambda: is_warned(Highest, True),
    "a sum that is assigned leaves none": lambda: is_warned(lambda: Total("total"), False),
    "metrics of Keras in one leave none": lambda: is_warned(lambda: Holds(keras.metrics.Precision), False),
    "a metric of slots in one leaves a warning": lambda: is_warned(lambda: Holds(Slots, "holds slots"), True),
    "metrics in one": lambda: same(lambda: Holds(keras.metrics.Precision)),
    "a buffer in Python": lambda: same(lambda: hpcdl.Gathered(Median())),
    "a ring of slots": lambda: same(lambda: hpcdl.Gathered(Slots())),
    "a function of each batch": lambda: same(lambda: hpcdl.Gathered(spread)),
    "a metric by its name": lambda: same(lambda: hpcdl.Gathered("auc", name="auc")),
    "with weights": lambda: same(lambda: hpcdl.Gathered(keras.metrics.AUC(name="auc")), sample_weight=w),
    "a maximum in compile": lambda: same(Largest),
    "a loop of one's own": gathers_in_a_loop,
    "unequal steps": gathers_unequal_steps,
    "its config": is_saved,
    "what is no metric": refuses_what_is_no_metric,
}

if __name__ == "__main__":
    main(CASES)
