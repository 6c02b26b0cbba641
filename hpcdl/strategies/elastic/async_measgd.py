"""Async MEASGD: Async EASGD whose workers have momentum.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983). Equations (5) and (6) on the worker, equation (2) for the
arriving worker alone on the center. The exchange goes on while the worker computes its gradient.
"""

from __future__ import annotations

from hpcdl.strategies.base import Context, Server
from hpcdl.strategies.elastic.center.rules import Attraction
from hpcdl.strategies.elastic.center.server import CenterServer
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, ElasticReplica
from hpcdl.strategies.elastic.links.base import ServerLink


class AsyncMeasgd(CenterStrategy):
    """The strategy `async-measgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Equations (5) and (6), the exchange beside forward and backward."""
        return ElasticReplica(context, ServerLink(context), momentum=True, overlapped=True)

    def server(self, context: Context) -> Server:
        """Equation (2) for who comes."""
        return CenterServer(context, Attraction())
