"""What the two loops have in common: workers that step together (synchronous.py) and those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcdl.rank.parts import Parts
from hpcdl.step.clock import Outcome
from hpcdl.step.host import Position
from hpcdl.strategies.base.salvage import Center

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Trainer:
    """Trains with `parts` on one worker, from where a checkpoint or a smaller group stands to the end.

    What a loop does not need for going on with fewer workers does nothing here.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def run(self) -> Outcome:
        """Train to the end, or to a stop that everybody agrees on (StoppedEarly, after a checkpoint)."""
        raise NotImplementedError

    def position_at(self, step: int, facts: Mapping[str, Any], own: Mapping[str, Array]) -> Position:
        """Where this worker stands, of a state kept after `step` with `facts` and this rank's `own` arrays."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """The parts have joined another group."""

    def progress(self, center: Center | None) -> dict[str, Any]:
        """What `position_at` takes beside the parts' facts, now that it is known what `center` has counted."""
        return {}

    def take_over(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Worker 0 is lost and this one takes its place; `events` are what it has written into the journal."""

    def owe_epoch_end(self, owes: bool) -> None:
        """Whether an epoch was over when the group broke, and nobody has evaluated."""
