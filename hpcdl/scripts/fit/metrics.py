"""Metrics over all ranks' samples, from the summed state of Keras's metrics: exact for AUC, precision and counts too.

A metric whose state is not a sum is computed from all ranks' predictions, as in one process: `hpcdl.Gathered`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives.arrays import gather_arrays, unconverted
from hpcdl.scripts.fit.metric_code import sets_state
from hpcdl.scripts.process.session import is_rank, session
from hpcdl.step.keras_internals import RESULTS, check_internals, metrics_inside
from hpcdl.strategies.base.graph import call_python

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.scripts.process.group import ScriptGroup


@keras.saving.register_keras_serializable(package="hpcdl")
class GatheredMetric(keras.metrics.Metric):
    """Computes `metric` over all ranks' samples if it buffers predictions or its state is no sum. Or a function's mean.

    It keeps the arguments of `update_state` in host memory. At the end of an epoch or evaluation it gathers all ranks'
    inputs, batch by batch in rank order: `metric` sees whole batches as in one process. In the logs of single steps it
    shows the value of this rank's last batch. The result is one number.
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
        # Bypass Keras's tracking: these variables must not be summed over the ranks.
        object.__setattr__(self, "metric", inner)
        object.__setattr__(self, "batches", [])
        self._arguments: list[str] = []

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Keep a batch: arrays with the samples as first dimension."""
        arguments = {"y_true": y_true, "y_pred": y_pred, "sample_weight": sample_weight}
        self._arguments = [name for name, value in arguments.items() if value is not None]
        values = [tf.convert_to_tensor(arguments[name]) for name in self._arguments]
        return call_python(self._keep, values, tf.bool)

    def _keep(self, *arrays: Array) -> bool:
        self.batches.append([numpy.array(array) for array in arrays])
        return True

    def result(self) -> Any:
        """Return the metric of the kept batches, or inside a graph that of the last batch."""
        if tf.executing_eagerly():
            return tf.constant(self._of(self.batches), tf.float32)
        value = call_python(lambda: numpy.float32(self._of(self.batches[-1:])), [], tf.float32)
        return tf.ensure_shape(value, [])

    def reset_state(self) -> None:
        """Forget all batches."""
        self.batches.clear()

    def gather(self) -> None:
        """Gather the batches of all ranks for `result`; for use in a custom loop. Collective."""
        self.gather_in(session().group)

    def gather_in(self, group: ScriptGroup) -> None:
        """Gather the batches of all ranks of a group. Collective."""
        if group.size > 1:
            self.batches[:] = list(_of_all_ranks(self.batches, group, self.name))

    def _of(self, batches: Sequence[Sequence[Array]]) -> float:
        metric = self.metric
        metric.reset_state()
        for batch in batches:
            metric.update_state(**dict(zip(self._arguments, batch, strict=True)))
        value = metric.result()
        if isinstance(value, dict) or numpy.size(value) != 1:
            raise UsageError(
                f"hpcdl.Gathered: the result of {metric.name} is no single number; give one metric for each"
            )
        return float(numpy.asarray(value).reshape(()))

    def get_config(self) -> dict[str, Any]:
        """Return the inner metric as Keras saves it."""
        return {"metric": keras.saving.serialize_keras_object(self.metric), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GatheredMetric:
        """Create a metric from what `get_config` returned."""
        return cls(keras.saving.deserialize_keras_object(config["metric"]), config["name"])


Gathered = GatheredMetric
"""The public name."""


def _of_all_ranks(batches: Sequence[Sequence[Array]], group: ScriptGroup, name: str) -> Iterator[list[Array]]:
    """Yield each batch of all ranks together, in rank order. A rank with fewer batches adds none to the last ones."""
    number = max(_by_rank(group, len(batches)))
    forms = [[[one.dtype.str, list(one.shape[1:])] for one in batches[0]]] if batches else []
    all_forms = [one for row in _by_rank(group, forms) for one in row]
    for index in range(number):
        own_batch = (
            batches[index] if index < len(batches) else [numpy.zeros((0, *shape), kind) for kind, shape in all_forms[0]]
        )
        if any(one.ndim == 0 for one in own_batch):
            raise UsageError(f"hpcdl.Gathered({name}): a value without a dimension of samples cannot be gathered")
        yield gather_arrays(group, own_batch)


def _by_rank(group: ScriptGroup, value: Any) -> list[Any]:
    group.agree("hpcdl.Gathered")
    rows: list[Any] = group.messages.allgather_json(value)
    return rows


class MetricsOverRanks:
    """Replaces the results of a model's metrics during a distributed fit or evaluation.

    States of metrics can be added: those of Keras consist of sums and counts. The loss is the mean over all samples.
    """

    def __init__(self, model: Any, communicator: Communicator, group: ScriptGroup) -> None:
        self._model, self._communicator, self._group = model, communicator, group
        self.in_epoch = self.in_evaluation = False
        self.own_samples = 0.0
        """Samples of this rank in the last complete epoch; 0 if the model does not count them."""
        self._end_steps: Callable[[], None] = lambda: None
        self._outer: Any = None

    def install(self, end_steps: Callable[[], None]) -> None:
        """Make Keras take results from here. `end_steps` is called when the last step of an epoch is done."""
        check_internals()
        self._end_steps = end_steps
        self._outer = vars(self._model).get(RESULTS)
        vars(self._model)[RESULTS] = self._results

    def uninstall(self) -> None:
        """Restore the previous source of results: the model itself, or the callback of an outer fit."""
        if self._outer is None:
            vars(self._model).pop(RESULTS, None)
        else:
            vars(self._model)[RESULTS] = self._outer

    def _results(self, logs: Any) -> Any:
        """Return the results over all ranks at the end of an epoch or evaluation, otherwise the model's own."""
        # Of the class: the model's own attribute is this method.
        plain = getattr(type(self._model), RESULTS)
        if self.in_evaluation:
            self.in_evaluation = False
        elif self.in_epoch:
            self.in_epoch = False
            self.own_samples = self._samples() if logs else 0.0
            self._end_steps()
        else:
            return plain(self._model, logs)
        if self._communicator.size == 1:
            return plain(self._model, logs)
        own_logs = _flat(logs)
        by_rank = self._communicator.allgather_json(
            [
                {name: value.tolist() for name, value in own_logs.items()},
                [one.name for one in self._metrics_in(own_logs)],
            ]
        )
        by_rank = [row for row in by_rank if row[0]]  # a rank without a step has none
        if by_rank and not own_logs:
            logs = by_rank[0][0]  # so that Keras, too, goes by the same names on all ranks
            self._model.reset_metrics()  # a batch of a fixed size is counted before Keras finds that there is none
        self._sum_up()
        result = plain(self._model, logs)
        if result is not logs or not by_rank:
            return result
        # A custom train_step returns results of metrics and other values, which are averaged.
        results = {name: numpy.mean([row[name] for row, _ in by_rank], axis=0) for name in by_rank[0][0]}
        for metric in self._model.metrics:
            if all(metric.name in names for _, names in by_rank):
                results |= _flat({metric.name: metric.result()})
        return {name: float(value) if value.ndim == 0 else value for name, value in results.items()}

    def _metrics_in(self, logs: Mapping[str, Array]) -> list[Any]:
        """Return the metrics whose results the logs hold, without those whose name has another value there."""
        own_results = [(metric, _flat({metric.name: metric.result()})) for metric in self._model.metrics if logs]
        return [
            metric
            for metric, results in own_results
            if all(
                name in logs and numpy.array_equal(value, logs[name], equal_nan=True) for name, value in results.items()
            )
        ]

    def _samples(self) -> float:
        """Return the number of samples that the mean loss has counted in this epoch."""
        trackers = (tracker for tracker in self._model.metrics if tracker.name == "loss" and hasattr(tracker, "count"))
        return next((float(tracker.count) for tracker in trackers), 0.0)

    def _sum_up(self) -> None:
        """Sum every metric's state over the ranks, or take its maximum or minimum if `over_ranks` says so."""
        states: dict[int, tuple[Any, str]] = {}
        metrics = leaves_of_metrics(self._model.metrics)
        for metric in metrics:
            if isinstance(metric, Gathered):
                metric.gather_in(self._group)
                continue
            how = getattr(metric, "over_ranks", "sum")
            # By identity, because metrics may share variables, which must be added up once.
            states |= {id(variable): (variable, how) for variable in metric.variables}
        forms = [f"{how} of {tuple(variable.shape)}" for variable, how in states.values()]
        # Before the sum, which would add states of different metrics slot by slot.
        self._group.agree("metrics over the ranks", forms)
        # Counts beyond 2^24 lose single samples in float32.
        values = [numpy.asarray(variable.numpy(), numpy.float64) for variable, _ in states.values()]
        if self._group.rank == 0 and (doubtful := [one for one in metrics if _may_be_no_sum(one)]):
            names = ", ".join(one.name for one in doubtful)
            self._group.keep(f"said that {names} may be no sums", lambda: _warn_of_other_metrics(names))
        if not values:
            return
        total = numpy.concatenate([value.reshape(-1) for value in values])
        self._communicator.allreduce(total)
        parts = numpy.split(total, numpy.cumsum([value.size for value in values])[:-1])
        for (variable, how), part, own_value in zip(states.values(), parts, values, strict=True):
            combined = part.reshape(own_value.shape)
            if how in ("max", "min"):
                gathered = numpy.array(self._communicator.allgather_json(own_value.tolist()))
                combined = getattr(gathered, how)(axis=0)
            variable.assign(combined.astype(variable.dtype))


