"""Spans of time inside a step; recorders that keep them, and the one that keeps nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol


class Recorder(Protocol):
    """Takes spans: `name`, start and end in seconds of `time.monotonic`."""

    def span(self, name: str, start_s: float, end_s: float) -> None:
        """Keep one span."""


class NullRecorder:
    """Keeps nothing, so that callers need no `if`."""

    def span(self, name: str, start_s: float, end_s: float) -> None:
        """Drop the span."""


class ListRecorder:
    """Keeps every span in memory, in order of arrival."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    def span(self, name: str, start_s: float, end_s: float) -> None:
        """Append the span."""
        self.spans.append((name, start_s, end_s))


@contextlib.contextmanager
def spanning(recorder: Recorder, name: str) -> Iterator[None]:
    """Record the time that the block takes as one span."""
    start_s = time.monotonic()
    try:
        yield
    finally:
        recorder.span(name, start_s, time.monotonic())


class Whereabouts:
    """What a rank does at the moment, for others that may have to wait for it; `since` is Unix time in seconds.

    `bucket` is -1 outside an exchange.
    """

    def __init__(self) -> None:
        self.step, self.bucket, self.doing = 0, -1, "starting"
        self.since = time.time()

    def beat(self, doing: str, *, step: int | None = None, bucket: int = -1) -> None:
        """The rank moved on to `doing`; a bucket number means that it is in an exchange."""
        self.step = self.step if step is None else step
        self.bucket, self.doing, self.since = bucket, doing, time.time()


class NullWhereabouts(Whereabouts):
    """Nobody asks."""

    def beat(self, doing: str, *, step: int | None = None, bucket: int = -1) -> None:
        """Do nothing."""
