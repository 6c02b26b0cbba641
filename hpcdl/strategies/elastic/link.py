"""A worker's link to the center by messages: to servers, or to the other workers, each of which serves a part.

Hogwild uses the second kind between nodes whose MPI makes no progress on windows. The center has as many parts as there
are workers; a thread per worker serves its part, one request at a time. So no update is lost and no request locks the
whole center. lock_free.py has the link by windows.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from hpcdl.core.errors import StoppedEarly
from hpcdl.core.protocols import Communicator, Request
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic import server as center_message
from hpcdl.strategies.elastic.server import CenterServer, Endpoint, Message, Rule, server_spans, sizes_within

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class Link(Protocol):
    """A replica's access to the center. `count`, `stopped`: see replica.Replica; `group`: the workers alone.

    `warnings` are for the user, at the start; `num_lost`, after `leave`, is the number of workers that died.
    """

    group: Communicator
    count: int
    stopped: bool
    warnings: list[str]
    num_lost: int

    def start(self, weights: Array, sizes: Sequence[int], *, count: int, total: int, velocity: Array | None) -> None:
        """Agree on the center's first value, `weights`, equal on every worker. Collective."""

    def exchange(self, sent: Array, reply: Array, rate: float, steps: int) -> None:
        """Send `sent` for this worker's last `steps` steps; fill `reply`, which may be the same memory."""

    def fetch(self, buffer: Array) -> None:
        """Read the center."""

    def fetch_velocity(self, buffer: Array) -> None:
        """Read the center's velocity; zeros if it has none."""

    def leave(self, buffer: Array, *, stop: bool) -> None:
        """Make no more exchanges; return with the last center when every worker has left."""

    def finish(self, *, early: bool) -> None:
        """Tell the servers whether the run is to be resumed; called after `leave`."""

    def details(self) -> dict[str, Any]:
        """Return details for the record."""


class ServerLink:
    """Two-sided messages to server ranks, which any MPI supports."""

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
        """Start: worker 0 sends the servers the sizes and the center."""
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
        """Send one request to each server, and receive its reply."""
        self._ask(sent, reply, center_message.UPDATE, rate, steps)

    def fetch(self, buffer: Array) -> None:
        """Read the center."""
        self._ask(buffer, buffer, center_message.FETCH)

    def fetch_velocity(self, buffer: Array) -> None:
        """Read the servers' velocity."""
        self._ask(buffer, buffer, center_message.FETCH_VELOCITY)

    def leave(self, buffer: Array, *, stop: bool) -> None:
        """Leave; the reply arrives when every worker has left, and waiting for it uses no CPU."""
        self._ask(buffer, buffer, center_message.STOP if stop else center_message.LEAVE)
        self.num_lost = max(int(message.header[3]) for message in self._messages)

    def finish(self, *, early: bool) -> None:
        """Worker 0 tells the servers how the run ended."""
        if self._channel.rank == 0:
            for server in range(self._context.num_servers):
                verdict = numpy.array([early, self.num_lost], numpy.int64)
                self._channel.isend(verdict, self._context.num_workers + server, center_message.VERDICT_TAG).wait()

    def details(self) -> dict[str, Any]:
        """Return nothing: the servers count staleness."""
        return {}

    def _ask(self, sent: Array, reply: Array, kind: int, rate: float = 0.0, steps: int = 0) -> None:
        self._send(sent, (kind, rate, 0, steps))  # to all servers before the first reply: they work at the same time
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
        for request in sending:
            request.wait()


class _HostedEndpoint:
    """One side's messages. Server i has the number `workers + i`, and runs in worker i's process.

    Requests and replies have groups of their own, because a worker also sends to the server in its own process.
    """

    def __init__(self, outgoing: Communicator, incoming: Communicator, rank: int, start: queue.Queue[Any]) -> None:
        self._outgoing, self._incoming, self._start = outgoing, incoming, start
        self.rank = rank

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> Request:
        """Send to the process of `destination`."""
        return self._outgoing.isend(buffer, destination % self._outgoing.size, tag)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> Request:
        """Receive from the process of `source`."""
        return self._incoming.irecv(buffer, source % self._incoming.size, tag)

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Wait as the group does; with requests of both groups either group can wait."""
        return self._incoming.wait_any(requests)

    def failed(self) -> set[int]:
        """Return no ranks: a lost worker takes its server with it, so the run cannot continue."""
        return set()

    def allgather_json(self, value: Any) -> list[Any]:
        """Distribute worker 0's value; each worker passes it to the server in its own process."""
        if self.rank < self._outgoing.size:
            values = self._outgoing.allgather_json(value)
            self._start.put(values)
            return values
        answers: list[Any] = self._start.get()
        return answers


class HostedLink(ServerLink):
    """Messages to servers that are threads of the workers."""

    def __init__(self, context: Context, group: Communicator, rule: Rule, why: str) -> None:
        requests, replies = group.duplicate(), group.duplicate()
        start: queue.Queue[Any] = queue.Queue()
        hosted = dataclasses.replace(context, num_servers=group.size)
        super().__init__(hosted, _HostedEndpoint(requests, replies, group.rank, start), group)
        self._server = CenterServer(
            hosted, rule, channel=_HostedEndpoint(replies, requests, group.size + group.rank, start)
        )
        self._found: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._serve, name="center", daemon=True)
        self._thread.start()
        self.warnings.append(
            f"{context.info.name} between nodes needs one-sided updates, but {why}: each worker serves a part of the "
            "center by messages instead, one request at a time"
        )

    def finish(self, *, early: bool) -> None:
        """Finish, and wait for this process's server thread."""
        super().finish(early=early)
        self._thread.join()

    def details(self) -> dict[str, Any]:
        """Return the staleness of the writes that this process's server received."""
        return {"staleness_counts": self._found.get("staleness_counts", {})}

    def _serve(self) -> None:
        try:
            self._found = self._server.serve()
        except StoppedEarly:  # the workers know: they sent the stop
            return
        except BaseException:  # noqa: BLE001  on any error the workers must not wait for this server
            traceback.print_exc()
            self.group.abort(1)
