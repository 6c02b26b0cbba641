"""One watch for every rank of every run: who waits too long, for whom, and what that one is doing instead.

Each rank has a watching thread. One whose rank has waited for half of the time allowed raises an alarm: a small file in
a folder that all ranks see. To an alarm every living rank answers with a note of where it stands, again and again; in a
run that is well nothing is ever written. When the time is over, the waiting rank follows the waits from note to note
until it comes to a rank that is the cause: one that leaves no note (stopped, dead, or its node is gone), one that
is outside any communication (stuck where its processor time stands still, busy where it advances), or, where all of
them wait for each other, the two operations that do not fit.

Times in notes are durations by the clock of who writes them, and a note answers alarms by name, so that the clocks of
hosts need not agree.
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
"""Where nobody says otherwise."""
ADVANCES = 0.02
"""Share of a core above which a process computes; a watching thread alone takes a tenth of that."""
LEARN_S = 60.0
"""How long ranks may take to learn from each other who was left behind."""
LOOKS = 16
"""Looks of a watch in the time allowed."""
STOOD_STILL = 0.25
"""A process that sleeps longer than it meant to by so much of the time allowed has stood still."""
_LEAST_TICK_S, _LONGEST_TICK_S = 0.02, 15.0
EVICTED = "evicted"
"""The file that tells a rank, by its number, that the others go on without it."""
LEFT, LEFT_S = "left-", 4.0
"""The note of a rank whose script is over, and how long others wait before they look for one."""
VIEWED, VIEW_S, VIEW_TICK_S = "viewed", 60.0, 1.0
"""A file that says that somebody looks on; how long that holds; how often ranks leave their notes meanwhile."""


@dataclass(frozen=True, kw_only=True)
class WaitNote:
    """A wait as a note tells it; `peers` are ranks of the world."""

    operation: str
    peers: Sequence[int]
    age_s: float
    patient: bool = False
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class Note:
    """Where a rank stands: what it does since `idle_s` seconds, its share of a core lately, and what it waits for.

    The share is what it computed or would have computed, had others not had the core.
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
    """As RankMonitor has it."""

    @property
    def name(self) -> str:
        """Rank, role and host, as a sentence begins."""
        return f"rank {self.rank} ({self.role}) on {self.host}"

    @property
    def place(self) -> str:
        """What it does and where, as a sentence goes on."""
        return self.doing if self.step is None else f"{self.doing}, step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a wait in vain comes down to. `cause` is the rank to blame; `fatal` where the time is over for good."""

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
    """Why `asker` waits in vain, by the notes of all ranks that have answered; None where nothing is wrong (yet).

    `hosts` are names of ranks' hosts as far as they are known.
    """
    overdue = [wait for wait in asker.waits if wait.age_s > limits.stall_s]
    if not overdue:
        return None
    reached = _reached(asker, overdue, notes, limits.stall_s / 2)
    waited = f"{asker.name} has waited for {format_seconds(overdue[0].age_s)} in {overdue[0].operation} ({asker.place})"
    silent = [rank for rank in reached if rank not in notes]
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
        text = f"{note.name} goes on elsewhere: {note.place}; {waited}"
        impatient = any(not wait.patient for wait in overdue)
        return Verdict(kind="elsewhere", cause=note.rank, host=note.host, text=text, fatal=over and impatient)
    return _deadlock(asker, overdue[0], [notes[rank] for rank in reached], limits.stall_s, waited)


def processor_wanted_s() -> float:
    """Seconds that this process has computed, and that its threads stood in line for a core that others had.

    The caller's own wait does not count: a watch wakes up on a busy node too.
    """
    waited_ns = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            with contextlib.suppress(OSError, IndexError):  # a thread that has ended, a kernel that does not count
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return time.process_time() + waited_ns / 1e9


def _reached(asker: Note, overdue: Sequence[WaitNote], notes: Mapping[int, Note], after_s: float) -> list[int]:
    """The ranks that `asker` waits for, and those that these wait for in turn, in rank order."""
    found: set[int] = set()
    waiting = [peer for wait in overdue for peer in wait.peers]
    while waiting:
        rank = waiting.pop()
        if rank == asker.rank or rank in found:
            continue
        found.add(rank)
        if rank in notes:
            waiting += [peer for wait in notes[rank].waits if wait.age_s > after_s for peer in wait.peers]
    return sorted(found)


