"""`--period auto`: the shortest period whose exchanges cost a tenth of the time, found in the run's own first steps.

The first steps are each worker's own. When some have been timed, all workers time an exchange, and the slowest one's
numbers count. A deterministic run measures nothing: it would not be the same each time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.units import counted, format_seconds
from hpcdl.strategies.base.strategy import Context

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.strategies.periodic.shared import SharedWeights

LONGEST_SHARE = 10
"""A period beyond one in so many of an epoch is warned of, and is not chosen."""
SHARE = 0.1
"""What exchanges may take of the time."""
WARMUP, TIMED = 3, 9
"""Steps that do not count, the first of which is traced; and those that do."""
_CHOSEN = "periodic/chosen"


def period_for(step_s: float, exchange_s: float, epoch: int, multiple: int = 1) -> int:
    """Steps of `step_s` seconds to one exchange of `exchange_s`; no more than a tenth of an `epoch` (steps, 0: any).

    A multiple of `multiple`, which alone may be more than that.
    """
    steps = math.ceil(exchange_s * (1 - SHARE) / SHARE / step_s)
    if epoch:
        steps = min(steps, epoch // LONGEST_SHARE)
    return max(1, math.ceil(steps / multiple)) * multiple


def is_long(period: int, epoch: int) -> bool:
    """Whether a period is so long beside an `epoch` (steps, 0: unknown) that it is warned of."""
    return epoch > 0 and period * LONGEST_SHARE > epoch


class PeriodChoosing:
    """How far the choice is; `period` is 0 until it is made."""

    def __init__(self, context: Context) -> None:
        self.period = 0
        self._default = context.info.features.default_period
        self._epoch = context.steps_per_epoch
        self._within = context.elastic.period_within or 1
        self._deterministic = context.deterministic
        self._seconds: list[float] = []
        self._began_s, self._counts = 0.0, False
        self._by: tuple[float, float] | None = None

    def began(self, *, all_meet: bool) -> None:
        """A step begins; it counts unless it ends with an exchange of all workers."""
        self._began_s, self._counts = time.perf_counter(), not all_meet

    def timed_enough(self) -> bool:
        """A step is over; whether the choice can be made now. The same on every worker."""
        if self.period:
            return False
        if self._counts:
            self._seconds.append(time.perf_counter() - self._began_s)
        return self._deterministic or len(self._seconds) == WARMUP + TIMED

    def choose(self, shared: SharedWeights) -> str:
        """Choose, and say what and why. Collective."""
        if self._deterministic:
            self.period = math.ceil(min(self._default, self._longest()) / self._within) * self._within
            return f"--period auto: {counted(self.period, 'step')} (not measured, because of --deterministic)"
        own = [statistics.median(self._seconds[WARMUP:]), shared.exchange_seconds()]
        step_s, exchange_s = numpy.max(shared.group.allgather_json(own), axis=0).tolist()
        self._by = step_s, exchange_s
        self.period = period_for(step_s, exchange_s, self._epoch, self._within)
        cost = exchange_s / (exchange_s + self.period * step_s)
        text = (
            f"--period auto: {counted(self.period, 'step')}; a step takes {format_seconds(step_s)}, an exchange "
            f"{format_seconds(exchange_s)}, so exchanges are {cost:.1%} of the time"
        )
        if cost > SHARE:
            text += f"; a longer period would be more than a tenth of an epoch ({self._epoch} steps)"
        return text

    def state(self) -> dict[str, Array]:
        """What a checkpoint keeps: the choice, once it is made."""
        if not self.period:
            return {}
        return {_CHOSEN: numpy.array([self.period, *(self._by or ())], numpy.float64)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Keep a choice that was made."""
        if _CHOSEN in arrays:
            period, *by = arrays[_CHOSEN].tolist()
            self.period, self._by = int(period), (by[0], by[1]) if by else None

    def details(self) -> dict[str, Any]:
        """The choice as the record keeps it; nothing where the run was too short for one."""
        if not self.period:
            return {}
        seconds = dict(zip(("step_seconds", "exchange_seconds"), self._by or (), strict=False))
        return {"period": {"steps": self.period, **seconds}}

    def _longest(self) -> int:
        return max(1, self._epoch // LONGEST_SHARE) if self._epoch else self._default
