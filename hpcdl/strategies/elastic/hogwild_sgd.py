"""Hogwild SGD: Async SGD without the lock, on a center in shared or remote memory.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983), baseline; Niu, Recht, Re and Wright 2011 (arXiv 1106.5730).
"""

from __future__ import annotations

from hpcdl.strategies.base import Context
from hpcdl.strategies.elastic.center.rules import Descent
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, PullingReplica
from hpcdl.strategies.elastic.links.choice import lock_free_link


class HogwildSgd(CenterStrategy):
    """The strategy `hogwild-sgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Writes its gradient step into the center, reads the center."""
        return PullingReplica(context, lock_free_link(context, Descent()))
