"""Records the spans of one rank while it runs, on the node's own storage, and puts them into the run directory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.comm.agree import decided
from hpcdl.comm.clocks import ClockPoint, measure
from hpcdl.comm.observed import (
    CONTROL,
    IN_GAPS,
    NOTHING,
    OUTSIDE_GAPS,
    PARTS,
    RECEIVING,
    SENDING,
    NoRecorder,
    Observed,
    Recorder,
)
from hpcdl.config.forms import FULL, OFF, UNASKED, parse_trace
from hpcdl.core.errors import HpcdlError, StoppedEarly
from hpcdl.core.processes.wall import WALL
from hpcdl.core.storage.disk import (
    creating,
    is_own,
    is_own_file,
    make_folder,
    remove_file,
    remove_private,
    touch,
)
from hpcdl.trace.counters import CPU_US, cpu_us, sample
from hpcdl.trace.file import COUNTER, TraceFile

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

FOLDER = "trace"
COLLECTOR = "collecting garbage"
LONG_COLLECTION_S = 50e-6
OUTSIDE = -1
"""The step number of spans between steps."""
CLOCK_EVERY_S = 5.0
"""Clocks are measured between steps at most this often."""
COUNT_EVERY_S = 1.0
CPU_EVERY_S = 0.02
"""The use of processors by part of a step needs more than one sample per second."""
PREFIX, PLACE = "hpcdl-trace-", ".place"
"""Prefix of folders on a node's own storage, and suffix of files that hold the place of a rank's folder."""
KEPT_S = 24 * 3600.0
"""How long a killed rank's data are kept on its node, for `collect`."""
_RECORDED_ELSEWHERE = ("reading a batch", "computing")
"""Activities whose time `parts` knows more exactly."""


