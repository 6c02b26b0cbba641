"""When a rank is idle, and what it knows of its gaps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy
import pytest

from hpcdl.comm import gaps as module
from hpcdl.comm import threads
from hpcdl.comm.gaps import IdleCore, IdleGaps
from hpcdl.comm.observed import observe


def remember(gaps: IdleGaps, *lengths_s: float) -> None:
    """Record finished gaps, by a clock of the test's own."""
    for length_s in lengths_s:
        with mock.patch.object(module, "time") as clock:
            clock.monotonic.return_value = length_s
            gaps.enter(0.0)
            gaps.leave()


def test_the_typical_gap_is_a_median_of_the_last_and_short_waits_do_not_count() -> None:
    gaps = IdleGaps()
    remember(gaps, 0.0, module.LEAST_S / 2)
    assert gaps._typical_s == float("inf")
    remember(gaps, 0.5, 0.1, 9.0)
    assert gaps._typical_s == pytest.approx(0.5, abs=0.1)
    remember(gaps, *[2.0] * 200)
    assert gaps._typical_s == pytest.approx(2.0, abs=0.1) and len(gaps._lengths) < 100


def test_no_slice_is_begun_that_would_outlast_the_gap() -> None:
    """No slice starts that would outlast the gap, except in a gap of twice the usual length: that is another kind."""
    gaps = IdleGaps()
    remember(gaps, *[10.0] * 3)
    assert not gaps.fits(0.0), "nobody waits"
    gaps.enter(time.monotonic() - 5)
    assert gaps.fits(1.0) and not gaps.fits(6.0)
    gaps.leave()
    gaps.enter(time.monotonic() - 15)
    assert not gaps.fits(0.1)
    gaps.leave()
    gaps.enter(time.monotonic() - 21)
    assert gaps.fits(100.0)
    gaps.leave()
    assert not gaps.fits(0.0)


def scripted(core: IdleCore, times: Iterator[tuple[float, float]]) -> bool:
    with mock.patch.object(core, "_now", lambda: next(times)):
        return core.is_idle()


def test_a_core_is_idle_where_the_other_threads_of_the_process_leave_half_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {3})
    assert not scripted(IdleCore(), iter([(0.0, 5.0), (0.001, 5.0009)])), "back-propagation continues"
    assert scripted(IdleCore(), iter([(0.0, 5.0), (0.001, 5.0001)]))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {3, 4})
    assert scripted(IdleCore(), iter([(0.0, 5.0), (0.001, 5.0011)])), "of two cores one is at work"
    assert not scripted(IdleCore(), iter([(0.0, 5.0), (0.001, 5.0019)]))


def test_a_gap_is_taken_while_it_lasts_and_given_up_in_time() -> None:
    gaps, core = IdleGaps(), IdleCore()
    assert not gaps.take(1e-3, core, time.monotonic() + 0.05, lambda: True), "none came"
    assert not gaps.take(1e-3, core, time.monotonic() + 1000, lambda: False), "nobody wants one"
    gaps.enter(time.monotonic())
    with mock.patch.object(core, "is_idle", lambda: True):
        assert gaps.take(1e-3, core, time.monotonic() + 1000, lambda: True)
    gaps.leave()


def test_who_waits_for_a_message_leaves_its_core_where_somebody_wants_it() -> None:
    """A rank that waits for a message frees its core if other work wants it, and still gets the message or its error.

    Without such a wish nothing is opened.
    """

    looked = [threading.Event(), threading.Event()]

    def rank(communicator: threads.ThreadCommunicator) -> bool:
        mine = observe(communicator)
        gaps, buffer, opened = mine.monitor.gaps, numpy.zeros(3), []
        for wanted in (0, 1):
            gaps.wanted = wanted
            mine.barrier()
            if mine.rank == 0:
                assert looked[wanted].wait(60)
                mine.isend(numpy.full(3, 7.0), 1).wait()
                continue
            over = threading.Event()
            seen: list[bool] = []

            def look(over: threading.Event = over, seen: list[bool] = seen, wanted: int = wanted) -> None:
                while not over.wait(0.01):
                    seen.append(gaps.open_since_s is not None)
                    if any(seen) or len(seen) > (3000 if wanted else 30):
                        looked[wanted].set()

            looking = threading.Thread(target=look)
            looking.start()
            mine.irecv(buffer, 0).wait()
            over.set()
            looking.join()
            opened.append(any(seen))
            assert (buffer == 7).all() and gaps.open_since_s is None
        return opened == [False, True] if mine.rank == 1 else True

    assert threads.run(2, rank) == [True, True]
