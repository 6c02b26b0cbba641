"""The Keras callback of a distributed `fit`."""

from __future__ import annotations

from typing import Any

import keras

from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.training.checkpoint.state import average_moving_statistics
from hpcdl.training.keras import alike
from hpcdl.training.keras.optimizer import LATE_SCALE, prepare_model
from hpcdl.training.keras.session import communicator


class AgreeOverRanks(keras.callbacks.Callback):
    """Rank 0's weights and optimizer to all at the start; moving statistics and logs averaged at each epoch's end.

    Put it first: callbacks behind it (early stopping, checkpoints) then see the same numbers on every rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator

    def set_model(self, model: Any) -> None:
        """Before the step is traced: see prepare_model."""
        super().set_model(model)
        prepare_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start alike. UsageError where each rank would decide for itself whether to take a step."""
        optimizer = self.model.optimizer
        if hasattr(getattr(optimizer, "inner_optimizer", None), "exchanges"):
            raise UsageError(LATE_SCALE)
        alike.start(self._communicator, [*self.model.weights, *self.model.optimizer.variables])

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Evaluate alike: batch normalisation's moving statistics become the mean over the ranks."""
        average_moving_statistics(self.model, self._communicator)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place."""
        average_moving_statistics(self.model, self._communicator)
        if logs is None or self._communicator.size == 1:
            return
        gathered = self._communicator.allgather_json({name: float(value) for name, value in logs.items()})
        for name in logs:
            logs[name] = sum(other[name] for other in gathered) / len(gathered)


def callbacks() -> Any:
    """One Keras callback: everybody starts with rank 0's weights, and logs are means over the ranks."""
    return AgreeOverRanks(communicator())
