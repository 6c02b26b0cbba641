"""`hpcdl.Gathered`: metrics whose state is no sum see what all ranks have predicted, as in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives.arrays import gather_arrays
from hpcdl.scripts.process.session import session
from hpcdl.strategies.base.graph import call_python

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.scripts.process.group import ScriptGroup


@keras.saving.register_keras_serializable(package="hpcdl")
class GatheredMetric(keras.metrics.Metric):
    """`metric`, one that buffers predictions or whose state is no sum, over all ranks' samples; also a function's mean.

    What `update_state` is given is kept, in the host's memory. At the end of an epoch or evaluation the inputs of all
    ranks come together, batch by batch in rank order, and `metric` sees them as one process would see whole batches.
    Before that, in the logs of single steps, it shows the value of this rank's last batch. Its result is one number.
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        try:
            inner = keras.metrics.get(metric)
        except ValueError:
            inner = None
        if callable(inner) and not isinstance(inner, keras.metrics.Metric):
            inner = keras.metrics.MeanMetricWrapper(inner, name=getattr(inner, "__name__", "mean"))
        if not isinstance(inner, keras.metrics.Metric) or isinstance(inner, GatheredMetric):
            raise UsageError(f"hpcdl.Gathered takes a Keras metric or a function, not {type(metric).__name__}")
        super().__init__(name=name or inner.name)
        # Past Keras's tracking: its variables are no part of what is summed over the ranks.
        object.__setattr__(self, "metric", inner)
        object.__setattr__(self, "batches", [])
        self._arguments: list[str] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Keep a batch: arrays whose first dimension is the samples."""
        given = {"y_true": y_true, "y_pred": y_pred, "sample_weight": sample_weight}
        self._arguments = [name for name, value in given.items() if value is not None]
        values = [tf.convert_to_tensor(given[name]) for name in self._arguments]
        return call_python(self._keep, values, tf.bool)

    def _keep(self, *arrays: Array) -> bool:
        self.batches.append([numpy.array(one) for one in arrays])
        return True

    def result(self) -> Any:
        """The metric of what is kept; inside a graph that of the last batch."""
        if tf.executing_eagerly():
            return tf.constant(self._of(self.batches), tf.float32)
        found = call_python(lambda: numpy.float32(self._of(self.batches[-1:])), [], tf.float32)
        return tf.ensure_shape(found, [])

    def reset_state(self) -> None:
        """Forget all batches."""
        self.batches.clear()

    def gather(self) -> None:
        """Keep what all ranks have kept, which `result` then is of; in a loop of your own. Collective."""
        self.gather_in(session().group)

    def gather_in(self, group: ScriptGroup) -> None:
        """The same, over the ranks of a group."""
        if group.size > 1:
            self.batches[:] = list(_of_all_ranks(self.batches, group, self.name))

    def _of(self, batches: Sequence[Sequence[Array]]) -> float:
        metric = self.metric
        metric.reset_state()
        for batch in batches:
            metric.update_state(**dict(zip(self._arguments, batch, strict=True)))
        found = metric.result()
        if isinstance(found, dict) or numpy.size(found) != 1:
            raise UsageError(
                f"hpcdl.Gathered: the result of {metric.name} is no single number; give one metric for each"
            )
        return float(numpy.asarray(found).reshape(()))

    def get_config(self) -> dict[str, Any]:
        """The metric inside, as Keras saves it."""
        return {"metric": keras.saving.serialize_keras_object(self.metric), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GatheredMetric:
        """Of what `get_config` has returned."""
        return cls(keras.saving.deserialize_keras_object(config["metric"]), config["name"])


Gathered = GatheredMetric
"""Its public name."""


def _of_all_ranks(batches: Sequence[Sequence[Array]], group: ScriptGroup, name: str) -> Iterator[list[Array]]:
    """Every batch of the ranks together, rank after rank; who has fewer gives none to the last ones."""
    number = max(_by_rank(group, len(batches)))
    forms = [[[one.dtype.str, list(one.shape[1:])] for one in batches[0]]] if batches else []
    known = [one for row in _by_rank(group, forms) for one in row]
    for index in range(number):
        mine = batches[index] if index < len(batches) else [numpy.zeros((0, *shape), kind) for kind, shape in known[0]]
        if any(one.ndim == 0 for one in mine):
            raise UsageError(f"hpcdl.Gathered({name}): a value without a dimension of samples cannot be gathered")
        yield gather_arrays(group, mine)


def _by_rank(group: ScriptGroup, mine: Any) -> list[Any]:
    group.agree("hpcdl.Gathered")
    rows: list[Any] = group.messages.allgather_json(mine)
    return rows
