"""What training minimises and evaluation reports: cross-entropy with top-1 and top-5, or Keras functions by name.

With samples of named fields, each target has its own loss and metrics.

Every metric is a sum over samples, so sums over batches and ranks are exact, whatever their sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from hpcdl.config.schema import AUXILIARY_WEIGHT, CROSS_ENTROPY, ObjectiveConfig
from hpcdl.core.errors import UsageError, suggestion
from hpcdl.data.format.manifest import Field
from hpcdl.run.trained_data import SHORT, check_functions, losses_of, metrics_of


class Objective(Protocol):
    """Loss and metrics. Outputs are the model's: one tensor, or a list whose first element is the main output."""

    names: tuple[str, ...]
    labels: Any
    """`tf.TensorSpec` of a batch of labels, or several by name."""

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Return the scalar to minimise: a mean over the batch."""

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Return the sum over the batch of each metric in `names`, shape (len(names),), float64."""

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to report, from the means over all samples of the quantities in `names`."""


class Classification:
    """Softmax cross-entropy on logits (B, classes) and integer labels (B,)."""

    names: tuple[str, ...] = ("accuracy", "top5_accuracy")
    labels: Any = tf.TensorSpec((None,), tf.int64)

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._smoothing = label_smoothing

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the means themselves."""
        return dict(means)

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Return the cross-entropy; auxiliary heads add theirs with a weight."""
        heads: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        losses = [tf.reduce_mean(self._cross_entropy(labels, tf.cast(head, tf.float32))) for head in heads]
        return tf.add_n([losses[0], *(AUXILIARY_WEIGHT * loss for loss in losses[1:])])

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Return the numbers of samples whose label has the highest logit, and is among the five highest."""
        logits = tf.cast(_main(outputs), tf.float32)
        first = tf.equal(tf.argmax(logits, -1), labels)
        among_five = tf.math.in_top_k(labels, logits, min(5, logits.shape[-1]))
        return tf.stack([tf.reduce_sum(tf.cast(hits, tf.float64)) for hits in (first, among_five)])

    def _cross_entropy(self, labels: Any, logits: Any) -> Any:
        if not self._smoothing:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        num_classes = logits.shape[-1]
        hard = tf.one_hot(labels, num_classes)
        # Szegedy et al. 2016 (arXiv 1512.00567), section 7.
        soft = hard * (1 - self._smoothing) + self._smoothing / num_classes
        return tf.nn.softmax_cross_entropy_with_logits(soft, logits)


class Masks(Classification):
    """Cross-entropy of logits (B, ..., classes) and integer labels (B, ...): a class for each element.

    `iou` is the intersection over union of elements whose class is not 0, over all samples together.
    """

    names = ("accuracy", "iou/common", "iou/either")

    def __init__(self, labels: Any, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing)
        self.labels = labels

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Return the cross-entropy; auxiliary heads add theirs with a weight."""
        return super().loss(tf.cast(labels, tf.int64), outputs)

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Return sums over the samples of the fraction of correct elements, and of the two counts of `iou`."""
        predicted = tf.argmax(tf.cast(_main(outputs), tf.float32), -1)
        labels = tf.cast(labels, tf.int64)  # the type of argmax
        return tf.stack([tf.reduce_sum(_per_sample(tf.equal(predicted, labels))), *_overlap(labels, predicted)])

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return accuracy and iou."""
        return {"accuracy": means["accuracy"], "iou": _DERIVED["iou"].value(means)}


class KerasFunctions:
    """A loss and metrics that are functions of (labels, predictions) in Keras; also `r2` and `iou`."""

    def __init__(self, loss: str, metrics: Sequence[str], labels: Any = None) -> None:
        self.labels = tf.TensorSpec((None,), tf.int64) if labels is None else labels
        self._loss = _function(keras.losses, "loss", SHORT.get(loss, loss))
        self._derived = [name for name in metrics if name in _DERIVED]
        plain = [name for name in metrics if name not in _DERIVED]
        self._metrics = [_function(keras.metrics, "metric", SHORT.get(name, name)) for name in plain]
        self.names = (*plain, *(part for name in self._derived for part in _DERIVED[name].names))

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Return the mean of the loss over the batch."""
        return tf.reduce_mean(self._loss(*_aligned(labels, _main(outputs))))

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Return the sum of each metric over the batch; several values of one sample count as their mean."""
        pair = _aligned(labels, _main(outputs))
        values = [tf.reduce_sum(_per_sample(metric(*pair))) for metric in self._metrics]
        values += [value for name in self._derived for value in _DERIVED[name].sums(*pair)]
        return tf.stack(values) if values else tf.zeros([0], tf.float64)

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the means, and the metrics derived from them."""
        parts = {part for name in self._derived for part in _DERIVED[name].names}
        metrics = {name: value for name, value in means.items() if name not in parts}
        return metrics | {name: _DERIVED[name].value(means) for name in self._derived}


