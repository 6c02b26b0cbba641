"""Work that two processes share: what one interpreter does piece by piece takes less time on two cores.

The second one is forked, so that it has all that this one has read. Whoever is free takes the next piece.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from hpcdl.core.lifeline import told_to_end_with_parent
from hpcdl.core.signals import STOPS

Item = TypeVar("Item")
Found = TypeVar("Found")
MOST_ITEMS = 1000
"""So many numbers fit into the smallest pipe that Linux makes."""
_NUMBER_BYTES = 4


def _as_it_is(found: Any) -> Any:
    return found


@contextmanager
def side_by_side(
    work: Callable[[Item], Found],
    items: Sequence[Item],
    *,
    worth: bool = True,
    pack: Callable[[Found], Any] = _as_it_is,
    unpack: Callable[[Any], Found] = _as_it_is,
) -> Iterator[Callable[[], list[Found]]]:
    """A second process begins with `work` on the items; what is yielded takes part, and gives all results in order.

    `work` changes nothing that lasts, and draws no bar. `pack` makes of a result what JSON holds (NaN too), which goes
    from process to process, `unpack` itself again. Without a second core, with other threads, which a fork would cut
    off, with more than MOST_ITEMS items, or where it is not `worth` a process, all is done here. So is what the second
    process fails at, however it does: an error is raised here, as if there were no other. It ends with this block.
    """
    alone = threading.active_count() > 1 or len(os.sched_getaffinity(0)) < 2
    if alone or not worth or not 0 < len(items) <= MOST_ITEMS:
        yield functools.cache(lambda: [work(item) for item in items])
        return
    with _pile(len(items)) as pile, _forked((number, pack(work(items[number]))) for number in pile) as others:

        def all_in_order() -> list[Found]:
            found: dict[int, Found] = {}
            with suppress(Exception):  # raised again below, unless an item before it fails too
                for number in pile:
                    found[number] = work(items[number])
            found |= {number: unpack(value) for number, value in others()}
            return [found[number] if number in found else work(item) for number, item in enumerate(items)]

        yield functools.cache(all_in_order)


@contextmanager
def _pile(size: int) -> Iterator[Iterator[int]]:
    """Numbers below `size`, of which each goes to the process that asks first."""
    taking, filling = os.pipe()
    os.write(filling, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(size)))
    os.close(filling)
    try:
        yield (int.from_bytes(found) for found in iter(lambda: os.read(taking, _NUMBER_BYTES), b""))
    finally:
        os.close(taking)


@contextmanager
def _forked(share: Iterable[tuple[int, Any]]) -> Iterator[Callable[[], list[tuple[int, Any]]]]:
    """A process that goes through `share` meanwhile; what is yielded waits for it, and is empty where it failed."""
    told = os.memfd_create("hpcdl")  # a pipe would keep who writes much until somebody reads
    end_with_parent = told_to_end_with_parent(signal.SIGKILL)
    # This process alone hears what is to end both.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    with warnings.catch_warnings():
        # From Python 3.12 on a warning tells of threads, which libraries keep waiting: the child runs none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _be_child(share, told, end_with_parent)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield lambda: _heard(child, told)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)


def _be_child(share: Iterable[tuple[int, Any]], told: int, end_with_parent: Callable[[], None]) -> NoReturn:
    """Write a line for each of `share` and end, without a word or any of the parent's last deeds."""
    status = 1
    try:
        end_with_parent()
        with os.fdopen(told, "wb") as file:
            file.writelines(f"{json.dumps(pair)}\n".encode() for pair in share)
        status = 0
    finally:
        os._exit(status)


def _heard(child: int, told: int) -> list[tuple[int, Any]]:
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if end is None or (end.si_code, end.si_status) != (os.CLD_EXITED, 0):
        return []
    content = os.pread(told, os.fstat(told).st_size, 0)
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
