"""Which rank a wait in vain is blamed on, and what the watch does about it; threads and short times, no ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.comm.observed import RankMonitor
from hpcdl.core.errors import RankError
from hpcdl.supervision.watchdog import (
    Actions,
    Limits,
    Note,
    WaitNote,
    Watchdog,
    diagnose,
    processor_wanted_s,
)
from tests.conftest import patience

LIMITS = Limits(stall_s=10, busy_s=100)
HOSTS = {0: "a", 1: "b", 2: "c"}


def waiting(rank: int, *peers: int, age_s: float = 12, operation: str = "an all-reduce", patient: bool = False) -> Note:
    wait = WaitNote(operation=operation, peers=peers, age_s=age_s, patient=patient)
    return note(rank, waits=[wait])


def note(rank: int, *, idle_s: float = 12, share: float = 0.0, waits: list[WaitNote] | None = None) -> Note:
    return Note(
        rank=rank, host=HOSTS[rank], role="worker", doing="computing", step=7, idle_s=idle_s, processor_share=share,
        waits=waits or [],
    )  # fmt: skip


def hidden(rank: int, share: float) -> Note:
    peers = [other for other in range(3) if other != rank]
    return note(rank, share=share, waits=[WaitNote(operation="an engine", peers=peers, age_s=12, hidden=True)])


CASES: dict[str, tuple[list[Note], str, int, bool, str]] = {
    "no note: gone": ([waiting(0, 1, 2), waiting(2, 0, 1)], "gone", 1, True, "rank 1 on b is not responding"),
    "gone behind another": ([waiting(0, 1), waiting(1, 2)], "gone", 2, True, "rank 2 on c"),
    "gone before stuck": ([waiting(0, 1, 2), note(1)], "gone", 2, True, "rank 2"),
    "stuck": ([waiting(0, 1), note(1), note(2, share=1)], "stuck", 1, True, "stuck outside any communication"),
    "busy": ([waiting(0, 1), note(1, share=0.9)], "busy", 1, False, "is busy: computing, step 7"),
    "busy too long": ([waiting(0, 1, age_s=101), note(1, share=0.9)], "busy", 1, True, "is busy"),
    "elsewhere": ([waiting(0, 1), note(1, idle_s=1)], "elsewhere", 1, False, "continues elsewhere"),
    "elsewhere too long": ([waiting(0, 1, age_s=101), note(1, idle_s=1)], "elsewhere", 1, True, "continues elsewhere"),
    "a server may wait": (
        [waiting(0, 1, age_s=101, patient=True), note(1, idle_s=1)], "elsewhere", 1, False, "elsewhere"
    ),
    "deadlock": (
        [waiting(0, 1), waiting(1, 0, operation="a barrier")], "deadlock", 1, True,
        "waits in a barrier (computing, step 7), while rank 0 (worker) on a has waited for",
    ),
    "the network": ([waiting(0, 1), waiting(1, 0)], "hang", 0, True, "the network or the library hangs"),
    "an engine of its own that computes": ([hidden(0, 0.9), hidden(1, 0.9), hidden(2, 0.1)], "busy", 1, False, "busy"),
    "an engine of its own that waits": ([hidden(0, 0.1), hidden(1, 0.1), hidden(2, 0.1)], "hang", 0, True, "hangs"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cause_is_found(case: str) -> None:
    notes, kind, cause, fatal, words = CASES[case]
    found = diagnose(notes[0], {each.rank: each for each in notes}, HOSTS, LIMITS)
    assert found is not None
    assert (found.kind, found.cause, found.fatal) == (kind, cause, fatal)
    assert words in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize(
    "mine, others",
    [
        (waiting(0, 1, age_s=9), [note(1)]),
        (note(0), [note(1)]),
        (waiting(0, 1), [waiting(1, 0, age_s=6, operation="a barrier")]),
    ],
    ids=["not yet overdue", "waits for nobody", "the other one may still be answered"],
)
def test_nothing_is_wrong_yet(mine: Note, others: list[Note]) -> None:
    assert diagnose(mine, {each.rank: each for each in [mine, *others]}, HOSTS, LIMITS) is None


class Rank:
    """One rank under a watch with short times; the watch's messages are kept."""

    def __init__(self, rank: int, folder: Path, *, is_optional: Callable[[int], bool] = lambda rank: False) -> None:
        self.seen = RankMonitor(rank, 3, HOSTS[rank])
        self.ended: list[RankError] = []
        self.told: list[str] = []
        self.left: list[int] = []
        actions = Actions(
            end=self.ended.append,
            log=self.told.append,
            is_optional=is_optional,
            on_lost=lambda gone, text: self.left.append(gone),
        )
        limits = Limits(stall_s=0.6, busy_s=60)
        self.watch = Watchdog(monitor=self.seen, folder=folder, actions=actions, limits=limits, hosts=dict(HOSTS))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(20)
    while not condition():
        assert time.monotonic() < deadline, "the watch did not come to it"
        time.sleep(0.02)


