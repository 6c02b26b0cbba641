"""Original EASGD: workers exchange with the center one after another, in rank order (round robin).

Source: You, Buluc and Demmel 2017 (arXiv 1708.02983), its baseline; Zhang, Choromanska and LeCun 2015 (arXiv
1412.6651). Equation (1) on the worker, equation (2) for one worker at a time on the center. The exchange blocks, after
the backward pass: this is what the other methods are measured against.
"""

from __future__ import annotations

from hpcdl.strategies.base import Context, Server
from hpcdl.strategies.elastic.center.rules import Attraction
from hpcdl.strategies.elastic.center.server import CenterServer
from hpcdl.strategies.elastic.center_replicas import CenterReplica, CenterStrategy, ElasticReplica
from hpcdl.strategies.elastic.links.base import ServerLink


class Easgd(CenterStrategy):
    """The strategy `easgd`."""

    def replica(self, context: Context) -> CenterReplica:
        """Equation (1), nothing overlapped."""
        return ElasticReplica(context, ServerLink(context))

    def server(self, context: Context) -> Server:
        """Equation (2), in rank order."""
        return CenterServer(context, Attraction(), in_rank_order=True)