def _is_free(note: Note, after_s: float) -> bool:
    """Whether a rank waits for nobody; inside an engine of its own, where that cannot be seen, whether it computes."""
    long = [wait for wait in note.waits if wait.age_s > after_s]
    return not long or (all(wait.hidden for wait in long) and note.processor_share > 0.5)


def _deadlock(
    asker: Note, mine: WaitNote, others: Sequence[Note], after_s: float, waited: str
) -> Verdict | None:  # fmt: skip
    """All wait for each other: two operations that do not fit, or a message that does not come."""
    if not others or any(max(wait.age_s for wait in note.waits) < after_s for note in others):
        return None
    for note in others:
        theirs = max(note.waits, key=lambda wait: wait.age_s)
        if theirs.operation != mine.operation:
            text = f"deadlock: {note.name} waits in {theirs.operation} ({note.place}), while {waited}"
            return Verdict(kind="deadlock", cause=note.rank, host=note.host, text=text, fatal=True)
    text = f"{waited}, and so do all others: the network or the library hangs"
    return Verdict(kind="hang", cause=asker.rank, host=asker.host, text=text, fatal=True)


@dataclass(kw_only=True)
class Actions:
    """What a watchdog does about what it finds.

    `end` gets the error that ends the job. `log` gets a line for the user. `is_optional` says which ranks the run can
    continue without; `on_lost` is called for each one that it loses. `failed` returns those of some ranks that have
    ended the job themselves.
    """

    end: Callable[[RankError], None]
    log: Callable[[str], None] = lambda text: None
    is_optional: Callable[[int], bool] = lambda rank: False
    on_lost: Callable[[int, str], None] = lambda rank, text: None
    failed: Callable[[Collection[int]], list[int]] = lambda ranks: []


