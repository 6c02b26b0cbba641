"""Waiting for MPI's messages without a busy loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_EAGER_LOOKS = 20
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""A wait for the first of several messages looks this often without a pause, then with pauses that grow."""


def first_done(mpi: Any, handles: Sequence[Any], look: Callable[[], None]) -> int:
    """Index of the first of MPI's requests that is done; sleeps between looks, because every MPI's own wait spins.

    `look` is called once the pauses are at their longest.
    """
    looks, pause_s = 0, 0.0
    while True:
        index, done = mpi.Request.Testany(handles)
        if done:
            return max(int(index), 0)  # undefined where all of them were through before: then any will do
        looks += 1
        if looks > _EAGER_LOOKS:
            pause_s = min(pause_s + _PAUSE_STEP_S, _LONGEST_PAUSE_S)
            time.sleep(pause_s)
            if pause_s == _LONGEST_PAUSE_S:
                look()
