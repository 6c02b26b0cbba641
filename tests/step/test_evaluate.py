"""Evaluation is exact for any distribution of samples: 997 samples over 4 ranks, top-1 and top-5 counted by numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from hpcdl.cli.training.evaluate import worth_printing
from hpcdl.comm import threads
from hpcdl.core.errors import UsageError


def test_top1_and_top5_on_uneven_parts() -> None:
    import keras
    import tensorflow as tf

    from hpcdl.step.evaluate import Evaluator
    from hpcdl.step.objective import Classification

    generator = numpy.random.default_rng(1)
    images = generator.normal(size=(997, 2, 2, 1)).astype(numpy.float32)
    labels = generator.integers(0, 12, 997)
    inputs = keras.Input((2, 2, 1))
    model = keras.Model(inputs, keras.layers.Dense(12)(keras.layers.Flatten()(inputs)))
    logits = model(images).numpy()
    order = numpy.argsort(-logits, axis=1)
    evaluate = Evaluator(model, Classification())

    def rank(communicator: Any) -> Any:
        first, stop = (997 * part // 4 for part in (communicator.rank, communicator.rank + 1))

        def batches() -> Iterator[Any]:
            for start in range(first, stop, 60):
                mine = slice(start, min(start + 60, stop))
                yield tf.constant(images[mine]), tf.constant(labels[mine])

        return evaluate(batches(), communicator)

    for found in threads.run(4, rank):
        assert found.num_samples == 997
        assert found.metrics["accuracy"] == numpy.sum(order[:, 0] == labels) / 997
        assert found.metrics["top5_accuracy"] == numpy.sum(order[:, :5] == labels[:, None]) / 997


def test_a_loss_of_keras_and_its_metrics() -> None:
    import tensorflow as tf

    from hpcdl.step.objective import build_objective

    objective = build_objective("mean_squared_error", ["mean_absolute_error"], 0.0)
    labels, outputs = tf.constant([1, 3]), tf.constant([[1.5], [2.0]])
    assert float(objective.loss(labels, outputs)) == pytest.approx((0.25 + 1.0) / 2)
    assert objective.sums(labels, outputs).numpy().tolist() == pytest.approx([1.5])


def test_unknown_losses_and_metrics_are_refused() -> None:
    from hpcdl.step.objective import build_objective

    with pytest.raises(UsageError, match="did you mean 'mean_squared_error'"):
        build_objective("mean_square_error", [], 0.0)
    with pytest.raises(UsageError, match="counts top-1 and top-5 itself"):
        build_objective("cross-entropy", ["binary_accuracy"], 0.0)
    with pytest.raises(UsageError, match="goes with --loss cross-entropy"):
        build_objective("mean_squared_error", [], 0.1)


def test_losses_and_metrics_of_keras_are_known_without_importing_it() -> None:
    from hpcdl.run.trained_data import METRICS, _functions_of_keras
    from hpcdl.step.objective import _DERIVED, _functions

    assert tuple(_DERIVED) == METRICS
    for name in ("losses", "metrics"):
        module = __import__(f"keras.{name}", fromlist=["get"])
        assert sorted(_functions_of_keras(name)) == sorted(_functions(module))


def test_top5_of_five_classes_is_not_printed() -> None:
    values = {"loss": 0.5, "accuracy": 0.75, "top5_accuracy": 1.0}
    assert [*worth_printing(values, 3)] == ["loss", "accuracy"]
    assert (
        worth_printing(values, 10) == values
        and worth_printing(values | {"top5_accuracy": 0.9}, 3)["top5_accuracy"] == 0.9
    )
