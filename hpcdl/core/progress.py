"""Progress on stderr for people: a bar on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from hpcdl.core.errors import printable
from hpcdl.core.units import format_seconds

LINE_EVERY_S = 60.0
"""Interval of the lines: about 1,400 in the log of a day."""


class Progress(Protocol):
    """A progress display, used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, done: float, note: str = "") -> None:
        """Set the amount done (in the unit of `total`) and the text after the bar."""


class NullProgress:
    """Draws nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, done: float, note: str = "") -> None:
        """Do nothing."""


class BarProgress:
    """A rich bar on stderr: description, share done, note, time left."""

    def __init__(self, description: str, total: float) -> None:
        # Imported here: `hpcdl --help` must not pay for rich.
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar: Any = RichProgress(
            TextColumn("{task.description}", markup=False),  # a name may hold rich's square brackets
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(printable(description), total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: float, note: str = "") -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, note=printable(note))


class LineProgress:
    """Prints a line on stderr each minute, for logs: share done, note, time left at the pace since the first update."""

    def __init__(self, description: str, total: float) -> None:
        self._description, self._total = printable(description), total
        self._first: tuple[float, float] | None = None
        self._reported_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, done: float, note: str = "") -> None:
        """Print the progress if the last line is a minute old."""
        now_s = time.monotonic()
        self._first = self._first or (done, now_s)
        if now_s - self._reported_s < LINE_EVERY_S:
            return
        self._reported_s = now_s
        share = f"{100 * done / self._total:.0f} %" if self._total else ""
        begun, begun_s = self._first
        left = ""
        if done > begun:  # a resumed run begins in the middle
            left = f"{format_seconds((self._total - done) * (now_s - begun_s) / (done - begun))} left"
        parts = ", ".join(part for part in (share, printable(note), left) if part)
        print(f"{self._description}: {parts}", file=sys.stderr, flush=True)


def progress(description: str, total: float, *, enabled: bool = True) -> Progress:
    """Return a bar if stderr is a terminal, else lines; without `enabled` draw nothing."""
    if not enabled:
        return NullProgress()
    return BarProgress(description, total) if sys.stderr.isatty() else LineProgress(description, total)
