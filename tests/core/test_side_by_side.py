"""Two processes share work: same results in the same order, whatever becomes of the second one."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.core.side_by_side import MOST_ITEMS, side_by_side

HERE = os.getpid()
ITEMS = list(range(10))


def gone(second_processes: list[int]) -> bool:
    """Whether each of the processes has ended and was waited for."""
    for child in second_processes:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    return bool(second_processes)


def until(path: Path) -> None:
    """Wait for a file, half a minute at most."""
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {path.name} came")


def test_the_second_process_begins_at_once_and_results_come_in_their_order(
    second_processes: list[int], tmp_path: Path
) -> None:
    def work(item: int) -> list[int]:
        if item == 7:
            (tmp_path / "at 7").touch()
            until(tmp_path / "go on")
        return [item, os.getpid()]

    with side_by_side(work, ITEMS) as found:
        until(tmp_path / "at 7")
        (tmp_path / "go on").touch()
        results = found()
        assert found() is results, "nothing is done twice"
    assert [item for item, _ in results] == ITEMS
    assert {pid for _, pid in results[:8]} == set(second_processes) and gone(second_processes)


def test_this_process_does_what_the_second_one_has_not_begun_with(second_processes: list[int], tmp_path: Path) -> None:
    def work(item: int) -> int:
        if os.getpid() != HERE:
            (tmp_path / "busy").touch()
            until(tmp_path / "done")
        elif item == ITEMS[-1]:
            (tmp_path / "done").touch()
        return os.getpid()

    with side_by_side(work, ITEMS) as found:
        until(tmp_path / "busy")
        assert found() == [*second_processes, *[HERE] * 9]
    assert gone(second_processes)


def test_what_json_does_not_hold_is_packed(second_processes: list[int]) -> None:
    def work(item: int) -> frozenset[float]:
        return frozenset({item, math.inf})

    with side_by_side(work, ITEMS, pack=sorted, unpack=frozenset) as found:
        assert found() == [frozenset({item, math.inf}) for item in ITEMS]
    assert gone(second_processes)


@pytest.mark.parametrize("why", ["not worth it", "one core", "threads", "no items", "too many items"])
def test_alone(why: str, second_processes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    items = {"no items": [], "too many items": list(range(MOST_ITEMS + 1))}.get(why, ITEMS)
    if why == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    if why == "threads":
        monkeypatch.setattr(threading, "active_count", lambda: 2)
    with side_by_side(lambda item: item * item, items, worth=why != "not worth it") as found:
        assert found() == [item * item for item in items]
    assert second_processes == []


def test_as_many_items_as_a_pipe_holds(second_processes: list[int]) -> None:
    with side_by_side(str, range(MOST_ITEMS)) as found:
        assert found() == list(map(str, range(MOST_ITEMS)))
    assert gone(second_processes)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong() -> None:
    raise ValueError("only there")


@pytest.mark.parametrize("end", [killed, wrong, lambda: os._exit(0)], ids=["killed", "raises", "leaves"])
def test_where_the_second_process_fails_this_one_does_its_share(
    end: Callable[[], None], second_processes: list[int]
) -> None:
    def work(item: int) -> int:
        if os.getpid() != HERE and item == 3:
            end()
        return item * item

    with side_by_side(work, ITEMS) as found:
        os.waitid(os.P_PID, second_processes[0], os.WEXITED | os.WNOWAIT)
        assert found() == [item * item for item in ITEMS]
    assert gone(second_processes)


@pytest.mark.parametrize("item", [0, 9])
def test_an_error_is_raised_here_whoever_met_it(
    item: int, second_processes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    def work(number: int) -> int:
        if number == item:
            raise KeyError(number)
        return number

    with pytest.raises(KeyError, match=str(item)), side_by_side(work, ITEMS) as found:
        found()
    assert gone(second_processes) and capfd.readouterr().err == ""


def test_of_two_errors_the_first_in_order_is_raised(second_processes: list[int], tmp_path: Path) -> None:
    def work(item: int) -> int:
        if os.getpid() != HERE:
            (tmp_path / "begun").touch()
            until(tmp_path / "failed here")
        elif item:
            (tmp_path / "failed here").touch()
        raise KeyError(item)

    with pytest.raises(KeyError, match="0"), side_by_side(work, ITEMS) as found:
        until(tmp_path / "begun")
        found()
    assert gone(second_processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_process_ends_with_this_one_s_work_and_hears_no_signal_itself(
    number: signal.Signals, second_processes: list[int], tmp_path: Path
) -> None:
    def work(item: int) -> int:
        (tmp_path / f"{item}").touch()
        until(tmp_path / "on" if item == 0 else tmp_path / "never")
        return item

    with pytest.raises(KeyboardInterrupt), side_by_side(work, ITEMS):
        until(tmp_path / "0")
        os.kill(second_processes[0], number)
        (tmp_path / "on").touch()
        until(tmp_path / "1")
        raise KeyboardInterrupt
    assert gone(second_processes)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM} == set()