def run(ranks: list[Rank], over: Callable[[], bool]) -> None:
    for rank in ranks:
        rank.watch.start()
    try:
        until(over)
    finally:
        for rank in ranks:
            rank.watch.stop()


def test_a_rank_without_a_sign_of_life_ends_the_run(tmp_path: Path) -> None:
    ranks = [Rank(0, tmp_path), Rank(2, tmp_path)]
    with ranks[0].seen.waiting_for("a barrier"), ranks[1].seen.waiting_for("a barrier"):
        run(ranks, lambda: any(rank.ended for rank in ranks))
    (error,) = next(rank.ended for rank in ranks if rank.ended)[:1]
    assert (error.rank, error.host) == (1, "b")
    assert "is not responding" in str(error)


def test_a_note_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    """A note of a lost rank fails to be read once, and one of a slow rank has no text yet: both are acted on."""
    rank = Rank(0, tmp_path)
    (tmp_path / "lost-2").mkdir()
    (tmp_path / "evicted-0").touch()
    with pytest.raises(OSError, match="lost-2"):
        rank.watch._learn_of_lost(["evicted-0", "lost-2"])
    assert rank.seen.evicted and not rank.seen.lost
    (tmp_path / "lost-2").rmdir()
    (tmp_path / "lost-2").write_text("it is gone")
    rank.watch._learn_of_lost(["evicted-0", "lost-2"])
    assert rank.seen.lost == {2}
    assert rank.told[-1] == "the run continues without rank 2: it is gone"


def test_a_rank_that_computes_is_reported_once(tmp_path: Path) -> None:
    """A rank that computes is reported once; all three are in this process, whose processor time advances."""
    ranks = [Rank(0, tmp_path), Rank(1, tmp_path), Rank(2, tmp_path)]
    over = threading.Event()
    spinning = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)], daemon=True)
    spinning.start()
    try:
        with ranks[0].seen.waiting_for("receiving", [1]):
            run(ranks, lambda: bool(ranks[0].told))
    finally:
        over.set()
        spinning.join()
    assert len(ranks[0].told) == 1
    assert "rank 1 (rank) on b is busy" in ranks[0].told[0]
    assert not any(rank.ended for rank in ranks)


def test_a_run_that_can_continues_without_a_rank(tmp_path: Path) -> None:
    ranks = [Rank(rank, tmp_path, is_optional=lambda gone: gone == 1) for rank in (0, 2)]
    with ranks[1].seen.waiting_for("receiving", [1]):
        run(ranks, lambda: all(rank.seen.lost == {1} for rank in ranks) and bool(ranks[0].told))
    assert [rank.left for rank in ranks if rank.left] == [[1]]
    assert "continues without rank 1" in ranks[0].told[0]
    assert not any(rank.ended for rank in ranks)


def test_two_operations_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    ranks = [Rank(0, tmp_path), Rank(1, tmp_path), Rank(2, tmp_path)]
    with ranks[0].seen.waiting_for("a barrier", [1]), ranks[1].seen.waiting_for("an all-reduce", [0]):
        run(ranks, lambda: any(rank.ended for rank in ranks))
    text = str(next(rank.ended for rank in ranks if rank.ended)[0])
    assert text.startswith("deadlock: ")
    assert "a barrier" in text
    assert "an all-reduce" in text


