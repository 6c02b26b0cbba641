"""A server that holds the center or a part of it, and the effect of a worker's request. Needs numpy only.

A rule is equation (2), or a gradient step; the server counts how stale requests were. Requests are served either first
come, first served (`async-*`), or in rank order, round after round (`easgd`). A request is completed before the next
one begins: that is the lock of the methods that have one. There is no busy waiting: the server sleeps in `wait_any`.

Messages between workers and servers are a header of four float64 and a part of the flat buffer.

Request and reply have the same length. By default header and payload are packed into one message; unpacked, the header
is sent first and then each layer as a separate message.

    header   request                          reply
    0        kind                             updates of the center so far, over all workers (in steps)
    1        alpha or learning rate           number of writes to the center so far, its version
    2        version that was read last       1 if the center takes no more updates
    3        steps since the last exchange    seconds of work on the request; to a leaving worker: workers lost
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from hpcdl.collectives.slices import spans
from hpcdl.core.errors import BrokenGroup, RankError, StoppedEarly
from hpcdl.core.protocols import Request
from hpcdl.strategies.base.salvage import CenterPart
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.elastic.replica import descend_and_reply, descend_with_momentum, swap_elastic

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


HEADER_LENGTH = 4
HEADER_BYTES = 8 * HEADER_LENGTH
UPDATE, FETCH, FETCH_VELOCITY, LEAVE, STOP = range(5)
"""Kinds of requests: exchange; read; read the server's velocity; leave; leave and stop all updates."""
TAG, VERDICT_TAG = 1, 2


class Endpoint(Protocol):
    """The communicator methods that messages need; `rank` and the peers' numbers may belong to different groups."""

    @property
    def rank(self) -> int:
        """This side's number."""

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> Request:
        """Start sending `buffer`."""

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> Request:
        """Start receiving into `buffer`."""

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Return the index of the first completed request."""

    def failed(self) -> set[int]:
        """Return the ranks that are known to be dead."""

    def allgather_json(self, value: Any) -> list[Any]:
        """Return every side's `value`."""


class Message:
    """One buffer for a request and its reply; `header` and `payload` (float32) are views of it."""

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
        # One tag serves all parts: MPI keeps the order of messages between two ranks.
        """Wait for all parts; the first one's receive has been started."""
        requests = [channel.irecv(part, source, TAG) for part in self.parts[1:]]
        # The first one may take long: wait_any sleeps, a plain wait may keep a core busy.
        channel.wait_any([first])
        for request in (first, *requests):
            request.wait()


class Sending:
    """A message whose parts are being sent."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def wait(self) -> None:
        """Return when the buffer may be used again."""
        for request in self.requests:
            request.wait()


def server_spans(num_elements: int, num_servers: int) -> list[slice]:
    """Return each server's part of the flat buffer: equal parts, independent of the layers."""
    return [slice(start, stop) for start, stop in spans(num_elements, num_servers)]


def sizes_within(sizes: Sequence[int], part: slice) -> list[int]:
    """Return the lengths of the layers' pieces in `part` of the flat buffer."""
    overlaps, start = [], 0
    for size in sizes:
        overlap = min(start + size, part.stop) - max(start, part.start)
        if overlap > 0:
            overlaps.append(overlap)
        start += size
    return overlaps


class Rule(Protocol):
    """How a request changes the center."""

    velocity: Array | None

    def begin(self, num_elements: int) -> None:
        """Prepare for a center of that length."""

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """Change `center` by `payload`, and fill `reply`, which may be the same memory."""


class Attraction:
    """Equation (2) for one worker: the request holds its weights, the reply the center before the update."""

    velocity: Array | None = None

    def begin(self, num_elements: int) -> None:
        """Do nothing: there is no state."""

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """Move the center towards the worker's weights."""
        swap_elastic(center, payload, reply, rate)


class Descent:
    """A gradient step on the center: the request holds a gradient, the reply the center after the update."""

    velocity: Array | None = None

    def begin(self, num_elements: int) -> None:
        """Do nothing: there is no state."""

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """W~ <- W~ - eta dW."""
        descend_and_reply(center, payload, reply, rate)


class MomentumDescent:
    """A gradient step with momentum, whose velocity belongs to the center."""

    def __init__(self, momentum: float) -> None:
        self.velocity: Array | None = None
        self._momentum = momentum

    def begin(self, num_elements: int) -> None:
        """Set the velocity to zero."""
        self.velocity = numpy.zeros(num_elements, numpy.float32)

    def serve(self, center: Array, payload: Array, reply: Array, rate: float) -> None:
        """V <- mu V - eta dW; W~ <- W~ + V."""
        assert self.velocity is not None
        descend_with_momentum(center, self.velocity, payload, rate, self._momentum)
        reply[:] = center


