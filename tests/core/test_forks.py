"""Two processes share work: same results in the same order, whatever becomes of the second one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import pytest

from hpcdl.core.forks import Carried, in_two
from hpcdl.core.progress import NullProgress, Progress

HERE = os.getpid()
ITEMS = list(range(10))


class Counted(NullProgress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def update(self, done: float, note: str = "") -> None:
        self.told.append(done)


def squares(items: Sequence[int], bar: Progress) -> list[int]:
    for item in items:
        bar.update(item)
    return [item * item for item in items]


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_all_results_come_in_their_order_and_half_of_the_work_was_done_elsewhere() -> None:
    where = in_two(lambda items, _: [[item, os.getpid()] for item in items], ITEMS, 2)
    assert [item for item, _ in where] == ITEMS
    assert {pid for _, pid in where[:5]} == {HERE} and HERE not in {pid for _, pid in where[5:]}


def test_few_items_and_a_single_core_need_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_two(lambda items, _: [os.getpid() for _ in items], ITEMS, 11) == [HERE] * 10
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert in_two(lambda items, _: [os.getpid() for _ in items], ITEMS, 2) == [HERE] * 10


def test_the_bar_is_told_of_this_process_s_half() -> None:
    bar = Counted()
    assert in_two(squares, ITEMS, 2, bar) == [item * item for item in ITEMS]
    assert bar.told == ITEMS[:5]


def test_what_no_pipe_carries_is_packed() -> None:
    words = Carried(pack=lambda found: sorted(found), unpack=frozenset)
    assert in_two(lambda items, _: [frozenset({item, "x"} - {"x"}) for item in items], ITEMS, 2, None, words) == [
        frozenset({item}) for item in ITEMS
    ]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong() -> None:
    raise ValueError("only there")


@pytest.mark.parametrize("end", [killed, wrong, lambda: os._exit(0)], ids=["killed", "raises", "leaves"])
def test_where_the_other_process_fails_this_one_does_its_half(end: Callable[[], None]) -> None:
    def work(items: Sequence[int], bar: Progress) -> list[int]:
        if os.getpid() != HERE:
            end()
        return squares(items, bar)

    assert in_two(work, ITEMS, 2) == [item * item for item in ITEMS]


@pytest.mark.parametrize("item", [2, 7])
def test_an_error_of_either_half_is_raised_here_and_nothing_is_left(item: int, monkeypatch: pytest.MonkeyPatch) -> None:
    children, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])

    def work(items: Sequence[int], bar: Progress) -> list[int]:
        if item in items:
            raise KeyError(item)
        return squares(items, bar)

    with pytest.raises(KeyError, match=str(item)):
        in_two(work, ITEMS, 2)
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)
