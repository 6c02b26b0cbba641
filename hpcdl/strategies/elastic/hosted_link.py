"""A worker's link to a center that every worker serves a part of, in a thread of its own, by two-sided messages.

What Hogwild falls back on between nodes whose MPI makes no progress on windows: the center is cut in as many parts as
there are workers, each served one request at a time, so nothing is lost and nobody waits for the whole of it.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import StoppedEarly
from hpcdl.core.protocols import Communicator, Request
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.link import ServerLink
from hpcdl.strategies.elastic.rules import Rule
from hpcdl.strategies.elastic.server import CenterServer

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


class _HostedEndpoint:
    """One side's messages. Server i has the number `workers + i`, and lives in worker i's process.

    Requests and replies have groups of their own, because a worker also talks to the server in its own process.
    """

    def __init__(self, outgoing: Communicator, incoming: Communicator, rank: int, start: queue.Queue[Any]) -> None:
        self._outgoing, self._incoming, self._start = outgoing, incoming, start
        self.rank = rank

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> Request:
        """To the process of `destination`."""
        return self._outgoing.isend(buffer, destination % self._outgoing.size, tag)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> Request:
        """From the process of `source`."""
        return self._incoming.irecv(buffer, source % self._incoming.size, tag)

    def wait_any(self, requests: Sequence[Request]) -> int:
        """As the group's; where requests of both kinds are waited for, either group can do it."""
        return self._incoming.wait_any(requests)

    def failed(self) -> set[int]:
        """A worker is lost with the server in its process: nobody can go on."""
        return set()

    def allgather_json(self, value: Any) -> list[Any]:
        """Worker 0's word alone counts; each worker hands it to the server in its own process."""
        if self.rank < self._outgoing.size:
            words = self._outgoing.allgather_json(value)
            self._start.put(words)
            return words
        found: list[Any] = self._start.get()
        return found


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
        """The server of this process ends too."""
        super().finish(early=early)
        self._thread.join()

    def details(self) -> dict[str, Any]:
        """How stale the writes were that this process has served."""
        return {"staleness_counts": self._found.get("staleness_counts", {})}

    def _serve(self) -> None:
        try:
            self._found = self._server.serve()
        except StoppedEarly:  # the workers know, they have said so
            return
        except BaseException:  # noqa: BLE001  whatever it is, workers must not wait for this server
            traceback.print_exc()
            self.group.abort(1)
