"""What training minimises and evaluation counts: cross-entropy with top-1 and top-5, or Keras functions by name.

Every metric is a sum over samples, so that adding up over batches and ranks is exact, whatever their sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from hpcdl.config.schema import CROSS_ENTROPY, ObjectiveConfig
from hpcdl.core.errors import UsageError, suggestion

AUXILIARY_WEIGHT = 0.3
"""Weight of each auxiliary head's loss (GoogLeNet, Szegedy et al. 2015, section 5)."""


class Objective(Protocol):
    """Loss and metrics. Outputs are the model's, one tensor or a list whose first is the one that counts."""

    names: tuple[str, ...]

    def loss(self, labels: Any, outputs: Any) -> Any:
        """The scalar to minimise: a mean over the batch."""

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Sum over the batch of each metric in `names`, shape (len(names),), float64."""


class Classification:
    """Softmax cross-entropy on logits (B, classes) and integer labels (B,)."""

    names: tuple[str, ...] = ("accuracy", "top5_accuracy")

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._smoothing = label_smoothing

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Cross-entropy; auxiliary heads add theirs with a weight."""
        heads: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        losses = [tf.reduce_mean(self._cross_entropy(labels, tf.cast(head, tf.float32))) for head in heads]
        return tf.add_n([losses[0], *(AUXILIARY_WEIGHT * loss for loss in losses[1:])])

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Numbers of samples whose label is the first, and among the first five, of the logits."""
        logits = tf.cast(_main(outputs), tf.float32)
        first = tf.equal(tf.argmax(logits, -1), labels)
        among_five = tf.math.in_top_k(labels, logits, min(5, logits.shape[-1]))
        return tf.stack([tf.reduce_sum(tf.cast(hits, tf.float64)) for hits in (first, among_five)])

    def _cross_entropy(self, labels: Any, logits: Any) -> Any:
        if not self._smoothing:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        num_classes = logits.shape[-1]
        hard = tf.one_hot(labels, num_classes)
        soft = hard * (1 - self._smoothing) + self._smoothing / num_classes
        return tf.nn.softmax_cross_entropy_with_logits(soft, logits)


class KerasFunctions:
    """A loss and metrics that Keras has as functions of (labels, predictions), one value per sample."""

    def __init__(self, loss: str, metrics: Sequence[str]) -> None:
        self._loss = _function(keras.losses, "loss", loss)
        self._metrics = [_function(keras.metrics, "metric", name) for name in metrics]
        self.names = tuple(metrics)

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Mean of the loss over the batch."""
        return tf.reduce_mean(self._loss(*_aligned(labels, _main(outputs))))

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Sum of each metric over the batch."""
        pair = _aligned(labels, _main(outputs))
        values = [tf.reduce_sum(tf.cast(metric(*pair), tf.float64)) for metric in self._metrics]
        return tf.stack(values) if values else tf.zeros([0], tf.float64)


def objective_of(config: ObjectiveConfig) -> Objective:
    """The objective that `config` names; its `loss` is `cross-entropy` or a function of keras.losses."""
    metrics = [name.strip() for name in config.metrics.split(",") if name.strip()]
    return build_objective(config.loss, metrics, config.label_smoothing)


def build_objective(loss: str, metrics: Sequence[str], label_smoothing: float) -> Objective:
    """The objective of a run, from its settings one by one."""
    if loss == CROSS_ENTROPY:
        if metrics:
            names = ",".join(metrics)
            raise UsageError(f"--metrics {names}: cross-entropy counts top-1 and top-5 itself; give another --loss too")
        return Classification(label_smoothing)
    if label_smoothing:
        raise UsageError(f"--label-smoothing goes with --loss cross-entropy, not with {loss!r}")
    return KerasFunctions(loss, metrics)


def _main(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, list | tuple) else outputs


def _aligned(labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Labels of shape (B,) beside predictions of shape (B, n), in float32."""
    predictions = tf.cast(predictions, tf.float32)
    labels = tf.cast(labels, tf.float32)
    if len(labels.shape) == 1 and len(predictions.shape) == 2:
        labels = labels[:, None]
    return labels, predictions


def _function(module: Any, kind: str, name: str) -> Callable[..., Any]:
    known = {item: value for item, value in vars(module).items() if inspect.isfunction(value) and item.islower()}
    for helper in ("get", "serialize", "deserialize"):
        known.pop(helper, None)
    if name not in known:
        raise UsageError(f"unknown {kind} {name!r}{suggestion(name, known)}")
    return known[name]