def test_who_waits_for_one_that_has_left_is_reported_soon(tmp_path: Path) -> None:
    ranks = [Rank(0, tmp_path), Rank(1, tmp_path)]
    for rank in ranks:
        rank.watch.limits = Limits(stall_s=4)
    ranks[1].watch.leaves("its script has come to its end after 3 updates")
    with ranks[0].seen.waiting_for("an all-reduce"), ranks[1].seen.waiting_for("a barrier"):
        run(ranks, lambda: bool(ranks[0].ended))
    assert str(ranks[0].ended[0]).startswith("rank 1 on b has left: its script has come to its end after 3 updates, ")
    assert not ranks[1].ended, "who has left accuses nobody"


def test_who_leaves_with_all_others_writes_nothing(tmp_path: Path) -> None:
    ranks = [Rank(0, tmp_path), Rank(1, tmp_path)]
    for rank in ranks:
        rank.watch.limits = Limits(stall_s=40)
        rank.watch.leaves("its script has come to its end")
    began = time.monotonic()
    run(ranks, lambda: time.monotonic() - began > 0.5)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_run_that_moves_writes_nothing(tmp_path: Path) -> None:
    ranks = [Rank(0, tmp_path), Rank(1, tmp_path)]
    stall_s = patience(0.6)
    for rank in ranks:
        rank.watch.limits = Limits(stall_s=stall_s)
    began = time.monotonic()

    def step() -> bool:
        for rank in ranks:
            with rank.seen.waiting_for("a barrier", [1 - rank.seen.rank]):
                time.sleep(0.005)
        return time.monotonic() - began > 2.5 * stall_s

    run(ranks, step)
    assert not list(tmp_path.iterdir())
    assert not any(rank.ended or rank.told for rank in ranks)


def test_a_rank_that_waits_for_a_core_counts_as_computing() -> None:
    """A process that waits for a core counts as computing: five programs share it, and this one asks for little."""
    core = str(min(os.sched_getaffinity(0)))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]
    asks = (
        "import os, threading, time; from hpcdl.supervision.watchdog import processor_wanted_s as wanted_s\n"
        f"os.sched_setaffinity(0, {{{core}}}); os.nice(10)\n"
        "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()\n"
        "before, begun = wanted_s(), time.monotonic(); time.sleep(3)\n"
        "print((wanted_s() - before) / (time.monotonic() - begun), flush=True); os._exit(0)"
    )
    try:
        line = [sys.executable, "-c", asks]
        share = float(subprocess.run(line, capture_output=True, text=True, timeout=120, check=True).stdout)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert share > 0.5
    before, begun = processor_wanted_s(), time.monotonic()
    time.sleep(1)
    assert (processor_wanted_s() - before) / (time.monotonic() - begun) < 0.5


STANDS_STILL = """
import sys, time
from pathlib import Path
from hpcdl.comm.observed import RankMonitor
from hpcdl.supervision.watchdog import Actions, Limits, Watchdog
seen = RankMonitor(0, 2, "a")
actions = Actions(end=lambda error: print(error, flush=True))
watch = Watchdog(monitor=seen, folder=Path(sys.argv[1]), actions=actions, limits=Limits(stall_s=float(sys.argv[2])))
with seen.waiting_for("an all-reduce", [1]):
    watch.start()
    print("waits", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_who_has_stood_still_itself_blames_nobody_for_that_time(tmp_path: Path) -> None:
    """A rank that was itself stopped blames no rank for that time, as in a virtual machine paused with all ranks."""
    stall_s = patience(1)
    line = [sys.executable, "-c", STANDS_STILL, str(tmp_path / "watch"), str(stall_s)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waits\n"
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(3 * stall_s)
            went_on_s = time.monotonic()
            os.kill(process.pid, signal.SIGCONT)
            assert "rank 1" in process.stdout.readline()
            assert time.monotonic() - went_on_s > stall_s
        finally:
            process.kill()
