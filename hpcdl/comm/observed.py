"""Every message of a run goes through here: what a rank waits for, what it has sent, and when, whatever the strategy.

`Observed` wraps any Communicator. Each operation leaves a heartbeat (what, with whom, since when), counts of messages
and bytes, and a span for a recorder. All groups that come from one `Observed` write into one `RankMonitor`, which is
what the watch of a rank (supervision/watchdog.py), the record's `bytes_*` and trace/ read.

Counts are of what this rank has handed to the library and has got from it. What the library moves inside a collective
of its own nobody can count: `Traffic.unknown` says so, and the record then holds null.
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
"""What a message is for: gradients and weights of a step, or everything that ranks agree on beside that."""
SENDING, RECEIVING = "sending", "receiving"
PARTS = ("input", "compute", "exchange", "update", "other")
"""What lies between the six borders of a step."""
BUCKET = "bucket"
"""The span of gradients that are exchanged together."""
UPDATING = "updating"
"""The span in which a bucket's weights move, where they do not wait for the last bucket."""
IN_GAPS, OUTSIDE_GAPS = "background work in gaps", "background work outside gaps"
"""The spans of work that had time: while the rank waited, or beside its step."""
FORWARD, BACKWARD, LAYER_UPDATE = "forward", "backward", "updating a layer"
"""Spans of one layer each."""
LOOPBACK = "127.0.0.1"

Result = TypeVar("Result")


