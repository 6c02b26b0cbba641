"""Observation of all messages of a run: what a rank waits for, what it has sent, and when, for every strategy.

`Observed` wraps any Communicator. Each operation leaves a heartbeat (what, with whom, since when), counts of messages
and bytes, and a span for a recorder. All groups derived from one `Observed` write into one `RankMonitor`. Its readers
are the rank's watchdog (supervision/watchdog.py), the record's `bytes_*` and trace/.

Counts cover what this rank has passed to the library and received from it. The traffic inside a library's own
collective cannot be counted: `Traffic.unknown` reports that, and the record then holds null.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from hpcdl.comm.gaps import IdleGaps
from hpcdl.core.errors import BrokenGroup, RankError
from hpcdl.core.protocols import Revocable

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, RemoteArray, Request

EXCHANGE, CONTROL = "exchange", "control"
"""The purpose of a message: gradients and weights of a step, or all other agreements between ranks."""
SENDING, RECEIVING = "sending", "receiving"
PARTS = ("input", "compute", "exchange", "update", "other")
"""The parts of a step, between its six borders."""
BUCKET = "bucket"
"""The span of gradients that are exchanged together."""
UPDATING = "updating"
"""The span in which a bucket's weights are updated, if they do not wait for the last bucket."""
IN_GAPS, OUTSIDE_GAPS = "background work in gaps", "background work outside gaps"
"""The spans of background work: while the rank waited, or during its step."""
FORWARD, BACKWARD, LAYER_UPDATE = "forward", "backward", "updating a layer"
"""Spans of one layer each."""
LOOPBACK = "127.0.0.1"

Result = TypeVar("Result")