def leaves_of_metrics(metrics: Iterable[Any]) -> list[Any]:
    """Return all metrics once each, including those that Keras groups into one for `compile`."""
    leaves: dict[int, Any] = {}
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        leaves |= {id(leaf): leaf for leaf in (leaves_of_metrics(inner) if inner else [metric])}
    return list(leaves.values())


def _may_be_no_sum(metric: Any) -> bool:
    """Return whether a custom metric's state may be something other than a sum.

    That is so if it has no variables, or sets its state instead of adding to it. Metrics that it holds, as Precision
    and Recall in an F1, are looked at by themselves.
    """
    custom = type(metric).__module__.partition(".")[0] not in ("keras", "hpcdl")
    if not custom or hasattr(metric, "over_ranks"):
        return False
    return bool(not metric.variables or sets_state(metric) or any(map(_may_be_no_sum, metrics_inside(metric))))


def _warn_of_other_metrics(names: str) -> bool:
    sys.stderr.write(
        f"hpcdl: warning: {names}: the states of metrics are summed over the ranks, slot by slot, and one without "
        "variables stays each rank's own; where that is wrong write hpcdl.Gathered(metric), or over_ranks = "
        '"max" or "min" in its class, where it is right over_ranks = "sum"\n'
    )
    return True


@contextlib.contextmanager
def apart_from_fit(model: Any) -> Iterator[None]:
    """Run an evaluation or a fit inside a callback of a distributed fit, and restore the outer fit's state after it.

    Keras resets the model's metrics, and would add the inner counts to the epoch in progress.
    """
    hook = vars(model).get(RESULTS)
    if hook is None:
        yield
        return
    outer: MetricsOverRanks = hook.__self__
    flags = outer.in_epoch, outer.in_evaluation
    values = [(one, one.numpy()) for metric in model.metrics for one in metric.variables]
    gathered = [one for one in leaves_of_metrics(model.metrics) if isinstance(one, Gathered)]
    batches = [list(one.batches) for one in gathered]
    history = getattr(model, "history", None)
    outer.in_epoch = outer.in_evaluation = False
    try:
        yield
    finally:
        outer.in_epoch, outer.in_evaluation = flags
        for variable, value in values:
            variable.assign(value)
        for metric, kept in zip(gathered, batches, strict=True):
            metric.batches[:] = kept
        model.history = history


