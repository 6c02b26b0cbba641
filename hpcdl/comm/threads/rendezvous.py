"""Where the threads of comm/threads meet: messages that have come from one side only, and who has left."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import RankError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


LOOK_S = 0.05


class World:
    """What the threads share: messages that have come from one side only, and who has left."""

    def __init__(self, num_ranks: int, hosts: Sequence[str]) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[tuple[Any, ...], collections.deque[ThreadRequest]] = collections.defaultdict(
            collections.deque
        )
        self.shared: dict[tuple[Any, ...], Any] = {}
        self.left: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None
        self.hosts = tuple(hosts) or (os.uname().nodename,) * num_ranks

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Rank `rank` is done; with an error, unless another rank's came first."""
        with self.changed:
            self.left.add(rank)
            if error is not None and self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def meet(self, mine: ThreadRequest, key: tuple[Any, ...]) -> None:
        """Pair a request with the oldest one from the other side under `key`, or leave it to wait."""
        with self.changed:
            queue = self.waiting[key]
            if not queue or queue[0].sends == mine.sends:
                queue.append(mine)
                return
            other = queue.popleft()
            source, target = (mine, other) if mine.sends else (other, mine)
            if source.buffer.nbytes != target.buffer.nbytes:
                problem = f"{source.buffer.nbytes} bytes were sent where {target.buffer.nbytes} are expected"
                source.problem = target.problem = problem
            else:
                _bytes_of(target.buffer)[:] = _bytes_of(source.buffer)
            source.done = target.done = True
            self.changed.notify_all()

    def wait(self, requests: Sequence[ThreadRequest], look: Callable[[], None] = lambda: None) -> int:
        """Index of the first of `requests` that is done; RankError where that can no longer happen."""
        with self.changed:
            while True:
                look()
                for index, request in enumerate(requests):
                    if request.done:
                        if request.problem:
                            raise RankError(request.problem, rank=request.peer)
                        return index
                self._check_alive(requests)
                self.changed.wait(LOOK_S)

    def _check_alive(self, requests: Sequence[ThreadRequest]) -> None:
        if self.failure is not None:
            rank, error = self.failure
            raise RankError(f"rank {rank} failed: {error}", rank=rank, host=self.hosts[rank]) from error
        if all(request.peer in self.left for request in requests):
            peer = requests[0].peer
            raise RankError(f"rank {peer} left without the message that is waited for", rank=peer)


class ThreadRequest:
    """A message under way between two threads."""

    def __init__(self, world: World, buffer: Array, peer: int, *, sends: bool) -> None:
        self._world = world
        self.buffer = buffer
        self.peer = peer
        self.sends = sends
        self.done = False
        self.problem = ""

    def wait(self) -> None:
        """Return when the message is through."""
        self._world.wait([self])

    def test(self) -> bool:
        """Whether it is through, or never will be."""
        return self.done or self._world.failure is not None or self.peer in self._world.left


class ThreadRemoteArray:
    """The arrays of all threads of a group, each changed whole."""

    def __init__(self, world: World, arrays: Sequence[Array], rank: int) -> None:
        self._world = world
        self._arrays = arrays
        self.own = arrays[rank]

    def read(self, owner: int, target: Array) -> None:
        """Copy."""
        with self._world.changed:
            target[...] = self._arrays[owner][: target.size]

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add in place."""
        with self._world.changed:
            self._arrays[owner][start : start + values.size] += values

    def free(self) -> None:
        """The last reference does it."""


def _bytes_of(buffer: Array) -> Array:
    return buffer.reshape(-1).view(numpy.uint8)