class OfTargets:
    """The sum of the losses of several targets, each with its own metrics, named TARGET/METRIC."""

    def __init__(self, parts: Mapping[str, Objective]) -> None:
        self._parts = parts
        self.names = tuple(f"{target}/{name}" for target, part in parts.items() for name in part.names)
        self.labels = {target: part.labels for target, part in parts.items()}

    def loss(self, labels: Any, outputs: Any) -> Any:
        """Return the sum of the losses."""
        by_target = self._outputs(outputs)
        return tf.add_n([part.loss(labels[target], by_target[target]) for target, part in self._parts.items()])

    def sums(self, labels: Any, outputs: Any) -> Any:
        """Return the sums of all targets, concatenated."""
        by_target = self._outputs(outputs)
        return tf.concat([part.sums(labels[target], by_target[target]) for target, part in self._parts.items()], 0)

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the reports of all targets."""
        metrics: dict[str, float] = {}
        for target, part in self._parts.items():
            part_means = {name: means[f"{target}/{name}"] for name in part.names}
            metrics |= {f"{target}/{name}": value for name, value in part.reported(part_means).items()}
        return metrics

    def _outputs(self, outputs: Any) -> Mapping[str, Any]:
        if isinstance(outputs, Mapping):
            return outputs
        return dict(zip(self._parts, outputs, strict=True))


def objective_of(config: ObjectiveConfig, targets: Sequence[Field] = ()) -> Objective:
    """Return the objective that `config` names; its `loss` is `cross-entropy` or a function of keras.losses."""
    if not targets:
        metrics = [name.strip() for name in config.metrics.split(",") if name.strip()]
        return build_objective(config.loss, metrics, config.label_smoothing)
    names = [target.name for target in targets]
    losses, metric_names = losses_of(config, names), metrics_of(config, names)
    parts = {
        target.name: build_objective(losses[target.name], metric_names[target.name], config.label_smoothing, target)
        for target in targets
    }
    return parts[names[0]] if len(parts) == 1 else OfTargets(parts)


def build_objective(
    loss: str, metrics: Sequence[str], label_smoothing: float, target: Field | None = None
) -> Objective:
    """Return the objective of a run, or of one of its targets, from its individual settings."""
    labels = None
    if target is not None:
        labels = tf.TensorSpec((None, *target.shape), tf.int32 if target.kind == "text" else tf.as_dtype(target.dtype))
    check_functions(SHORT.get(loss, loss), [SHORT.get(name, name) for name in metrics], label_smoothing)
    if loss == CROSS_ENTROPY:
        return Masks(labels, label_smoothing) if target and target.shape else Classification(label_smoothing)
    return KerasFunctions(loss, metrics, labels)


class _Derived(Protocol):
    """A metric derived from means over all samples."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sums."""

    def sums(self, labels: Any, predictions: Any) -> list[Any]:
        """Return sums over the batch of the quantities in `names`, float64."""

    def value(self, means: Mapping[str, float]) -> float:
        """Return the metric."""


class _Determination:
    """R2, the coefficient of determination: 1 - mean squared error / variance of the labels."""

    names = ("r2/residual", "r2/square", "r2/label")

    def sums(self, labels: Any, predictions: Any) -> list[Any]:
        labels, predictions = tf.cast(labels, tf.float64), tf.cast(predictions, tf.float64)
        return [tf.reduce_sum(_per_sample(value)) for value in ((labels - predictions) ** 2, labels**2, labels)]

    def value(self, means: Mapping[str, float]) -> float:
        variance = means["r2/square"] - means["r2/label"] ** 2
        # Labels that are all equal have no variance to explain.
        return 1 - means["r2/residual"] / variance if variance > 0 else float("nan")


class _Overlap:
    """Intersection over union of elements that are not 0; predictions above one half count as 1."""

    names = ("iou/common", "iou/either")

    def sums(self, labels: Any, predictions: Any) -> list[Any]:
        return _overlap(tf.cast(labels > 0.5, tf.int64), tf.cast(predictions > 0.5, tf.int64))

    def value(self, means: Mapping[str, float]) -> float:
        # Nothing to find and nothing found is a complete overlap.
        return means["iou/common"] / means["iou/either"] if means["iou/either"] else 1.0


_DERIVED: Mapping[str, _Derived] = {"r2": _Determination(), "iou": _Overlap()}


def _overlap(labels: Any, found: Any) -> list[Any]:
    """Return the number of elements with equal nonzero class (intersection), and that of the union over all classes."""
    common = tf.reduce_sum(tf.cast(tf.equal(labels, found) & (labels > 0), tf.float64))
    each = [tf.reduce_sum(tf.cast(side > 0, tf.float64)) for side in (labels, found)]
    return [common, each[0] + each[1] - common]


def _per_sample(values: Any) -> Any:
    """Return the mean of each sample's values, (B,) float64."""
    values = tf.cast(values, tf.float64)
    return tf.reduce_mean(tf.reshape(values, (tf.shape(values)[0], -1)), -1)


def _main(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, list | tuple) else outputs


def _aligned(labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Return labels of shape (B, ...) aligned with predictions of shape (B, ...) or (B, ..., n), in float32."""
    predictions = tf.cast(predictions, tf.float32)
    labels = tf.cast(labels, tf.float32)
    # Without the added axis (B,) against (B, 1) would broadcast to (B, B).
    if len(predictions.shape) == len(labels.shape) + 1:
        labels = labels[..., None]
    return labels, predictions


def _functions(module: Any) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {
        item: value for item, value in vars(module).items() if inspect.isfunction(value) and item.islower()
    }
    for helper in ("get", "serialize", "deserialize"):
        functions.pop(helper, None)
    return functions


def _function(module: Any, kind: str, name: str) -> Callable[..., Any]:
    functions = _functions(module)
    if name not in functions:
        own = [CROSS_ENTROPY] if kind == "loss" else []  # hpcdl's word beside those of Keras
        raise UsageError(f"unknown {kind} {name!r}{suggestion(name, [*functions, *own])}")
    return functions[name]
