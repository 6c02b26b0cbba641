"""The current state of a run, from its journal and the notes its ranks write while someone watches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster.status import FOLDER as RANKS_FOLDER
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.run_record import FILE_NAME, FINISHED, continues, from_json, read_record, state_of
from hpcdl.core.storage.disk import is_own, make_folder, remove_file, touch
from hpcdl.core.storage.files import read_json
from hpcdl.core.units import IMAGES
from hpcdl.run.journal import FILE_NAME as JOURNAL
from hpcdl.run.journal import JournalReader, seconds_between
from hpcdl.run.rundir import CONFIG_FILE
from hpcdl.supervision.watchdog import FOLDER, VIEWED, Note

MOST_ROWS = 20
_OF_A_RUN = (CONFIG_FILE, FILE_NAME, JOURNAL)
"""A folder with none of these is not a run, and the viewer file is not written there."""


@dataclass(frozen=True, kw_only=True)
class RankNow:
    """One rank: what it does, which ranks it waits for, its steps per second.

    `shares` are those of the parts of a step (PARTS of comm/observed.py) in its most recent steps.
    """

    note: Note
    steps_per_second: float | None
    shares: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RunNow:
    """`ranks`: the slowest first, at most MOST_ROWS of `num_ranks`; `seconds_left` is None if unknown.

    `counted` is the unit that `images_per_second` counts.
    """

    status: str
    step: int
    num_steps: int | None
    loss: float | None
    images_per_second: float | None
    counted: str
    seconds_left: float | None
    ranks: Sequence[RankNow]
    num_ranks: int

    def continues(self) -> bool:
        """Whether the run continues."""
        return continues(self.status)


class LiveView:
    """Repeatedly reads the state of a run; its ranks write notes as long as `look` is called."""

    def __init__(self, run_dir: Path) -> None:
        if not any((run_dir / name).is_file() for name in _OF_A_RUN):
            lacking = f"it holds none of {', '.join(_OF_A_RUN)}; " if run_dir.is_dir() else ""
            raise UsageError(f"{run_dir} is not a run directory: {lacking}`hpcdl runs` lists what there is")
        self._run_dir = run_dir
        self._folder = run_dir / RANKS_FOLDER / FOLDER
        self._journal = JournalReader(run_dir, from_begin=True, strict=True)
        self._events: dict[str, dict[str, Any]] = {}
        self._before: dict[int, tuple[float, Sequence[float]]] = {}
        self._rates: dict[int, tuple[float | None, Sequence[float]]] = {}
        self._stamps: dict[Path, int] = {}
        self._start: Path | None = None

    def look(self) -> RunNow:
        """Return the current state. Raises CorruptError if the journal is damaged."""
        if is_own(self._run_dir):  # another user's run can be viewed, but its ranks write notes for its owner only
            with contextlib.suppress(OSError, UsageError):
                make_folder(self._folder)
                touch(self._folder / VIEWED)
        for event in self._journal.read():
            self._events[event.get("kind", "")] = event
        # A damaged record is reported.
        record = read_record(self._run_dir) if (self._run_dir / FILE_NAME).exists() else None
        status = state_of(self._run_dir, record.status if record else None)
        ranks = [self._rank_now(note) for note in self._notes()] if continues(status) else []
        ranks.sort(key=lambda one: (one.steps_per_second is None, one.steps_per_second or 0.0, one.note.rank))
        step, start = self._events.get("step", {}), self._events.get("start", {})
        num_done, total, first = step.get("step") or 0, start.get("steps"), start.get("done") or 0
        took_s = seconds_between(start, step)
        left_s, loss, rate = None, step.get("loss"), step.get("images_per_second")
        if not continues(status):  # the journal notes steps only twice a second
            num_done = max(num_done, record.steps if record else 0)
            if record and record.status == FINISHED:
                loss, rate = record.loss, record.images_per_second
        elif total and took_s is not None and num_done > first:
            left_s = (total - num_done) * took_s / (num_done - first)
        return RunNow(
            status=status,
            step=num_done,
            num_steps=total,
            loss=loss,
            images_per_second=rate,
            counted=start.get("counted", IMAGES),
            seconds_left=left_s,
            ranks=ranks[:MOST_ROWS],
            num_ranks=len(ranks),
        )

    def close(self) -> None:
        """Stop the ranks' notes."""
        if is_own(self._run_dir):
            with contextlib.suppress(OSError, UsageError):
                remove_file(self._folder / VIEWED)

    def _notes(self) -> list[Note]:
        """Return the notes of the newest start; others are outdated."""
        try:
            newest = self._newest_start()
        except OSError:
            return []
        notes = []
        for path in sorted(newest.glob("note-*")) if newest else []:
            with contextlib.suppress(CorruptError, TypeError, ValueError, OSError):
                notes.append(from_json(Note, read_json(path)))
        return notes

    def _newest_start(self) -> Path | None:
        """Return the folder in which ranks write now; before any has written, the one with the newest time stamp.

        If the clock was set back, an earlier start may have the newest time stamp.
        """
        before = self._stamps
        self._stamps = {path: path.stat().st_mtime_ns for path in self._folder.iterdir() if path.is_dir()}
        moved = [path for path, stamp in self._stamps.items() if before and before.get(path) != stamp]
        if moved or self._start not in self._stamps:
            self._start = max(moved or self._stamps, key=self._stamps.__getitem__, default=None)
        return self._start

    def _rank_now(self, note: Note) -> RankNow:
        now_s = time.monotonic()
        before_s, before = self._before.get(note.rank, (now_s, note.spent))
        if note.rank not in self._before or tuple(before) != tuple(note.spent):
            self._before[note.rank] = (now_s, note.spent)
            steps, *seconds = (b - a for a, b in zip(before, note.spent, strict=False)) if note.spent else (0,)
            total_s = sum(seconds)
            if steps > 0 and total_s > 0:
                rate = steps / max(now_s - before_s, 1e-9)
                self._rates[note.rank] = (rate, [part_s / total_s for part_s in seconds])
        rate_now, shares = self._rates.get(note.rank, (None, ()))
        return RankNow(note=note, steps_per_second=rate_now, shares=shares)
