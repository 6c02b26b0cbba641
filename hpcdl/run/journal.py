"""metrics.jsonl: one line per event of a run, appended by rank 0, followed by commands that watch the run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcdl.comm.clocks import clock_identity
from hpcdl.core.errors import CorruptError
from hpcdl.core.processes.wall import NOTICED_S, WALL
from hpcdl.core.records.run_record import event_of
from hpcdl.core.storage.disk import cut, open_to_append
from hpcdl.core.storage.files import MOST_JSON_BYTES, open_regular, without_infinities
from hpcdl.core.storage.lock import job_here
from hpcdl.core.units import format_seconds

FILE_NAME = "metrics.jsonl"
STEP_INTERVAL_S = 0.5


EventHandler = Callable[[dict[str, Any]], None]


class Journal(Protocol):
    """Receives events; `kind` is start, step, epoch or message."""

    def write(self, kind: str, **values: Any) -> None:
        """Append one event."""

    def step(self, step: int, **values: Any) -> None:
        """Append a step event, at most one per interval."""

    def due(self) -> bool:
        """Return whether a step event would be kept; True starts a new interval."""

    def close(self) -> None:
        """Close the journal; no event may follow."""


class NullJournal:
    """A journal for ranks that do not write."""

    def write(self, kind: str, **values: Any) -> None:
        """Drop the event."""

    def step(self, step: int, **values: Any) -> None:
        """Drop the event."""

    def due(self) -> bool:
        """Return False: no event is kept."""
        return False

    def close(self) -> None:
        """Do nothing."""


class FileJournal:
    """Appends to `metrics.jsonl` in a run directory; a line is whole or absent for a reader that waits for its end.

    A full disk loses events but never stops the run; the first line after a gap says how many are missing.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = io.FileIO(open_to_append(run_dir / FILE_NAME), "ab")  # unbuffered: a kill loses no event
        self._last_step_at = 0.0
        self._lost = 0
        self._logged_set_by_s = WALL.set_by_s()

    def write(self, kind: str, **values: Any) -> None:
        """Append one event with the time of day."""
        before = []
        if self._lost:
            before.append(f"{self._lost} events before this one are missing: the disk was full")
        set_by_s = WALL.set_by_s()
        if abs(set_by_s - self._logged_set_by_s) > NOTICED_S:
            before.append(clock_was_set(os.uname().nodename, set_by_s - self._logged_set_by_s))
        warnings = b"".join(_line("message", text=f"warning: {text}") for text in before)
        # One write: the warning and the line are both there, or both missing.
        if self._append(warnings + _line(kind, **values)):
            self._lost, self._logged_set_by_s = 0, set_by_s
        else:
            self._lost += 1

    def _append(self, content: bytes) -> bool:
        """Append `content` and return True; if it does not fit, append nothing and return False."""
        end = self._file.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            if self._file.write(content) == len(content):
                return True
        # A part of a line would spoil the next one, which begins where the file ends.
        cut(self._file.fileno(), end)
        return False

    def step(self, step: int, **values: Any) -> None:
        """Append a step event unless the last one is less than half a second old."""
        if self.due():
            self.write("step", step=step, **values)

    def due(self) -> bool:
        """Return whether the interval since the last True is over."""
        now_s = time.monotonic()
        if now_s - self._last_step_at < STEP_INTERVAL_S:
            return False
        self._last_step_at = now_s
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(kind: str, **values: Any) -> bytes:
    times = {"at": round(WALL.now_s(), 3), "monotonic_s": round(time.monotonic(), 3), "clock": _own_clock()}
    if kind == "start":
        values["job"] = job_here()[1]  # several jobs may continue one run: `hpcdl jobs` distinguishes them by it
    event = without_infinities({"kind": kind, **times, **values})
    return (json.dumps(event, allow_nan=False) + "\n").encode()


@functools.cache
def _own_clock() -> str:
    """Return a short name for the clock of `monotonic_s`: one per boot of a kernel."""
    return hashlib.blake2b(clock_identity().encode(), digest_size=4).hexdigest()


def clock_was_set(host: str, seconds: float) -> str:
    """Return the text for a run's journal and record about a host whose clock was set during the run."""
    how = "ahead" if seconds > 0 else "back"
    return (
        f"the clock of {host} was set {how} by {format_seconds(abs(seconds))} while it ran: its durations and "
        "time stamps continue as if it had not been"
    )


def seconds_between(sooner: Mapping[str, Any], later: Mapping[str, Any]) -> float | None:
    """Return the seconds between two events of a journal, None if they hold no times.

    Uses the monotonic clock if both events have the same one. Otherwise uses the time of day, as for journals of older
    versions.
    """
    name = "monotonic_s" if sooner.get("clock") == later.get("clock") and "clock" in sooner else "at"
    began_s, ended_s = sooner.get(name), later.get(name)
    if isinstance(began_s, int | float) and isinstance(ended_s, int | float):
        return ended_s - began_s
    return None


class EchoJournal:
    """Forwards every event to another journal and to `on_event`, for a rank with a watched terminal."""

    def __init__(self, journal: Journal, on_event: EventHandler) -> None:
        self._journal, self._on_event = journal, on_event

    def write(self, kind: str, **values: Any) -> None:
        """Append one event to both."""
        self._journal.write(kind, **values)
        self._on_event({"kind": kind, **values})

    def step(self, step: int, **values: Any) -> None:
        """Append a step event to both, as often as the journal accepts one."""
        if self._journal.due():
            self.write("step", step=step, **values)

    def due(self) -> bool:
        """Return whether a step event would be kept now."""
        return self._journal.due()

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def all_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return the journal's events, oldest first."""
    reader, entries = JournalReader(run_dir, from_begin=True), list[dict[str, Any]]()
    while events := reader.read():
        entries += events
    return entries


def since_start(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a journal since the last start of training."""
    begun = max((index for index, event in enumerate(events) if event.get("kind") == "start"), default=0)
    return events[begun:]


class JournalReader:
    """Reads the events that were appended since the last call; with `from_begin` the first call reads all.

    Damaged lines are skipped, because a run must continue whatever its journal holds; `strict` is for commands that
    show them.
    """

    def __init__(self, run_dir: Path, *, from_begin: bool = False, strict: bool = False) -> None:
        self._path = run_dir / FILE_NAME
        self._strict, self._num_lines = strict, 0
        self._position = self._path.stat().st_size if self._path.exists() and not from_begin else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new events, oldest first; an unfinished line is left for the next call.

        With `strict`, raises CorruptError for a damaged line.
        """
        content = b""
        with contextlib.suppress(OSError), open_regular(self._path) as file:
            file.seek(self._position)
            content = file.read(MOST_JSON_BYTES)
        # Without any line end `rfind` gives -1, and nothing is whole.
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        events = []
        for line in whole.split(b"\n")[:-1]:
            self._num_lines += 1
            try:
                events.append(event_of(line))
            except ValueError as error:
                if self._strict:
                    raise CorruptError(f"{self._path}, line {self._num_lines} is damaged: {error}") from error
        return events
