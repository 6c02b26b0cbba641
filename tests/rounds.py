"""Count the rounds of an algorithm, which determine its latency, for tests of the cost formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, RemoteArray, Request


@dataclass(kw_only=True)
class Counts:
    """What one rank has sent and received, in this group and in those split from it.

    `rounds` counts in the one-port model: a rank sends at most one message and receives at most one in a round, and a
    message leaves after what its sender had received before (Lamport's clock, Communications of the ACM 21, 1978, with
    ports). The maximum over the ranks gives the latency.
    """

    messages: int = 0
    bytes: int = 0
    library_calls: int = 0
    last_sent: int = 0
    last_received: int = 0

    @property
    def rounds(self) -> int:
        """The last round in which this rank sent or received."""
        return max(self.last_sent, self.last_received)

    def sending(self) -> int:
        """Return the round in which the next message leaves."""
        self.last_sent = self.rounds + 1
        return self.last_sent

    def received(self, round_sent: int) -> None:
        """Record the arrival of a message that was sent in `round_sent`."""
        self.last_received = max(self.last_received + 1, round_sent)


class TracingCommunicator:
    """Wrap a communicator and count into `counts`; a second message carries the clock of each message."""

    def __init__(self, inner: Communicator, counts: Counts | None = None, clocks: Communicator | None = None) -> None:
        self._inner = inner
        self._clocks = clocks or inner.duplicate()
        self.counts = counts or Counts()
        self.rank = inner.rank
        self.size = inner.size
        self.host = inner.host
        self.library = inner.library

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> TracingRequest:
        """Count the message, and send it with the clock's next value."""
        self.counts.messages += 1
        self.counts.bytes += buffer.nbytes
        clock = numpy.array([self.counts.sending()])
        sent = self._clocks.isend(clock, destination, tag)
        return TracingRequest(self._inner.isend(buffer, destination, tag), sent, None, self.counts)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> TracingRequest:
        """Receive the message and its clock."""
        clock = numpy.zeros(1, numpy.int64)
        coming = self._clocks.irecv(clock, source, tag)
        return TracingRequest(self._inner.irecv(buffer, source, tag), coming, clock, self.counts)

    def wait_any(self, requests: Sequence[Request], look: Callable[[], None] = lambda: None) -> int:
        """Return the index of the first finished request, after taking over its clock."""
        traced = [request for request in requests if isinstance(request, TracingRequest)]
        index = self._inner.wait_any([request.message for request in traced], look)
        traced[index].take_over()
        return index

    def barrier(self) -> None:
        """Not counted."""
        self._inner.barrier()

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Counted as a call of the library."""
        self.counts.library_calls += 1
        self._inner.broadcast(buffer, root)

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Counted as a call of the library."""
        self.counts.library_calls += 1
        self._inner.allreduce(buffer, add)

    def allgather_json(self, value: Any) -> list[Any]:
        """Not counted."""
        return self._inner.allgather_json(value)

    def duplicate(self) -> TracingCommunicator:
        """Return a group that counts into the same counts."""
        return TracingCommunicator(self._inner.duplicate(), self.counts)

    def split(self, color: int, key: int = 0) -> TracingCommunicator:
        """Return a group that counts into the same counts."""
        return TracingCommunicator(self._inner.split(color, key), self.counts)

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Not counted: nothing is sent."""
        return self._inner.shared_array(shape, dtype)

    def remote_array(self, length: int, dtype: Any) -> TracingRemoteArray:
        """Return a remote array that counts what is read from and added to other ranks."""
        return TracingRemoteArray(self._inner.remote_array(length, dtype), self.rank, self.counts)

    def failed(self) -> set[int]:
        """Return what the wrapped communicator returns."""
        return self._inner.failed()

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> TracingCommunicator:
        """Return a group that counts into the same counts."""
        return TracingCommunicator(self._inner.survivors(lost), self.counts)

    def free(self) -> None:
        """Free both groups."""
        self._clocks.free()
        self._inner.free()

    def abort(self, exit_code: int) -> None:
        """End every rank of the job at once."""
        self._inner.abort(exit_code)


class TracingRemoteArray:
    """A remote array whose traffic is counted as one message per operation, by the rank that asks for it."""

    def __init__(self, inner: RemoteArray, rank: int, counts: Counts) -> None:
        self._inner = inner
        self._rank = rank
        self._counts = counts
        self.own = inner.own

    def read(self, owner: int, target: Array) -> None:
        """Count and read."""
        self._count(owner, target)
        self._inner.read(owner, target)

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Count and add."""
        self._count(owner, values)
        self._inner.add(owner, values, start)

    def free(self) -> None:
        """Free the memory."""
        self._inner.free()

    def _count(self, owner: int, values: Array) -> None:
        if owner != self._rank:
            self._counts.messages += 1
            self._counts.bytes += values.nbytes


class TracingRequest:
    """A message and its clock."""

    def __init__(self, message: Request, clock_message: Request, clock: Array | None, counts: Counts) -> None:
        self.message = message
        self._clock_message = clock_message
        self._clock = clock
        self._counts = counts

    def wait(self) -> None:
        """Wait for both, and take over the clock."""
        self.message.wait()
        self.take_over()

    def take_over(self) -> None:
        """Advance this rank's clock to the received one."""
        self._clock_message.wait()
        if self._clock is not None:
            self._counts.received(int(self._clock[0]))
