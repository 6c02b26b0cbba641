"""Where a run stands: steps done, and the sums over the epoch so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Position:
    """Steps done, training seconds so far, and this rank's sums since the epoch began.

    `totals` (float64) holds samples, summed loss and the summed metrics.
    """

    def __init__(self, num_metrics: int) -> None:
        self.step = 0
        self.seconds = 0.0
        self.totals = numpy.zeros(2 + num_metrics)

    def add(self, loss: float, sums: Array, num_samples: int) -> None:
        """Count one step: `loss` is the mean over its `num_samples` samples."""
        self.step += 1
        self.totals += (num_samples, loss * num_samples, *sums)

    def arrays(self) -> dict[str, Array]:
        """The position as arrays, for a checkpoint."""
        return {"position": numpy.array([self.step, self.seconds]), "totals": self.totals.copy()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Take the position that `arrays` wrote down."""
        step, self.seconds = arrays["position"].tolist()
        self.step = int(step)
        self.totals = arrays["totals"].copy()
