"""The watchdog of every rank of every run: finds ranks that wait too long, and the rank that causes it.

Each rank has a watchdog thread. If its rank has waited for half of the time allowed, the thread raises an alarm: a
small file in a folder that all ranks see. To an alarm every living rank answers with a note of its state, repeatedly;
in a healthy run nothing is ever written. After the full time the waiting rank follows the waits from note to note until
it reaches the cause. The cause is a rank without a note: stopped, dead, or its node is gone. Or it is a rank outside
any communication: stuck if its CPU time does not advance, else busy. If all ranks wait for each other, it is two
operations that do not match.

Times in notes are durations by the writer's clock, and a note names the alarms it answers, so the clocks of hosts need
not agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcdl.cluster.status import ALONE, WATCH_FOLDER
from hpcdl.comm.observed import Observed, RankMonitor
from hpcdl.core.errors import CorruptError, RankError
from hpcdl.core.records.run_record import from_json
from hpcdl.core.storage.disk import create, make_folder, remove_file, touch
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import format_seconds

FOLDER = WATCH_FOLDER
STALL_TIMEOUT_S, BUSY_TIMEOUT_S = 300.0, 3600.0
"""The default timeouts."""
ADVANCES = 0.02
"""Fraction of a core above which a process computes; a watchdog thread alone takes a tenth of that."""
LEARN_S = 60.0
"""How long ranks may take to learn from each other which ranks were lost."""
LOOKS = 16
"""Checks of a watchdog within the time allowed."""
STOOD_STILL = 0.25
"""A process that oversleeps by this fraction of the time allowed was suspended."""
_LEAST_TICK_S, _LONGEST_TICK_S = 0.02, 15.0
EVICTED = "evicted"
"""The file that tells a rank, by its number, that the others continue without it."""
LEFT, LEFT_S = "left-", 4.0
"""The note of a rank whose script has ended, and how long others wait before they check for one."""
VIEWED, VIEW_S, VIEW_TICK_S = "viewed", 60.0, 1.0
"""A file written by a viewer; how long it is valid; how often ranks write their notes in that time."""


@dataclass(frozen=True, kw_only=True)
class WaitNote:
    """A wait in a note; `peers` are ranks of the world."""

    operation: str
    peers: Sequence[int]
    age_s: float
    patient: bool = False
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class Note:
    """The state of a rank: its activity for the last `idle_s` seconds, its recent CPU share, and its waits.

    The CPU share, of one core, includes time in which the rank was ready to run but others had the core.
    """

    rank: int
    host: str
    role: str
    doing: str
    step: int | None
    idle_s: float
    processor_share: float
    waits: Sequence[WaitNote] = ()
    answers: Sequence[str] = ()
    spent: Sequence[float] = ()
    """As in RankMonitor."""

    @property
    def name(self) -> str:
        """Rank, role and host, as the start of a sentence."""
        return f"rank {self.rank} ({self.role}) on {self.host}"

    @property
    def place(self) -> str:
        """Its activity and step, as the continuation of a sentence."""
        return self.doing if self.step is None else f"{self.doing}, step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The diagnosis of a wait. `cause` is the rank to blame; `fatal` if the job must end or lose that rank."""

    kind: str
    cause: int
    host: str
    text: str
    fatal: bool


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank waits for one that is gone or stuck, and for one that computes."""

    stall_s: float = STALL_TIMEOUT_S
    busy_s: float = BUSY_TIMEOUT_S


def diagnose(asker: Note, notes: Mapping[int, Note], hosts: Mapping[int, str], limits: Limits) -> Verdict | None:
    """Diagnose why `asker` waits, from the notes of all ranks that have answered; None if nothing is wrong (yet).

    `hosts` are the names of the ranks' hosts, as far as known.
    """
    overdue = [wait for wait in asker.waits if wait.age_s > limits.stall_s]
    if not overdue:
        return None
    reached = _reached(asker, overdue, notes, limits.stall_s / 2)
    waited = f"{asker.name} has waited for {format_seconds(overdue[0].age_s)} in {overdue[0].operation} ({asker.place})"
    silent = [rank for rank in reached if rank not in notes]
    # A living rank answers an alarm at its next check, so a note that is still missing is no delay.
    if silent:
        rank, host = silent[0], hosts.get(silent[0], "a host unknown yet")
        why = "stopped, swapped out, or its node is gone or cut off"
        text = f"rank {rank} on {host} is not responding ({why}); {waited}"
        return Verdict(kind="gone", cause=rank, host=host, text=text, fatal=True)
    free = [notes[rank] for rank in reached if _is_free(notes[rank], limits.stall_s / 2)]
    still = [note for note in free if note.idle_s > limits.stall_s]
    for note in still:
        if note.processor_share < ADVANCES:
            text = f"{note.name} is stuck outside any communication: {note.place} for {format_seconds(note.idle_s)}"
            return Verdict(kind="stuck", cause=note.rank, host=note.host, text=f"{text}; {waited}", fatal=True)
    over = overdue[0].age_s > limits.busy_s
    if still:
        note = still[0]
        text = f"{note.name} is busy: {note.place} for {format_seconds(note.idle_s)}; {waited}"
        return Verdict(kind="busy", cause=note.rank, host=note.host, text=text, fatal=over)
    if free:
        note = free[0]
        text = f"{note.name} continues elsewhere: {note.place}; {waited}"
        impatient = any(not wait.patient for wait in overdue)
        return Verdict(kind="elsewhere", cause=note.rank, host=note.host, text=text, fatal=over and impatient)
    return _deadlock(asker, overdue[0], [notes[rank] for rank in reached], limits.stall_s, waited)


def processor_wanted_s() -> float:
    """Return the seconds that this process computed, or that its threads were ready to run while others had the core.

    The caller's own wait does not count: a watchdog also wakes up on a busy node.
    """
    waited_ns = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            with contextlib.suppress(OSError, IndexError):  # the thread ended, or the kernel lacks these statistics
                # The second number: nanoseconds that the task was ready to run, and waited for a core.
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return time.process_time() + waited_ns / 1e9


def _reached(asker: Note, overdue: Sequence[WaitNote], notes: Mapping[int, Note], after_s: float) -> list[int]:
    """Return the ranks that `asker` waits for, directly or through others' waits, in rank order."""
    ranks: set[int] = set()
    waiting = [peer for wait in overdue for peer in wait.peers]
    while waiting:
        rank = waiting.pop()
        if rank == asker.rank or rank in ranks:
            continue
        ranks.add(rank)
        if rank in notes:
            waiting += [peer for wait in notes[rank].waits if wait.age_s > after_s for peer in wait.peers]
    return sorted(ranks)