class Recorder(Protocol):
    """Receives spans, in seconds of `time.monotonic`; a peer is a rank of the world, -1 for none or many."""

    @property
    def wants_layers(self) -> bool:
        """Whether a step that is traced now should record its layers."""

    def step(self, number: int) -> None:
        """Begin this step in the main thread; what follows is part of it."""

    def span(self, name: str, begin_s: float, end_s: float, *, num_bytes: int = 0, bucket: int = -1) -> None:
        """Record an action of this rank: a part of a step, the exchange of a bucket, an evaluation."""

    def parts(self, borders: Sequence[float], waited_s: float = 0.0) -> None:
        """Record a completed step. Unix times: began, had its batch, its gradients, exchanged, updated, ended.

        `waited_s`: waiting time within the exchange, if a strategy whose workers do not step together knows it.
        """

    def layers(self, spans: Iterable[tuple[str, str, float, float]]) -> None:
        """Record the phases (FORWARD, ...) of a step by layer, with begin and end in Unix times."""

    def exchanged(self, bucket: int, values: Array) -> None:
        """Receive a bucket of gradients as it came from its exchange, before any check."""

    def activity(self, name: str, begin_s: float, end_s: float) -> None:
        """Record an activity of the main thread, by its heartbeat."""

    def operation(self, purpose: str, name: str, peer: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        """Record one operation of a group that communicates for `purpose`."""

    def background(self, begin_s: float, end_s: float, *, in_gap: bool) -> None:
        """Record background work by a thread of its own: while the rank waited, or during its step."""

    def quiesced(self, group: Communicator, *, last: bool = False) -> None:
        """Note that every rank of `group`, which begins with rank 0 of the world, is between steps. Collective."""


class NoRecorder:
    """Discards everything it receives."""

    wants_layers = False

    def step(self, number: int) -> None:
        """Do nothing: recording is off."""

    def span(self, name: str, begin_s: float, end_s: float, *, num_bytes: int = 0, bucket: int = -1) -> None:
        """Do nothing: recording is off."""

    def parts(self, borders: Sequence[float], waited_s: float = 0.0) -> None:
        """Do nothing: recording is off."""

    def layers(self, spans: Iterable[tuple[str, str, float, float]]) -> None:
        """Do nothing: recording is off."""

    def exchanged(self, bucket: int, values: Array) -> None:
        """Do nothing: recording is off."""

    def activity(self, name: str, begin_s: float, end_s: float) -> None:
        """Do nothing: recording is off."""

    def operation(self, purpose: str, name: str, peer: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        """Do nothing: recording is off."""

    def background(self, begin_s: float, end_s: float, *, in_gap: bool) -> None:
        """Do nothing: recording is off."""

    def quiesced(self, group: Communicator, *, last: bool = False) -> None:
        """Do nothing: recording is off."""


NOTHING = NoRecorder()
"""Operations compare with this object, because a call that does nothing costs a tenth of an operation."""


@dataclass(kw_only=True)
class Traffic:
    """Messages and bytes of one rank. `unknown` counts library collectives, whose messages are not visible.

    `rounds` is the length of the chain of dependent messages, with one port per direction. A message is sent in the
    round after all that its rank has sent and received before. `round_bytes` are the bytes of that chain. For the
    busiest rank they give the latency and bandwidth cost of an exchange, whatever its algorithm.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    rounds: int = 0
    round_bytes: int = 0
    unknown: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(**{name: value - getattr(other, name) for name, value in vars(self).items()})

    def per_step(self, num_steps: int, *, countable: bool = True) -> dict[str, Any]:
        """Return means under the field names of a RankRecord; None if a part is unknown or not `countable`."""
        is_known = countable and not self.unknown
        names = ("bytes_sent", "bytes_received", "rounds", "round_bytes")
        return {f"{name}_per_step": getattr(self, name) / max(num_steps, 1) if is_known else None for name in names}


class Wait(NamedTuple):
    """A message or collective in progress: `peers` are the world ranks that this rank waits for.

    `patient`: this rank has nothing else to do (a server between steps); only a dead or stuck peer is a reason to stop.
    `hidden`: inside another library's engine, where computing and waiting cannot be distinguished.
    """

    operation: str
    peers: tuple[int, ...]
    since_s: float
    patient: bool = False
    hidden: bool = False


class ScriptSteps:
    """The steps of a script since its run began, over all its fits and loops.

    A fit and `hpcdl.State.commit` report the end of a step. In a loop without reports, or with rare commits, a step
    ends when an optimizer or tape exchanges a second time. Exchanges of several optimizers or tapes are one step.
    """

    def __init__(self) -> None:
        self.done = 0
        self.counted = False
        """Whether the end of steps is reported, as during a fit."""
        self._known = 0
        self._exchanged: set[str] = set()

    def over(self, num: int = 1) -> None:
        """Count `num` completed steps, or more if the exchanges since the last call indicate more."""
        exchanged = self.done - self._known + bool(self._exchanged)
        self.done = self._known = self._known + max(num, exchanged)
        self._exchanged.clear()

    def reached(self, step: int) -> None:
        """Set the position of a resumed run."""
        self.done = self._known = max(self.done, step)

    def exchange(self, name: str) -> None:
        """Note an exchange of the optimizer or tape `name`."""
        if self.counted:
            return
        if name in self._exchanged:
            self.done += 1
            self._exchanged.clear()
        self._exchanged.add(name)


class RankMonitor:
    """The current and past activity of one rank, over all its groups. `rank` is its number in the world."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self.role = "rank"
        self.recorder: Recorder = NOTHING
        self.gaps = IdleGaps()
        self.patient = False
        self.cut_off = False
        """Whether an injected partition isolates this rank: then it must not respond either."""
        self.lost: frozenset[int] = frozenset()
        """Ranks of the world that the run continues without, as reported by the watchdog."""
        self.activity: tuple[str, int | None, float] = ("starting", None, time.monotonic())
        """The rank's activity, its step, and the start of the activity (`time.monotonic`)."""
        self.spent: tuple[float, ...] = (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Steps so far, and the seconds of each of PARTS in them."""
        self.own_work = self.spent
        """The same for steps in which the rank took part and had no other work: the basis for comparing ranks."""
        self.at_other_work: Callable[[], bool] = lambda: False
        """Whether the rank has work besides its step now: a checkpoint to write."""
        self.evicted = ""
        """Why the run continues without this rank, which is alive; its main thread leaves when it sees that."""
        self.num_updates = 0
        """Number of gradient exchanges of a script."""
        self.script_steps = ScriptSteps()
        self._at_it_since_s = self.activity[2]
        self._lanes: list[Lane] = []
        self._past: dict[str, Traffic] = {}

    @property
    def step(self) -> int | None:
        """The current step; for a script without counted steps, the number of the last gradient exchange."""
        updates = self.activity[1]
        return self.num_updates or None if updates is None else updates

    @property
    def step_of_run(self) -> int | None:
        """Steps since the run began, over all epochs and fits: injected faults are scheduled by it."""
        return self.script_steps.done if self.role == "script" else self.step

    @property
    def leads(self) -> bool:
        """Whether this is the first of the remaining ranks, with the duties of rank 0."""
        return self.rank == self.first_left

    @property
    def first_left(self) -> int:
        """The first of the remaining ranks."""
        return min(set(range(self.size)) - self.lost, default=0)

    def doing(self, what: str, step: int | None = None) -> None:
        """Note that the main thread now does `what`; `step` stays the same if it is not given."""
        now_s = time.monotonic()
        before, known_step, _ = self.activity
        if what != before:
            self.recorder.activity(before, self._at_it_since_s, now_s)
            self._at_it_since_s = now_s
        if step is not None:
            self.recorder.step(step)
        # One tuple: the watchdog never reads half of a change.
        self.activity = (what, known_step if step is None else step, now_s)

    def step_over(self, borders: Sequence[float], waited_s: float = 0.0, *, follows: bool = False) -> None:
        """Record a completed step; see `Recorder.parts`. `follows`: the others took it without this rank."""
        self.recorder.parts(borders, waited_s)
        added = (1, *(after - before for before, after in itertools.pairwise(borders)))
        self.spent = tuple(map(operator.add, self.spent, added))
        if not follows and not self.at_other_work():
            self.own_work = tuple(map(operator.add, self.own_work, added))

    def traffic(self, purpose: str = EXCHANGE) -> Traffic:
        """Return the sum over all groups of that purpose since the start."""
        total = self._past.get(purpose, Traffic())
        for lane in tuple(self._lanes):  # a copy: other threads add lanes meanwhile
            if lane.purpose == purpose:
                total += lane.traffic()
        return total

    def waits(self) -> list[Wait]:
        """Return the operations in progress, the oldest first."""
        all_waits = [wait for lane in tuple(self._lanes) for wait in lane.waits()]
        return sorted((wait._replace(patient=self.patient) for wait in all_waits), key=lambda wait: wait.since_s)

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Inside, waiting is this rank's work: others may take any time as long as they are alive and at work."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    def moved_s(self) -> float:
        """Return when an operation or activity last began or ended on this rank, by `time.monotonic`."""
        return max([self.activity[2], *(lane.moved_s for lane in tuple(self._lanes))])

    @contextlib.contextmanager
    def waiting_for(self, operation: str, peers: Iterable[int] = (), *, hidden: bool = False) -> Iterator[None]:
        """For waits without a message: inside, this rank waits for `peers` (ranks of the world; none: all others)."""
        awaited = tuple(peers) or tuple(rank for rank in range(self.size) if rank != self.rank)
        lane = self.lane(CONTROL, awaited)
        lane.hidden = hidden
        lane.enter(operation, 0, awaited)
        try:
            yield
        finally:
            lane.leave()
            self.forget(lane)
            self.doing(self.activity[0])  # the end of the wait is progress, and the lane that noted it is gone

    def lane(self, purpose: str, members: Sequence[int]) -> Lane:
        """Return a new lane for one group's heartbeat and counts."""
        lane = Lane(self, purpose, tuple(members))
        self._lanes.append(lane)
        return lane

    def forget(self, lane: Lane) -> None:
        """Remove a freed group's lane; keep its counts."""
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._past[lane.purpose] = self._past.get(lane.purpose, Traffic()) + lane.traffic()

    def abandon(self, kept: Lane) -> None:
        """Close revoked groups: wait until the library has released each message's buffer; forget all lanes but `kept`.

        Dropping a request instead sometimes ends the whole job, when its message arrives later.
        """
        for lane in tuple(self._lanes):
            for request in tuple(lane.pending):
                with contextlib.suppress(RankError):
                    request.inner.wait()
            lane.pending.clear()
            if lane is not kept:
                self.forget(lane)


class Lane:
    """One group's heartbeat and counts; one thread at a time writes, the watchdog's thread reads.

    `members` are the world ranks of the group, in the group's order. Each operation pays for its notes here, so texts
    and objects are built from them only by the reader.
    """

    __slots__ = (
        "_num_bytes",
        "_operation",
        "_peers",
        "_since_s",
        "bytes_received",
        "bytes_sent",
        "hidden",
        "members",
        "messages_received",
        "messages_sent",
        "monitor",
        "moved_s",
        "pending",
        "purpose",
        "received_in",
        "sent_in",
        "unknown",
    )

    def __init__(self, monitor: RankMonitor, purpose: str, members: tuple[int, ...]) -> None:
        self.monitor, self.purpose, self.members = monitor, purpose, members
        self.messages_sent = self.bytes_sent = self.messages_received = self.bytes_received = self.unknown = 0
        self.hidden = False
        self.sent_in, self.received_in = (0, 0), (0, 0)
        """The last round of each direction, and the bytes up to it."""
        self.pending: dict[ObservedRequest, None] = {}
        self._operation: str | None = None
        self._peers: tuple[int, ...] = ()
        self._num_bytes = 0
        self._since_s = self.moved_s = time.monotonic()

    def sends(self, num_bytes: int) -> None:
        """Count a message being sent."""
        self.messages_sent += 1
        self.bytes_sent += num_bytes
        # A message leaves after all that the rank has sent and received before it.
        rounds, size = max(self.sent_in[0], self.received_in[0]), max(self.sent_in[1], self.received_in[1])
        self.sent_in = (rounds + 1, size + num_bytes)

    def receives(self, num_bytes: int) -> None:
        """Count a received message."""
        self.messages_received += 1
        self.bytes_received += num_bytes
        self.received_in = (self.received_in[0] + 1, self.received_in[1] + num_bytes)

    def traffic(self) -> Traffic:
        """Return the counts so far."""
        return Traffic(
            rounds=max(self.sent_in[0], self.received_in[0]),
            round_bytes=max(self.sent_in[1], self.received_in[1]),
            messages_sent=self.messages_sent,
            bytes_sent=self.bytes_sent,
            messages_received=self.messages_received,
            bytes_received=self.bytes_received,
            unknown=self.unknown,
        )

    def enter(self, operation: str, num_bytes: int, peers: tuple[int, ...]) -> None:
        """Begin a blocking operation that waits for `peers`, if there are any."""
        self._num_bytes, self._peers = num_bytes, peers
        self._since_s = time.monotonic()
        self._operation = operation  # last: the watchdog's thread uses the others only if this is set

    def leave(self, peer: int = -1) -> None:
        """End the operation, whether or not it succeeded."""
        self.moved_s = now_s = time.monotonic()
        operation, self._operation = self._operation, None
        recorder = self.monitor.recorder
        if recorder is not NOTHING and operation is not None:
            recorder.operation(self.purpose, operation, peer, self._num_bytes, self._since_s, now_s)

    def waits(self) -> list[Wait]:
        """Return the collective in progress, and the messages in progress."""
        all_waits = [Wait(message.operation, (message.peer,), message.since_s) for message in tuple(self.pending)]
        # In this order: `enter` sets what belongs to an operation before the operation itself.
        operation, peers, since_s = self._operation, self._peers, self._since_s
        if operation is not None and peers:
            all_waits.append(Wait(operation, peers, since_s, hidden=self.hidden))
        return all_waits


class ObservedRequest:
    """A message in progress, visible to the watchdog until it is complete."""

    __slots__ = ("_buffer", "_index", "_lane", "inner", "since_s")
    operation = SENDING

    def __init__(self, inner: Request, lane: Lane, buffer: Array, index: int) -> None:
        self.inner, self._lane, self._buffer, self._index = inner, lane, buffer, index
        self.since_s = time.monotonic()
        lane.pending[self] = None

    @property
    def peer(self) -> int:
        """The other side's rank in the world."""
        return self._lane.members[self._index]

    def wait(self) -> None:
        """Return when the buffer may be used again (send) or is filled (receive)."""
        gaps = self._lane.monitor.gaps
        if gaps.wanted:
            gaps.wait_until(self.inner.test)  # true also of a failed message: only `wait` raises its error
        self.inner.wait()
        self.through()

    def test(self) -> bool:
        """Whether the message is complete."""
        return self.inner.test()

    def through(self) -> None:
        """Count a received message (a sent one is counted when sent); only once, however often it is waited for."""
        lane = self._lane
        if self not in lane.pending:
            return
        del lane.pending[self]
        lane.moved_s = time.monotonic()
        if self.operation is RECEIVING:
            lane.receives(self._buffer.nbytes)
        recorder = lane.monitor.recorder
        if recorder is not NOTHING:
            num_bytes = self._buffer.nbytes
            recorder.operation(lane.purpose, self.operation, self.peer, num_bytes, self.since_s, lane.moved_s)


class ObservedReceive(ObservedRequest):
    """A message being received."""

    __slots__ = ()
    operation = RECEIVING


class Observed:
    """A Communicator that records every operation; core/protocols.py describes each."""

    def __init__(self, inner: Communicator, monitor: RankMonitor, lane: Lane) -> None:
        self._inner, self.monitor, self.lane = inner, monitor, lane
        self.rank, self.size = inner.rank, inner.size
        self.host, self.library = inner.host, inner.library
        self._others = (*lane.members[: self.rank], *lane.members[self.rank + 1 :])

    @property
    def address(self) -> str:
        """The rank's own address on the job's network, if the wrapped communicator has one."""
        return getattr(self._inner, "address", LOOPBACK)

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> ObservedRequest:
        """Count the message and start sending it."""
        lane = self.lane
        request = self._inner.isend(buffer, destination, tag)
        lane.sends(buffer.nbytes)
        return ObservedRequest(request, lane, buffer, destination)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> ObservedRequest:
        """Start receiving; counted on completion."""
        return ObservedReceive(self._inner.irecv(buffer, source, tag), self.lane, buffer, source)

    def wait_any(self, requests: Sequence[Any], look: Callable[[], None] = lambda: None) -> int:
        """Return the index of the first completed one of `requests`. Raises RankError if a request's rank was lost."""

        gaps, began_s = self.monitor.gaps, time.monotonic()

        def check() -> None:
            look()
            if gaps.wanted:
                gaps.enter(began_s)
            for request in requests:
                if request.peer in self.monitor.lost:
                    raise RankError(f"rank {request.peer} was left behind", rank=request.peer)

        try:
            index = self._inner.wait_any([request.inner for request in requests], check)
        finally:
            gaps.leave()
        requests[index].through()
        return index

    def barrier(self) -> None:
        """Return when every rank has called."""
        lane = self.lane
        lane.enter("a barrier", 0, self._others)
        try:
            self._inner.barrier()
        finally:
            lane.leave()

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` with the root's bytes."""
        self._collective("a broadcast", buffer.nbytes, self._inner.broadcast, buffer, root)

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum `buffer` over the ranks by the library, whose traffic cannot be counted."""
        lane = self.lane
        if self._others:
            lane.unknown += 1
        lane.enter("an all-reduce", buffer.nbytes, self._others)
        try:
            self._inner.allreduce(buffer, add)
        finally:
            lane.leave()

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Return every rank's `value`; such agreements are not counted as traffic."""
        gather = self._inner.allgather_json
        return self._collective(
            "an agreement", 0, functools.partial(gather, patient=True) if patient else gather, value
        )

    def duplicate(self) -> Observed:
        """Return the same group, with a heartbeat of its own."""
        return self._like(self._collective("a duplication", 0, self._inner.duplicate), self.lane.members)

    def split(self, color: int, key: int = 0) -> Observed:
        """Return a part of the group, with a heartbeat of its own."""
        return self._of_part(self._collective("a split", 0, self._inner.split, color, key))

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Observed:
        """Return the group of the ranks that neither the library nor the watchdog reports as lost."""
        gone = self.failed() | lost
        return self._of_part(self._collective("a split", 0, self._inner.survivors, gone))

    def revoke(self) -> None:
        """Interrupt every rank in this group and all groups derived from it, and end all their operations.

        Raises RankError if the library cannot.
        """
        if not isinstance(self._inner, Revocable):
            raise RankError(f"{self.library} cannot revoke a group")
        self._inner.revoke()
        self.monitor.abandon(self.lane)

    def over(self, other: Callable[[Communicator], Communicator]) -> Observed:
        """Return the same group and heartbeat, with the wrapped communicator replaced by `other` of it."""
        return Observed(other(self._inner), self.monitor, self.lane)

    def for_purpose(self, purpose: str) -> Observed:
        """Return the same group and message space; traffic through it counts for `purpose`."""
        return Observed(self._inner, self.monitor, self.monitor.lane(purpose, self.lane.members))

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return shared memory; nothing is sent or counted."""
        return self._collective("setting up shared memory", 0, self._inner.shared_array, shape, dtype)

    def remote_array(self, length: int, dtype: Any) -> ObservedRemoteArray:
        """Return an array whose reads and additions are counted by the rank that makes them."""
        make = self._inner.remote_array
        return ObservedRemoteArray(self._collective("setting up remote memory", 0, make, length, dtype), self)

    def failed(self) -> set[int]:
        """Return the ranks of the group that the library or the watchdog knows to be gone."""
        lost = self.monitor.lost
        return self._inner.failed() | {index for index, rank in enumerate(self.lane.members) if rank in lost}

    def dead(self) -> set[int]:
        """Return the ranks of the world, members of the group, that the library itself knows to be gone."""
        return {self.lane.members[index] for index in self._inner.failed()}

    def check_alive(self) -> None:
        """Raise BrokenGroup if a rank of the group is dead: for a rank that works without communication."""
        if dead := sorted(self.dead() - self.monitor.lost):
            raise BrokenGroup(f"rank {dead[0]} is dead", rank=dead[0])

    def free(self) -> None:
        """Free the group; its counts stay."""
        self.monitor.forget(self.lane)
        self._inner.free()

    def abort(self, exit_code: int) -> None:
        """End every rank of the job now."""
        self._inner.abort(exit_code)

    def _of_part(self, part: Communicator) -> Observed:
        # The library numbers a part's ranks from 0; the watchdog and its alarm files name ranks of the world.
        return self._like(part, part.allgather_json(self.monitor.rank))

    def _like(self, inner: Communicator, members: Sequence[int]) -> Observed:
        return Observed(inner, self.monitor, self.monitor.lane(self.lane.purpose, members))

    def _collective(self, operation: str, num_bytes: int, call: Callable[..., Result], *args: Any) -> Result:
        """Call the library, under a heartbeat that names all other ranks. The bytes it sends are unknown."""
        lane = self.lane
        if self._others and num_bytes:
            lane.unknown += 1
        lane.enter(operation, num_bytes, self._others)
        try:
            return call(*args)
        finally:
            lane.leave()


class ObservedRemoteArray:
    """A remote array whose traffic is counted, one message for each call to another rank."""

    def __init__(self, inner: RemoteArray, group: Observed) -> None:
        self._inner, self._group = inner, group
        self.own = inner.own

    def read(self, owner: int, target: Array) -> None:
        """Read, and count the bytes received."""
        lane = self._group.lane
        peer = lane.members[owner]
        lane.enter("reading memory", target.nbytes, (peer,))
        try:
            self._inner.read(owner, target)
        finally:
            lane.leave(peer)
        if owner != self._group.rank:
            lane.receives(target.nbytes)

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add, and count the bytes sent."""
        lane = self._group.lane
        peer = lane.members[owner]
        if owner != self._group.rank:
            lane.sends(values.nbytes)
        lane.enter("adding to memory", values.nbytes, (peer,))
        try:
            self._inner.add(owner, values, start)
        finally:
            lane.leave(peer)

    def free(self) -> None:
        """Free the memory; collective."""
        self._group._collective("giving remote memory back", 0, self._inner.free)


def observe(communicator: Communicator, monitor: RankMonitor | None = None) -> Observed:
    """Return `communicator`, the world or one in its place, under observation; unchanged if it already is."""
    if isinstance(communicator, Observed):
        return communicator
    rank_monitor = monitor or RankMonitor(communicator.rank, communicator.size, communicator.host)
    return Observed(communicator, rank_monitor, rank_monitor.lane(CONTROL, range(communicator.size)))


def waiting_for(communicator: Communicator, operation: str, peers: Iterable[int]) -> AbstractContextManager[None]:
    """Inside, this rank waits for `peers` of the group without a message: for a value in shared memory, for example."""
    if not isinstance(communicator, Observed):
        return contextlib.nullcontext()
    members = communicator.lane.members
    return communicator.monitor.waiting_for(operation, [members[peer] for peer in peers])


def for_control(communicator: Communicator) -> Communicator:
    """Return the same group for messages outside a step's exchange: measurements, set-up."""
    return communicator.for_purpose(CONTROL) if isinstance(communicator, Observed) else communicator


def for_exchange(communicator: Communicator) -> Communicator:
    """Return the same group for the exchanges of a step."""
    return communicator.for_purpose(EXCHANGE) if isinstance(communicator, Observed) else communicator


def recorder_of(communicator: Communicator) -> Recorder:
    """Return the recorder of this rank; for a communicator without observation, one that discards everything."""
    return communicator.monitor.recorder if isinstance(communicator, Observed) else NOTHING
