"""Learning rates of a distributed fit: warm-up to a rate that was multiplied with size(), and schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hpcdl.training.keras.session import size


class LearningRate(keras.callbacks.Callback):
    """Before each step: the optimizer's own learning rate times `factor` of the epochs that have passed (2.25, say)."""

    def __init__(self, factor: Callable[[float], float]) -> None:
        super().__init__()
        self._factor = factor
        self._own = 0.0
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the rate that the optimizer has."""
        self._own = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count from this epoch's first step."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set this step's rate; where nobody knows the number of steps of an epoch, the epoch's."""
        steps = self.params.get("steps")
        self.model.optimizer.learning_rate = self._own * self._factor(self._epoch + (batch / steps if steps else 0.0))


def learning_rate_schedule(factor: Callable[[float], float]) -> Any:
    """A callback that multiplies the learning rate with `factor(epochs)`, alike on all ranks; epochs have fractions."""
    return LearningRate(factor)


def learning_rate_warmup(epochs: float) -> Any:
    """A callback that raises the learning rate from 1 / size() of the optimizer's to all of it over `epochs`.

    For a rate that was multiplied with size() (Goyal et al., Accurate, Large Minibatch SGD, section 2.2).
    """
    first = 1 / size()
    return LearningRate(lambda passed: first + (1 - first) * min(passed / epochs, 1.0))
