"""The worker's side of `ps`: sends gradients bucket by bucket during back-propagation, receives means.

`ServerClient` communicates with the servers by numpy and a communicator; the worker puts it into a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.collectives.slices import unseen
from hpcdl.comm.observed import recorder_of
from hpcdl.strategies.allreduce.worker import broadcast_variables, exchange_bucket, packed
from hpcdl.strategies.base.graph import FiniteGuard, bucket_recorded, timestamp
from hpcdl.strategies.base.strategy import Context, Worker
from hpcdl.strategies.parameter_server.placement import (
    ANSWER_TAG,
    DATA_TAG,
    FINISH,
    FOLLOW,
    HEADER_TAG,
    NUM_FLAGS,
    STEP,
    STOP,
    Bucket,
    Piece,
    header,
    held_bytes,
    imbalance,
    messages,
    no_answer,
    plan,
    send_layout,
)

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Finished, Request


MESSAGE_BYTES = 1 << 20


class ServerClient:
    """One worker's side; the servers are the `num_servers` highest ranks of `communicator`."""

    def __init__(
        self, communicator: Communicator, num_servers: int, placement: str, bucket_bytes: int, message_bytes: int
    ) -> None:
        self._communicator = communicator
        self._servers = range(communicator.size - num_servers, communicator.size)
        self._placement, self._bucket_bytes, self._message_bytes = placement, bucket_bytes, message_bytes
        self._messages: list[tuple[Piece, ...]] = []
        self._answer = no_answer()
        self._flags = numpy.zeros(NUM_FLAGS)
        self._num_followed = 0
        self.buckets: tuple[Bucket, ...] = ()
        self.follows = False

    def lay_out(self, lengths: Sequence[int]) -> None:
        """Plan buckets for gradients of these lengths; the first worker sends each server its message lengths."""
        buckets = plan(lengths, len(self._servers), self._placement, self._bucket_bytes)
        if buckets == self.buckets:  # a step traced again, for another batch size: servers receive a layout only once
            return
        self.buckets = buckets
        first = self._communicator.rank % len(self._servers)
        self._messages = [messages(bucket, self._message_bytes, first) for bucket in buckets]
        if self._communicator.rank != 0:
            return
        for server, rank in enumerate(self._servers):
            sizes = [part.stop - part.start for parts in self._messages for part in parts if part.server == server]
            send_layout(self._communicator, rank, sizes)

    def announce(self, step: int) -> None:
        """Announce a step; if the others have completed it already, only follow."""
        self.follows = bool(self._answer[-1] >= step)
        self._num_followed += self.follows
        self._send_header(FOLLOW if self.follows else STEP, step)
        self._flags[:] = 0

    def exchange(self, number: int, buffer: Array) -> None:
        """Replace the gradients of a bucket by their means, in place; float32, in the order of the bucket."""
        parts = self._messages[number]
        pieces = [(buffer[part.start : part.stop], self._servers[part.server]) for part in parts]
        if self.follows:
            coming: list[Request] = [self._communicator.irecv(piece, rank, DATA_TAG) for piece, rank in pieces]
        else:
            coming = self._send_and_receive(pieces)
        # Sleep while waiting: back-propagation needs the core.
        for request in coming:
            self._communicator.wait_any([request])

    def take_answer(self) -> None:
        """Receive the first server's answer for the completed step."""
        self._communicator.wait_any([self._communicator.irecv(self._answer, self._servers[0], ANSWER_TAG)])

    def set_flags(self, flags: Array) -> None:
        """Store `flags`, which are sent to the servers with the next step."""
        self._flags[:] = flags

    def agreed(self) -> Array:
        """Return the combined flags of all workers for the completed step."""
        return self._answer[:-1].copy()  # a copy: the next answer arrives in the same memory

    def leave(self, *, early: bool = False) -> None:
        """Let the servers end."""
        self._send_header(STOP if early else FINISH, 0)

    def as_json(self) -> dict[str, Any]:
        """Return the placement and its balance, and the number of followed steps."""
        loads = held_bytes(self.buckets, len(self._servers))
        return {
            "placement": self._placement,
            "server_bytes": loads,
            "imbalance": imbalance(loads) if sum(loads) else 1.0,
            "followed_steps": self._num_followed,
        }

    def _send_header(self, kind: int, step: int) -> None:
        message = header(kind, step, self._flags)
        for request in [self._communicator.isend(message, server, HEADER_TAG) for server in self._servers]:
            self._communicator.wait_any([request])

    def _send_and_receive(self, pieces: Sequence[tuple[Array, int]]) -> list[Request]:
        """Receive each mean into the piece it was computed from, as soon as the gradient there is sent."""
        leaving = [self._communicator.isend(piece, rank, DATA_TAG) for piece, rank in pieces]
        coming = []
        for request, (piece, rank) in zip(leaving, pieces, strict=True):
            self._communicator.wait_any([request])
            coming.append(self._communicator.irecv(piece, rank, DATA_TAG))
        return coming


