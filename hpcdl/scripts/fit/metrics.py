"""Metrics of all ranks' samples, from the summed state of Keras's metrics: exact for AUC, precision and counts too.

Those whose state is no sum see what all ranks have predicted, as in one process: `hpcdl.Gathered`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives.arrays import gather_arrays
from hpcdl.scripts.process.session import session
from hpcdl.step.keras_internals import RESULTS, check_internals
from hpcdl.strategies.base.graph import call_python

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
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
        self._outer: Any = None

    def install(self, end_steps: Callable[[], None]) -> None:
        """Have Keras ask here; `end_steps` is called when the last step of an epoch is done."""
        check_internals()
        self._end_steps = end_steps
        self._outer = vars(self._model).get(RESULTS)
        vars(self._model)[RESULTS] = self._results

    def uninstall(self) -> None:
        """Let whoever answered before do so again: the model itself, or the fit whose callback this was for."""
        if self._outer is None:
            vars(self._model).pop(RESULTS, None)
        else:
            vars(self._model)[RESULTS] = self._outer

    def _results(self, logs: Any) -> Any:
        """The results over all ranks at the end of an epoch or evaluation; the model's own at any other time."""
        plain = getattr(type(self._model), RESULTS)
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
        own = _flat(logs)
        by_rank = self._communicator.allgather_json(
            [{name: value.tolist() for name, value in own.items()}, [one.name for one in self._metrics_in(own)]]
        )
        by_rank = [row for row in by_rank if row[0]]  # a rank without a step has none
        self._sum_up()
        found = plain(self._model, logs)
        if found is not logs or not by_rank:
            return found
        # What a train_step of the user's own returns: results of metrics, and beside them what is averaged.
        results = {name: numpy.mean([row[name] for row, _ in by_rank], axis=0) for name in by_rank[0][0]}
        for metric in self._model.metrics:
            if all(metric.name in names for _, names in by_rank):
                results |= _flat({metric.name: metric.result()})
        return {name: float(value) if value.ndim == 0 else value for name, value in results.items()}

    def _metrics_in(self, logs: Mapping[str, Array]) -> list[Any]:
        """The metrics whose results the logs hold: not those that have something else by their name."""
        own_results = [(metric, _flat({metric.name: metric.result()})) for metric in self._model.metrics if logs]
        return [
            metric
            for metric, results in own_results
            if all(name in logs and numpy.array_equal(one, logs[name], equal_nan=True) for name, one in results.items())
        ]

    def _samples(self) -> float:
        """What the mean loss has counted since the epoch began."""
        trackers = (one for one in self._model.metrics if one.name == "loss" and hasattr(one, "count"))
        return next((float(one.count) for one in trackers), 0.0)

    def _sum_up(self) -> None:
        """Every metric's state becomes the sum over the ranks; those with `over_ranks = "max"` or "min" that."""
        states: dict[int, tuple[Any, str]] = {}
        metrics = leaves_of_metrics(self._model.metrics)
        for metric in metrics:
            if isinstance(metric, Gathered):
                metric.gather_in(self._group)
                continue
            how = getattr(metric, "over_ranks", "sum")
            states |= {id(variable): (variable, how) for variable in metric.variables}
        forms = [f"{how} of {tuple(variable.shape)}" for variable, how in states.values()]
        self._group.agree("metrics over the ranks", forms)
        values = [numpy.asarray(variable.numpy(), numpy.float64) for variable, _ in states.values()]
        if self._group.rank == 0 and (odd := [one for one in metrics if _may_be_no_sum(one)]):
            names = ", ".join(one.name for one in odd)
            self._group.keep(f"said that {names} may be no sums", lambda: _say_what_may_be_no_sum(names))
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


def leaves_of_metrics(metrics: Iterable[Any]) -> list[Any]:
    """Metrics, and those that Keras holds together in one for `compile`, each once."""
    found: dict[int, Any] = {}
    for one in metrics:
        inner = getattr(one, "metrics", None)
        found |= {id(leaf): leaf for leaf in (leaves_of_metrics(inner) if inner else [one])}
    return list(found.values())


def _may_be_no_sum(metric: Any) -> bool:
    """Whether a metric of the script's own says nothing of its state.

    Which has slots, or which Keras does not know, or which is set where a sum would be added to.
    """
    own = type(metric).__module__.partition(".")[0] not in ("keras", "hpcdl")
    if not own or hasattr(metric, "over_ranks"):
        return False
    return not metric.variables or any(len(one.shape) for one in metric.variables) or _sets_state(type(metric))


def _sets_state(kind: Any) -> bool:
    """Whether `update_state` of a metric's class assigns something else than a sum with what was there."""
    update = inspect.unwrap(kind.update_state)
    if update.__module__.partition(".")[0] == "keras":
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(update)))
    except (OSError, TypeError, SyntaxError):  # nobody can tell
        return True
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "assign"
        and not _adds(one)
        for one in ast.walk(tree)
    )


def _adds(call: ast.Call) -> bool:
    """Whether it is `state.assign(state + something)`."""
    state = ast.unparse(call.func).removesuffix(".assign")
    sums = [one for one in call.args if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add)]
    return any(state in (ast.unparse(one.left), ast.unparse(one.right)) for one in sums)


def _say_what_may_be_no_sum(names: str) -> bool:
    sys.stderr.write(
        f"hpcdl: warning: {names}: the states of metrics are summed over the ranks, slot by slot, and one without "
        "variables stays each rank's own; where that is wrong write hpcdl.Gathered(metric), or over_ranks = "
        '"max" or "min" in its class, where it is right over_ranks = "sum"\n'
    )
    return True


@contextlib.contextmanager
def apart_from_fit(model: Any) -> Iterator[None]:
    """Inside, an evaluation or another fit within a callback of a distributed fit: afterwards that one is as it was.

    Keras resets the model's metrics, and leaves what the inner one has counted to the epoch that is under way.
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
    """Logs by name as arrays; those of a metric that has several (compile_metrics) by their own names."""
    found: dict[str, Array] = {}
    for name, value in (logs or {}).items():
        found |= _flat(value) if isinstance(value, Mapping) else {name: numpy.asarray(value, numpy.float64)}
    return found
