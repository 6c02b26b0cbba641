"""The Keras callback of a distributed `fit`, and what becomes of the others beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from hpcdl.core.errors import UsageError
from hpcdl.core.records import HistoryPoint
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.training.checkpoint.state import average_moving_statistics
from hpcdl.training.keras.exchange import OWN_CHANGES
from hpcdl.training.keras.learning_rate import rates_of, set_rates
from hpcdl.training.keras.metrics import MetricsOverRanks
from hpcdl.training.keras.normalization import synchronize_normalization
from hpcdl.training.keras.optimizer import LATE_SCALE, optimizers_of, prepare_model
from hpcdl.training.keras.session import Session, session
from hpcdl.training.session.safety import check_same_weights

if TYPE_CHECKING:
    from hpcdl.training.keras.state import State

_WRITERS: dict[str, tuple[str, ...]] = {
    "ModelCheckpoint": (),
    "BackupAndRestore": ("set_model", "on_train_begin"),
    "CSVLogger": (),
    "TensorBoard": (),
}
"""Keras's callbacks that write files, with what they do on ranks other than 0 all the same (to restore, that is)."""


_OF_RECORD = {
    **{
        prefix + name: f"{prefix}accuracy"
        for prefix in ("", "val_")
        for name in ("sparse_categorical_accuracy", "acc", "accuracy")
    },
    **{name: name for name in ("loss", "val_loss")},
}
"""Keras's names of what a record's history has."""


class AgreeOverRanks(keras.callbacks.Callback):
    """Starts alike, evaluates alike, ends epochs together: see docs/how-to/scripts.md.

    It stands last in the list, wherever it is put: stop_training that any callback sets on one rank then counts on all.
    """

    def __init__(self, here: Session, state: State | None = None) -> None:
        super().__init__()
        self._communicator, self._group, self._run = here.communicator, here.group, here.run
        self._state = state
        self._metrics: MetricsOverRanks | None = None
        self._steps = self._epoch = 0
        self._began_s = self._mark_s = 0.0

    def set_model(self, model: Any) -> None:
        """Before the step is traced: see prepare_model."""
        super().set_model(model)
        prepare_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start alike. UsageError where each rank would decide for itself whether to take a step, or update alone."""
        optimizer = self.model.optimizer
        if hasattr(getattr(optimizer, "inner_optimizer", None), "exchanges"):
            raise UsageError(LATE_SCALE)
        if self._group.size > 1 and not self._is_distributed():
            raise UsageError(
                f"hpcdl.callbacks() with {type(optimizer).__name__}, which is not distributed: each rank would train a "
                f"model of its own; write optimizer=hpcdl.DistributedOptimizer({type(optimizer).__name__}(...))"
            )
        self._group.agree("the start of model.fit")
        if self._state is not None:
            self._state.restore()
        broadcast_variables(self._communicator, self._variables())
        self._metrics = MetricsOverRanks(self.model, self._communicator, self._group)
        self._metrics.install(self._end_steps)
        self._began_s = time.monotonic()

    def _is_distributed(self) -> bool:
        """By its own optimizer, or by those that a model with a train_step of its own holds."""
        own_step = type(self.model).train_step is not keras.Model.train_step
        return own_step or any(hasattr(one, "exchanges") for one in optimizers_of(self.model))

    def _variables(self) -> list[Any]:
        """Weights and the variables of all optimizers, each once."""
        of_optimizers = [one.variables for one in optimizers_of(self.model)]
        found = {id(one): one for group in [self.model.weights, *of_optimizers] for one in group}
        return list(found.values())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Steps are counted from here on."""
        self._epoch, self._steps = epoch, 0
        self._communicator.observation.doing(f"epoch {epoch + 1}", 0)
        self._mark_s = time.monotonic()
        if self._metrics is not None:
            self._metrics.in_epoch = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the step; save and leave where that is asked for."""
        taken, self._steps = batch + 1 - self._steps, batch + 1
        now_s = time.monotonic()
        self._communicator.observation.doing(f"epoch {self._epoch + 1}", self._steps)
        if self._run is not None:
            self._run.meter.add(now_s - self._mark_s, max(taken, 1))
        self._mark_s = now_s
        if self._state is not None:
            self._state.commit()

    def _end_steps(self) -> None:
        """The steps of an epoch are over on this rank: take part in those of the others, then stop where any has.

        A rank that had fewer steps takes over the weights of the one that had the most.
        """
        last = self._group.join()
        told = self._communicator.allgather_json([self._steps, bool(self.model.stop_training)])
        if len({steps for steps, _ in told}) > 1:
            self._group.agree("the weights of the rank with the most steps")
            broadcast_variables(self._communicator, self._variables(), last)
            set_rates([self.model.optimizer], self._communicator.allgather_json(rates_of([self.model.optimizer]))[last])
            if self._communicator.rank == 0:
                counts = ", ".join(f"rank {rank} {steps}" for rank, (steps, _) in enumerate(told))
                sys.stderr.write(
                    f"hpcdl: unequal steps in epoch {self._epoch + 1} ({counts}): those with fewer have followed the "
                    "others; hpcdl.dataset() gives all as many\n"
                )
        if any(stop for _, stop in told):
            self.model.stop_training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Evaluate alike: batch normalisation's moving statistics become the mean over the ranks."""
        self._group.agree("the start of an evaluation")
        average_moving_statistics(self.model, self._communicator)
        if self._metrics is None:
            self._metrics = MetricsOverRanks(self.model, self._communicator, self._group)
            self._metrics.install(lambda: None)
        self._metrics.in_evaluation = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Moving statistics are averaged and all variables compared; a stop on one rank is one on all."""
        self._group.agree("the end of an epoch")
        average_moving_statistics(self.model, self._communicator)
        named = {getattr(one, "path", str(index)): one for index, one in enumerate(self._variables())}
        check_same_weights(named, self._communicator, f"after epoch {epoch + 1}", OWN_CHANGES)
        if any(self._communicator.allgather_json(bool(self.model.stop_training))):
            self.model.stop_training = True
        if self._run is not None and logs is not None:
            self._note(epoch, logs)
        if self._state is not None:
            self._state.epoch = epoch + 1
            self._state.commit(stepped=False)

    def _note(self, epoch: int, logs: dict[str, Any]) -> None:
        """Put the epoch into the run's record."""
        assert self._run is not None and self._metrics is not None
        self._run.meter.count(self._metrics.own_samples, self._steps)
        known: dict[str, Any] = {field: float(logs[name]) for name, field in _OF_RECORD.items() if name in logs}
        seconds, step = time.monotonic() - self._began_s, self._run.meter.num_steps
        self._run.history.append(HistoryPoint(epoch=epoch + 1, step=step, seconds=seconds, **known))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the model its own metrics back."""
        self._communicator.observation.doing("running the script")
        if self._metrics is not None:
            self._metrics.uninstall()
            self._metrics = None


class Kept(keras.callbacks.Callback):
    """Of a callback that writes files what is done on ranks other than 0 too."""

    def __init__(self, callback: Any, methods: Sequence[str]) -> None:
        super().__init__()
        self._callback, self._methods = callback, methods

    def set_model(self, model: Any) -> None:
        """Hand on the model."""
        super().set_model(model)
        if "set_model" in self._methods:
            self._callback.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restore, where that is what it does."""
        if "on_train_begin" in self._methods:
            self._callback.on_train_begin(logs)