DEFAULT_PLACEMENT = "split"


class ParameterServerWorker(Worker):
    """Exchanges gradients for their means on `communicator`, then applies them with the local optimizer.

    `workers` is the group of the workers alone.
    """

    def __init__(self, context: Context, communicator: Communicator, workers: Communicator) -> None:
        self._workers = workers
        placement = context.exchange.placement or DEFAULT_PLACEMENT
        self._client = ServerClient(
            communicator, context.num_servers, placement, context.exchange.bucket_bytes, MESSAGE_BYTES
        )
        self._guard = FiniteGuard(workers.rank, workers)

    def start(self, variables: Sequence[Any]) -> None:
        """Broadcast rank 0's weights to all workers."""
        broadcast_variables(self._workers, variables)

    def before_step(self, step: int) -> None:
        """Announce the step to the servers."""
        self._guard.step = step
        self._client.announce(step)
        self.follows = self._client.follows

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Exchange gradients for their means bucket by bucket, then apply them."""
        lengths = [int(gradient.shape.num_elements()) for gradient in gradients]
        # AutoGraph must not rewrite it: it sends messages while the step is traced.
        tf.autograph.experimental.do_not_convert(self._client.lay_out)(lengths)
        names = [variable.path for variable in variables]
        means: list[Any] = [None] * len(gradients)
        previous: list[Any] = []
        for number, bucket in enumerate(self._client.buckets):
            of_bucket = [tf.cast(gradients[index], tf.float32) for index in bucket.variables]
            with tf.control_dependencies(previous):
                alone = names[bucket.variables[0]] if len(of_bucket) == 1 else ""
                exchanged, suspicious = exchange_bucket(packed(of_bucket), of_bucket, self._exchanger(number, alone))
            previous = [suspicious]
            for index, tensor in zip(bucket.variables, exchanged, strict=True):
                means[index] = tf.cast(tensor, gradients[index].dtype)
        fine = self._guard.verdict(suspicious, gradients, names) if self.checks_finite else suspicious
        with tf.control_dependencies([fine]):
            end = timestamp()
        with tf.control_dependencies([end]):
            optimizer.apply(means, variables)
        return end

    def after_step(self, step: int) -> None:
        """Receive the first server's answer."""
        self._client.take_answer()

    def set_flags(self, flags: Array) -> None:
        """Pass on `flags`, which are sent to the servers with the next step."""
        self._client.set_flags(flags)

    def agreed(self) -> Array | None:
        """Return the combined flags of all workers for the completed step."""
        return self._client.agreed()

    def details(self) -> dict[str, Any]:
        """Return the placement and its balance, and the number of followed steps."""
        return self._client.as_json()

    def finish(self, *, early: bool = False) -> None:
        """Let the servers end."""
        self._client.leave(early=early)

    def _exchanger(self, number: int, alone: str) -> Callable[[Array], tuple[Array, bool]]:
        def exchange(buffer: Array, finished: Finished) -> Array:
            self._client.exchange(number, buffer)
            finished(buffer)
            return buffer

        recorded = bucket_recorded(exchange, recorder_of(self._workers), number)
        if not self.checks_finite:
            return lambda buffer: (recorded(buffer, unseen), False)
        return self._guard.watched(recorded, first=number == 0, alone=alone)
