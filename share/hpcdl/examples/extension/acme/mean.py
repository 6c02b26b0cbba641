"""The exchange: gradients in, new weights out."""

import tensorflow as tf

from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.graph import FiniteGuard, call_python, timestamp
from hpcdl.strategies.base.strategy import Worker


class Mean:
    """The strategy; the table makes one."""

    def worker(self, context):
        """The exchange of one rank."""
        return MeanWorker(context)


class MeanWorker(Worker):
    """Averages each gradient by one all-reduce of the MPI library."""

    def __init__(self, context):
        self.communicator = context.communicator
        self.loss_share = 1 / context.num_workers
        self.guard = FiniteGuard(self.communicator.rank)

    def start(self, variables):
        """Give every rank the weights of rank 0."""
        broadcast_variables(self.communicator, variables)

    def before_step(self, step):
        """Note the step, which an error names."""
        self.guard.step = step

    def apply(self, gradients, variables, optimizer):
        """Move the weights; gradients come divided by the number of workers. Returns when the exchange was over."""
        names = [variable.path for variable in variables]
        with tf.control_dependencies([self.guard.before_exchange(gradients, names)]):
            means = call_python(self.sum, gradients, [gradient.dtype for gradient in gradients])
        with tf.control_dependencies(means):
            exchanged = timestamp()
        means = [tf.ensure_shape(mean, variable.shape) for mean, variable in zip(means, variables, strict=True)]
        optimizer.apply(means, variables)
        return exchanged

    def sum(self, *gradients):
        """The sums over all ranks."""
        sums = [gradient.copy() for gradient in gradients]
        for array in sums:
            self.communicator.allreduce(array)
        return sums
