"""The Keras callback of a distributed `fit`, and its effect on the other callbacks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import history_point
from hpcdl.core.units import listed
from hpcdl.scripts.collectives.tensors import check_no_strategy
from hpcdl.scripts.exchange import OWN_CHANGES, key_of, name_of
from hpcdl.scripts.existing import existing_alike
from hpcdl.scripts.fit.adapted import check_adapted, synchronize_normalization
from hpcdl.scripts.fit.deferred import with_deferred
from hpcdl.scripts.fit.files import Kept, keeps_best, written_on_rank_0
from hpcdl.scripts.fit.learning_rate import fixed_rate, rates_of, set_rates
from hpcdl.scripts.fit.metrics import MetricsOverRanks, apart_from_fit
from hpcdl.scripts.fit.model import (
    LATE_SCALE,
    build_for,
    center_of,
    group_of_fit,
    leaves_of,
    optimizers_of,
    prepare_model,
    set_own,
)
from hpcdl.scripts.fit.numbering import check_numbering
from hpcdl.scripts.fit.pipelines import check_pipelines
from hpcdl.scripts.fit.samples import (
    STEPS_OF_EPOCH,
    SamplesOfEpoch,
    is_split,
    long_epochs,
    stop_noting,
    warn_of_same_samples,
)
from hpcdl.scripts.fit.series import check_series
from hpcdl.scripts.fit.settings import settings_of_model, warn_of_other_settings
from hpcdl.scripts.fit.variables import CombinedVariables, fixed_and_own, shared_variables_of, warn_of_local_variables
from hpcdl.scripts.process.session import Session, is_initialized, is_rank, session, warn_once
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.supervision.control import check_same_weights, digest_of

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup
    from hpcdl.scripts.state import State

_EPOCHS, _WEIGHTS = ("epochs", "initial_epoch"), "class_weight"
"""Arguments of `fit` that ranks must have alike."""
_FEW_OUTPUTS = 32
"""Predictions of so few samples are not compared: they are looks at single ones, or actions."""
_MOST_OUTPUT_BYTES, _CHUNK = 2**27, 2**16
"""Larger outputs are not compared: reading them again would take too long. Values to take at once."""
_SAME_LOGS = 1e-5
"""Relative difference of a value in the logs that is rounding."""
_OF_RECORD = {
    **{
        prefix + name: f"{prefix}accuracy"
        for prefix in ("", "val_")
        for name in ("sparse_categorical_accuracy", "acc", "accuracy")
    },
    **{name: name for name in ("loss", "val_loss")},
}
"""Keras's names of the fields of a record's history."""


class AgreeOverRanks(keras.callbacks.Callback):
    """Starts training and evaluates equally on all ranks, and ends epochs together: see docs/how-to/scripts.md.

    It is always moved to the end of the list: stop_training that any callback sets on one rank then counts on all.
    """

    def __init__(self, here: Session, group: ScriptGroup, state: State | None = None) -> None:
        super().__init__()
        separate = group is not here.group  # a process set's: its messages must not mix with those of its exchange
        self._communicator = group.keep("callbacks", group.messages.duplicate) if separate else here.communicator
        self.group, self._run, self._seen = group, here.run, here.communicator.monitor
        self._state = state
        self._metrics: MetricsOverRanks | None = None
        self._combined: CombinedVariables | None = None
        self._shown: list[Any] = []
        self._samples: SamplesOfEpoch | None = None
        self.counts_steps = False
        """Whether the script says how many steps an epoch of this fit takes."""
        self.given: Sequence[Any] = ()
        """What this fit trains on and validates with."""
        self.call: Mapping[str, Any] = {}
        """Those arguments of this fit that ranks must have alike."""
        self.checkpoints: list[Any] = []
        """Keras's checkpoints of this fit, which check the weights on rank 0 only."""
        self.watching: dict[str, str] = {}
        """Values of the logs by which other callbacks of this fit decide, with the name of such a callback's class."""
        self._steps = self._epoch = 0
        self._epochs_before = 0
        """Epochs of the state when the fit began."""
        self._counts_on: bool | None = None
        """Whether this fit's epochs are added to those; None before its first epoch."""
        self._alone = False  # during an evaluation outside a fit
        self._began_s = self._mark_s = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> AgreeOverRanks:
        """Return an equal callback for another fit: KerasTuner copies its callbacks. Both share one communicator."""
        return AgreeOverRanks(session(), self.group, self._state)

    @property
    def waits_to_restore(self) -> bool:
        """Whether its state has read weights that are not in the model yet."""
        return self._state is not None and self._state.waits

    def set_model(self, model: Any) -> None:
        """Prepare the model before its step is traced: see prepare_model."""
        super().set_model(model)
        prepare_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Make all ranks start alike. Raises UsageError if each rank would skip steps or update by itself."""
        optimizer = self.model.optimizer
        if hasattr(getattr(optimizer, "inner_optimizer", None), "exchanges"):
            raise UsageError(LATE_SCALE)
        if self.group.size > 1 and not self._is_distributed():
            raise UsageError(
                f"hpcdl.callbacks() with {type(optimizer).__name__}, which is not distributed: each rank would train a "
                f"model of its own; write optimizer=hpcdl.DistributedOptimizer({type(optimizer).__name__}(...))"
            )
        weights = self.call.get(_WEIGHTS)
        # Else the ranks with more epochs would wait for one that has left.
        epochs = [f"{name}={self.call.get(name)}" for name in _EPOCHS]
        self.group.agree("the start of model.fit", [*epochs, f"{'no ' * (weights is None)}{_WEIGHTS}"])
        if self.group.size > 1:
            if weights is not None:
                warn_of_other_settings(self.group, "model.fit", {_WEIGHTS: weights})
            check_adapted(self.model, self.group)
            check_numbering(self.group)
            if vars(self.model).get("compared_with") != id(optimizer):  # once for each `compile`
                # Not the optimizer itself: after another `compile` it would be taken for one that the model uses.
                set_own(self.model, "compared_with", id(optimizer))
                warn_of_other_settings(self.group, self.model.name, settings_of_model(self.model))
            self._compare_rates()
            check_pipelines(self.group, self.given)
            check_series(self.group, self.given[0] if self.given else None)
            stop_noting(self.model)
            if not self._centers():  # else each worker may draw from all samples (EASGD)
                data = self.given[0] if self.given else None
                self._samples = warn_of_same_samples(self.group, self.model, data, counts_steps=self.counts_steps)
        if self._state is not None:
            self._state.restore()
            self._epochs_before = self._state.epoch
        self._counts_on = None
        self._seen.script_steps.counted = True
        for center in self._centers():
            # First: making variables equal below must not give all ranks rank 0's own weights.
            center.to_center()
        self._start_alike()
        self._metrics = MetricsOverRanks(self.model, self._communicator, self.group)
        self._metrics.install(self._end_steps)
        self._began_s = time.monotonic()

    def _compare_rates(self) -> None:
        """Warn if the script has given ranks different learning rates since the optimizers were made. Collective."""
        leaves = [leaf for optimizer in optimizers_of(self.model) for leaf in leaves_of(optimizer)]
        names = ", ".join(type(leaf).__name__ for leaf in leaves)
        numbers = [f" {number}" for number in range(1, len(leaves) + 1)] if len(leaves) > 1 else [""]
        rates = {f"learning_rate{number}": fixed_rate(leaf) for number, leaf in zip(numbers, leaves, strict=False)}
        warn_of_other_settings(self.group, names, rates)

    def _is_distributed(self) -> bool:
        """Return whether its own optimizer, or one that a model with its own train_step holds, is distributed."""
        own_step = type(self.model).train_step is not keras.Model.train_step
        return own_step or any(hasattr(optimizer, "exchanges") for optimizer in optimizers_of(self.model))

    def _centers(self) -> list[Any]:
        return [center for center in map(center_of, optimizers_of(self.model)) if center is not None]

    def _start_alike(self) -> None:
        """Set shared variables to rank 0's at each fit, but a rank's own variables only once, when they begin."""
        begun = self.group.keep("own variables that have begun", set[str])
        new = [variable for variable in fixed_and_own(self.model) if key_of(variable) not in begun]
        existing_alike(self.group, {key_of(variable) for variable in self.model.weights})
        alike = [*shared_variables_of(self.model), *new]
        forms = [f"{variable.dtype} {tuple(variable.shape)}" for variable in alike]
        # Variables of different sizes would not fit into the messages, and MPI would end the rank without a word.
        self.group.agree("the variables of a model in fit", forms, names=[name_of(variable) for variable in alike])
        broadcast_variables(self._communicator, alike)
        self._combined = CombinedVariables(self.model, self._communicator)
        self._combined.begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count steps from here on."""
        self._epoch, self._steps = epoch, 0
        self.group.num_batches = (self.params or {}).get("steps")
        if self._counts_on is None:  # fit(epochs=n - state.epoch) begins at 0; with initial_epoch= Keras counts itself
            self._counts_on = epoch == 0
        self._seen.doing(f"epoch {epoch + 1}", 0)
        self._mark_s = time.monotonic()
        if self._metrics is not None:
            self._metrics.in_epoch = True
        for center in self._centers():
            center.report_period((self.params or {}).get("steps"), (self.params or {}).get("epochs"))
            center.begin_epoch(self._communicator)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the step. Save and leave if that is requested."""
        # With steps_per_execution Keras calls once for several steps.
        num_steps, self._steps = batch + 1 - self._steps, batch + 1
        now_s = time.monotonic()
        self._seen.doing(f"epoch {self._epoch + 1}", self._steps)
        self._seen.script_steps.over(max(num_steps, 1))
        if self._run is not None:
            self._run.meter.add(now_s - self._mark_s, max(num_steps, 1))
        self._mark_s = now_s
        if self._state is not None:
            self._state.commit()

    def _end_steps(self) -> None:
        """End the epoch's steps on this rank: take part in those of the others, then stop if any rank stops.

        A rank with fewer steps takes the weights of the rank with the most.
        """
        last = self.group.join(without_batch=self._steps == 0)
        by_rank = self._communicator.allgather_json([self._steps, bool(self.model.stop_training)])
        differ = len({steps for steps, _ in by_rank}) > 1
        # One rank's callback may stop the fit, and the next epoch's steps need all ranks.
        stops = self._any_stops([stop for _, stop in by_rank])
        over = stops or self._epoch + 1 == (self.params or {}).get("epochs")
        for center in self._centers():
            center.end_steps(last, unequal=self.group.unequal or differ, over=over)
        if self.group.unequal or differ:  # Keras rounds the number of steps up to a multiple of steps_per_execution
            self.group.agree("the weights of the rank with the most steps")
            broadcast_variables(self._communicator, shared_variables_of(self.model), last)
            set_rates([self.model.optimizer], self._communicator.allgather_json(rates_of([self.model.optimizer]))[last])
            if self._communicator.rank == 0:
                counts = ", ".join(f"rank {rank} {steps}" for rank, (steps, _) in enumerate(by_rank))
                counts = counts if differ else "by less than one steps_per_execution"
                sys.stderr.write(
                    f"hpcdl: unequal steps in epoch {self._epoch + 1} ({counts}): those with fewer have followed the "
                    "others; hpcdl.dataset() gives all as many\n"
                )
        self._combine()  # before the script's callbacks: a checkpoint of theirs saves what they find
        if stops:
            self.model.stop_training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Evaluate alike: average the moving statistics of batch normalization over the ranks."""
        self.group.agree("the start of an evaluation")
        self._shown = [center for center in self._centers() if center.to_center()]
        self._combine()
        if self._metrics is None:
            self._metrics = MetricsOverRanks(self.model, self._communicator, self.group)
            self._metrics.install(lambda: None)
            self._alone = True
        self._metrics.in_evaluation = True

    def _combine(self) -> None:
        """Average the moving statistics, and combine other variables as the script has chosen (hpcdl.combine)."""
        if self._combined is None:
            self._combined = CombinedVariables(self.model, self._communicator)
            self._combined.begin()
        self._combined.combine()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Outside a fit, give each rank its own weights and the model its own metrics back."""
        for center in self._shown:
            center.to_own()
        if self._alone and self._metrics is not None:
            self._metrics.uninstall()
            self._metrics, self._alone = None, False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average moving statistics and compare all variables. If one rank stops, all stop."""
        self.group.agree("the end of an epoch")
        if self._samples is not None:
            stop_noting(self.model)
            self._samples.compare(self.group)
            self._samples = None
        self._combine()
        own_paths = self._combined.differing_own() if self._combined else []
        if own_paths and self.group.rank == 0:
            self.group.keep("said what is a rank's own", lambda: warn_of_local_variables(own_paths))
        shared = shared_variables_of(self.model)
        named = {f"{index}: {getattr(variable, 'path', '')}": variable for index, variable in enumerate(shared)}
        check_same_weights(named, self._communicator, f"after epoch {epoch + 1}", OWN_CHANGES)
        values = {name: (logs or {}).get(name) for name in self.watching}
        watched = {name: float(value) for name, value in values.items() if value is not None and numpy.ndim(value) == 0}
        rows = self._communicator.allgather_json([bool(self.model.stop_training), watched])
        self._compare_watched([one for _, one in rows])
        if self._any_stops([stops for stops, _ in rows]):
            self.model.stop_training = True
        if self._run is not None and logs is not None:
            self._note(epoch, logs)
        if self._state is not None:
            self._state.epoch = epoch + 1 + (self._epochs_before if self._counts_on else 0)
            self._state.commit(stepped=False)

    def _any_stops(self, by_rank: Sequence[bool]) -> bool:
        """Return whether a rank has stopped this fit. Say so if others have not: it may decide by its own samples."""
        if any(by_rank) and not all(by_rank) and self._communicator.rank == 0:
            sys.stderr.write(
                f"hpcdl: rank {by_rank.index(True)} has stopped fit in epoch {self._epoch + 1}, and all ranks stop "
                "with it; if a callback decides by a number of its rank, give it hpcdl.allreduce(number)\n"
            )
        return any(by_rank)

    def _compare_watched(self, by_rank: Sequence[Mapping[str, float]]) -> None:
        """Warn if a callback decides by a value that another callback has put into the logs on each rank."""
        for name, value in by_rank[0].items():
            for rank, values in enumerate(by_rank):
                if not numpy.isclose(values.get(name, value), value, rtol=_SAME_LOGS, equal_nan=True):
                    warn_once(
                        self.group,
                        f"{name} of each rank's own",
                        f"{self.watching[name]} monitors {name}, which is {value:.6g} on rank 0, {values[name]:.6g} on "
                        f"rank {rank}: each rank decides by its own; give all ranks the mean, "
                        f"logs[{name!r}] = float(hpcdl.allreduce(value))",
                    )
                    return

    def _end_alike(self) -> None:
        """Take rank 0's weights if a callback restored different ones on some ranks (EarlyStopping's best)."""
        if self._communicator.size == 1:
            return
        shared = shared_variables_of(self.model)
        rows = self._communicator.allgather_json([digest_of(one) for one in shared])
        odd = [one for one, *digests in zip(shared, *rows, strict=True) if len(set(digests)) > 1]
        broadcast_variables(self._communicator, odd)
        if odd and self._communicator.rank == 0:
            sys.stderr.write(
                f"hpcdl: warning: at the end of fit a callback changed {listed([one.path for one in odd], 1)} on some "
                "ranks only; all ranks have rank 0's values now. Give that callback on every rank\n"
            )

    def _note(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the epoch to the run's record."""
        assert self._run is not None and self._metrics is not None
        self._run.meter.count(self._metrics.own_samples, self._steps)
        results: dict[str, Any] = {field: float(logs[name]) for name, field in _OF_RECORD.items() if name in logs}
        seconds, step = time.monotonic() - self._began_s, self._run.meter.num_steps
        self._run.history.append(history_point(epoch=epoch + 1, step=step, seconds=seconds, **results))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the model its own metrics back; what rank 0's checkpoints have found best is known to all."""
        self._end_alike()
        if self._epoch + 1 < (self.params or {}).get("epochs", 0):
            session().last_looks.clear()  # steps that a callback has cut short say nothing about a schedule's length
        bests_by_rank = self._communicator.allgather_json(
            [None if checkpoint.best is None else float(checkpoint.best) for checkpoint in self.checkpoints]
        )
        for checkpoint, best in zip(
            self.checkpoints, bests_by_rank[0], strict=False
        ):  # other ranks may have no checkpoints
            checkpoint.best = best
        self._seen.doing("running the script")
        self._seen.script_steps.counted = False
        begun = self.group.keep("own variables that have begun", set[str])
        begun.update(key_of(checkpoint) for checkpoint in fixed_and_own(self.model))
        if self._metrics is not None:
            self._metrics.uninstall()
            self._metrics = None


def callbacks(state: State | None = None) -> Any:
    """Return one Keras callback: ranks start with rank 0's weights, metrics cover all samples, epochs end together.

    `fit` with a distributed optimizer adds it by itself. With `state` (hpcdl.State) it also saves at intervals, at the
    time limit and at a signal. Given to `evaluate`, it makes that evaluation cover all ranks.
    """
    here = session()
    follow_fits()
    return AgreeOverRanks(here, here.group, state)


def follow_fits() -> None:
    """Make every later `fit` with a distributed optimizer add the callback in last place, if the script has not."""
    if hasattr(keras.Model.fit, "over_ranks"):
        return
    if session().communicator.size > 1:
        synchronize_normalization()
    keras.optimizers.LossScaleOptimizer.__init__ = _never_around(keras.optimizers.LossScaleOptimizer.__init__)
    keras.Model.fit = _fit_over_ranks(keras.Model.fit)
    keras.Model.evaluate = _evaluation_apart(keras.Model.evaluate)
    keras.Model.predict = _noting_predictions(keras.Model.predict)
    keras.Model.test_on_batch = _noting_batches(keras.Model.test_on_batch)
    keras.Model.train_on_batch = _noting_training(keras.Model.train_on_batch)
    set_plain_model = keras.callbacks.CallbackList.set_model

    def set_model(self: Any, model: Any) -> None:
        if model:
            self.callbacks[:] = _arranged(self.callbacks)
        set_plain_model(self, model)

    keras.callbacks.CallbackList.set_model = set_model


def _never_around(plain: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a loss scale: it raises UsageError if the inner optimizer is distributed already."""

    @functools.wraps(plain)
    def made(self: Any, inner_optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(inner_optimizer, "exchanges"):
            raise UsageError(LATE_SCALE)
        plain(self, inner_optimizer, *args, **kwargs)

    return made


def _fit_over_ranks(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `callbacks` may be given by its place, as all arguments of fit.
        bound = signature.bind(self, *args, **kwargs)
        group = group_of_fit(self)
        user_callbacks = bound.arguments.get("callbacks")
        if group is not None and is_initialized():
            check_no_strategy(self.distribute_strategy)
            bound.arguments["callbacks"] = _with_own(user_callbacks, self, group, bound.arguments)
        with apart_from_fit(self):
            return plain(*bound.args, **bound.kwargs)

    vars(fit)["over_ranks"] = True
    return fit


def _evaluation_apart(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        user_callbacks = given.get("callbacks")
        if isinstance(user_callbacks, keras.callbacks.CallbackList):  # the validation of a fit
            return plain(self, *args, **kwargs)
        with apart_from_fit(self), session().evaluations.without_metrics() if is_rank() else contextlib.nullcontext():
            results = plain(self, *args, **kwargs)
        covers_all = any(isinstance(one, AgreeOverRanks) for one in tf.nest.flatten(user_callbacks))
        if not covers_all and _is_of_all_ranks(self):
            numbers = [float(numpy.sum(value)) for value in tf.nest.flatten(results)]
            session().evaluations.add(numbers, split=is_split(given.get("x")))
        return results

    return evaluate


def _noting_predictions(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = plain(self, *args, **kwargs)
        flat = [numpy.asarray(one) for one in tf.nest.flatten(outputs)]
        known = {one.dtype.kind for one in flat} <= set("fiu") and sum(one.nbytes for one in flat) <= _MOST_OUTPUT_BYTES
        if flat and len(flat[0]) > _FEW_OUTPUTS and known and _is_of_all_ranks(self):
            done = session().communicator.monitor.script_steps.done
            split = is_split(signature.bind(self, *args, **kwargs).arguments.get("x"))
            session().evaluations.add_predictions(_marks_of(flat), done, split=split)
        return outputs

    return predict


def _noting_batches(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def test_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = plain(self, *args, **kwargs)
        if _is_of_all_ranks(self):
            session().evaluations.add_batch([float(numpy.sum(value)) for value in tf.nest.flatten(results)])
        return results

    return test_on_batch


def _noting_training(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = plain(self, *args, **kwargs)
        numbers = tf.nest.flatten(results)
        exchanges = getattr(self.optimizer, "exchanges", None)  # not a search of the model, at every step
        of_all = exchanges is not None and is_rank() and exchanges() is session().group
        # Losses alone are those of a step, which a loop shows of one rank; an accuracy stands for the training.
        if of_all and len(numbers) > 1 and any("loss" not in metric.name for metric in self.metrics):
            session().evaluations.add_trained([float(numpy.sum(value)) for value in numbers])
        return results

    return train_on_batch


def _marks_of(outputs: Sequence[Any]) -> list[float]:
    """Return numbers that are the same for the same outputs in any order, and others for other outputs."""
    marks = [float(len(outputs[0]))]
    for one in outputs:
        values = one.reshape(-1)
        # Not sums: those of a softmax are the number of samples.
        sums = numpy.zeros(2)
        for start in range(0, len(values), _CHUNK):
            squares = values[start : start + _CHUNK].astype(numpy.float64) ** 2
            sums += squares.sum(), squares @ squares
        marks += (sums / max(len(values), 1)).tolist()
    return marks


def _is_of_all_ranks(model: Any) -> bool:
    """Return whether this process is a rank, and all ranks train `model`."""
    return is_rank() and group_of_fit(model) is session().group


def _with_own(given: Any, model: Any, group: ScriptGroup, arguments: Mapping[str, Any]) -> Any:
    """Return the callbacks of a fit with `arguments`, a list or a user's CallbackList, with hpcdl's callback added."""
    data = arguments.get("x")
    counts_steps = arguments.get("steps_per_epoch") is not None
    both = data, arguments.get("validation_data")
    call = {name: arguments[name] for name in (*_EPOCHS, _WEIGHTS) if name in arguments}
    if text := long_epochs(data, arguments.get("steps_per_epoch"), group.size):
        warn_once(group, STEPS_OF_EPOCH, text)
    by_hand = isinstance(given, keras.callbacks.CallbackList)
    listed = given.callbacks if by_hand else tf.nest.flatten(given) if given else []
    agreeing = [callback for callback in listed if isinstance(callback, AgreeOverRanks)]
    if any(callback.waits_to_restore for callback in agreeing):
        build_for(model, data)
    for callback in agreeing:
        callback.counts_steps, callback.given, callback.call = counts_steps, both, call
    if agreeing:
        return given
    added = AgreeOverRanks(session(), group)
    added.counts_steps, added.given, added.call = counts_steps, both, call
    if not by_hand:
        return [*listed, added]
    added.set_params(given.params)
    given.callbacks.append(added)
    given.set_model(model)  # this also arranges the callbacks
    return given


def _arranged(given: Sequence[Any]) -> list[Any]:
    """Return the callbacks with hpcdl's last. Without it (a fit of one rank alone, for example) nothing changes."""
    agreeing = [callback for callback in given if isinstance(callback, AgreeOverRanks)]
    if not agreeing:
        return list(given)
    other_callbacks = [callback for callback in given if not isinstance(callback, AgreeOverRanks)]
    # A list may be arranged more than once.
    unwrapped = [callback.callback if isinstance(callback, Kept) else callback for callback in other_callbacks]
    agreeing[0].watching = {
        callback.monitor: type(callback).__name__
        for callback in unwrapped
        if isinstance(getattr(callback, "monitor", None), str)
    }
    agreeing[0].checkpoints = [callback for callback in unwrapped if keeps_best(callback)]
    other_callbacks = (
        other_callbacks if agreeing[0].group.size == 1 else written_on_rank_0(other_callbacks, agreeing[0].group)
    )
    run = session().run
    return [*with_deferred(other_callbacks, None if run is None else run.work), *agreeing[:1]]