def _is_free(note: Note, after_s: float) -> bool:
    """Whether a rank waits for no other; within a TensorFlow engine, where waits are hidden, whether it computes."""
    long = [wait for wait in note.waits if wait.age_s > after_s]
    return not long or (all(wait.hidden for wait in long) and note.processor_share > 0.5)


def _deadlock(
    asker: Note, own_wait: WaitNote, others: Sequence[Note], after_s: float, waited: str
) -> Verdict | None:  # fmt: skip
    """Diagnose ranks that all wait for each other: two operations that do not match, or a message that never comes."""
    if not others or any(max(wait.age_s for wait in note.waits) < after_s for note in others):
        return None
    for note in others:
        other_wait = max(note.waits, key=lambda wait: wait.age_s)
        if other_wait.operation != own_wait.operation:
            text = f"deadlock: {note.name} waits in {other_wait.operation} ({note.place}), while {waited}"
            return Verdict(kind="deadlock", cause=note.rank, host=note.host, text=text, fatal=True)
    text = f"{waited}, and so do all others: the network or the library hangs"
    return Verdict(kind="hang", cause=asker.rank, host=asker.host, text=text, fatal=True)


@dataclass(kw_only=True)
class Actions:
    """What a watchdog does about its findings.

    `end` gets the error that ends the job. `log` gets a line for the user. `is_optional` returns whether the run can
    continue without a rank; `on_lost` is called for each such rank that is lost. `failed` returns those of some ranks
    that have ended the job themselves.
    """

    end: Callable[[RankError], None]
    log: Callable[[str], None] = lambda text: None
    is_optional: Callable[[int], bool] = lambda rank: False
    on_lost: Callable[[int, str], None] = lambda rank, text: None
    failed: Callable[[Collection[int]], list[int]] = lambda ranks: []


