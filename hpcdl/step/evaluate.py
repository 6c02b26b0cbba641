"""Loss and metrics over a split, divided among the workers; each sample counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.protocols import Communicator
from hpcdl.step.objective import Objective
from hpcdl.step.step import as_model_input


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over `num_samples` samples; `metrics` by name, in the objective's order."""

    loss: float
    metrics: dict[str, float]
    num_samples: int

    @property
    def accuracy(self) -> float | None:
        """Top-1 accuracy, if the objective counts it."""
        return self.metrics.get("accuracy")


class Evaluator:
    """Evaluates a model with a graph that is traced once."""

    def __init__(self, model: keras.Model, objective: Objective) -> None:
        self._objective = objective

        @tf.function(autograph=False, reduce_retracing=True)
        def batch_sums(images: Any, labels: Any) -> Any:
            outputs = model(as_model_input(images), training=False)
            # float64 counts exactly; float32 stops doing so at 2^24 samples.
            num_samples = tf.cast(tf.shape(tf.nest.flatten(labels)[0])[0], tf.float64)
            loss = tf.cast(objective.loss(labels, outputs), tf.float64) * num_samples
            return tf.concat([[num_samples, loss], objective.sums(labels, outputs)], 0)

        self._batch_sums = batch_sums

    def __call__(self, batches: Iterable[Any], group: Communicator) -> Evaluation:
        """Evaluate this worker's `batches` and sum over the ranks of `group`; collective."""
        totals = numpy.zeros(2 + len(self._objective.names))
        for images, labels in batches:
            totals += self._batch_sums(images, labels).numpy()
        if group.size > 1:
            group.allreduce(totals)
        num_samples, loss, *sums = totals.tolist()
        means = {name: value / num_samples for name, value in zip(self._objective.names, sums, strict=True)}
        metrics = self._objective.reported(means)
        return Evaluation(loss=loss / num_samples, metrics=metrics, num_samples=int(num_samples))