class Recorder(Protocol):
    """Takes spans, in seconds of `time.monotonic`; a peer is a rank of the world, -1 for none or many."""

    @property
    def wants_layers(self) -> bool:
        """Whether a step that is traced now shall tell of its layers."""

    def step(self, number: int) -> None:
        """The main thread begins this step; what follows is part of it."""

    def span(self, name: str, begin_s: float, end_s: float, *, num_bytes: int = 0, bucket: int = -1) -> None:
        """Something that this rank has done: a part of a step, the exchange of a bucket, an evaluation."""

    def parts(self, borders: Sequence[float], waited_s: float = 0.0) -> None:
        """The step that is over. Unix times: began, had its batch, its gradients, exchanged, updated, ended.

        `waited_s`: what of the exchange was waiting, where a strategy whose workers do not step together can tell.
        """

    def layers(self, spans: Iterable[tuple[str, str, float, float]]) -> None:
        """What (FORWARD, ...) a step has done in which layer, from when to when, in Unix times."""

    def exchanged(self, bucket: int, values: Array) -> None:
        """A bucket of gradients as it came back from its exchange, before anybody looks at it."""

    def activity(self, name: str, begin_s: float, end_s: float) -> None:
        """What the main thread was at, by its heartbeat."""

    def operation(self, purpose: str, name: str, peer: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        """One operation of a group that talks for `purpose`."""

    def background(self, begin_s: float, end_s: float, *, in_gap: bool) -> None:
        """Work that had time, done by a thread of its own: while the rank waited, or beside its step."""

    def quiesced(self, group: Communicator, *, last: bool = False) -> None:
        """Every rank of `group`, which begins with rank 0 of the world, is here between steps. Collective."""


class NoRecorder:
    """Drops what it gets."""

    wants_layers = False

    def step(self, number: int) -> None:
        """Off."""

    def span(self, name: str, begin_s: float, end_s: float, *, num_bytes: int = 0, bucket: int = -1) -> None:
        """Off."""

    def parts(self, borders: Sequence[float], waited_s: float = 0.0) -> None:
        """Off."""

    def layers(self, spans: Iterable[tuple[str, str, float, float]]) -> None:
        """Off."""

    def exchanged(self, bucket: int, values: Array) -> None:
        """Off."""

    def activity(self, name: str, begin_s: float, end_s: float) -> None:
        """Off."""

    def operation(self, purpose: str, name: str, peer: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        """Off."""

    def background(self, begin_s: float, end_s: float, *, in_gap: bool) -> None:
        """Off."""

    def quiesced(self, group: Communicator, *, last: bool = False) -> None:
        """Off."""


NOTHING = NoRecorder()
"""Operations look whether it is this one: a call that does nothing costs a tenth of an operation."""


@dataclass(kw_only=True)
class Traffic:
    """Messages and bytes of one rank. `unknown` counts collectives of the library whose messages nobody sees.

    `rounds` are messages that had to follow one another, with a port for each direction: a message leaves in the round
    after whatever its rank had sent and received before. `round_bytes` are the bytes of those. Of the busiest rank they
    are what latency and bandwidth cost an exchange, whatever its algorithm.
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
        """Means by the names that a RankRecord has for them; None where a part is unknown or not `countable`."""
        known = countable and not self.unknown
        names = ("bytes_sent", "bytes_received", "rounds", "round_bytes")
        return {f"{name}_per_step": getattr(self, name) / max(num_steps, 1) if known else None for name in names}


class Wait(NamedTuple):
    """A message or collective that has not come: `peers` are the world's ranks that it may come from.

    `patient`: this rank has nothing else to do (a server between steps); only a peer that is dead or stuck is a reason
    to stop. `hidden`: inside another library's engine, where computing and waiting cannot be told apart.
    """

    operation: str
    peers: tuple[int, ...]
    since_s: float
    patient: bool = False
    hidden: bool = False


class ScriptSteps:
    """The steps of a script since its run began, over all its fits and loops.

    A fit and `hpcdl.State.commit` say when a step is over. In a loop that says nothing, or commits only now and then,
    one is over when an optimizer or tape that has exchanged in it exchanges again; several of them are one step.
    """

    def __init__(self) -> None:
        self.done = 0
        self.counted = False
        """Whether somebody says when a step is over, as a fit does while it lasts."""
        self._known = 0
        self._exchanged: set[str] = set()

    def over(self, num: int = 1) -> None:
        """So many steps are over, or as many as exchanges since the last time have told where those are more."""
        exchanged = self.done - self._known + bool(self._exchanged)
        self.done = self._known = self._known + max(num, exchanged)
        self._exchanged.clear()

    def reached(self, step: int) -> None:
        """A run that is resumed stands there."""
        self.done = self._known = max(self.done, step)

    def exchange(self, name: str) -> None:
        """The optimizer or tape of that name has exchanged."""
        if self.counted:
            return
        if name in self._exchanged:
            self.done += 1
            self._exchanged.clear()
        self._exchanged.add(name)


class RankMonitor:
    """What one rank does and has done, over all groups that it talks in. `rank` is its number in the world."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self.role = "rank"
        self.recorder: Recorder = NOTHING
        self.gaps = IdleGaps()
        self.patient = False
        self.cut_off = False
        """Whether a partition made on purpose lies round this rank: then it is not responding either."""
        self.lost: frozenset[int] = frozenset()
        """Ranks of the world that the run goes on without, by the watch's word."""
        self.activity: tuple[str, int | None, float] = ("starting", None, time.monotonic())
        """What the rank does, in which step, and since when (`time.monotonic`)."""
        self.spent: tuple[float, ...] = (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Steps so far, and the seconds of each of PARTS in them."""
        self.own_work = self.spent
        """The same of those steps in which it had nothing else to do and took part: what ranks are compared by."""
        self.at_other_work: Callable[[], bool] = lambda: False
        """Whether the rank has something to do beside its step now: a checkpoint to write."""
        self.evicted = ""
        """Why the run goes on without this rank, which is alive; its main thread leaves when it sees that."""
        self.num_updates = 0
        """Times that a script has exchanged gradients."""
        self.script_steps = ScriptSteps()
        self._at_it_since_s = self.activity[2]
        self._lanes: list[Lane] = []
        self._past: dict[str, Traffic] = {}

    @property
    def step(self) -> int | None:
        """The step that it is in; of a script whose steps nobody counts the last one that has exchanged gradients."""
        updates = self.activity[1]
        return self.num_updates or None if updates is None else updates

    @property
    def step_of_run(self) -> int | None:
        """Steps since the run began, whatever epoch or fit they are in: what faults on purpose go by."""
        return self.script_steps.done if self.role == "script" else self.step

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that the run goes on with: what rank 0 does at the start."""
        return self.rank == self.first_left

    @property
    def first_left(self) -> int:
        """The first of the ranks that the run goes on with."""
        return min(set(range(self.size)) - self.lost, default=0)

    def doing(self, what: str, step: int | None = None) -> None:
        """The rank's main thread has moved on to `what`; `step` stays as it was where it is not given."""
        now_s = time.monotonic()
        before, known_step, _ = self.activity
        if what != before:
            self.recorder.activity(before, self._at_it_since_s, now_s)
            self._at_it_since_s = now_s
        if step is not None:
            self.recorder.step(step)
        self.activity = (what, known_step if step is None else step, now_s)

    def step_over(self, borders: Sequence[float], waited_s: float = 0.0, *, follows: bool = False) -> None:
        """A step is over; see `Recorder.parts`. `follows`: the others have taken it without this rank."""
        self.recorder.parts(borders, waited_s)
        added = (1, *(after - before for before, after in itertools.pairwise(borders)))
        self.spent = tuple(map(operator.add, self.spent, added))
        if not follows and not self.at_other_work():
            self.own_work = tuple(map(operator.add, self.own_work, added))

    def traffic(self, purpose: str = EXCHANGE) -> Traffic:
        """The sum over all groups of that purpose since the start."""
        total = self._past.get(purpose, Traffic())
        for lane in tuple(self._lanes):
            if lane.purpose == purpose:
                total += lane.traffic()
        return total

    def waits(self) -> list[Wait]:
        """What has been asked for and has not come yet, the oldest first."""
        found = [wait for lane in tuple(self._lanes) for wait in lane.waits()]
        return sorted((wait._replace(patient=self.patient) for wait in found), key=lambda wait: wait.since_s)

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Inside, to wait is this rank's work: others may take as long as they are alive and at work."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    def moved_s(self) -> float:
        """When anything last began or came to an end on this rank, by `time.monotonic`."""
        return max([self.activity[2], *(lane.moved_s for lane in tuple(self._lanes))])

    @contextlib.contextmanager
    def waiting_for(self, operation: str, peers: Iterable[int] = (), *, hidden: bool = False) -> Iterator[None]:
        """For waits that are no message: inside, this rank waits for `peers` (ranks of the world; none: all others)."""
        others = tuple(peers) or tuple(rank for rank in range(self.size) if rank != self.rank)
        lane = self.lane(CONTROL, others)
        lane.hidden = hidden
        lane.enter(operation, 0, others)
        try:
            yield
        finally:
            lane.leave()
            self.forget(lane)
            self.doing(self.activity[0])

    def lane(self, purpose: str, members: Sequence[int]) -> Lane:
        """A place for one group's heartbeat and counts."""
        lane = Lane(self, purpose, tuple(members))
        self._lanes.append(lane)
        return lane

    def forget(self, lane: Lane) -> None:
        """A group is freed: its counts stay."""
        if lane in self._lanes:
            self._lanes.remove(lane)
            self._past[lane.purpose] = self._past.get(lane.purpose, Traffic()) + lane.traffic()

    def abandon(self, kept: Lane) -> None:
        """All groups are revoked: wait until the library has let go of each message's buffer, and forget all but one.

        A request that is dropped instead ends the whole job, now and then, when its message comes after all.
        """
        for lane in tuple(self._lanes):
            for request in tuple(lane.pending):
                with contextlib.suppress(RankError):
                    request.inner.wait()
            lane.pending.clear()
            if lane is not kept:
                self.forget(lane)


class Lane:
    """One group's heartbeat and counts; one thread at a time writes, the watch's thread reads.

    `members` are the world's ranks of the group, in the group's order. What an operation writes down here it pays for
    each time, so the words and objects that are made of it are made by who reads.
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
        """Count a message that leaves."""
        self.messages_sent += 1
        self.bytes_sent += num_bytes
        rounds, size = max(self.sent_in[0], self.received_in[0]), max(self.sent_in[1], self.received_in[1])
        self.sent_in = (rounds + 1, size + num_bytes)

    def receives(self, num_bytes: int) -> None:
        """Count a message that has come."""
        self.messages_received += 1
        self.bytes_received += num_bytes
        self.received_in = (self.received_in[0] + 1, self.received_in[1] + num_bytes)

    def traffic(self) -> Traffic:
        """What has gone through."""
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
        """An operation that blocks begins; it waits for `peers`, if there are any."""
        self._num_bytes, self._peers = num_bytes, peers
        self._since_s = time.monotonic()
        self._operation = operation

    def leave(self, peer: int = -1) -> None:
        """It is over, however it ended."""
        self.moved_s = now_s = time.monotonic()
        operation, self._operation = self._operation, None
        recorder = self.monitor.recorder
        if recorder is not NOTHING and operation is not None:
            recorder.operation(self.purpose, operation, peer, self._num_bytes, self._since_s, now_s)

    def waits(self) -> list[Wait]:
        """The collective under way, and messages that have not come."""
        found = [Wait(one.operation, (one.peer,), one.since_s) for one in tuple(self.pending)]
        operation, peers, since_s = self._operation, self._peers, self._since_s
        if operation is not None and peers:
            found.append(Wait(operation, peers, since_s, hidden=self.hidden))
        return found


class ObservedRequest:
    """A message under way, known to the watch until it is through."""

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
            gaps.wait_until(self.inner.test)
        self.inner.wait()
        self.through()

    def test(self) -> bool:
        """Whether it is through."""
        return self.inner.test()

    def through(self) -> None:
        """Count what has come (what is sent is counted when it leaves); once, however often it is waited for."""
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
    """One that comes."""

    __slots__ = ()
    operation = RECEIVING


class Observed:
    """A Communicator that leaves a trace of every operation; core/protocols.py says what each does."""

    def __init__(self, inner: Communicator, monitor: RankMonitor, lane: Lane) -> None:
        self._inner, self.monitor, self.lane = inner, monitor, lane
        self.rank, self.size = inner.rank, inner.size
        self.host, self.library = inner.host, inner.library
        self._others = (*lane.members[: self.rank], *lane.members[self.rank + 1 :])

    @property
    def address(self) -> str:
        """The rank's own address on the job's network, where the wrapped communicator has one."""
        return getattr(self._inner, "address", LOOPBACK)

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> ObservedRequest:
        """Count the message and start sending it."""
        lane = self.lane
        request = self._inner.isend(buffer, destination, tag)
        lane.sends(buffer.nbytes)
        return ObservedRequest(request, lane, buffer, destination)

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> ObservedRequest:
        """Start receiving; counted when it has come."""
        return ObservedReceive(self._inner.irecv(buffer, source, tag), self.lane, buffer, source)

    def wait_any(self, requests: Sequence[Any], look: Callable[[], None] = lambda: None) -> int:
        """Index of the first of `requests` (its own) that is done; RankError where one's rank was left behind."""

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
        """Sum `buffer` over the ranks by the library, which moves bytes that nobody counts."""
        lane = self.lane
        if self._others:
            lane.unknown += 1
        lane.enter("an all-reduce", buffer.nbytes, self._others)
        try:
            self._inner.allreduce(buffer, add)
        finally:
            lane.leave()

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Every rank's `value`; agreeing is no payload, so it leaves the counts known."""
        gather = self._inner.allgather_json
        return self._collective(
            "an agreement", 0, functools.partial(gather, patient=True) if patient else gather, value
        )

    def duplicate(self) -> Observed:
        """The same group, with a heartbeat of its own."""
        return self._like(self._collective("a duplication", 0, self._inner.duplicate), self.lane.members)

    def split(self, color: int, key: int = 0) -> Observed:
        """A part of the group, with a heartbeat of its own."""
        return self._of_part(self._collective("a split", 0, self._inner.split, color, key))

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Observed:
        """The ranks that are left, by the library's knowledge and the watch's."""
        gone = self.failed() | lost
        return self._of_part(self._collective("a split", 0, self._inner.survivors, gone))

    def revoke(self) -> None:
        """Call every rank out of this group and of all that were made of it; nothing of theirs is under way afterwards.

        RankError where the library cannot.
        """
        if not isinstance(self._inner, Revocable):
            raise RankError(f"{self.library} cannot revoke a group")
        self._inner.revoke()
        self.monitor.abandon(self.lane)

    def over(self, other: Callable[[Communicator], Communicator]) -> Observed:
        """The same group and heartbeat, with what `other` makes of the wrapped communicator in its place."""
        return Observed(other(self._inner), self.monitor, self.lane)

    def for_purpose(self, purpose: str) -> Observed:
        """The same group and message space; what goes through this one counts for `purpose`."""
        return Observed(self._inner, self.monitor, self.monitor.lane(purpose, self.lane.members))

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Memory is not sent: nothing is counted."""
        return self._collective("setting up shared memory", 0, self._inner.shared_array, shape, dtype)

    def remote_array(self, length: int, dtype: Any) -> ObservedRemoteArray:
        """An array whose reads and additions are counted by the rank that asks for them."""
        make = self._inner.remote_array
        return ObservedRemoteArray(self._collective("setting up remote memory", 0, make, length, dtype), self)

    def failed(self) -> set[int]:
        """Ranks of the group that the library or the watch knows to be gone."""
        lost = self.monitor.lost
        return self._inner.failed() | {index for index, rank in enumerate(self.lane.members) if rank in lost}

    def dead(self) -> set[int]:
        """Ranks of the world, members of the group, that the library itself knows to be gone."""
        return {self.lane.members[index] for index in self._inner.failed()}

    def check_alive(self) -> None:
        """BrokenGroup where a rank of the group is dead: for who is at work and talks to nobody meanwhile."""
        if dead := sorted(self.dead() - self.monitor.lost):
            raise BrokenGroup(f"rank {dead[0]} is dead", rank=dead[0])

    def free(self) -> None:
        """Give the group back; its counts stay."""
        self.monitor.forget(self.lane)
        self._inner.free()

    def abort(self, exit_code: int) -> None:
        """End every rank of the job now."""
        self._inner.abort(exit_code)

    def _of_part(self, part: Communicator) -> Observed:
        return self._like(part, part.allgather_json(self.monitor.rank))

    def _like(self, inner: Communicator, members: Sequence[int]) -> Observed:
        return Observed(inner, self.monitor, self.monitor.lane(self.lane.purpose, members))

    def _collective(self, operation: str, num_bytes: int, call: Callable[..., Result], *args: Any) -> Result:
        """Call the library, under a heartbeat that names everybody else. Bytes that it moves are unknown."""
        lane = self.lane
        if self._others and num_bytes:
            lane.unknown += 1
        lane.enter(operation, num_bytes, self._others)
        try:
            return call(*args)
        finally:
            lane.leave()


class ObservedRemoteArray:
    """A remote array whose traffic is counted, one message for each call that leaves this rank."""

    def __init__(self, inner: RemoteArray, group: Observed) -> None:
        self._inner, self._group = inner, group
        self.own = inner.own

    def read(self, owner: int, target: Array) -> None:
        """Read, and count what has come."""
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
        """Add, and count what has left."""
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
        """Give the memory back; collective."""
        self._group._collective("giving remote memory back", 0, self._inner.free)


def observe(communicator: Communicator, monitor: RankMonitor | None = None) -> Observed:
    """`communicator`, the world's or one that stands for it, under observation; as it is where it is already."""
    if isinstance(communicator, Observed):
        return communicator
    seen = monitor or RankMonitor(communicator.rank, communicator.size, communicator.host)
    return Observed(communicator, seen, seen.lane(CONTROL, range(communicator.size)))


def waiting_for(communicator: Communicator, operation: str, peers: Iterable[int]) -> AbstractContextManager[None]:
    """Inside, this rank waits for `peers` of the group without a message: for a word in shared memory, say."""
    if not isinstance(communicator, Observed):
        return contextlib.nullcontext()
    members = communicator.lane.members
    return communicator.monitor.waiting_for(operation, [members[peer] for peer in peers])


def for_control(communicator: Communicator) -> Communicator:
    """The same group for messages that are no exchange of a step: measurements, set-up."""
    return communicator.for_purpose(CONTROL) if isinstance(communicator, Observed) else communicator


def for_exchange(communicator: Communicator) -> Communicator:
    """The same group for what a step exchanges."""
    return communicator.for_purpose(EXCHANGE) if isinstance(communicator, Observed) else communicator


def recorder_of(communicator: Communicator) -> Recorder:
    """Where spans of this rank go; nowhere, for a communicator that nobody observes."""
    return communicator.monitor.recorder if isinstance(communicator, Observed) else NOTHING
