"""What a worker's loop leaves for the record."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdl.comm.observed import Traffic
from hpcdl.core.records import HistoryPoint
from hpcdl.training.loop.clock import StepClock


@dataclass(kw_only=True)
class Outcome:
    """Times, history and warnings of one worker."""

    clock: StepClock
    steps_done: int = 0
    seconds: float = 0.0
    center_steps: int | None = None
    """Steps of a run whose workers do not step together: updates of the center over the number of workers."""
    seconds_to_target: float | None = None
    history: list[HistoryPoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    num_lost: int = 0
    """Ranks that have died or were left behind on the way."""
    traffic: Traffic = field(default_factory=Traffic)
    """Of the exchange, summed over the steps: what lies between them (evaluation, checkpoints) is left out."""
