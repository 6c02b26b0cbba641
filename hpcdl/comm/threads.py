"""Ranks as threads of one process: for tests, and for a single rank that needs no MPI.

A message is copied once, when both sides have called, and not before. So code that touches a buffer too early, or waits
for a send without a receiver, fails here as it would between machines.
"""

from __future__ import annotations

import collections
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy

from hpcdl.comm.arithmetic import plain_add
from hpcdl.core.errors import HpcdlError, RankError

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Request


LOOK_S = 0.05


class World:
    """The shared state of the threads: messages with one side posted, and the ranks that have left."""

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
        """Note that `rank` has ended; keep its error, unless another rank's came first."""
        with self.changed:
            self.left.add(rank)
            if error is not None and self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def meet(self, request: ThreadRequest, key: tuple[Any, ...]) -> None:
        """Pair a request with the oldest one from the other side under `key`, or leave it to wait."""
        with self.changed:
            queue = self.waiting[key]
            if not queue or queue[0].sends == request.sends:
                queue.append(request)
                return
            partner = queue.popleft()
            source, target = (request, partner) if request.sends else (partner, request)
            if source.buffer.nbytes != target.buffer.nbytes:
                problem = f"{source.buffer.nbytes} bytes were sent where {target.buffer.nbytes} are expected"
                source.problem = target.problem = problem
            else:
                _bytes_of(target.buffer)[:] = _bytes_of(source.buffer)
            source.done = target.done = True
            self.changed.notify_all()

    def wait(self, requests: Sequence[ThreadRequest], look: Callable[[], None] = lambda: None) -> int:
        """Return the index of the first completed one of `requests`. Raises RankError if none can complete any more."""
        with self.changed:
            while True:
                look()
                # First what has arrived, then who has left: the last message of a rank that left still counts.
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
        if all(request.peer in self.left for request in requests):  # any one of the others may still complete
            peer = requests[0].peer
            raise RankError(f"rank {peer} left without the message that is waited for", rank=peer)


class ThreadRequest:
    """A message in progress between two threads."""

    def __init__(self, world: World, buffer: Array, peer: int, *, sends: bool) -> None:
        self._world = world
        self.buffer = buffer
        self.peer = peer
        self.sends = sends
        self.done = False
        self.problem = ""

    def wait(self) -> None:
        """Return when the message is complete."""
        self._world.wait([self])

    def test(self) -> bool:
        """Whether the message is complete, or never will be."""
        return self.done or self._world.failure is not None or self.peer in self._world.left


class ThreadRemoteArray:
    """The arrays of all threads of a group; each change is atomic."""

    def __init__(self, world: World, arrays: Sequence[Array], rank: int) -> None:
        self._world = world
        self._arrays = arrays
        self.own = arrays[rank]

    def read(self, owner: int, target: Array) -> None:
        """Copy from the owner's array."""
        with self._world.changed:
            target[...] = self._arrays[owner][: target.size]

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add to the owner's array in place."""
        with self._world.changed:
            self._arrays[owner][start : start + values.size] += values

    def free(self) -> None:
        """Do nothing: the memory is freed with its last reference."""


def _bytes_of(buffer: Array) -> Array:
    return buffer.reshape(-1).view(numpy.uint8)


Result = TypeVar("Result")


def alone() -> ThreadCommunicator:
    """Return the communicator of a job of one rank."""
    return ThreadCommunicator(World(1, ()), tuple(range(1)), 0, ("world",))


def run(num_ranks: int, function: Callable[[ThreadCommunicator], Result], hosts: Sequence[str] = ()) -> list[Result]:
    """Call `function` with a communicator on each of `num_ranks` threads; return the results in rank order.

    `hosts` names each rank's node; by default all share this one. If a rank raises, the others' waits raise RankError
    and its own exception is raised here, with a note that names the rank.
    """
    world = World(num_ranks, hosts)
    results: list[Any] = [None] * num_ranks

    def body(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(world, tuple(range(num_ranks)), rank, ("world",)))
            world.leave(rank, None)
        except BaseException as error:  # noqa: BLE001  on any error the others must be woken; raised again below
            world.leave(rank, error)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        rank, error = world.failure
        error.add_note(f"on rank {rank} of {num_ranks} threads")
        raise error
    return results


