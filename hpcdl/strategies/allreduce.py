"""Synchronous SGD: gradients are averaged by an all-reduce, bucket by bucket, while back-propagation goes on.

Each bucket is one `tf.numpy_function` in a fixed order given by control dependencies, so that every rank runs the
same collectives in the same order without negotiation. The function gets a private copy of its input, reduces it in
place and returns it. The loss is divided by the number of workers before back-propagation, so that the sum of the
gradients is their mean: that saves a pass over all of them, and keeps half precision from overflowing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.collectives.buckets import plan_buckets
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.collectives.workspace import Workspace
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base import Context, Server, Worker
from hpcdl.strategies.compression import WIRES, Wire
from hpcdl.strategies.stamps import timestamp

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class AllReduce:
    """Every all-reduce of collectives/ as a strategy of the same name."""

    def worker(self, context: Context) -> Worker:
        """All ranks work."""
        return AllReduceWorker(context)

    def server(self, context: Context) -> Server:
        """Nobody serves."""
        raise AssertionError("an all-reduce has no servers")


class AllReduceWorker(Worker):
    """Averages gradients over the ranks, then applies them with the local optimizer."""

    def __init__(self, context: Context) -> None:
        # A message space of its own: the exchange runs on TensorFlow's threads, beside the main thread's messages.
        self._communicator = context.communicator.duplicate()
        self._bucket_bytes = context.exchange.bucket_size
        self._wire = WIRES[context.exchange.compress]
        target = COLLECTIVES.entry(context.info.name).target.partition(":")[0]
        self._collective = importlib.import_module(target)
        self._workspace = Workspace(measure=not context.deterministic)
        self._bytes_per_step = 0
        self.loss_share = 1 / self._communicator.size

    def start(self, variables: Sequence[Any]) -> None:
        """Rank 0's weights become everybody's."""
        broadcast_variables(self._communicator, variables)

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Average the gradients in buckets, then apply them."""
        averaged = self.sum_up(gradients)
        with tf.control_dependencies(averaged):
            exchanged = timestamp()
        with tf.control_dependencies([exchanged]):
            optimizer.apply(averaged, variables)
        return exchanged

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The mean of `gradients` over the ranks, for a step whose loss nobody has shared out."""
        return self.sum_up([gradient * self.loss_share for gradient in gradients])

    def sum_up(self, gradients: Sequence[Any]) -> list[Any]:
        """The sum of `gradients` over the ranks, in the same order; traced into the graph."""
        if self._communicator.size == 1:
            return list(gradients)
        self._bytes_per_step = 0
        averaged: list[Any] = [None] * len(gradients)
        previous: list[Any] = []
        sizes = [gradient.dtype.size * gradient.shape.num_elements() for gradient in gradients]
        for number, bucket in enumerate(plan_buckets(sizes, self._bucket_bytes)):
            with tf.control_dependencies(previous):
                mine = [gradients[index] for index in bucket]
                reduced = exchange_bucket(mine, self._reducer(number), self._wire)
            previous = [reduced[0]]
            for index, tensor in zip(bucket, reduced, strict=True):
                averaged[index] = tensor
            self._bytes_per_step += self._bytes_of(mine)
        return averaged

    def after_step(self, step: int) -> None:
        """Count the step's bytes by the algorithm's own rule, which a test holds against a tracing communicator."""
        self.bytes_sent += self._bytes_per_step

    def finish(self, *, early: bool = False) -> None:
        """Give scratch buffers and sub-communicators back."""
        self._workspace.close()

    def _reducer(self, number: int) -> Callable[[Array], Array]:
        def reduce(buffer: Array) -> Array:
            self.whereabouts.beat("exchanging", bucket=number)
            self._collective.allreduce(self._communicator, buffer, self._workspace, self._wire.add)
            self.whereabouts.beat("computing")
            return buffer

        return reduce

    def _bytes_of(self, tensors: Sequence[Any]) -> int:
        item_bytes = self._wire.item_bytes or tensors[0].dtype.size
        num_bytes = sum(tensor.shape.num_elements() for tensor in tensors) * item_bytes
        return int(self._collective.cost(self._communicator.size, num_bytes, item_bytes).bytes)


def exchange_bucket(tensors: Sequence[Any], reduce: Callable[[Array], Array], wire: Wire = WIRES["none"]) -> list[Any]:
    """Send `tensors` through `reduce` as one flat buffer; a bucket of one tensor is not copied into another."""
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0) if len(tensors) > 1 else tensors[0]
    sent = wire.encode(tf.reshape(flat, [-1]))
    received = wire.decode(tf.numpy_function(reduce, [sent], sent.dtype), tensors[0].dtype)
    lengths = [tensor.shape.num_elements() for tensor in tensors]
    received.set_shape([sum(lengths)])
    pieces = tf.split(received, lengths) if len(tensors) > 1 else [received]
    return [tf.reshape(piece, tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def broadcast_variables(communicator: Communicator, variables: Sequence[Any], root: int = 0) -> None:
    """Give every rank the root's values of `variables`."""
    for variable in variables:
        value = numpy.asarray(variable.numpy()).copy()
        communicator.broadcast(value, root)
        if communicator.rank != root:
            variable.assign(value)
