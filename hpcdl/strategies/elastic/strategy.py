"""Every method with a center as a strategy: reads its row of methods.py. No TensorFlow here: servers do not need it."""

from __future__ import annotations

from hpcdl.comm.mpi.calls import no_passive_progress
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.elastic.center_replicas import CenterReplica, ElasticReplica, PullingReplica
from hpcdl.strategies.elastic.link import HostedLink, Link, ServerLink
from hpcdl.strategies.elastic.lock_free import RemoteLink, SharedLink
from hpcdl.strategies.elastic.methods import METHODS
from hpcdl.strategies.elastic.server import RULES, CenterServer, Rule


class CenterStrategy:
    """Workers that exchange with a center, according to the strategy's row in the table."""

    def replica(self, context: Context) -> CenterReplica:
        """Return one worker's part, without TensorFlow."""
        method = METHODS[context.info.name]
        link = _lock_free_link(context) if method.lock_free else ServerLink(context)
        if method.elastic:
            return ElasticReplica(context, link, momentum=method.momentum, overlapped=method.overlapped)
        return PullingReplica(context, link)

    def worker(self, context: Context) -> Worker:
        """Return the worker's side."""
        from hpcdl.strategies.elastic.flat import FlatWorker

        return FlatWorker(self.replica(context))

    def server(self, context: Context) -> Server:
        """Return the server's side; only called if the method has servers."""
        return CenterServer(context, _rule(context), in_rank_order=METHODS[context.info.name].in_rank_order)


def _rule(context: Context) -> Rule:
    """Return the rule by which a request changes the center."""
    return RULES[METHODS[context.info.name].rule](context.optimizer.momentum)


def _lock_free_link(context: Context) -> Link:
    """Return a link by shared memory if all workers are on one node; else one-sided, if MPI can. Collective."""
    group = context.communicator.duplicate()
    if len(set(group.allgather_json(group.host))) == 1:
        return SharedLink(group, _rule(context))
    why = no_passive_progress(group)
    return HostedLink(context, group, _rule(context), why) if why else RemoteLink(group, _rule(context))