class ThreadCommunicator:
    """Communicator of one thread; `members` are the group's ranks in the world, `name` distinguishes groups."""

    library = "threads"

    def __init__(self, world: World, members: tuple[int, ...], rank: int, name: tuple[Any, ...]) -> None:
        self._world = world
        self._members = members
        self._name = name
        self._num_groups = 0
        self._num_arrays = 0
        self.rank = rank
        self.size = len(members)
        self.host = world.hosts[members[rank]]

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> ThreadRequest:
        """Start sending `buffer`."""
        return self._start(buffer, destination, (self.rank, destination, tag), sends=True)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> ThreadRequest:
        """Start receiving into `buffer`."""
        return self._start(buffer, source, (source, self.rank, tag), sends=False)

    def wait_any(self, requests: Sequence[Request], look: Callable[[], None] = lambda: None) -> int:
        """Return the index of the first completed request."""
        return self._world.wait([request for request in requests if isinstance(request, ThreadRequest)], look)

    def barrier(self) -> None:
        """Return when every rank has called."""
        self.allgather_json(None)

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` on every rank with the root's bytes, in place."""
        if self.rank != root:
            self.irecv(buffer, root, _COLLECTIVE).wait()
            return
        requests = [self.isend(buffer, rank, _COLLECTIVE) for rank in range(self.size) if rank != root]
        for request in requests:
            request.wait()

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum in rank order on rank 0, then broadcast."""
        if self.rank != 0:
            self.isend(buffer, 0, _COLLECTIVE).wait()
        else:
            incoming = numpy.empty_like(buffer)
            for rank in range(1, self.size):
                self.irecv(incoming, rank, _COLLECTIVE).wait()
                (add or plain_add)(buffer, incoming)
        self.broadcast(buffer)

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Return every rank's `value` in rank order, through JSON as between processes; waiting threads sleep."""
        texts = [json.dumps(value).encode()] * self.size
        for rank in range(self.size):
            length = numpy.array([len(texts[rank])])
            self.broadcast(length, rank)
            content = numpy.zeros(int(length[0]), numpy.uint8)
            if rank == self.rank:
                content[:] = numpy.frombuffer(texts[rank], numpy.uint8)
            self.broadcast(content, rank)
            texts[rank] = content.tobytes()
        return [json.loads(text) for text in texts]

    def duplicate(self) -> Communicator:
        """Return the same group with a message space of its own."""
        return self.split(0, self.rank)

    def split(self, color: int, key: int = 0) -> Communicator:
        """Return the group of the ranks with the same `color`."""
        answers = self.allgather_json([color, key])
        order = sorted((answer[1], rank) for rank, answer in enumerate(answers) if answer[0] == color)
        ranks = [rank for _, rank in order]
        self._num_groups += 1
        name = (*self._name, self._num_groups, color)
        return ThreadCommunicator(
            self._world, tuple(self._members[rank] for rank in ranks), ranks.index(self.rank), name
        )

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an array shared by all threads."""
        if len({self._world.hosts[member] for member in self._members}) > 1:
            raise RankError("the ranks of this group are on several nodes and share no memory", rank=self.rank)
        self._num_arrays += 1
        with self._world.changed:
            name = (self._name, self._num_arrays)
            array: Array = self._world.shared.setdefault(name, numpy.zeros(math.prod(shape), dtype))
        self.barrier()
        return array.reshape(shape)

    def remote_array(self, length: int, dtype: Any) -> ThreadRemoteArray:
        """Return arrays that the threads change under one lock."""
        self._num_arrays += 1
        name = (self._name, self._num_arrays)
        with self._world.changed:
            self._world.shared[*name, self.rank] = numpy.zeros(length, dtype)
        self.barrier()  # every thread's array must be there before the list is made
        return ThreadRemoteArray(self._world, [self._world.shared[*name, rank] for rank in range(self.size)], self.rank)

    def failed(self) -> set[int]:
        """Return no ranks: a thread that fails ends the job."""
        return set()

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Communicator:
        """Return the group of the others, without communication."""
        members = tuple(member for rank, member in enumerate(self._members) if rank not in lost)
        name = (*self._name, "without", *sorted(lost))
        return ThreadCommunicator(self._world, members, members.index(self._members[self.rank]), name)

    def free(self) -> None:
        """Drop this group's shared arrays."""
        with self._world.changed:
            for name in [name for name in self._world.shared if name[0] == self._name]:
                del self._world.shared[name]

    def abort(self, exit_code: int) -> NoReturn:
        """End this rank with an error that wakes the others."""
        raise HpcdlError(f"rank {self.rank} aborted the job with exit code {exit_code}")

    def _start(self, buffer: Array, peer: int, key: tuple[int, int, int], *, sends: bool) -> ThreadRequest:
        if not buffer.flags.c_contiguous:
            raise ValueError("a message's buffer must be C-contiguous; copy it first")
        request = ThreadRequest(self._world, buffer, self._members[peer], sends=sends)
        self._world.meet(request, (self._name, *key))
        return request


_COLLECTIVE = -1
"""Tag of the messages of barrier, broadcast, allreduce and allgather_json."""
