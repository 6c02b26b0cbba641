"""A network that is not what it should be: messages that stand still, or come at the rate of a slow link.

`Impaired` wraps any Communicator below `Observed`, so every group of a run that is made from it is impaired too, and
what a rank waits for is seen as ever. Only a run that asks for it has one. Memory that ranks share is not a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

from hpcdl.comm.observed import LOOPBACK
from hpcdl.core.errors import RankError
from hpcdl.core.protocols import Revocable

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, RemoteArray, Request

LOOK_S = 0.005
"""Time between two looks whether messages go on."""

Result = TypeVar("Result")


class Impairment:
    """What lies between this rank and the others, for all groups that the rank talks in.

    `parts` are sets of ranks of the world that nobody outside hears, and that hear nobody: whoever changes it
    changes it whole, from any thread.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: tuple[frozenset[int], ...] = ()
        self._near: frozenset[int] = frozenset()
        self._rate = 0.0
        self._free_s = {True: 0.0, False: 0.0}

    def slow_down(self, near: frozenset[int], bytes_per_s: float) -> None:
        """What comes from others than `near`, or goes to them, takes its time; each direction has the whole rate."""
        self._near, self._rate = near, bytes_per_s

    def parted(self, peers: Iterable[int]) -> bool:
        """Whether a partition lies between this rank and one of `peers`."""
        parts = self.parts
        return bool(parts) and any((self.rank in part) != (peer in part) for part in parts for peer in peers)

    def hold(self, peers: Sequence[int]) -> None:
        """Return when no partition lies between this rank and `peers`."""
        while self.parted(peers):
            time.sleep(LOOK_S)

    def due_s(self, peers: Iterable[int], num_bytes: float, *, sends: bool) -> float:
        """When a message that begins now is through, by `time.monotonic`; 0 where nothing slows it down."""
        if not self._rate or all(peer in self._near for peer in peers):
            return 0.0
        self._free_s[sends] = max(self._free_s[sends], time.monotonic()) + num_bytes / self._rate
        return self._free_s[sends]


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class _OtherwiseNow(Exception):
    """Ends a wait whose messages are to be chosen anew."""


class ImpairedRequest:
    """A message under way; where it is sent, its time on the link runs from its begin, else from when it has come."""

    def __init__(self, inner: Request, network: Impairment, peer: int, buffer: Array, *, sends: bool) -> None:
        self.inner, self.peer = inner, peer
        self._network, self._num_bytes, self._sends = network, buffer.nbytes, sends
        self._due_s = network.due_s((peer,), buffer.nbytes, sends=True) if sends else 0.0
        self.is_through = False
        """Whether its rank knows that it is done: nothing takes that back."""

    def wait(self) -> None:
        """Return when the buffer may be used again (send) or is filled (receive), and the network lets it be known."""
        self.inner.wait()
        if not self.is_through:
            self._network.hold((self.peer,))
        self.arrive()

    def test(self) -> bool:
        """Whether `wait` would return at once, but for what is left of its time on the link."""
        return self.inner.test() and (self.is_through or not self._network.parted((self.peer,)))

    def arrive(self) -> None:
        """Spend what is left of its time on the link."""
        if not self._sends and not self.is_through:
            self._due_s = self._network.due_s((self.peer,), self._num_bytes, sends=False)
        self.is_through = True
        _sleep_until(self._due_s)


