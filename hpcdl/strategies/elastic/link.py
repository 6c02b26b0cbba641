"""A worker's link to the center: what every link offers, and the link by messages to servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from hpcdl.core.protocols import Communicator
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic import message as center_message
from hpcdl.strategies.elastic.message import Endpoint, Message, server_spans, sizes_within

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Link(Protocol):
    """What a replica does with the center. `count`, `stopped`: see replica.Replica; `group`: the workers alone.

    `warnings` are for the user, at the start; `num_lost`, after `leave`, are the workers that died on the way.
    """

    group: Communicator
    count: int
    stopped: bool
    warnings: list[str]
    num_lost: int

    def start(self, weights: Array, sizes: Sequence[int], *, count: int, total: int, velocity: Array | None) -> None:
        """Agree on the center's first value, `weights`, equal on every worker. Collective."""

    def exchange(self, sent: Array, reply: Array, rate: float, steps: int) -> None:
        """Send `sent` for this worker's last `steps` steps; `reply` is filled, which may be the same memory."""

    def fetch(self, buffer: Array) -> None:
        """Read the center."""

    def fetch_velocity(self, buffer: Array) -> None:
        """Read the center's velocity; zeros where it has none."""

    def leave(self, buffer: Array, *, stop: bool) -> None:
        """No more exchanges; returns with the last center when every worker has left."""

    def finish(self, *, early: bool) -> None:
        """After `leave`: tell the servers whether the run is to be resumed."""

    def details(self) -> dict[str, Any]:
        """What the record keeps."""


class ServerLink:
    """Two-sided messages to server ranks, which any MPI has."""

    def __init__(self, context: Context, channel: Endpoint | None = None, group: Communicator | None = None) -> None:
        self._channel: Endpoint = channel or context.communicator.duplicate()
        self.group = group or context.communicator.split(0)
        self._context = context
        self.warnings: list[str] = []
        self.num_lost = 0
        self.count = 0
        self.stopped = False
        self._versions: list[int] = []

    def start(self, weights: Array, sizes: Sequence[int], *, count: int, total: int, velocity: Array | None) -> None:
        """Worker 0 tells the servers the sizes and gives them the center."""
        start = {"sizes": list(sizes), "total": total, "count": count, "velocity": velocity is not None}
        self._channel.allgather_json(start if self._channel.rank == 0 else None)
        self.count, self.stopped = count, 0 < total <= count
        self._spans = server_spans(weights.size, self._context.num_servers)
        packed = not self._context.elastic.unpacked
        self._messages = [Message(sizes_within(sizes, span), packed=packed) for span in self._spans]
        self._versions = [0] * len(self._spans)
        if self._channel.rank == 0:
            for values in (weights,) if velocity is None else (weights, velocity):
                self._send(values, (0, 0, 0, 0))

    def exchange(self, sent: Array, reply: Array, rate: float, steps: int) -> None:
        """One request to each server, and its reply."""
        self._ask(sent, reply, center_message.UPDATE, rate, steps)

    def fetch(self, buffer: Array) -> None:
        """Read the center."""
        self._ask(buffer, buffer, center_message.FETCH)

    def fetch_velocity(self, buffer: Array) -> None:
        """Read the servers' velocity."""
        self._ask(buffer, buffer, center_message.FETCH_VELOCITY)

    def leave(self, buffer: Array, *, stop: bool) -> None:
        """The reply comes when every worker has left; waiting for it costs no core."""
        self._ask(buffer, buffer, center_message.STOP if stop else center_message.LEAVE)
        self.num_lost = max(int(message.header[3]) for message in self._messages)

    def finish(self, *, early: bool) -> None:
        """Worker 0 gives the servers the verdict."""
        if self._channel.rank == 0:
            for server in range(self._context.num_servers):
                verdict = numpy.array([early, self.num_lost], numpy.int64)
                self._channel.isend(verdict, self._context.num_workers + server, center_message.VERDICT_TAG).wait()

    def details(self) -> dict[str, Any]:
        """Staleness is the servers' to count."""
        return {}

    def _ask(self, sent: Array, reply: Array, kind: int, rate: float = 0.0, steps: int = 0) -> None:
        self._send(sent, (kind, rate, 0, steps))
        for index, (span, message) in enumerate(zip(self._spans, self._messages, strict=True)):
            message.receive(self._channel, self._context.num_workers + index)
            reply[span] = message.payload
            self._versions[index] = int(message.header[1])
        self.count = int(self._messages[0].header[0])
        self.stopped = self.stopped or bool(self._messages[0].header[2])

    def _send(self, values: Array, header: Sequence[float]) -> None:
        sending = []
        for index, (span, message) in enumerate(zip(self._spans, self._messages, strict=True)):
            message.header[:] = header
            message.header[2] = self._versions[index]
            message.payload[:] = values[span]
            sending.append(message.send(self._channel, self._context.num_workers + index))
        for one in sending:
            one.wait()