@dataclass(kw_only=True)
class Watchdog:
    """Watches one rank's RankMonitor from a thread of its own. `folder` must be visible to all ranks of the run.

    `accuses`: whether it raises alarms; otherwise it only answers those of others.
    """

    monitor: RankMonitor
    folder: Path
    actions: Actions
    limits: Limits = field(default_factory=Limits)
    hosts: dict[int, str] = field(default_factory=dict)
    accuses: bool = True
    besides: Callable[[], None] = lambda: None
    """Called at each check while the rank works."""

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._alarm: tuple[str, float] | None = None
        self._suspected: tuple[str, int] | None = None
        self._read: set[str] = set()
        self._processor: list[tuple[float, float]] = []
        self._viewed = False
        self._view = (0.0, 0.0)
        self._leaving: tuple[str, float] | None = None
        self._looked_s = -math.inf
        self._went_on_s = -math.inf
        self._waited_for: set[tuple[int, float]] = set()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and withdraw this rank's alarm."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:  # no thread can join itself
            self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._withdraw()
            remove_file(self.folder / ALONE)

    @property
    def tick_s(self) -> float:
        """Seconds between two checks."""
        tick_s = min(max(self.limits.stall_s / LOOKS, _LEAST_TICK_S), _LONGEST_TICK_S)
        return min(tick_s, VIEW_TICK_S) if self._viewed else tick_s

    @property
    def left_s(self) -> float:
        """Seconds that a rank waits before it checks whether others have left."""
        return min(LEFT_S, self.limits.stall_s / LOOKS * 4)

    def leaves(self, how: str) -> None:
        """Note that this rank's script has ended: it only answers others, and ranks that wait for it get `how`."""
        self.accuses = False
        self._leaving = how, time.monotonic()

    def evict(self, rank: int, text: str, *, in_place: bool) -> None:
        """Continue the run without `rank`, which is alive; with `in_place` it leaves when it learns of it."""
        if in_place:
            with contextlib.suppress(FileExistsError):
                self._create(f"{EVICTED}-{rank}", text)
            return
        verdict = Verdict(kind=EVICTED, cause=rank, host=self.hosts.get(rank, ""), text=text, fatal=True)
        if self._speaks(verdict):
            self.actions.end(RankError(text, rank=rank, host=verdict.host, lost=True, evicted=True))

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._rested():
            if self.monitor.cut_off:  # its files would show to others that it is alive
                continue
            with contextlib.suppress(OSError):  # a failing disk is no reason to end a healthy run
                self._glance()
                if time.monotonic() - looked_s >= self.tick_s:
                    looked_s = time.monotonic()
                    self._give_sign()
                    self._look()
            if self.accuses:
                with contextlib.suppress(OSError):
                    self.besides()

    def _rested(self) -> bool:
        """Sleep until the next check. Return whether the watchdog was stopped.

        A process that wakes up far too late was suspended itself, alone or with its machine. Its waits until then prove
        nothing about others, which may have been suspended too and be about to continue.
        """
        pause_s, began_s = min(self.tick_s, self.left_s / 4), time.monotonic()
        over = self._over.wait(pause_s)
        now_s = time.monotonic()
        if now_s - began_s - pause_s > self.limits.stall_s * STOOD_STILL:
            self._went_on_s = now_s
        return over

    def _age_s(self, since_s: float) -> float:
        """Return the seconds since then, not counting time before the last suspension ended."""
        return time.monotonic() - max(since_s, self._went_on_s)

    def _give_sign(self) -> None:
        """Write a sign of life for the starting process if no other rank is left that would notice a stop."""
        monitor = self.monitor
        if monitor.size - len(monitor.lost) == 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_note(
                self.folder / ALONE,
                {
                    "rank": monitor.rank,
                    "host": monitor.host,
                    "doing": monitor.activity[0],
                    "silent_s": self.limits.stall_s,
                },
            )

    def _glance(self) -> None:
        """Report that this rank has left and others have not followed, or detect that a rank it waits for has left.

        Only a rank that has waited for `left_s` seconds accesses the disk.
        """
        now_s = time.monotonic()
        if self._leaving is not None:
            how, since_s = self._leaving
            if now_s - since_s > self.left_s / 2:
                self._leaving = None
                make_folder(self.folder)
                write_note(self.folder / f"{LEFT}{self.monitor.rank}", how)
        if not self.accuses or now_s - self._looked_s < self.left_s:
            return
        waits = [wait for wait in self.monitor.waits() if self._age_s(wait.since_s) > self.left_s]
        if not waits:
            return
        self._looked_s = now_s
        left_ranks = {int(name.removeprefix(LEFT)) for name in self._names() if name.startswith(LEFT)}
        waits_for_left = {(peer, wait.since_s) for wait in waits for peer in wait.peers if peer in left_ranks}
        # Require it twice: a message sent before may still be on its way.
        again, self._waited_for = sorted(waits_for_left & self._waited_for), waits_for_left
        if again:
            self._end_without(again[0][0])

    def _end_without(self, rank: int) -> None:
        own_note = self._own_note()
        wait = max(own_note.waits, key=lambda wait: wait.age_s)
        how, host = read_json(self.folder / f"{LEFT}{rank}"), self.hosts.get(rank, "a host unknown yet")
        text = (
            f"rank {rank} on {host} has left: {how}, while {own_note.name} waits in {wait.operation} "
            f"({own_note.place}); give all ranks as many steps (hpcdl.dataset, hpcdl.join) and let them exit alike: a "
            "rank that stops by a number of its own needs hpcdl.allreduce(number)"
        )
        verdict = Verdict(kind="left", cause=rank, host=host, text=text, fatal=True)
        if self._speaks(verdict):
            self.actions.end(RankError(text, rank=rank, host=host))

    def _look(self) -> None:
        own_note = self._own_note()
        longest_s = max((wait.age_s for wait in own_note.waits), default=0.0)
        # After half of the time, so that the others have the other half to answer.
        if longest_s <= self.limits.stall_s / 2 or not self.accuses:
            self._withdraw()
        elif self._alarm is None:
            self._raise_alarm()
        names = self._names()
        self._learn_of_lost(names)
        alarms = [name.removeprefix("alarm-") for name in names if name.startswith("alarm-")]
        self._viewed = self._is_viewed()
        if not alarms and self._viewed:
            make_folder(self.folder)
            write_note(self.folder / f"note-{own_note.rank}", asdict(own_note))
        if not alarms:
            return
        own_note = dataclasses.replace(own_note, answers=alarms)
        write_note(self.folder / f"note-{own_note.rank}", asdict(own_note))
        if self._alarm is not None and self._age_s(self._alarm[1]) > self.limits.stall_s / 2:
            self._judge(own_note, self._alarm[0])

    def _is_viewed(self) -> bool:
        """Whether a viewer (supervision/live.py) is active, by the recent change of its file."""
        try:
            seen_at = (self.folder.parent / VIEWED).stat().st_mtime
        except OSError:
            return False
        # Only a change counts: the file system's clock may differ from this node's.
        if seen_at != self._view[0]:
            self._view = (seen_at, time.monotonic())
        return time.monotonic() - self._view[1] < VIEW_S

    def _own_note(self) -> Note:
        now_s = time.monotonic()
        monitor = self.monitor
        lost = monitor.lost
        waits = [
            WaitNote(
                operation=_with_whom(wait.operation, wait.peers, monitor.size),
                peers=[peer for peer in wait.peers if peer not in lost],
                age_s=self._age_s(wait.since_s),
                patient=wait.patient,
                hidden=wait.hidden,
            )
            for wait in monitor.waits()
        ]
        return Note(
            rank=monitor.rank,
            host=monitor.host,
            role=monitor.role,
            doing=monitor.activity[0],
            step=monitor.step,
            idle_s=now_s - monitor.moved_s(),
            processor_share=self._processor_share(now_s),
            waits=[wait for wait in waits if wait.peers],
            spent=monitor.spent,
        )

    def _processor_share(self, now_s: float) -> float:
        """Return the share of one core, over half of the time allowed: a short wait for a disk does not look stuck."""
        window_s = min(self.limits.stall_s / 2, _LONGEST_TICK_S * LOOKS / 2)
        before = [sample for sample in self._processor if now_s - sample[0] <= window_s]
        self._processor = [*before, (now_s, processor_wanted_s())]
        (first_s, before_s), (last_s, after_s) = self._processor[0], self._processor[-1]
        # One sample shows nothing: assume that the rank computes, so that nobody calls it stuck.
        return (after_s - before_s) / (last_s - first_s) if last_s > first_s else 1.0

    def _judge(self, note: Note, alarm: str) -> None:
        verdict = diagnose(note, self._answers(alarm), self.hosts, self.limits)
        suspected = None if verdict is None else (verdict.kind, verdict.cause)
        # Require it twice, one check apart: a note may be on its way, a wait may have just ended.
        confirmed, self._suspected = suspected == self._suspected, suspected
        if verdict is None or not confirmed:
            return
        if not verdict.fatal:
            self._report_once(verdict)
        elif self.actions.is_optional(verdict.cause) and verdict.kind in ("gone", "stuck", "busy"):
            self._on_lost(verdict)
        elif self._speaks(verdict):
            lost = verdict.kind in ("gone", "stuck")  # new ranks may take over; a busy rank, or a deadlock, would recur
            self.actions.end(RankError(verdict.text, rank=verdict.cause, host=verdict.host, lost=lost))

    def _report_once(self, verdict: Verdict) -> None:
        if verdict.kind == "busy":
            with contextlib.suppress(FileExistsError):
                self._create(f"busy-{verdict.cause}", verdict.text)

    def _on_lost(self, verdict: Verdict) -> None:
        with contextlib.suppress(FileExistsError):
            # Fails if another rank was faster: `on_lost` is called by one rank only.
            self._create(f"lost-{verdict.cause}", verdict.text)
            self.actions.on_lost(verdict.cause, verdict.text)
        self._learn_of_lost(self._names())

    def _learn_of_lost(self, names: Sequence[str]) -> None:
        """Take over the findings of all ranks; rank 0 logs them."""
        monitor = self.monitor
        for name in names:
            kind, _, number = name.partition("-")
            if kind not in ("lost", "busy", EVICTED) or name in self._read:
                continue
            text = (self.folder / name).read_text(encoding="utf-8")
            self._read.add(name)  # not before: a read that fails is tried again
            if kind == "lost" and int(number) == monitor.rank:
                os._exit(1)  # it was stopped, the others continued without it, and it must not disturb them
            if kind == EVICTED and int(number) == monitor.rank:
                monitor.evicted = text or EVICTED  # its writer may not have come further than an empty file
            if kind == "lost":
                monitor.lost |= {int(number)}
            if monitor.leads:
                self.actions.log(text if kind == "busy" else f"the run continues without rank {number}: {text}")

    def _speaks(self, verdict: Verdict) -> bool:
        """Whether this rank ends the job; if the rank that should end it does not, the next check returns True."""
        try:
            self._create("verdict", verdict.text)
        except FileExistsError:
            return self._over.wait(5.0) is False  # by then the rank that spoke has ended this one
        return True

    def _answers(self, alarm: str) -> dict[int, Note]:
        note_of_rank = {}
        for name in self._names():
            if name.startswith("note-"):
                with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
                    note = from_json(Note, read_json(self.folder / name))
                    self.hosts.setdefault(note.rank, note.host)
                    if alarm in note.answers:
                        note_of_rank[note.rank] = note
        return note_of_rank

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir())
        except FileNotFoundError:
            return []

    def _raise_alarm(self) -> None:
        # Unique, so that an answer to an earlier alarm of this rank does not count.
        name = f"{self.monitor.rank}.{uuid.uuid4().hex[:12]}"
        make_folder(self.folder)
        self._create(f"alarm-{name}", "")
        self._alarm = (name, time.monotonic())
        self._suspected = None

    def _withdraw(self) -> None:
        if self._alarm is not None:
            name, self._alarm = self._alarm[0], None
            remove_file(self.folder / f"alarm-{name}")

    def _create(self, name: str, text: str) -> None:
        create(self.folder / name, text.encode())