def on_rank_0(callbacks: Iterable[Any]) -> list[Any]:
    """`callbacks` on rank 0, none on the others; but what BackupAndRestore restores is restored on all."""
    given = list(callbacks)
    return given if session().communicator.rank == 0 else [Kept(one, methods_kept(one) or ()) for one in given]


def methods_kept(callback: Any) -> tuple[str, ...] | None:
    """What a callback that writes files does on ranks other than 0; None for one that writes none."""
    kinds = [getattr(keras.callbacks, name) for name in _WRITERS]
    return next((_WRITERS[kind.__name__] for kind in kinds if isinstance(callback, kind)), None)


def callbacks(state: State | None = None) -> Any:
    """One Keras callback: all start with rank 0's weights, metrics are those of all samples, epochs end together.

    With `state` (hpcdl.State) it also saves now and then, at the time limit and at a signal.
    """
    here = session()
    if here.communicator.size > 1:
        _arrange_lists(here)
        synchronize_normalization()
    return AgreeOverRanks(here, state)


def _arrange_lists(here: Session) -> None:
    """From now on Keras's lists of callbacks are arranged for many ranks when they get their model."""
    plain = keras.callbacks.CallbackList.set_model
    if hasattr(plain, "arranges"):
        return

    def set_model(self: Any, model: Any) -> None:
        if model:
            self.callbacks[:] = _arranged(self.callbacks, here)
        plain(self, model)

    vars(set_model)["arranges"] = True
    keras.callbacks.CallbackList.set_model = set_model


def _arranged(given: Sequence[Any], here: Session) -> list[Any]:
    """hpcdl's own callback last; without it (a fit of one rank alone, say) the list stays as it is."""
    own = [one for one in given if isinstance(one, AgreeOverRanks)]
    if not own:
        return list(given)
    others = [one for one in given if not isinstance(one, AgreeOverRanks)]
    if here.communicator.rank > 0:
        others = [one if (kept := methods_kept(one)) is None else Kept(one, kept) for one in others]
    elif any(methods_kept(one) is not None for one in others):
        here.group.keep("said that files are rank 0's", _say_who_writes)
    return [*others, *own[:1]]


def _say_who_writes() -> bool:
    sys.stderr.write("hpcdl: callbacks that write files do so on rank 0 alone (hpcdl.on_rank_0)\n")
    return True
