"""The interval between two checkpoints: as requested, or the one with the lowest total cost.

A checkpoint stalls training; a failure loses, on average, half of the work since the last checkpoint. With a cost C of
one checkpoint and a mean time M between failures the sum is smallest at sqrt(2 C M): J. W. Young, A first order
approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, FGCS 22 (2006), whose further terms are
negligible while C is far smaller than M.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from hpcdl.config.settings import AUTO
from hpcdl.core.units import format_seconds

FIRST_S = 5.0
"""Interval until the first checkpoint, before which the cost is unknown."""
LEAST_S = 10.0
"""The shortest interval, whatever the formula gives: a parallel file system is shared."""
_REMEMBERED = 9
"""Number of recent checkpoints that determine the cost; the first of a run costs more than the others."""
_REPORT_AGAIN = 1.5
"""Factor by which the interval must change before it is reported again."""


PATIENCE = 0.1
"""Fraction of an interval that a checkpoint may wait for gaps, in which its work delays no rank."""


class CheckpointInterval:
    """Seconds between checkpoints: `asked`, or with AUTO from their cost and how often `num_nodes` nodes fail.

    A node fails every `node_mtbf_s` on average, and a failing node ends the job. A checkpoint may wait for gaps for at
    most `most_patience_s`, and starts that much earlier: no more than an interval is ever lost.
    """

    def __init__(self, asked: float | str, *, node_mtbf_s: float, num_nodes: int, most_patience_s: float = 0.0) -> None:
        self._auto = asked == AUTO
        self._most_patience_s = most_patience_s
        self._node_mtbf_s, self._num_nodes = node_mtbf_s, num_nodes
        self.seconds = FIRST_S if self._auto else float(asked)
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._reported_s = 0.0
        self.choice: dict[str, float] = {}
        """The chosen interval and its reasons, for the record; empty if nothing was chosen."""

    @property
    def patience_s(self) -> float:
        """The time in seconds that a checkpoint may wait for gaps."""
        return min(PATIENCE * self.seconds, self._most_patience_s)

    @property
    def due_s(self) -> float:
        """Seconds from the start of one checkpoint to the start of the next."""
        return self.seconds - self.patience_s

    def saved(self, stall_s: float) -> str:
        """Record that a checkpoint stalled training for `stall_s`; return a message for the user, usually empty."""
        if not self._auto:
            return ""
        self._stalls.append(stall_s)
        cost_s = statistics.median(self._stalls)
        best_s = math.sqrt(2 * cost_s * self._node_mtbf_s / self._num_nodes)
        self.seconds = max(LEAST_S, best_s)
        self.choice = {
            "seconds": self.seconds,
            "stall_seconds": cost_s,
            "node_mtbf_seconds": self._node_mtbf_s,
            "nodes": self._num_nodes,
        }
        # Before the first report the ratio is 0, so that the first choice is always reported.
        if 1 / _REPORT_AGAIN < self.seconds / (self._reported_s or math.inf) < _REPORT_AGAIN:
            return ""
        self._reported_s = self.seconds
        nodes = f"one of {self._num_nodes} nodes" if self._num_nodes > 1 else "the node"
        often = format_seconds(self._node_mtbf_s / self._num_nodes)
        least = f", and never less than {format_seconds(LEAST_S)}" if best_s < LEAST_S else ""
        return (
            f"a checkpoint every {format_seconds(self.seconds)}: one holds training up for {format_seconds(cost_s)}, "
            f"and {nodes} fails every {often} in the mean (Young and Daly: sqrt(2 x cost x MTBF){least})"
        )
