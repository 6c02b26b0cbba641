"""What a worker says to parameter servers: numpy and a communicator; worker.py puts it into a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.strategies.parameter_server import agreement
from hpcdl.strategies.parameter_server.agreement import ANSWER_TAG, DATA_TAG, HEADER_TAG, send_layout
from hpcdl.strategies.parameter_server.placement import (
    Bucket,
    Piece,
    held_bytes,
    imbalance,
    messages,
    plan,
)

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator, Request

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
        self._answer = agreement.no_answer()
        self._wishes = numpy.zeros(agreement.NUM_FLAGS)
        self._num_followed = 0
        self.buckets: tuple[Bucket, ...] = ()
        self.follows = False

    def lay_out(self, lengths: Sequence[int]) -> None:
        """Plan buckets for gradients of these lengths; the first worker tells each server what it will get."""
        buckets = plan(lengths, len(self._servers), self._placement, self._bucket_bytes)
        if buckets == self.buckets:
            return
        self.buckets = buckets
        first = self._communicator.rank % len(self._servers)
        self._messages = [messages(bucket, self._message_bytes, first) for bucket in buckets]
        if self._communicator.rank != 0:
            return
        for server, rank in enumerate(self._servers):
            mine = [part.stop - part.start for parts in self._messages for part in parts if part.server == server]
            send_layout(self._communicator, rank, mine)

    def announce(self, step: int) -> None:
        """Begin a step; one that the others have finished already is only followed."""
        self.follows = bool(self._answer[-1] >= step)
        self._num_followed += self.follows
        self._send_header(agreement.FOLLOW if self.follows else agreement.STEP, step)
        self._wishes[:] = 0

    def exchange(self, number: int, buffer: Array) -> None:
        """Replace the gradients of a bucket by their means, in place; float32, in the order of the bucket."""
        parts = self._messages[number]
        pieces = [(buffer[part.start : part.stop], self._servers[part.server]) for part in parts]
        if self.follows:
            coming: list[Request] = [self._communicator.irecv(piece, rank, DATA_TAG) for piece, rank in pieces]
        else:
            coming = self._send_and_receive(pieces)
        # Sleeps while it waits: the core belongs to back-propagation, which goes on beside this thread.
        for request in coming:
            self._communicator.wait_any([request])

    def take_answer(self) -> None:
        """Take the first server's answer to the step that is over."""
        self._communicator.wait_any([self._communicator.irecv(self._answer, self._servers[0], ANSWER_TAG)])

    def wish(self, wishes: Array) -> None:
        """These go to the servers with the next step."""
        self._wishes[:] = wishes

    def agreed(self) -> Array:
        """What all workers have been told about the step that is over."""
        return self._answer[:-1].copy()

    def leave(self, *, early: bool = False) -> None:
        """Let the servers go."""
        self._send_header(agreement.STOP if early else agreement.FINISH, 0)

    def as_json(self) -> dict[str, Any]:
        """Placement and its balance; how many steps were followed only."""
        loads = held_bytes(self.buckets, len(self._servers))
        return {
            "placement": self._placement,
            "server_bytes": loads,
            "imbalance": imbalance(loads) if sum(loads) else 1.0,
            "followed_steps": self._num_followed,
        }

    def _send_header(self, kind: int, step: int) -> None:
        message = agreement.header(kind, step, self._wishes)
        for request in [self._communicator.isend(message, server, HEADER_TAG) for server in self._servers]:
            self._communicator.wait_any([request])

    def _send_and_receive(self, pieces: Sequence[tuple[Array, int]]) -> list[Request]:
        """The means come into the pieces that they were made of, each as soon as its gradient has left."""
        leaving = [self._communicator.isend(piece, rank, DATA_TAG) for piece, rank in pieces]
        coming = []
        for request, (piece, rank) in zip(leaving, pieces, strict=True):
            self._communicator.wait_any([request])
            coming.append(self._communicator.irecv(piece, rank, DATA_TAG))
        return coming