@dataclass(kw_only=True)
class Watchdog:
    """Watches one rank's RankMonitor from a thread of its own. `folder` is one that all ranks of the run see.

    `accuses`: whether it raises alarms; without that it answers those of others.
    """

    monitor: RankMonitor
    folder: Path
    actions: Actions
    limits: Limits = field(default_factory=Limits)
    hosts: dict[int, str] = field(default_factory=dict)
    accuses: bool = True
    besides: Callable[[], None] = lambda: None
    """What else is looked after, while this rank is at work."""

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
        """Watch no more, and take back what was said."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._withdraw()
            remove_file(self.folder / ALONE)

    @property
    def tick_s(self) -> float:
        """Seconds between two looks."""
        tick_s = min(max(self.limits.stall_s / LOOKS, _LEAST_TICK_S), _LONGEST_TICK_S)
        return min(tick_s, VIEW_TICK_S) if self._viewed else tick_s

    @property
    def left_s(self) -> float:
        """Seconds that a rank waits before it looks whether others have left."""
        return min(LEFT_S, self.limits.stall_s / LOOKS * 4)

    def leaves(self, how: str) -> None:
        """This rank's script is over: it answers others from now on, and who still waits for it is told `how`."""
        self.accuses = False
        self._leaving = how, time.monotonic()

    def evict(self, rank: int, text: str, *, in_place: bool) -> None:
        """The run is to go on without `rank`, which is alive; `in_place`: it leaves when it learns of it."""
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
            if self.monitor.cut_off:
                continue
            with contextlib.suppress(OSError):  # a disk that fails is no reason to end a run that may be well
                self._glance()
                if time.monotonic() - looked_s >= self.tick_s:
                    looked_s = time.monotonic()
                    self._give_sign()
                    self._look()
            if self.accuses:
                with contextlib.suppress(OSError):
                    self.besides()

    def _rested(self) -> bool:
        """Whether the watch is over, some time later.

        A process that wakes up far too late has stood still itself: stopped, or its whole machine. What it has waited
        for by then says nothing about others, who may have stood still as well and are just about to go on.
        """
        pause_s, began_s = min(self.tick_s, self.left_s / 4), time.monotonic()
        over = self._over.wait(pause_s)
        now_s = time.monotonic()
        if now_s - began_s - pause_s > self.limits.stall_s * STOOD_STILL:
            self._went_on_s = now_s
        return over

    def _age_s(self, since_s: float) -> float:
        """Seconds since then in which this process was there all the time."""
        return time.monotonic() - max(since_s, self._went_on_s)

    def _give_sign(self) -> None:
        """Where no other rank is left to notice that this one is stopped, who has started it does."""
        seen = self.monitor
        if seen.size - len(seen.lost) == 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_note(
                self.folder / ALONE,
                {"rank": seen.rank, "host": seen.host, "doing": seen.activity[0], "silent_s": self.limits.stall_s},
            )

    def _glance(self) -> None:
        """Say that this rank has left, where others have not come after it; or find that one has that it waits for.

        No disk is touched but by who waits for `left_s` seconds.
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
        left = {int(name.removeprefix(LEFT)) for name in self._names() if name.startswith(LEFT)}
        found = {(peer, wait.since_s) for wait in waits for peer in wait.peers if peer in left}
        # Twice the same: a message may be on its way that was sent before.
        again, self._waited_for = sorted(found & self._waited_for), found
        if again:
            self._end_without(again[0][0])

    def _end_without(self, rank: int) -> None:
        mine = self._own_note()
        wait = max(mine.waits, key=lambda wait: wait.age_s)
        how, host = read_json(self.folder / f"{LEFT}{rank}"), self.hosts.get(rank, "a host unknown yet")
        text = (
            f"rank {rank} on {host} has left: {how}, while {mine.name} waits in {wait.operation} ({mine.place}); give "
            "all ranks as many steps (hpcdl.dataset, hpcdl.join) and let them exit alike"
        )
        verdict = Verdict(kind="left", cause=rank, host=host, text=text, fatal=True)
        if self._speaks(verdict):
            self.actions.end(RankError(text, rank=rank, host=host))

    def _look(self) -> None:
        mine = self._own_note()
        longest_s = max((wait.age_s for wait in mine.waits), default=0.0)
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
            write_note(self.folder / f"note-{mine.rank}", asdict(mine))
        if not alarms:
            return
        mine = dataclasses.replace(mine, answers=alarms)
        write_note(self.folder / f"note-{mine.rank}", asdict(mine))
        if self._alarm is not None and self._age_s(self._alarm[1]) > self.limits.stall_s / 2:
            self._judge(mine, self._alarm[0])

    def _is_viewed(self) -> bool:
        """Whether somebody looks on (supervision/live.py), and has said so again not long ago."""
        try:
            seen_at = (self.folder.parent / VIEWED).stat().st_mtime
        except OSError:
            return False
        if seen_at != self._view[0]:
            self._view = (seen_at, time.monotonic())
        return time.monotonic() - self._view[1] < VIEW_S

    def _own_note(self) -> Note:
        now_s = time.monotonic()
        seen = self.monitor
        lost = seen.lost
        waits = [
            WaitNote(
                operation=_with_whom(wait.operation, wait.peers, seen.size),
                peers=[peer for peer in wait.peers if peer not in lost],
                age_s=self._age_s(wait.since_s),
                patient=wait.patient,
                hidden=wait.hidden,
            )
            for wait in seen.waits()
        ]
        return Note(
            rank=seen.rank,
            host=seen.host,
            role=seen.role,
            doing=seen.activity[0],
            step=seen.step,
            idle_s=now_s - seen.moved_s(),
            processor_share=self._processor_share(now_s),
            waits=[wait for wait in waits if wait.peers],
            spent=seen.spent,
        )

    def _processor_share(self, now_s: float) -> float:
        """Of one core, over half of the time allowed: who waits for a disk for a moment is not stuck."""
        window_s = min(self.limits.stall_s / 2, _LONGEST_TICK_S * LOOKS / 2)
        before = [one for one in self._processor if now_s - one[0] <= window_s]
        self._processor = [*before, (now_s, processor_wanted_s())]
        (first_s, before_s), (last_s, after_s) = self._processor[0], self._processor[-1]
        return (after_s - before_s) / (last_s - first_s) if last_s > first_s else 1.0

    def _judge(self, mine: Note, alarm: str) -> None:
        verdict = diagnose(mine, self._answers(alarm), self.hosts, self.limits)
        suspected = None if verdict is None else (verdict.kind, verdict.cause)
        # Twice the same, a look apart: a note may be on its way, a wait may just be over.
        confirmed, self._suspected = suspected == self._suspected, suspected
        if verdict is None or not confirmed:
            return
        if not verdict.fatal:
            self._tell_once(verdict)
        elif self.actions.is_optional(verdict.cause) and verdict.kind in ("gone", "stuck", "busy"):
            self._on_lost(verdict)
        elif self._speaks(verdict):
            lost = verdict.kind in ("gone", "stuck")
            self.actions.end(RankError(verdict.text, rank=verdict.cause, host=verdict.host, lost=lost))

    def _tell_once(self, verdict: Verdict) -> None:
        if verdict.kind == "busy":
            with contextlib.suppress(FileExistsError):
                self._create(f"busy-{verdict.cause}", verdict.text)

    def _on_lost(self, verdict: Verdict) -> None:
        with contextlib.suppress(FileExistsError):
            self._create(f"lost-{verdict.cause}", verdict.text)
            self.actions.on_lost(verdict.cause, verdict.text)
        self._learn_of_lost(self._names())

    def _learn_of_lost(self, names: Sequence[str]) -> None:
        """Take over what any rank has found out; rank 0 tells the user."""
        seen = self.monitor
        for name in names:
            kind, _, number = name.partition("-")
            if kind not in ("lost", "busy", EVICTED) or name in self._read:
                continue
            self._read.add(name)
            text = (self.folder / name).read_text(encoding="utf-8")
            if kind == "lost" and int(number) == seen.rank:
                os._exit(1)  # it was stopped, the others went on without it, and it must not disturb them now
            if kind == EVICTED and int(number) == seen.rank:
                seen.evicted = text
            if kind == "lost":
                seen.lost |= {int(number)}
            if seen.leads:
                self.actions.log(text if kind == "busy" else f"the run continues without rank {number}: {text}")

    def _speaks(self, verdict: Verdict) -> bool:
        """Whether this rank is the one that ends the job; where who should have cannot, the next look says yes."""
        try:
            self._create("verdict", verdict.text)
        except FileExistsError:
            return self._over.wait(5.0) is False
        return True

    def _answers(self, alarm: str) -> dict[int, Note]:
        found = {}
        for name in self._names():
            if name.startswith("note-"):
                with contextlib.suppress(CorruptError, TypeError, ValueError, FileNotFoundError):
                    note = from_json(Note, read_json(self.folder / name))
                    self.hosts.setdefault(note.rank, note.host)
                    if alarm in note.answers:
                        found[note.rank] = note
        return found

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir())
        except FileNotFoundError:
            return []

    def _raise_alarm(self) -> None:
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
    """Whole or not at all, but not made durable: it is worth nothing after a crash."""
    touch(path, json.dumps(document).encode())


def _with_whom(operation: str, peers: Sequence[int], size: int) -> str:
    """`receiving from rank 2`, `an all-reduce`."""
    if len(peers) != 1 or size == 1:
        return operation
    join = {"sending": "sending to", "receiving": "receiving from"}.get(operation, f"{operation} with")
    return f"{join} rank {peers[0]}"


def watchdog_of(
    communicator: Observed, folder: Path, note: Callable[[RankError], None] = lambda error: None
) -> Watchdog:  # fmt: skip
    """A watch for a rank that somebody else's launcher has started: what it finds goes to stderr, and ends the job.

    `note` hears of it before that.
    """

    def end(error: RankError) -> None:
        note(error)
        sys.stderr.write(f"hpcdl: {error}\n")
        communicator.abort(error.exit_code)

    return Watchdog(monitor=communicator.monitor, folder=folder, actions=Actions(end=end))


def leave_without_lost(communicator: Observed) -> None:
    """Where others are gone: return once all that are left are done. Those left behind end here, without MPI."""
    if communicator.failed():
        communicator.survivors().barrier()
    if communicator.monitor.lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def survivors(communicator: Observed, num_lost: int) -> Observed:
    """The ranks that are left where `num_lost` are not, once this rank knows which; all of them call it."""
    if not num_lost:
        return communicator
    deadline_s = time.monotonic() + LEARN_S
    while len(communicator.failed()) < num_lost and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return communicator.survivors()


@contextlib.contextmanager
def watching(watch: Watchdog) -> Iterator[Watchdog]:
    """Inside, `watch` is on."""
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
