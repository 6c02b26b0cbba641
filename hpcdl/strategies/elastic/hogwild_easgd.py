"""Hogwild EASGD: Async EASGD without the lock, on a center in shared or remote memory.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983). Equation (1) on the worker, equation (2) for the worker alone,
written into the center by the worker itself, beside the forward and backward pass.
"""

from __future__ import annotations

from hpcdl.strategies.base import Context
from hpcdl.strategies.elastic.center.rules import Attraction
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, ElasticReplica
from hpcdl.strategies.elastic.links.choice import lock_free_link


class HogwildEasgd(CenterStrategy):
    """The strategy `hogwild-easgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Equation (1), the exchange beside forward and backward."""
        return ElasticReplica(context, lock_free_link(context, Attraction()), overlapped=True)