RULES: dict[str, Callable[[float], Rule]] = {
    "attraction": lambda momentum: Attraction(),
    "descent": lambda momentum: Descent(),
    "momentum descent": MomentumDescent,
}
"""Constructors of rules, which take the momentum, by the names in methods.py."""


class Staleness:
    """Counts how many writes of others the center saw between a worker's read and its next write."""

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()

    def add(self, staleness: int) -> None:
        """Count one write."""
        self._counts[staleness] += 1

    def as_json(self) -> dict[str, int]:
        """Return the number of writes by staleness."""
        return {str(staleness): number for staleness, number in sorted(self._counts.items())}


def summary_of(counts: list[dict[str, Any]]) -> tuple[float | None, float | None, dict[str, int]]:
    """Return mean, maximum and histogram of several ranks' counts; None and empty without any."""
    total: collections.Counter[int] = collections.Counter()
    for count in counts:
        total.update({int(staleness): int(number) for staleness, number in count.items()})
    num_writes = sum(total.values())
    if not num_writes:
        return None, None, {}
    mean = sum(staleness * number for staleness, number in total.items()) / num_writes
    histogram = {str(staleness): number for staleness, number in sorted(total.items())}
    return mean, float(max(total)), histogram


class CenterServer:
    """One server. `in_rank_order`: round robin over the workers instead of first come, first served."""

    def __init__(
        self, context: Context, rule: Rule, *, in_rank_order: bool = False, channel: Endpoint | None = None
    ) -> None:
        self._channel: Endpoint = channel or context.communicator.duplicate()
        if channel is None:
            context.communicator.split(1)  # the split of the workers' group is collective over all
        self._context = context
        self._rule = rule
        self._in_rank_order = in_rank_order
        self._left: set[int] = set()
        self._lost: set[int] = set()
        self._stopped = self._has_center = False
        self._count = self._begun = self._version = self._total = self._first = 0
        self._busy_s = 0.0
        self._staleness = Staleness()

    def serve(self) -> dict[str, Any]:
        """Serve until every worker has left. Raises StoppedEarly if the workers say that the run is to be resumed."""
        self._begin()
        for worker, message in self._arrivals():
            began = time.perf_counter()
            if self._handle(worker, message):
                message.header[3] = took = time.perf_counter() - began
                self._busy_s += took
                self._reply(worker, message)
        self._answer_leavers()
        verdict = numpy.zeros(2, numpy.int64)
        self._channel.irecv(verdict, 0, VERDICT_TAG).wait()
        if verdict[0]:
            raise StoppedEarly("the workers stopped; continue with --resume")
        # Use worker 0's number, so that all servers return the same.
        return self._details() | ({"lost_workers": int(verdict[1])} if verdict[1] else {})

    def part(self) -> CenterPart | None:
        """Return its part of the center: always consistent, because a request is served between two messages."""
        if not self._has_center:
            return None
        velocity = self._rule.velocity
        return CenterPart(start=self._first, values=self._center, velocity=velocity, count=self._count, held=True)

    def _begin(self) -> None:
        """Receive from worker 0 the sizes and the center's weights, and its velocity if it has one."""
        start = self._channel.allgather_json(None)[0]
        self._total, self._count = start["total"], start["count"]
        self._begun = self._count
        index = self._channel.rank - self._context.num_workers
        part = server_spans(sum(start["sizes"]), self._context.num_servers)[index]
        self._first = part.start
        sizes = sizes_within(start["sizes"], part)
        packed = not self._context.elastic.unpacked
        self._messages = [Message(sizes, packed=packed) for _ in range(self._context.num_workers)]
        self._center: Array = numpy.zeros(sum(sizes), numpy.float32)
        self._rule.begin(sum(sizes))
        targets = [self._center]
        if start["velocity"] and self._rule.velocity is not None:
            targets.append(self._rule.velocity)
        for target in targets:
            self._messages[0].receive(self._channel, 0)
            target[:] = self._messages[0].payload
        self._stopped = 0 < self._total <= self._count
        # Last: after a failure before this line, recovery must not take a part of zeros for the center.
        self._has_center = True

    def _arrivals(self) -> Iterator[tuple[int, Message]]:
        """Yield requests in serving order, until every worker has left."""
        self._sending: dict[int, Sending] = {}
        self._pending: dict[int, Request] = {}
        order = self._round_robin() if self._in_rank_order else self._first_come()
        for worker in order:
            message = self._messages[worker]
            try:
                message.receive_rest(self._channel, worker, self._pending.pop(worker))
            except RankError as error:
                self._go_on_without(error)
                continue
            yield worker, message

    def _post(self, worker: int) -> None:
        self._pending[worker] = self._channel.irecv(self._messages[worker].parts[0], worker, TAG)

    def _round_robin(self) -> Iterator[int]:
        """Serve one worker after the other, each request and reply in full: P (2 alpha + 2 n beta) a round."""
        while len(self._left) < self._context.num_workers:
            for worker in sorted(set(range(self._context.num_workers)) - self._left):
                self._post(worker)
                yield worker
                # The reply leaves completely before the next worker's turn: that makes this the paper's serial
                # baseline.
                if worker in self._sending:
                    self._sending.pop(worker).wait()

    def _first_come(self) -> Iterator[int]:
        """Yield workers with a request, the least recently served first. A buffer is reused once its reply is sent."""
        queue = list(range(self._context.num_workers))
        for worker in queue:
            self._post(worker)
        while queue:
            waits = [
                self._sending[worker].requests[-1] if worker in self._sending else self._pending[worker]
                for worker in queue
            ]
            try:
                worker = queue[self._channel.wait_any(waits)]
                if worker in self._sending:
                    self._sending.pop(worker).wait()
                    self._post(worker)
                    continue
            except RankError as error:
                self._go_on_without(error)
                queue = [worker for worker in queue if worker not in self._lost]
                continue
            queue.remove(worker)
            yield worker
            if worker not in self._left:
                queue.append(worker)

    def _go_on_without(self, error: RankError) -> None:
        """Remove the dead workers if the library can identify them (ULFM); raise `error` otherwise.

        Worker 0 is required: it evaluates and saves the center. With recovery in place the dead break the group, and
        only workers without a heartbeat are removed here.
        """
        if self._context.in_place and isinstance(error, BrokenGroup):
            raise error
        lost = (self._channel.failed() & set(range(self._context.num_workers))) - self._lost
        if not lost or 0 in lost or self._in_rank_order:
            raise error
        self._lost |= lost
        self._left |= lost
        for worker in lost:
            self._sending.pop(worker, None)
            self._pending.pop(worker, None)

    def _handle(self, worker: int, message: Message) -> bool:
        """Serve one request. Return False if its reply must wait until all workers have left."""
        kind, rate, version, steps = message.header.tolist()
        if kind in (LEAVE, STOP):
            self._left.add(worker)
            self._stopped = self._stopped or kind == STOP
            return False
        if kind == FETCH:
            message.payload[:] = self._center
        elif kind == FETCH_VELOCITY:
            message.payload[:] = 0 if self._rule.velocity is None else self._rule.velocity
        # Workers learn of the end from this reply; a late request must not move the final center.
        elif self._stopped:
            message.payload[:] = self._center
        else:
            self._staleness.add(self._version - int(version))
            self._rule.serve(self._center, message.payload, message.payload, rate)
            self._version += 1
            self._count += int(steps)
            # A total of 0 means that the workers stop by themselves.
            self._stopped = 0 < self._total <= self._count
        return True

    def _reply(self, worker: int, message: Message) -> None:
        message.header[:3] = (self._count, self._version, self._stopped)
        self._sending[worker] = message.send(self._channel, worker)

    def _answer_leavers(self) -> None:
        """Send every live worker the last center, and the number of lost workers."""
        if not self._context.in_place:  # there the dead break the group
            self._lost |= self._channel.failed() & self._left
        for worker, message in enumerate(self._messages):
            if worker in self._lost:
                continue
            message.payload[:] = self._center
            message.header[3] = len(self._lost)
            self._reply(worker, message)
        for sending in self._sending.values():
            sending.wait()

    def _details(self) -> dict[str, Any]:
        served = self._count - self._begun  # in a resumed run others have served the rest
        # A step is one update by every worker.
        per_step = self._context.num_workers / max(served, 1)
        return {
            "steps": served / self._context.num_workers,
            "busy_seconds_per_step": self._busy_s * per_step,
            "exchanges": self._version,
            "updates": self._count,
            "staleness_counts": self._staleness.as_json(),
        }
