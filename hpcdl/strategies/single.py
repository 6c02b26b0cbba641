"""One process: gradients go straight to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hpcdl.strategies.base.graph import FiniteGuard, timestamp
from hpcdl.strategies.base.strategy import Context, Server, Worker


class Single:
    """The strategy `single`."""

    def worker(self, context: Context) -> Worker:
        """Return the worker, the only rank."""
        return SingleWorker()

    def server(self, context: Context) -> Server:
        """Fail: there are no servers."""
        raise AssertionError("single has no servers")


class SingleWorker(Worker):
    """Applies its own gradients."""

    def __init__(self) -> None:
        self._guard = FiniteGuard(0)

    def before_step(self, step: int) -> None:
        """Store the step for error messages."""
        self._guard.step = step

    def leaves_early(self, gradients: Sequence[Any]) -> bool:
        """Return False: gradients are not sent."""
        return False

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Apply the local gradients."""
        names = [variable.path for variable in variables]
        fine = [self._guard.before_exchange(gradients, names)] if self.checks_finite else gradients
        with tf.control_dependencies(fine):
            exchanged = timestamp()
        # Otherwise the update could begin before the time is read.
        with tf.control_dependencies([exchanged]):
            optimizer.apply(gradients, variables)
        return exchanged