class Clocks:
    """Measures at intervals how far the ranks' clocks differ, by the same calls on every rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, identity: str | None = None) -> None:
        self._clock, self._identity = clock, identity
        self._measured_s = clock()

    def quiesced(self, group: Communicator, *, last: bool = False) -> ClockPoint | None:
        """Return this rank's point, if rank 0's clock says that the last measurement is old enough, or the `last` time.

        After ranks are lost, the group's numbers differ from the world's, and the clocks keep their last points.
        """
        members = group.lane.members if isinstance(group, Observed) else tuple(range(group.size))
        if members != tuple(range(group.size)):
            return None
        if not last and not decided(group, lambda: self._clock() - self._measured_s >= CLOCK_EVERY_S):
            return None
        self._measured_s = self._clock()
        return measure(group, self._clock, self._identity)


class Untraced(NoRecorder):
    """Recorder of a rank without a trace beside others with one: it takes part in measuring their clocks."""

    def __init__(self) -> None:
        self._clocks = Clocks()

    def quiesced(self, group: Communicator, *, last: bool = False) -> None:
        """Take part in a measurement of clocks."""
        self._clocks.quiesced(group, last=last)


class TraceRecorder:
    """A Recorder (comm/observed.py) with its own file. config/forms.py describes `text`.

    `clock` gives its times; `identity` distinguishes that clock from others if it is not the system's.
    """

    def __init__(
        self,
        text: str,
        folder: Path,
        *,
        rank: int,
        size: int,
        host: str,
        role: str,
        clock: Callable[[], float] = time.monotonic,
        identity: str | None = None,
    ) -> None:
        self._spec = parse_trace(text)
        self._clock, self._clocks = clock, Clocks(clock, identity)
        self._traced = self._spec.has_rank(rank)
        self._full = self._traced and self._spec.level == FULL
        self._on = self._traced
        self._step = OUTSIDE
        self._of_script = role == "script"
        self._last_step, self._began_s, self._last_span = 0, 0.0, (0.0, 0.0)
        facts = {"rank": rank, "size": size, "host": host, "role": role, "level": self._spec.level}
        times = {"begin_s": clock(), "wall_s": WALL.now_s()}
        self.file = TraceFile(folder / file_name(rank), self._spec.num_bytes, {**facts, **times})
        self._write = self.file.write
        self._closed = threading.Event()
        # A daemon: a rank that ends by an error must not wait for it.
        self._counting = threading.Thread(target=self._count, name="trace", daemon=True)
        self._collection_s = 0.0
        self._collections: deque[tuple[float, float, int]] = deque(maxlen=1000)
        """Collections by Python's garbage collector. It may run inside any line, so it writes nothing itself."""

    @property
    def wants_layers(self) -> bool:
        """Whether a traced rank records layers, at the level `full`."""
        return self._full

    def start(self) -> None:
        """Start to count, and to record the garbage collector's work."""
        if self._traced:
            self.file.facts["cost_s"][0] = self.file.cost_s()
            gc.callbacks.append(self._collected)
            self._counting.start()

    def step(self, number: int) -> None:
        """Begin a step on the main thread. A script's numbers restart in each epoch; here they continue."""
        if self._of_script:
            number = self._script_step(number)
        self._step = number
        self._on = self._traced and self._spec.has_step(number)

    def span(self, name: str, begin_s: float, end_s: float, *, num_bytes: int = 0, bucket: int = -1) -> None:
        """Keep the span, if its step is kept."""
        if self._on:
            self._write(name, begin_s, end_s, num_bytes, self._step, -1, bucket)
            self._last_span = (begin_s, end_s)

    def _script_step(self, number: int) -> int:
        """Record a step of Keras's own loop from its last bucket, which shows its only parts. Return its number.

        Reading is part of computing here, and so is everything before the last bucket leaves.
        """
        now_s, continues = self._clock(), self._began_s > 0 and number == self._last_step + 1
        self._last_step = number
        if continues:
            left_s, came_s = self._last_span if self._last_span[0] >= self._began_s else (now_s, now_s)
            if self._on:
                borders = (self._began_s, self._began_s, left_s, came_s, now_s, now_s)
                self._write_parts(borders, 0.0)
        self._began_s = now_s
        return self._step + 1 if continues or self._step == OUTSIDE else self._step

    def parts(self, borders: Sequence[float], waited_s: float = 0.0) -> None:
        """Keep the five parts of the completed step; that of the exchange holds `waited_s` in ns."""
        if self._on:
            # Borders are times of the run's clock (WALL), a constant away from this trace's.
            self._write_parts(borders, self._clock() - WALL.now_s(), round(waited_s * 1e9))

    def _write_parts(self, borders: Sequence[float], shift_s: float, waited_ns: int = 0) -> None:
        for name, (begin_s, end_s) in zip(PARTS, itertools.pairwise(borders), strict=True):
            value = waited_ns if name == "exchange" else 0
            self._write(name, begin_s + shift_s, max(end_s, begin_s) + shift_s, value, self._step, -1, -1)

    def layers(self, spans: Iterable[tuple[str, str, float, float]]) -> None:
        """Keep the spans of layers, with the index of the layer's name as bucket."""
        if self._on:
            shift_s = self._clock() - WALL.now_s()
            for name, layer, begin_s, end_s in spans:
                if number := self.file.code(layer):
                    self._write(name, begin_s + shift_s, max(begin_s, end_s) + shift_s, 0, self._step, -1, number)

    def exchanged(self, bucket: int, values: object) -> None:
        """Do nothing: the bucket's span has all information."""

    def activity(self, name: str, begin_s: float, end_s: float) -> None:
        """Keep an activity outside the steps."""
        if self._traced and name not in _RECORDED_ELSEWHERE:
            self._write(name, begin_s, end_s, 0, OUTSIDE, -1, -1)

    def operation(self, purpose: str, name: str, peer: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        """Keep each message at the level `full`; at other levels only collectives outside the exchange."""
        if self._on and (self._full or (purpose == CONTROL and name not in (SENDING, RECEIVING))):
            self._write(name, begin_s, end_s, num_bytes, self._step, peer, -1)

    def background(self, begin_s: float, end_s: float, *, in_gap: bool) -> None:
        """Keep the slice without its step, because the end of a step may cut it."""
        if self._traced:
            self._write(IN_GAPS if in_gap else OUTSIDE_GAPS, begin_s, end_s, 0, OUTSIDE, -1, -1)

    def quiesced(self, group: Communicator, *, last: bool = False) -> None:
        """Keep the difference between this clock and others, if it was measured."""
        point = self._clocks.quiesced(group, last=last)
        if point is not None:
            self.file.add_point(point)

    def close(self) -> None:
        """Stop recording. The file is then complete."""
        if self._closed.is_set():
            return
        # First, so that no other thread writes while the file is closed.
        self._on = self._traced = self._full = False
        self._closed.set()
        if self._counting.is_alive():
            gc.callbacks.remove(self._collected)
            self._counting.join()
        self.file.close()  # after the thread, which counts once more when it ends

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        """Record that Python's collector has begun or ended."""
        now_s = self._clock()
        if phase == "start":
            self._collection_s = now_s
        elif self._on and now_s - self._collection_s > LONG_COLLECTION_S:
            self._collections.append((self._collection_s, now_s, self._step))

    def _count(self) -> None:
        """Count once a second, and once more at the end; processor time much more often, while steps are kept."""
        names: dict[str, str] = {}
        used, next_s = COUNTER + CPU_US, self._clock()
        while True:
            ended = self._closed.is_set()
            now_s = self._clock()
            if now_s < next_s and not ended:
                if self._on:
                    self._write(used, now_s, now_s, cpu_us(), OUTSIDE, -1, -1)
                self._closed.wait(CPU_EVERY_S)
                continue
            next_s = now_s + COUNT_EVERY_S
            for name, value in sample().items():
                self._write(names.setdefault(name, COUNTER + name), now_s, now_s, value, OUTSIDE, -1, -1)
            while self._collections:
                begin_s, end_s, step = self._collections.popleft()
                self._write(COLLECTOR, begin_s, end_s, 0, step, -1, -1)
            if ended:
                return
            self._closed.wait(CPU_EVERY_S)


@contextlib.contextmanager
def recording(text: str, communicator: Observed, run_dir: Path) -> Iterator[None]:
    """Record this rank's spans inside this context as `text` asks (config/forms.py). Collective over all ranks.

    The file always comes into `run_dir`, unless this process is killed: then `collect` fetches it. If one rank has no
    room for a trace that was not requested, no rank keeps one.
    """
    if parse_trace(text).level == OFF:
        yield
        return
    target = run_dir / FOLDER
    decided(communicator, lambda: _cleared(target))  # before any rank makes a file there
    note = target / f"rank-{communicator.rank}{PLACE}"
    # A requested trace that cannot be kept ends the run; one that nobody requested only warns.
    if text != UNASKED:
        with _kept(_opened(text, communicator, note), communicator, note):
            yield
        return
    recorder, problems = _agreed(communicator, note)
    if not problems and recorder is not None:
        with _kept(recorder, communicator, note):
            yield
        return
    if communicator.rank == 0:
        sys.stderr.write(f"hpcdl: warning: this run keeps no trace: {problems[0]}\n")
    if recorder is not None:
        recorder.close()
        _drop(recorder.file.path.parent)
        remove_file(note)
    with _heard(NOTHING if problems else Untraced(), communicator):
        yield


@contextlib.contextmanager
def _kept(recorder: TraceRecorder, communicator: Observed, note: Path) -> Iterator[None]:
    try:
        with _heard(recorder, communicator, recorder.start):
            yield
    finally:
        recorder.close()
        _bring(recorder.file, note.parent, note)


@contextlib.contextmanager
def _heard(recorder: Recorder, communicator: Observed, begin: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let `recorder` observe this rank. All ranks are quiescent when that begins, and when all stop early."""
    monitor = communicator.monitor
    try:
        recorder.quiesced(communicator, last=True)
        monitor.recorder = recorder
        begin()
        try:
            yield
        except StoppedEarly:
            # Without lost ranks only: a collective call would wait for them.
            if not monitor.lost:
                recorder.quiesced(communicator, last=True)
            raise
    finally:
        monitor.recorder = NOTHING


def _opened(text: str, communicator: Observed, note: Path) -> TraceRecorder:
    """Return a recorder with a file on this node. `note` holds its path before it exists: a kill may come any time."""
    # The next run on this node does it: nobody else returns for what killed ranks left.
    _sweep()
    local = None
    try:
        # Another user of /tmp could take a name that can be guessed.
        named = Path(tempfile.gettempdir()) / f"{PREFIX}{os.geteuid()}-{secrets.token_hex(8)}"
        touch(note, f"{communicator.host}\n{named / file_name(communicator.rank)}\n".encode())
        named.mkdir(0o700)
        local = named
        role = communicator.monitor.role
        recorder = TraceRecorder(
            text, local, rank=communicator.rank, size=communicator.size, host=communicator.host, role=role
        )
    except OSError as error:
        if local is not None:
            _drop(local)
        with contextlib.suppress(OSError):
            remove_file(note)
        # `gettempdir` itself may have failed, and has no answer then.
        where = f"{tempfile.tempdir or 'the folder of temporary files'} on {communicator.host}"
        raise HpcdlError(f"no trace can be kept in {where}: {error.strerror}; set TMPDIR, or --trace off") from error
    return recorder


def _agreed(communicator: Observed, note: Path) -> tuple[TraceRecorder | None, list[str]]:
    """Return the recorder of an unrequested trace, if this rank has one, and the problems with it. Collective."""
    recorder, problem = None, ""
    try:
        if parse_trace(UNASKED).has_rank(communicator.rank):
            recorder = _opened(UNASKED, communicator, note)
    except HpcdlError as error:
        problem = str(error)
    return recorder, [text for text in communicator.allgather_json(problem) if text]


def _sweep() -> None:
    """Remove data of this user's ranks that were killed long ago. Running ranks hold locks on theirs."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.geteuid()}-*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            if not is_own(folder) or WALL.now_s() - folder.lstat().st_mtime < KEPT_S:
                continue
            for path in folder.iterdir():
                # A lock of a running rank raises OSError here, which leaves its folder alone.
                fcntl.flock(held.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            _drop(folder)


def _drop(folder: Path) -> None:
    """Remove a folder with a recording of this user's rank; no other user could put anything there."""
    remove_private(folder, PREFIX, lambda _: True)


def _cleared(target: Path) -> None:
    """Make the folder, and remove what an earlier part of a resumed run has left."""
    try:
        make_folder(target)
        for path in (*target.glob("rank-*" + PLACE), *target.glob("rank-*.trace")):
            remove_file(path)
    except OSError as error:
        raise HpcdlError(f"cannot write {target}: {error.strerror}") from error


def _bring(file: TraceFile, target: Path, note: Path) -> None:
    """Copy the file into the run directory. If that has no room, the file stays where it is."""
    try:
        with creating(target / file.path.name) as out:
            out.writelines(file.content())
        _drop(file.path.parent)
        remove_file(note)
    except OSError as error:
        sys.stderr.write(f"hpcdl: warning: the trace stays in {file.path}: {error.strerror or error}\n")


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}.trace"


@contextlib.contextmanager
def collected(run_dir: Path) -> Iterator[None]:
    """Collect the recordings of ranks on this node into `run_dir` at the end, even after errors."""
    try:
        yield
    finally:
        collect(run_dir)


def trace_files_in(run_dir: Path) -> dict[Path, tuple[str, Path]]:
    """Return host and path of each rank's trace, by the file that holds this place."""
    trace_files = {}
    for note in sorted((run_dir / FOLDER).glob("rank-*" + PLACE)):
        with contextlib.suppress(OSError):  # the rank has just brought its trace
            # A damaged note may have fewer lines.
            lines = [*note.read_text(encoding="utf-8", errors="replace").splitlines(), "", ""]
            trace_files[note] = lines[0], Path(lines[1])
    return trace_files


def is_written(path: Path) -> bool:
    """Return whether the rank of this trace is alive: it holds a lock on the file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def collect_abandoned(run_dir: Path) -> None:
    """Fetch traces of dead ranks on this node, which remain if all processes of a run died."""
    collect(run_dir, {note: left for note, left in trace_files_in(run_dir).items() if not is_written(left[1])})


def collect(run_dir: Path, trace_files: Mapping[Path, tuple[str, Path]] | None = None) -> list[str]:
    """Fetch traces of killed ranks on this node. Return a line for each file that is elsewhere or missing.

    `trace_files`: as they were (by default the present ones). Outdated ones, which new ranks replaced, are removed.
    """
    left, present = [], trace_files_in(run_dir)
    for note, (host, path) in (present if trace_files is None else trace_files).items():
        target = run_dir / FOLDER / f"{note.stem}.trace"
        # The note is only text: it must not lead to another folder, which would be dropped below.
        honest = path.name == target.name and path.parent.name.startswith(PREFIX)
        if host != os.uname().nodename or not honest or not is_own(run_dir):
            left.append(f"{note.stem}: its trace was left on {host} in {path}")
            continue
        try:
            counts = present.get(note) == (host, path)
            if counts and is_own_file(path):
                # A copy, because the node's storage is another file system than the run directory's.
                with path.open("rb") as left_there, creating(target) as out:
                    shutil.copyfileobj(left_there, out)
            _drop(path.parent)
            if counts:
                remove_file(note)
        except OSError as error:
            left.append(f"{note.stem}: its trace stays in {path}: {error.strerror or error}")
    return left
