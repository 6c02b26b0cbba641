"""Work that two processes share: what one interpreter does piece by piece takes half the time on two cores."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcdl.core.progress import NullProgress, Progress

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Carried:
    """How a result becomes what JSON holds, which a pipe carries (NaN too), and itself again."""

    pack: Callable[[Any], Any] = lambda found: found
    unpack: Callable[[Any], Any] = lambda found: found


def in_two(
    work: Callable[[Sequence[Item], Progress], list[Found]],
    items: Sequence[Item],
    many: int,
    bar: Progress | None = None,
    carried: Carried = Carried(),
) -> list[Found]:
    """What `work` makes of the items, in their order; from `many` items on a forked process makes the second half.

    `work` gives a result for each item and changes nothing. Where the other process fails, however it does, this one
    makes its half too, and so raises what is to be raised. `work` uses the bar that it is given, which may start a
    thread: only after the fork, and not in the child.
    """
    shown, unseen = bar or NullProgress(), NullProgress()
    if len(items) < many or len(os.sched_getaffinity(0)) < 2:
        return work(items, shown)
    middle = len(items) // 2
    with _forked(lambda: json.dumps([carried.pack(found) for found in work(items[middle:], unseen)]).encode()) as rest:
        first = work(items[:middle], shown)
        content = rest()
    try:
        return first + [carried.unpack(found) for found in json.loads(content)]
    except ValueError:  # it ended before it had said all
        return first + work(items[middle:], unseen)


@contextmanager
def _forked(make: Callable[[], bytes]) -> Iterator[Callable[[], bytes]]:
    """A process that makes bytes meanwhile; what is yielded waits for them. It is ended with this block."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on a warning tells of threads, which libraries keep waiting: the child runs none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _be_child(make, reading, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            yield pipe.read
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_child(make: Callable[[], bytes], reading: int, writing: int) -> None:
    """Write what `make` gives and end, without a word or any of the parent's last deeds."""
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(make())
    finally:
        os._exit(0)
