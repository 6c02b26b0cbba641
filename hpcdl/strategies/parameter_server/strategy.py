"""The strategy `ps`: synchronous SGD over parameter servers, with MPI. No TensorFlow here: servers go without it.

Workers send their gradients to the servers, which average them and send the means back; each worker then applies the
same mean with its own optimizer. That equals servers that hold the variables and apply the optimizer themselves, and
moves the same bytes: a gradient there and a mean back, in place of a gradient there and new weights back.
"""

from __future__ import annotations

from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context, Server, Worker
from hpcdl.strategies.parameter_server.server import AveragingServer, QuorumServer


class ParameterServers:
    """The strategy `ps`."""

    def worker(self, context: Context) -> Worker:
        """A rank that trains."""
        from hpcdl.strategies.parameter_server.worker import ParameterServerWorker

        return ParameterServerWorker(context, *_groups(context))

    def server(self, context: Context) -> Server:
        """A rank that averages."""
        group, _ = _groups(context)
        answers = group.rank == context.num_workers
        if context.exchange.backup_workers:
            num_needed = context.num_workers - context.exchange.backup_workers
            return QuorumServer(group, context.num_workers, num_needed, answers=answers)
        return AveragingServer(group, context.num_workers, answers=answers)


def _groups(context: Context) -> tuple[Communicator, Communicator]:
    """A message space of all ranks for gradients, and the group of those with this rank's role; collective over all."""
    communicator = context.communicator.duplicate()
    return communicator, communicator.split(0 if context.is_worker else 1)
