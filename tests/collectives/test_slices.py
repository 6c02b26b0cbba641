"""Slices, spans, and reused scratch memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.collectives import slices
from hpcdl.collectives.fold import fold_for
from hpcdl.collectives.slices import Workspace, run_sliced, span, spans
from hpcdl.comm.threads import ThreadCommunicator, run

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator


@given(st.integers(0, 1000), st.integers(1, 50))
def test_spans_cover_and_are_even(length: int, num_parts: int) -> None:
    parts = spans(length, num_parts)
    assert [index for start, end in parts for index in range(start, end)] == list(range(length))
    assert parts == [span(length, num_parts, part) for part in range(num_parts)]
    sizes = [end - start for start, end in parts]
    assert len(sizes) == num_parts and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_few_slices_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one slice waits the next has been posted, but the one beyond those in flight has not."""
    monkeypatch.setattr(slices, "SLOTS", 2)
    events: list[str] = []

    def exchange(_: Communicator, part: Array, scratch: Array, add: Add, tag: int) -> Iterator[None]:
        name = int(part[0])
        events.append(f"{name} posted")
        assert scratch.size == 2
        yield
        events.append(f"{name} done")

    def body(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 0:
            run_sliced(exchange, communicator, numpy.arange(7.0), Workspace(message_bytes=16), None)

    run(2, body)
    assert events == ["0 posted", "2 posted", "0 done", "4 posted", "2 done", "6 posted", "4 done", "6 done"]


def test_scratch_is_kept_and_grows() -> None:
    workspace = Workspace()
    first = workspace.scratch("a", 10, numpy.float32)
    assert workspace.scratch("a", 5, numpy.float64).base is first.base
    assert workspace.scratch("b", 10, numpy.float32).base is not first.base
    larger = workspace.scratch("a", 11, numpy.float32)
    assert larger.base is not first.base and larger.size == 11


def test_what_is_kept_is_made_once_and_closed_last_first() -> None:
    workspace = Workspace()
    closed: list[Any] = []
    for _ in range(2):
        assert workspace.keep("a", lambda: "first", closed.append) == "first"
        assert workspace.keep("b", lambda: "second", closed.append) == "second"
    workspace.close()
    assert closed == ["second", "first"]
    assert workspace.keep("a", lambda: "again") == "again"


@given(st.integers(1, 300))
def test_fold_numbers_the_core(num_ranks: int) -> None:
    fold = fold_for(num_ranks)
    numbers = [fold.core_number(rank) for rank in range(num_ranks)]
    core = [number for number in numbers if number is not None]
    assert core == list(range(fold.num_core))
    assert [fold.rank_of(number) for number in core] == [
        rank for rank, number in enumerate(numbers) if number is not None
    ]
    assert fold.num_core & (fold.num_core - 1) == 0 and num_ranks < 2 * fold.num_core
