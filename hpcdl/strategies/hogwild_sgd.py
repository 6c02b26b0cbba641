"""Hogwild SGD: Async SGD without the lock, on a center in shared memory.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983), baseline; Niu, Recht, Re and Wright 2011 (arXiv 1106.5730).
"""

from __future__ import annotations

from hpcdl.strategies.base import Context
from hpcdl.strategies.center_replicas import CenterReplica, CenterStrategy, PullingReplica
from hpcdl.strategies.servers.center_rules import Descent
from hpcdl.strategies.servers.center_shared import SharedLink


class HogwildSgd(CenterStrategy):
    """The strategy `hogwild-sgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Writes its gradient step into the center, reads the center."""
        return PullingReplica(context, SharedLink(context, Descent()))