def _flat(logs: Any) -> dict[str, Array]:
    """Return logs by name as arrays. A metric with several results (compile_metrics) gives each its own name."""
    flat: dict[str, Array] = {}
    for name, value in (logs or {}).items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: numpy.asarray(value, numpy.float64)}
    return flat


def note_results() -> None:
    """Patch Keras's metrics to note the results that a loop of the script's own reads, each of a rank's own samples."""
    notes = {"result": _noted_result, "update_state": _with(_before_update), "reset_state": _with(_before_reset)}
    for kind in {one for one in vars(keras.metrics).values() if isinstance(one, type)}:
        for owner in kind.__mro__[:-1]:
            for name, noted in notes.items():
                plain = vars(owner).get(name)
                if plain is not None and issubclass(owner, keras.Metric) and not hasattr(plain, "noted"):
                    setattr(owner, name, noted(plain))


def _in_loop() -> bool:
    """Return whether this rank's script is in a loop of its own, not in a fit."""
    return is_rank() and not session().communicator.monitor.script_steps.counted


def _noted_result(plain: Callable[..., Any]) -> Callable[..., Any]:
    @unconverted
    @functools.wraps(plain)
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = plain(self, *args, **kwargs)
        reader = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        # A fit and an evaluation read their own metrics, some in a train_step of the script.
        if tf.executing_eagerly() and reader not in ("hpcdl", "keras") and hasattr(value, "dtype") and _in_loop():
            session().evaluations.add_result(self, value)
        return value

    vars(result)["noted"] = True
    return result


def _with(note: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a metric's method call `note` first, in a loop of the script's own."""

    def noted(plain: Callable[..., Any]) -> Callable[..., Any]:
        @unconverted
        @functools.wraps(plain)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _in_loop():
                note(self)
            return plain(self, *args, **kwargs)

        vars(method)["noted"] = True
        return method

    return noted


def _before_update(metric: Any) -> None:  # a graph calls this once, as it is traced
    session().evaluations.add_metric(metric, lambda: _result_of(metric))


def _before_reset(metric: Any) -> None:
    if tf.executing_eagerly():
        session().evaluations.before_reset(metric)


def _result_of(metric: Any) -> float | None:
    """Return the result of a metric, or None without any: of no samples, or not a number."""
    with contextlib.suppress(Exception):  # a script's own metric may raise anything
        if any(numpy.any(variable) for variable in metric.variables):
            return float(numpy.sum(metric.result()))
    return None
