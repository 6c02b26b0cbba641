"""The strategy `ps`: synchronous SGD over parameter servers, with MPI. No TensorFlow here: servers do not need it.

Workers send their gradients to the servers, which average them and send the means back; each worker then applies the
same mean with its own optimizer. The result equals that of servers that hold the variables and apply the optimizer
themselves. The traffic is the same: a gradient up and a mean down, instead of a gradient up and new weights down.
"""

from __future__ import annotations

from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.parameter_server.server import AveragingServer, QuorumServer


class ParameterServers:
    """The strategy `ps`."""

    def worker(self, context: Context) -> Worker:
        """Return the worker, a rank that trains."""
        from hpcdl.strategies.parameter_server.worker import ParameterServerWorker

        return ParameterServerWorker(context, *_groups(context))

    def server(self, context: Context) -> Server:
        """Return the server, a rank that averages."""
        group, _ = _groups(context)
        answers = group.rank == context.num_workers
        if context.exchange.backup_workers:
            num_needed = context.num_workers - context.exchange.backup_workers
            return QuorumServer(group, context.num_workers, num_needed, answers=answers)
        return AveragingServer(group, context.num_workers, answers=answers)


def _groups(context: Context) -> tuple[Communicator, Communicator]:
    """Return a communicator of all ranks for gradients, and the group of this rank's role; collective over all."""
    communicator = context.communicator.duplicate()
    return communicator, communicator.split(0 if context.is_worker else 1)
