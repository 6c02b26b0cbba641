"""Finds the rank that an exchange waits for in vain, says which, and ends the job.

Every rank has a watching thread. Where nothing has moved for half the time allowed, it writes down where its rank
stands, again and again as a sign of life; where an exchange has waited for all of it, the lowest rank that still lives
compares these notes: who left none lately is asleep or gone, else who is not in the exchange, or furthest behind, holds
the others up. In a run that is well nothing is ever written.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcdl.core.errors import CorruptError, RankError
from hpcdl.core.events import Whereabouts
from hpcdl.core.files import read_json, write_text
from hpcdl.core.records import from_json

CATCH_UP_S = 2.0
"""Notes of other ranks may take this long to be seen on a shared file system."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Where a rank stands: `bucket` is -1 outside an exchange; `since` and `at` are Unix times."""

    rank: int
    host: str
    step: int
    bucket: int
    doing: str
    since: float
    at: float


class StallWatch:
    """Watches a rank's Whereabouts from a thread; `on_stall` gets the sentence and must end the job."""

    def __init__(
        self,
        whereabouts: Whereabouts,
        folder: Path,
        *,
        rank: int,
        hosts: Sequence[str],
        timeout_s: float,
        on_stall: Callable[[RankError], None],
    ) -> None:
        self._whereabouts, self._folder, self._rank, self._hosts = whereabouts, folder, rank, list(hosts)
        self._timeout_s, self._on_stall = timeout_s, on_stall
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(10.0, self._timeout_s / 16)):
            waited_s = time.time() - self._whereabouts.since
            if waited_s > self._timeout_s / 2:
                self._note()
            if waited_s > self._timeout_s and self._whereabouts.bucket >= 0:
                self._judge(self._whereabouts.since)

    def _note(self) -> None:
        whereabouts = self._whereabouts
        note = Note(
            rank=self._rank,
            host=self._hosts[self._rank],
            step=whereabouts.step,
            bucket=whereabouts.bucket,
            doing=whereabouts.doing,
            since=whereabouts.since,
            at=time.time(),
        )
        with contextlib.suppress(OSError):
            write_text(self._path(self._rank), json.dumps(asdict(note)))

    def _judge(self, since: float) -> None:
        if self._over.wait(CATCH_UP_S) or self._whereabouts.since != since:
            return
        fresh_after = since + self._timeout_s / 2  # who lives has written one in the meantime
        notes = {note.rank: note for note in self._notes() if note.at > fresh_after}
        if min(notes, default=self._rank) == self._rank:
            self._on_stall(culprit(notes, self._hosts, self._whereabouts, self._timeout_s))
        else:
            self._over.wait(5.0)  # the lowest rank speaks; if it cannot, this one will at its next turn

    def _notes(self) -> list[Note]:
        found = []
        for rank in range(len(self._hosts)):
            with contextlib.suppress(CorruptError, TypeError, OSError):
                found.append(from_json(Note, read_json(self._path(rank))))
        return found

    def _path(self, rank: int) -> Path:
        return self._folder / f"position-{rank}.json"


def culprit(notes: dict[int, Note], hosts: Sequence[str], mine: Whereabouts, timeout_s: float) -> RankError:
    """The error that names the rank which holds the others up."""
    where = f"the others wait in step {mine.step}, bucket {mine.bucket}, for more than --stall-timeout {timeout_s:g}s"
    silent = [rank for rank in range(len(hosts)) if rank not in notes]
    elsewhere = [rank for rank, note in notes.items() if note.bucket < 0]
    behind = [rank for rank, note in notes.items() if (note.step, note.bucket) < (mine.step, mine.bucket)]
    if silent:
        rank, what = silent[0], "gives no sign of life (stopped, swapped out or its node hangs)"
    elif elsewhere:
        rank = elsewhere[0]
        what = f"is not in the exchange but {notes[rank].doing} (step {notes[rank].step})"
    elif behind:
        rank = behind[0]
        what = f"is behind, in step {notes[rank].step}, bucket {notes[rank].bucket}"
    else:
        rank, what = 0, "and all others wait for a message that does not come: the network or the MPI hangs"
    return RankError(f"rank {rank} on {hosts[rank]} {what}; {where}", rank=rank, host=hosts[rank])
