"""The host's count of a step if something breaks after it."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcdl.core.errors import BrokenGroup
from hpcdl.step.host import HostStep, Position


def test_a_step_counts_whose_weights_have_moved_when_the_group_breaks_behind_it() -> None:
    """A step counts if its weights have changed before the group breaks, in the servers' answer at the end of the step.

    Otherwise survivors would repeat it, and its mean would be applied twice.
    """
    asked: list[int] = []

    def after_step(step: int) -> None:
        asked.append(step)
        raise BrokenGroup("rank 5 is dead", rank=5)

    host: Any = SimpleNamespace(
        position=Position(num_metrics=1), group=SimpleNamespace(rank=0), best_loss=math.inf, sound_step=-1,
        _first_loss=None, steps_done=lambda: 0, worker=SimpleNamespace(after_step=after_step),
    )  # fmt: skip
    with pytest.raises(BrokenGroup):
        HostStep._note(host, 0.5, np.array([3.0]), 4, (0.0, 0.1, 0.2, 0.3), time.monotonic())
    assert asked == [0] and host.position.step == 1
    assert host.position.totals.tolist() == [4.0, 2.0, 3.0]
