"""What workers and the center's servers send each other: a header of four float64 and a part of the flat buffer.

Request and reply have the same length. Packed, which is the default, header and payload travel as one message;
unpacked the header goes first and then each layer, as a message of its own.

    header   request                          reply
    0        kind                             updates of the center so far, over all workers (in steps)
    1        alpha or learning rate           number of writes to the center so far, its version
    2        version that was read last       1 where the center takes no more updates
    3        steps since the last exchange    seconds that the server worked on the request; to who leaves: workers lost
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from hpcdl.collectives.slices import spans
from hpcdl.core.protocols import Request

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

HEADER_LENGTH = 4
HEADER_BYTES = 8 * HEADER_LENGTH
UPDATE, FETCH, FETCH_VELOCITY, LEAVE, STOP = range(5)
"""Kinds of requests: exchange; read; read the server's velocity; leave; leave and let nobody update any more."""
TAG, VERDICT_TAG = 1, 2


class Endpoint(Protocol):
    """What messages need of a communicator; `rank` and the other side's number may be another group's."""

    @property
    def rank(self) -> int:
        """This side's number."""

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> Request:
        """Start sending `buffer`."""

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> Request:
        """Start receiving into `buffer`."""

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Index of the first request that is done."""

    def failed(self) -> set[int]:
        """Ranks that are known to be dead."""

    def allgather_json(self, value: Any) -> list[Any]:
        """Every side's `value`."""


class Message:
    """One buffer, used for a request and for its reply; `header` and `payload` (float32) are views of it."""

    def __init__(self, sizes: Sequence[int], *, packed: bool) -> None:
        self._buffer: Array = numpy.zeros(HEADER_BYTES + 4 * sum(sizes), numpy.uint8)
        self.header: Array = self._buffer[:HEADER_BYTES].view(numpy.float64)
        self.payload: Array = self._buffer[HEADER_BYTES:].view(numpy.float32)
        edges = [0, HEADER_BYTES, *(HEADER_BYTES + 4 * edge for edge in itertools.accumulate(sizes))]
        self.parts: list[Array] = (
            [self._buffer] if packed else [self._buffer[start:stop] for start, stop in itertools.pairwise(edges)]
        )

    def send(self, channel: Endpoint, destination: int) -> Sending:
        """Start to send all parts."""
        return Sending([channel.isend(part, destination, TAG) for part in self.parts])

    def receive(self, channel: Endpoint, source: int) -> None:
        """Wait for all parts."""
        self.receive_rest(channel, source, channel.irecv(self.parts[0], source, TAG))

    def receive_rest(self, channel: Endpoint, source: int, first: Request) -> None:
        """Wait for all parts, of which the first is under way."""
        rest = [channel.irecv(part, source, TAG) for part in self.parts[1:]]
        # The first one may take long to come: wait_any sleeps, a plain wait may keep a core busy.
        channel.wait_any([first])
        for request in (first, *rest):
            request.wait()


class Sending:
    """A message whose parts are under way."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def wait(self) -> None:
        """Return when the buffer may be used again."""
        for request in self.requests:
            request.wait()


def server_spans(num_elements: int, num_servers: int) -> list[slice]:
    """Which part of the flat buffer each server holds: equal parts, whatever the layers."""
    return [slice(start, stop) for start, stop in spans(num_elements, num_servers)]


def sizes_within(sizes: Sequence[int], part: slice) -> list[int]:
    """Lengths of the pieces of layers that lie in `part` of the flat buffer."""
    found, start = [], 0
    for size in sizes:
        overlap = min(start + size, part.stop) - max(start, part.start)
        if overlap > 0:
            found.append(overlap)
        start += size
    return found
