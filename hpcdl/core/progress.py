"""Progress on stderr for people: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self

from hpcdl.core.errors import printable


class Progress(Protocol):
    """A bar that is told how far the work is; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, done: float, note: str = "") -> None:
        """Set the amount done (in the unit of `total`) and the text behind the bar."""


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
            TextColumn("{task.description}", markup=False),
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


def progress(description: str, total: float, *, enabled: bool = True) -> Progress:
    """A bar if stderr is a terminal and `enabled`, else nothing."""
    if enabled and sys.stderr.isatty():
        return BarProgress(description, total)
    return NullProgress()
