"""Async MSGD: the parameter server with momentum, whose velocity belongs to the center.

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983), baseline. First come, first served, one at a time (the lock):
V <- mu V - eta dW_i; W~ <- W~ + V.
"""

from __future__ import annotations

from hpcdl.strategies.base import Context, Server
from hpcdl.strategies.elastic.center.rules import MomentumDescent
from hpcdl.strategies.elastic.center.server import CenterServer
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, PullingReplica
from hpcdl.strategies.elastic.links.base import ServerLink


class AsyncMsgd(CenterStrategy):
    """The strategy `async-msgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Sends gradients, pulls the center."""
        return PullingReplica(context, ServerLink(context))

    def server(self, context: Context) -> Server:
        """A momentum step on the center for each request."""
        return CenterServer(context, MomentumDescent(context.optimizer.momentum))
