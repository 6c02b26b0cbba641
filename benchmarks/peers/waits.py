"""A step whose computing is a wait, on a peer's rank: the pieces and moments of hpcdl/models/emulated.py.

benchmarks/peers_hosts.py writes them for peers, which import this in environments without hpcdl.
"""

from __future__ import annotations

import json
import time
from pathlib import Path


class Waits:
    """A plan of waits: `pieces` are the shapes of gradients that are ready together, in back-propagation's order."""

    def __init__(self, plan: Path) -> None:
        told = json.loads(plan.read_text())
        self.pieces: list[list[list[int]]] = told["pieces"]
        self._seconds, self._forward = float(told["seconds"]), float(told["forward"])
        self._began = 0.0

    def forward(self) -> None:
        """Begin a step, and wait as long as its forward pass."""
        self._began = time.monotonic()
        self._until(self._forward)

    def backward(self, piece: int) -> None:
        """Wait until the gradients of that piece, from 0 on, are ready."""
        self._until(self._forward + (1 - self._forward) * (piece + 1) / len(self.pieces))

    def _until(self, share: float) -> None:
        # Until a moment, not for a time: what a busy machine takes from one piece does not make the step longer.
        time.sleep(max(0.0, self._began + share * self._seconds - time.monotonic()))