def write_note(path: Path, document: object) -> None:
    """Write a note atomically, but without syncing it: it is worthless after a crash."""
    touch(path, json.dumps(document).encode())


def _with_whom(operation: str, peers: Sequence[int], size: int) -> str:
    """Return `receiving from rank 2`, `an all-reduce`."""
    if len(peers) != 1 or size == 1:
        return operation
    join = {"sending": "sending to", "receiving": "receiving from"}.get(operation, f"{operation} with")
    return f"{join} rank {peers[0]}"


def watchdog_of(
    communicator: Observed, folder: Path, note: Callable[[RankError], None] = lambda error: None
) -> Watchdog:  # fmt: skip
    """Return a watchdog for a rank that an external launcher has started: errors go to stderr and end the job.

    `note` gets the error first.
    """

    def end(error: RankError) -> None:
        note(error)
        sys.stderr.write(f"hpcdl: {error}\n")
        communicator.abort(error.exit_code)

    return Watchdog(monitor=communicator.monitor, folder=folder, actions=Actions(end=end))


def leave_without_lost(communicator: Observed) -> None:
    """If other ranks are gone, return once all survivors are done. If ranks were lost, exit here, without MPI."""
    if communicator.failed():
        communicator.survivors().barrier()  # the first process to exit makes some launchers kill the rest
    if communicator.monitor.lost:
        # MPI_Finalize would wait for the lost ranks, and `os._exit` flushes nothing.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def survivors(communicator: Observed, num_lost: int) -> Observed:
    """Return the group of the survivors if `num_lost` ranks are lost, once this rank knows which; all must call it."""
    if not num_lost:
        return communicator
    deadline_s = time.monotonic() + LEARN_S
    while len(communicator.failed()) < num_lost and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return communicator.survivors()


@contextlib.contextmanager
def watching(watch: Watchdog) -> Iterator[Watchdog]:
    """Inside, `watch` is active."""
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
