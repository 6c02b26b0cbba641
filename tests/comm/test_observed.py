"""What an observed communicator reports of a rank: counts, waits, spans; and that it changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from hpcdl.collectives.slices import Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.observed import CONTROL, EXCHANGE, NoRecorder, Observed, RankMonitor, Traffic, for_control, observe
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.core.errors import RankError
from tests.conftest import patience

LENGTH = 30_030
"""Divisible by every number of ranks used here."""
HOSTS = tuple(f"host{rank // 2}" for rank in range(8))


class Spans(NoRecorder):
    """A recorder for tests."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []

    def operation(self, purpose: str, name: str, peer: int, num_bytes: int, begin_s: float, end_s: float) -> None:
        assert end_s >= begin_s and purpose == EXCHANGE
        self.found.append((name, peer, num_bytes))


def watched(body: Callable[[Observed], Any], num_ranks: int, hosts: tuple[str, ...] = ()) -> list[Any]:
    def on_rank(communicator: ThreadCommunicator) -> Any:
        return body(observe(communicator).for_purpose(EXCHANGE))

    return run(num_ranks, on_rank, hosts)


def test_a_message_is_counted_on_both_sides() -> None:
    def body(group: Observed) -> Traffic:
        spans = group.monitor.recorder = Spans()
        buffer = numpy.zeros(10)
        requests = [group.isend(buffer, 1 - group.rank), group.irecv(buffer.copy(), 1 - group.rank)]
        assert len(group.monitor.waits()) == 2
        for request in requests:
            request.wait()
            request.wait()
        assert group.monitor.waits() == []
        assert sorted(spans.found) == [("receiving", 1 - group.rank, 80), ("sending", 1 - group.rank, 80)]
        return group.monitor.traffic()

    for traffic in watched(body, 2):
        counts = Traffic(
            messages_sent=1, bytes_sent=80, messages_received=1, bytes_received=80, rounds=1, round_bytes=80
        )
        assert traffic == counts
        means = {"bytes_sent": 40, "bytes_received": 40, "rounds": 0.5, "round_bytes": 40}
        assert traffic.per_step(2) == {f"{name}_per_step": value for name, value in means.items()}


def test_what_the_library_moves_is_unknown_and_never_nothing() -> None:
    def body(group: Observed) -> Traffic:
        group.barrier()
        group.allgather_json({"rank": group.rank})
        assert group.monitor.traffic() == Traffic()
        group.allreduce(numpy.zeros(10))
        return group.monitor.traffic()

    for traffic in watched(body, 3):
        assert traffic.unknown == 1
        assert set(traffic.per_step(1).values()) == {None}


def test_groups_have_names_of_the_world_and_their_counts_stay() -> None:
    def body(group: Observed) -> Traffic:
        part = group.split(group.rank % 2, -group.rank)
        assert part.lane.members == ((2, 0) if group.rank % 2 == 0 else (3, 1))
        request = part.irecv(numpy.zeros(4), 1 - part.rank)
        assert group.monitor.waits()[0].peers == (part.lane.members[1 - part.rank],)
        part.isend(numpy.zeros(4), 1 - part.rank).wait()
        request.wait()
        aside = for_control(part)
        aside.isend(numpy.zeros(4), 1 - part.rank, 7)
        aside.irecv(numpy.zeros(4), 1 - part.rank, 7).wait()
        part.free()
        assert group.monitor.traffic(CONTROL).bytes_received == 32
        return group.monitor.traffic()

    for traffic in watched(body, 4):
        assert (traffic.bytes_sent, traffic.bytes_received) == (32, 32)


def test_a_collective_says_for_whom_it_waits() -> None:
    late = threading.Event()
    seen: list[tuple[str, tuple[int, ...]]] = []

    def body(group: Observed) -> None:
        if group.rank == 2:
            late.wait(20)
        elif group.rank == 0:
            threading.Thread(target=look, args=(group.monitor,), daemon=True).start()
        group.barrier()

    def look(monitor: RankMonitor) -> None:
        deadline = time.monotonic() + patience(20)
        while not monitor.waits() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.extend((wait.operation, wait.peers) for wait in monitor.waits())
        late.set()

    watched(body, 3)
    assert seen == [("a barrier", (1, 2))]


def test_a_rank_that_is_left_behind_ends_a_wait_for_it() -> None:
    def body(group: Observed) -> str:
        if group.rank == 1:
            return ""
        group.monitor.lost = frozenset({1})
        assert group.failed() == {1}
        with pytest.raises(RankError, match="rank 1 was left behind"):
            group.wait_any([group.irecv(numpy.zeros(1), 1)])
        rest = group.survivors()
        rest.barrier()
        return ",".join(map(str, rest.lane.members))

    assert watched(body, 3) == ["0,2", "", "0,2"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in ("mpi", "hierarchical", "auto")])
def test_costs_are_what_is_counted(name: str, num_ranks: int) -> None:
    """The cost formula gives the bytes that the busiest rank sends."""
    sent = [traffic.bytes_sent for traffic in watched(reduced_by(name), num_ranks)]
    module = __import__(COLLECTIVES.entry(name).target.partition(":")[0], fromlist=["cost"])
    assert max(sent) == pytest.approx(module.cost(num_ranks, 4 * LENGTH).bytes, rel=1e-3)


def test_the_cost_of_hierarchical_is_what_four_hosts_count() -> None:
    from hpcdl.collectives import hierarchical

    sent = [traffic.bytes_sent for traffic in watched(reduced_by("hierarchical"), 8, HOSTS)]
    assert max(sent) == pytest.approx(hierarchical.cost(8, 4 * LENGTH, num_nodes=4).bytes, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
def test_auto_counts_what_it_has_chosen(num_ranks: int) -> None:
    from hpcdl.collectives import auto

    sent = [traffic.bytes_sent for traffic in watched(reduced_by("auto", measure=False), num_ranks)]
    assert max(sent) == pytest.approx(auto.cost(num_ranks, 4 * LENGTH).bytes, rel=1e-3)


def test_what_auto_measures_is_no_exchange(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What auto measures is no exchange: many all-reduces make the table, but a step sends only one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for traffic in watched(reduced_by("auto", measure=True), 2):
        assert traffic.unknown or traffic.bytes_sent <= 2 * 4 * LENGTH


def reduced_by(name: str, *, measure: bool = False) -> Callable[[Observed], Traffic]:
    def body(group: Observed) -> Traffic:
        buffer = numpy.ones(LENGTH, numpy.float32)
        workspace = Workspace(measure=measure)
        COLLECTIVES.load(name)(group, buffer, workspace)
        assert (buffer == group.size).all()
        traffic = group.monitor.traffic()
        workspace.close()
        return traffic

    return body
