"""Metrics of all ranks' samples, from the summed state of Keras's metrics: exact for AUC, precision and counts too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import UsageError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator
    from hpcdl.training.keras.group import ScriptGroup

_METHOD = "_get_metrics_result_or_logs"
"""What Keras's fit and evaluate ask for their logs when the last batch is done."""


class MetricsOverRanks:
    """Stands before a model's own results while a distributed fit or evaluation is under way.

    The states of metrics add up: each of Keras's is made of sums and counts. The mean loss is one over samples.
    """

    def __init__(self, model: Any, communicator: Communicator, group: ScriptGroup) -> None:
        self._model, self._communicator, self._group = model, communicator, group
        self.in_epoch = self.in_evaluation = False
        self.own_samples = 0.0
        """Samples of this rank in the epoch that ended last; 0 where the model does not count them."""
        self._end_steps: Callable[[], None] = lambda: None

    def install(self, end_steps: Callable[[], None]) -> None:
        """Have Keras ask here; `end_steps` is called when the last step of an epoch is done."""
        if not hasattr(self._model, _METHOD):
            raise UsageError("this Keras has no end of an epoch that hpcdl knows; use Keras 3.5 or newer")
        self._end_steps = end_steps
        vars(self._model)[_METHOD] = self._results

    def uninstall(self) -> None:
        """Let the model answer for itself again."""
        vars(self._model).pop(_METHOD, None)

    def _results(self, logs: Any) -> Any:
        """The results over all ranks at the end of an epoch or evaluation; the model's own at any other time."""
        plain = getattr(type(self._model), _METHOD)
        if self.in_evaluation:
            self.in_evaluation = False
        elif self.in_epoch:
            self.in_epoch = False
            self.own_samples = self._samples()
            self._end_steps()
        else:
            return plain(self._model, logs)
        if self._communicator.size == 1:
            return plain(self._model, logs)
        self._sum_up()
        found = plain(self._model, logs)
        return self._means(found) if found is logs else found

    def _samples(self) -> float:
        """What the mean loss has counted since the epoch began."""
        trackers = (one for one in self._model.metrics if one.name == "loss" and hasattr(one, "count"))
        return next((float(one.count) for one in trackers), 0.0)

    def _sum_up(self) -> None:
        """Every metric's state becomes the sum over the ranks; those with `over_ranks = "max"` or "min" that."""
        states: dict[int, tuple[Any, str]] = {}
        for metric in self._model.metrics:
            how = getattr(metric, "over_ranks", "sum")
            states |= {id(variable): (variable, how) for variable in metric.variables}
        forms = [f"{how} of {tuple(variable.shape)}" for variable, how in states.values()]
        self._group.agree("metrics over the ranks", forms)
        values = [numpy.asarray(variable.numpy(), numpy.float64) for variable, _ in states.values()]
        if not values:
            return
        total = numpy.concatenate([value.reshape(-1) for value in values])
        self._communicator.allreduce(total)
        parts = numpy.split(total, numpy.cumsum([value.size for value in values])[:-1])
        for (variable, how), part, own in zip(states.values(), parts, values, strict=True):
            found = part.reshape(own.shape)
            if how in ("max", "min"):
                gathered = numpy.array(self._communicator.allgather_json(own.tolist()))
                found = getattr(gathered, how)(axis=0)
            variable.assign(found.astype(variable.dtype))

    def _means(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Of what a train_step of the user's own returns beside any metric, the mean over the ranks."""
        own = {name: float(numpy.mean(value)) for name, value in logs.items()}
        gathered = self._communicator.allgather_json(own)
        known = [row for row in gathered if row]  # a rank without a step has none
        return {name: sum(row[name] for row in known) / len(known) for name in (known[0] if known else {})}