class Impaired:
    """A Communicator over `network`; `members` are the world's ranks of the group. core/protocols.py says the rest.

    A collective of the library's own counts as what its best algorithm sends: an all-reduce twice its bytes but for
    one rank's share, a broadcast its bytes.
    """

    def __init__(self, inner: Communicator, network: Impairment, members: Sequence[int]) -> None:
        self._inner, self._network, self._members = inner, network, tuple(members)
        self.rank, self.size = inner.rank, inner.size
        self.host, self.library = inner.host, inner.library

    @property
    def address(self) -> str:
        """As the wrapped communicator has it."""
        return getattr(self._inner, "address", LOOPBACK)

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> ImpairedRequest:
        """Start sending."""
        request = self._inner.isend(buffer, destination, tag)
        return ImpairedRequest(request, self._network, self._members[destination], buffer, sends=True)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> ImpairedRequest:
        """Start receiving."""
        request = self._inner.irecv(buffer, source, tag)
        return ImpairedRequest(request, self._network, self._members[source], buffer, sends=False)

    def wait_any(self, requests: Sequence[Any], look: Callable[[], None] = lambda: None) -> int:
        """Index of the first of `requests` (its own) that is done and that no partition keeps back."""
        network = self._network
        while True:
            parts = network.parts
            reached = [
                index
                for index, request in enumerate(requests)
                if request.is_through or not network.parted((request.peer,))
            ]

            def check(parts: tuple[frozenset[int], ...] = parts) -> None:
                look()
                if network.parts != parts:
                    raise _OtherwiseNow

            try:
                if reached:
                    index = reached[self._inner.wait_any([requests[index].inner for index in reached], check)]
                    requests[index].arrive()
                    return index
                check()
                time.sleep(LOOK_S)
            except _OtherwiseNow:
                continue

    def barrier(self) -> None:
        """Return when every rank has called."""
        self._collective(0.0, self._inner.barrier)

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` with the root's bytes."""
        self._collective(buffer.nbytes, self._inner.broadcast, buffer, root)

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum by the library."""
        self._collective(2 * buffer.nbytes * (self.size - 1) / self.size, self._inner.allreduce, buffer, add)

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Every rank's `value`."""
        return self._collective(0.0, lambda: self._inner.allgather_json(value, patient=patient))

    def duplicate(self) -> Impaired:
        """The same group on the same network."""
        return Impaired(self._collective(0.0, self._inner.duplicate), self._network, self._members)

    def split(self, color: int, key: int = 0) -> Impaired:
        """A part of the group."""
        return self._of_part(self._collective(0.0, self._inner.split, color, key))

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Impaired:
        """The ranks that are left."""
        return self._of_part(self._inner.survivors(lost))

    def revoke(self) -> None:
        """Call every rank out of the group, whatever the network; RankError where the library cannot."""
        if not isinstance(self._inner, Revocable):
            raise RankError(f"{self.library} cannot revoke a group")
        self._inner.revoke()

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Memory of one node."""
        return self._inner.shared_array(shape, dtype)

    def remote_array(self, length: int, dtype: Any) -> ImpairedRemoteArray:
        """An array that others reach over the network."""
        return ImpairedRemoteArray(self._inner.remote_array(length, dtype), self._network, self._members)

    def failed(self) -> set[int]:
        """Ranks that the library knows to be gone."""
        return self._inner.failed()

    def free(self) -> None:
        """Give the group back."""
        self._inner.free()

    def abort(self, exit_code: int) -> None:
        """End every rank of the job now, whatever the network."""
        self._inner.abort(exit_code)

    def _of_part(self, part: Communicator) -> Impaired:
        return Impaired(part, self._network, part.allgather_json(self._network.rank))

    def _collective(self, num_bytes: float, call: Callable[..., Result], *args: Any) -> Result:
        """Call the library where all may take part; what a rank learns it learns when the network lets it."""
        self._network.hold(self._members)
        due_s = self._network.due_s(self._members, num_bytes, sends=True) if num_bytes else 0.0
        result = call(*args)
        self._network.hold(self._members)
        _sleep_until(due_s)
        return result


class ImpairedRemoteArray:
    """A remote array on the far side of the network."""

    def __init__(self, inner: RemoteArray, network: Impairment, members: Sequence[int]) -> None:
        self._inner, self._network, self._members = inner, network, members
        self.own = inner.own

    def read(self, owner: int, target: Array) -> None:
        """Read, when and as fast as the network lets it."""
        self._pass(owner, target.nbytes, sends=False)
        self._inner.read(owner, target)

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add, when and as fast as the network lets it."""
        self._pass(owner, values.nbytes, sends=True)
        self._inner.add(owner, values, start)

    def free(self) -> None:
        """Give the memory back."""
        self._inner.free()

    def _pass(self, owner: int, num_bytes: int, *, sends: bool) -> None:
        peers = (self._members[owner],)
        self._network.hold(peers)
        _sleep_until(self._network.due_s(peers, num_bytes, sends=sends))
