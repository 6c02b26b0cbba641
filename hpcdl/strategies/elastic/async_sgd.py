"""Async SGD, the classic parameter server: each gradient moves the center as it comes.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983), baseline. First come, first served, one at a time (the lock):
W~ <- W~ - eta dW_i; the worker goes on from the W~ that comes back.
"""

from __future__ import annotations

from hpcdl.strategies.base import Context, Server
from hpcdl.strategies.elastic.center.rules import Descent
from hpcdl.strategies.elastic.center.server import CenterServer
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, PullingReplica
from hpcdl.strategies.elastic.links.base import ServerLink


class AsyncSgd(CenterStrategy):
    """The strategy `async-sgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Sends gradients, pulls the center."""
        return PullingReplica(context, ServerLink(context))

    def server(self, context: Context) -> Server:
        """A gradient step on the center for each request."""
        return CenterServer(context, Descent())
