"""Impaired networks: partitions, slow links, blocked messages, clocks that differ.

`Impaired` wraps any Communicator below `Observed`. So every group made from it is impaired too, and the waits of a rank
are observed as usual. Only a run that requests it has one. Shared memory of ranks is not a message.
A partition begins when the first rank of its place says so, by a mark on the disk. Every rank holds back its own
messages across it. Ranks inside do not respond either, as if their node could not reach the file system. The mark names
the node: one that is cut off for good stays so for new ranks on it, whatever its number is then.
A slow link sends through a token bucket (tc-tbf(8)) while the process that requested it lives. Another process removes
the bucket when that process is gone. A link that is shaped already is left unchanged.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcdl.comm.observed import LOOPBACK, Observed, RankMonitor
from hpcdl.core.errors import RankError
from hpcdl.core.processes.wall import WALL
from hpcdl.core.protocols import Revocable
from hpcdl.run.faults import PARTITION, SKEW, Fault

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, RemoteArray, Request


LOOK_S = 0.005
"""Interval of checking whether messages may continue."""

Result = TypeVar("Result")


class Impairment:
    """The network between this rank and the others, for all groups of the rank.

    `parts` are sets of the world's ranks that exchange no messages with ranks outside. A change replaces the whole
    tuple, so that any thread may make it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: tuple[frozenset[int], ...] = ()
        self._near: frozenset[int] = frozenset()
        self._rate = 0.0
        self._free_s = {True: 0.0, False: 0.0}

    def slow_down(self, near: frozenset[int], bytes_per_s: float) -> None:
        """Delay messages from and to ranks outside `near`; each direction has the whole rate."""
        self._near, self._rate = near, bytes_per_s

    def parted(self, peers: Iterable[int]) -> bool:
        """Return whether a partition separates this rank from one of `peers`."""
        parts = self.parts
        return bool(parts) and any((self.rank in part) != (peer in part) for part in parts for peer in peers)

    def hold(self, peers: Sequence[int]) -> None:
        """Return when no partition separates this rank from `peers`."""
        while self.parted(peers):
            time.sleep(LOOK_S)

    def due_s(self, peers: Iterable[int], num_bytes: float, *, sends: bool) -> float:
        """Return when a message that begins now has passed, by `time.monotonic`; 0 if nothing delays it."""
        if not self._rate or all(peer in self._near for peer in peers):
            return 0.0
        # Each direction is a queue: a message begins when those before it have passed.
        self._free_s[sends] = max(self._free_s[sends], time.monotonic()) + num_bytes / self._rate
        return self._free_s[sends]


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class _OtherwiseNow(Exception):
    """Ends a wait whose messages must be chosen again."""


class ImpairedRequest:
    """A pending message. If sent, its time on the link counts from its start; if received, from its arrival."""

    def __init__(self, inner: Request, network: Impairment, peer: int, buffer: Array, *, sends: bool) -> None:
        self.inner, self.peer = inner, peer
        self._network, self._num_bytes, self._sends = network, buffer.nbytes, sends
        self._due_s = network.due_s((peer,), buffer.nbytes, sends=True) if sends else 0.0
        self.is_through = False
        """Whether its rank knows that it is done; this stays true."""

    def wait(self) -> None:
        """Return when the buffer may be reused (send) or is filled (receive), and the network lets the rank know."""
        self.inner.wait()
        if not self.is_through:
            self._network.hold((self.peer,))
        self.arrive()

    def test(self) -> bool:
        """Return whether `wait` would return at once, except for its remaining time on the link."""
        return self.inner.test() and (self.is_through or not self._network.parted((self.peer,)))

    def arrive(self) -> None:
        """Wait for its remaining time on the link."""
        if not self._sends and not self.is_through:
            self._due_s = self._network.due_s((self.peer,), self._num_bytes, sends=False)
        self.is_through = True
        _sleep_until(self._due_s)


