"""Deferred callbacks: those marked by `hpcdl.background` run in gaps of the steps, or beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from hpcdl.checkpoint.background import MOST_PATIENCE_S, BackgroundJob, BackgroundWork, Turn


def background(callback: Any) -> Any:
    """Mark a Keras callback: its work at the end of a batch, an epoch or an evaluation may be deferred.

    Under `hpcdl run --background gaps|thread` a thread does that work, in order, before the callback's next call and
    before the fit ends; otherwise it is done at once. It gets a copy of `logs`. Training continues in parallel, so copy
    any weights beforehand. A generator method runs piece by piece, so that each piece fits into a gap.
    """
    callback.background = True
    return callback


def with_deferred(callbacks: Sequence[Any], work: BackgroundWork | None) -> list[Any]:
    """Return `callbacks` with the marked ones wrapped to run in `work`, if there is any."""
    if work is None:
        return list(callbacks)
    return [Deferred(callback, work) if getattr(callback, "background", False) else callback for callback in callbacks]


class Deferred(keras.callbacks.Callback):
    """Wraps a marked callback: passes setup calls on, and defers calls at the end of batches, epochs and tests."""

    def __init__(self, callback: Any, work: BackgroundWork) -> None:
        super().__init__()
        self._callback, self._work = callback, work
        self._job: BackgroundJob | None = None

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Pass it on at once."""
        self._callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Pass it on at once."""
        super().set_model(model)
        self._callback.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Pass it on at once."""
        self._callback.on_train_begin(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Pass it on at once, after all deferred work."""
        self._finish()
        self._callback.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Pass it on at once, after all deferred work."""
        self._finish()
        self._callback.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Defer it."""
        self._later(self._callback.on_epoch_end, epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Defer it."""
        self._later(self._callback.on_train_batch_end, batch, logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Defer it."""
        self._later(self._callback.on_test_end, None, logs)

    def _later(self, method: Callable[..., Any], number: int | None, logs: dict[str, Any] | None) -> None:
        self._finish()
        if getattr(method, "__func__", None) is getattr(keras.callbacks.Callback, method.__name__):
            return  # the callback does not define this method
        arguments = ([] if number is None else [number]) + [dict(logs or {})]

        def work(turn: Turn) -> None:
            turn()
            made = method(*arguments)
            for _ in made if isinstance(made, Iterator) else ():
                turn()

        self._job = self._work.start("callback", work, MOST_PATIENCE_S)

    def _finish(self) -> None:
        """Return when the deferred work is done, and raise its error if it failed."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()
