"""Async EASGD: elastic exchange, first come first served.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983). Equation (1) on the worker, equation (2) for the arriving worker
alone on the center, one at a time (the lock). The exchange goes on while the worker computes its gradient.
"""

from __future__ import annotations

from hpcdl.strategies.base import Context, Server
from hpcdl.strategies.elastic.center.rules import Attraction
from hpcdl.strategies.elastic.center.server import CenterServer
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, ElasticReplica
from hpcdl.strategies.elastic.links.base import ServerLink


class AsyncEasgd(CenterStrategy):
    """The strategy `async-easgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Equation (1), the exchange beside forward and backward."""
        return ElasticReplica(context, ServerLink(context), overlapped=True)

    def server(self, context: Context) -> Server:
        """Equation (2) for who comes."""
        return CenterServer(context, Attraction())