class Impaired:
    """A Communicator over `network`; `members` are the world's ranks of the group. See core/protocols.py.

    A collective of the library counts as the bytes of its best algorithm: an all-reduce twice its bytes without one
    rank's share, a broadcast its bytes.
    """

    def __init__(self, inner: Communicator, network: Impairment, members: Sequence[int]) -> None:
        self._inner, self._network, self._members = inner, network, tuple(members)
        self.rank, self.size = inner.rank, inner.size
        self.host, self.library = inner.host, inner.library

    @property
    def address(self) -> str:
        """The address of the wrapped communicator."""
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
        """Return the index of the first of `requests` (its own) that is done and that no partition holds back."""
        network = self._network
        while True:
            # Read before the choice: a partition that begins or heals later then shows in `check`.
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
        """Return when every rank has called it."""
        self._collective(0.0, self._inner.barrier)

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` with the root's bytes."""
        self._collective(buffer.nbytes, self._inner.broadcast, buffer, root)

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum by the library."""
        self._collective(2 * buffer.nbytes * (self.size - 1) / self.size, self._inner.allreduce, buffer, add)

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Return every rank's `value`."""
        return self._collective(0.0, lambda: self._inner.allgather_json(value, patient=patient))

    def duplicate(self) -> Impaired:
        """Return the same group on the same network."""
        return Impaired(self._collective(0.0, self._inner.duplicate), self._network, self._members)

    def split(self, color: int, key: int = 0) -> Impaired:
        """Return a part of the group."""
        return self._of_part(self._collective(0.0, self._inner.split, color, key))

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Impaired:
        """Return the group of the remaining ranks."""
        return self._of_part(self._inner.survivors(lost))

    def revoke(self) -> None:
        """Release every rank from the group, despite the network. Raises RankError if the library cannot do that."""
        if not isinstance(self._inner, Revocable):
            raise RankError(f"{self.library} cannot revoke a group")
        self._inner.revoke()

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return memory shared on one node."""
        return self._inner.shared_array(shape, dtype)

    def remote_array(self, length: int, dtype: Any) -> ImpairedRemoteArray:
        """Return an array that others reach over the network."""
        return ImpairedRemoteArray(self._inner.remote_array(length, dtype), self._network, self._members)

    def failed(self) -> set[int]:
        """Return the ranks that the library knows to be gone."""
        return self._inner.failed()

    def free(self) -> None:
        """Free the group."""
        self._inner.free()

    def abort(self, exit_code: int) -> None:
        """End every rank of the job immediately, despite the network."""
        self._inner.abort(exit_code)

    def _of_part(self, part: Communicator) -> Impaired:
        return Impaired(part, self._network, part.allgather_json(self._network.rank))

    def _collective(self, num_bytes: float, call: Callable[..., Result], *args: Any) -> Result:
        """Call the library when all may take part; return its result when the network lets this rank know."""
        self._network.hold(self._members)
        due_s = self._network.due_s(self._members, num_bytes, sends=True) if num_bytes else 0.0
        result = call(*args)
        # Again: a partition may have begun while the library's call was under way.
        self._network.hold(self._members)
        _sleep_until(due_s)
        return result


class ImpairedRemoteArray:
    """A remote array behind the network."""

    def __init__(self, inner: RemoteArray, network: Impairment, members: Sequence[int]) -> None:
        self._inner, self._network, self._members = inner, network, members
        self.own = inner.own

    def read(self, owner: int, target: Array) -> None:
        """Read, when and as fast as the network allows."""
        self._pass(owner, target.nbytes, sends=False)
        self._inner.read(owner, target)

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add, when and as fast as the network allows."""
        self._pass(owner, values.nbytes, sends=True)
        self._inner.add(owner, values, start)

    def free(self) -> None:
        """Free the memory."""
        self._inner.free()

    def _pass(self, owner: int, num_bytes: int, *, sends: bool) -> None:
        peers = (self._members[owner],)
        self._network.hold(peers)
        _sleep_until(self._network.due_s(peers, num_bytes, sends=sends))


DEVICES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
_BURST_S, _LEAST_BURST = 0.004, 65536
"""Bytes that may leave at once: those of one tick of a slow kernel clock, and of one large packet."""
_TIMEOUT_S = 10.0
# It ignores the signals that end a run: without it the link would stay slow.
_AWAY = (
    "import os, signal, subprocess, sys, time\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    "while os.path.exists(f'/proc/{sys.argv[1]}/fd'): time.sleep(0.1)\n"
    "subprocess.run(sys.argv[2:])\n"
)


def shape(bytes_per_s: float) -> str:
    """Slow down this node's link by tc, and describe how; empty if tc is missing, cannot do it or is not allowed to."""
    tc, device = shutil.which("tc"), _only_device()
    if tc is None or not device or any(INFINIBAND.glob("*")):  # verbs bypass the kernel's queues
        return ""
    # Handle 0: is the kernel's default; any other queue was set up by somebody.
    code, shown = _answer_of(tc, "qdisc", "show", "dev", device)
    if code is None or any(" 0: " not in line for line in shown.splitlines()):
        return ""
    burst = max(_LEAST_BURST, int(bytes_per_s * _BURST_S))
    bucket = ("tbf", "rate", f"{bytes_per_s * 8:.0f}bit", "burst", f"{burst}b", "latency", "400ms")
    line = [sys.executable, "-P", "-S", "-c", _AWAY, str(os.getpid()), tc, "qdisc", "del", "dev", device, "root"]
    code, _ = _answer_of(tc, "qdisc", "add", "dev", device, "root", *bucket)
    if code in (0, None):  # without an answer it may be there, too
        # A session of its own: what ends the ranks' process group must not leave the link slow.
        subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    return f"by tc on {device}" if code == 0 else ""


def _answer_of(*line: str) -> tuple[int | None, str]:
    """Return exit status and output of a program; no status if it does not end in time."""
    try:
        finished = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return finished.returncode, finished.stdout


def _only_device() -> str:
    """Return the only active network device except the loopback; empty if several make the choice unclear."""
    names = [path.name for path in DEVICES.iterdir()] if DEVICES.is_dir() else []
    up = [name for name in names if name != "lo" and _state(DEVICES / name) == "up"]
    return up[0] if len(up) == 1 else ""


def _state(device: Path) -> str:
    try:
        return (device / "operstate").read_text(encoding="ascii").strip()
    except OSError:
        return ""


OWN_MESSAGES = "in hpcdl's own messages"
"""How a link is slowed if tc cannot do it or is not allowed to."""


class NetworkFaults:
    """The network faults of a run that have not struck yet, by number, and those in effect.

    Nodes in `cut_off` have been cut off for good since earlier ranks.
    """

    def __init__(self, faults: Mapping[int, Fault], monitor: RankMonitor, cut_off: Iterable[str] = ()) -> None:
        self.faults = dict(faults)
        self._cut_off = [*cut_off]
        self._seen = monitor
        self._network = Impairment(monitor.rank)
        self._hosts: Sequence[str] = [monitor.host] * monitor.size
        self._cuts: list[tuple[frozenset[int], float]] = []

    def impair(self, communicator: Observed, log: Callable[[int, str], None]) -> Observed:
        """Return `communicator` (the world's) under these faults; `log` receives those in effect. Collective."""
        if not self.faults and not self._cut_off:
            return communicator
        self._hosts = communicator.allgather_json(communicator.host)
        for host in self._cut_off:
            self._part(self._ranks_on(host), math.inf)
        for number, fault in [*self.faults.items()]:
            if fault.kind == PARTITION:
                continue
            ranks = self.place(fault)
            if fault.kind == SKEW:
                self._holds(number, ranks, "", log)
                # Added up: several faults may shift one node's clock.
                WALL.shift_s += (fault.value or 0.0) * (self._seen.rank in ranks)
            else:
                self._holds(number, ranks, self._slow_down(fault, ranks, communicator), log)
        return communicator.over(lambda inner: Impaired(inner, self._network, range(self._seen.size)))

    def _holds(self, number: int, ranks: frozenset[int], how: str, log: Callable[[int, str], None]) -> None:
        del self.faults[number]
        if self._seen.rank == min(ranks):
            log(number, how)

    def _slow_down(self, fault: Fault, ranks: frozenset[int], communicator: Observed) -> str:
        """Slow down the link of `ranks`, and describe how. Collective: if tc does it, hpcdl must not do it too."""
        rank, rate = self._seen.rank, fault.value or 0.0
        by_tc = shape(rate) if fault.of_host and rank == min(ranks) else ""
        how: str = communicator.allgather_json(by_tc)[min(ranks)]
        if not how and rank in ranks:
            self._network.slow_down(ranks, rate / len(ranks))  # the ranks of a node share its link
        return how or OWN_MESSAGES

    @property
    def host(self) -> str:
        """The name of this rank's node, as all ranks know it."""
        return self._hosts[self._seen.rank]

    def number_of(self, *, hosts: bool) -> int:
        """Return the number of nodes or ranks that a random fault may strike."""
        return len({*self._hosts}) if hosts else self._seen.size

    def place(self, fault: Fault, number: int | None = None) -> frozenset[int]:
        """Return the ranks that `fault` strikes; for a random fault, those of rank or node `number`."""
        which = fault.rank if number is None else number
        assert which is not None
        if not fault.of_host:
            return frozenset([which])
        return self._ranks_on([*dict.fromkeys(self._hosts)][which])

    def _ranks_on(self, host: str) -> frozenset[int]:
        return frozenset(rank for rank, name in enumerate(self._hosts) if name == host)

    def part(self, fault: Fault, ranks: frozenset[int]) -> None:
        """Block messages between `ranks` and the other ranks until the partition heals."""
        self._part(ranks, math.inf if fault.duration_s is None else time.monotonic() + fault.duration_s)

    def _part(self, ranks: frozenset[int], until_s: float) -> None:
        self._cuts.append((ranks, until_s))
        self._apply()

    def heal(self) -> None:
        """End the partitions whose time is over."""
        now_s = time.monotonic()
        if any(until_s <= now_s for _, until_s in self._cuts):
            self._cuts = [(ranks, until_s) for ranks, until_s in self._cuts if until_s > now_s]
            self._apply()

    def begin(self, number: int) -> None:
        """Begin the partition of that number."""
        fault = self.faults.pop(number)
        self.part(fault, self.place(fault))

    def follow(self, has_struck: Callable[[int], bool]) -> None:
        """Begin the partitions that the first rank of their place has marked."""
        for number, fault in [*self.faults.items()]:
            if fault.rank is not None and has_struck(number):
                self.begin(number)

    def leads(self, fault: Fault) -> bool:
        """Return whether this rank decides when a partition begins: the first of its place, by its own steps."""
        return fault.rank is not None and self._seen.rank == min(self.place(fault))

    def _apply(self) -> None:
        self._network.parts = tuple(ranks for ranks, _ in self._cuts)
        self._seen.cut_off = any(self._seen.rank in ranks for ranks, _ in self._cuts)
