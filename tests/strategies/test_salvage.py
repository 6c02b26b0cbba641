"""Recovery of a center after lost ranks: which rank supplies each element, and how recent its copy is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.comm import threads
from hpcdl.comm.observed import observe
from hpcdl.config.schema import ElasticConfig, ExchangeConfig, OptimizerConfig
from hpcdl.core.errors import BrokenGroup, RankError
from hpcdl.strategies.base.salvage import Center, CenterPart, Claim, gather_center, origins_of
from hpcdl.strategies.base.strategy import Context, HoldsCenter
from hpcdl.strategies.elastic.center_replicas import CenterReplica, ElasticReplica, PullingReplica
from hpcdl.strategies.elastic.methods import METHODS
from hpcdl.strategies.elastic.server import CenterServer, MomentumDescent, server_spans
from hpcdl.strategies.table import find_strategy, load_strategy

LENGTH = 60


@given(
    length=st.integers(1, 200),
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    num_servers=st.integers(1, 6),
    data=st.data(),
)
def test_each_element_comes_once_from_its_server_or_else_from_the_freshest_copy(
    length: int, counts: list[int], num_servers: int, data: st.DataObject
) -> None:
    spans = server_spans(length, num_servers)
    left = [span for span in spans if data.draw(st.booleans())]
    claims: list[Claim | None] = [Claim(0, length, count, False, False) for count in counts]
    claims += [Claim(span.start, span.stop, 99, True, False) for span in left]
    origins = origins_of(claims)
    assert [element for one in origins for element in range(one.start, one.stop)] == [*range(length)]
    for origin in origins:
        if origin.rank < len(counts):
            assert counts[origin.rank] == max(counts)
            assert not any(span.start < origin.stop and origin.start < span.stop for span in left)
        else:
            assert slice(origin.start, origin.stop) in left


def test_a_center_that_nobody_has_yet_is_none() -> None:
    assert origins_of([None, None]) == []
    assert threads.run(2, lambda group: gather_center(group, None)) == [None, None]


def gathered(parts: Sequence[CenterPart | None], num_workers: int) -> list[Center]:
    """Return each worker's center after the first worker has gathered all parts and shared them."""

    def rank(group: threads.ThreadCommunicator) -> Any:
        center = gather_center(group, parts[group.rank])
        workers = group.split(0 if group.rank < num_workers else 1)
        assert center is not None
        if group.rank < num_workers:
            center.share(workers)
        return center

    return list(threads.run(len(parts), rank))[:num_workers]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_server_s_part_is_a_worker_s_copy_and_its_velocity_is_gone(lost: int) -> None:
    exact, velocity = numpy.arange(LENGTH, dtype=numpy.float32), numpy.full(LENGTH, 0.5, numpy.float32)
    parts: list[CenterPart | None] = [
        CenterPart(start=0, values=exact - 100 * (9 - count), count=count) for count in (6, 8, 7)
    ]
    spans = server_spans(LENGTH, 3)
    for index, span in enumerate(spans):
        if index != lost:
            held = CenterPart(start=span.start, values=exact[span], velocity=velocity[span], count=9, held=True)
            parts.append(held)
    for center in gathered(parts, 3):
        expected, moving = exact.copy(), velocity.copy()
        expected[spans[lost]] -= 100
        moving[spans[lost]] = 0
        numpy.testing.assert_array_equal(center.values, expected)
        numpy.testing.assert_array_equal(center.velocity, moving)
        assert (center.count, center.num_copied, center.copied_count) == (9, LENGTH // 3, 8)
        assert center.log_line() == (
            "; 20 of 60 weights of the center were on a lost server: a worker's copy after update 8 of 9 takes their "
            "place, without its velocity"
        )


def test_where_no_server_is_lost_the_center_is_what_it_was() -> None:
    exact = numpy.arange(LENGTH, dtype=numpy.float32)
    parts = [
        None,
        CenterPart(start=0, values=exact - 5, count=3),
        CenterPart(start=0, values=exact, count=4, held=True),
    ]
    for center in gathered(parts, 2):
        numpy.testing.assert_array_equal(center.values, exact)
        assert (center.count, center.num_copied, center.log_line()) == (4, 0, "")


class Breaking:
    """A link whose `breaks_at`-th exchange fails after half of the reply has arrived."""

    def __init__(self, breaks_at: int) -> None:
        self.group: Any = SimpleNamespace(rank=0)
        self.warnings: list[str] = []
        self.count = self.num_lost = 0
        self.stopped = False
        self._breaks_at = breaks_at

    def start(self, weights: numpy.ndarray, sizes: Sequence[int], *, count: int, total: int, velocity: Any) -> None:
        self.count, self.velocity = count, velocity

    def exchange(self, sent: numpy.ndarray, reply: numpy.ndarray, rate: float, steps: int) -> None:
        if self._breaks_at == self.count + 1:
            reply[: reply.size // 2] = -1
            raise BrokenGroup("a rank is dead")
        self.count += 1
        reply[:] = 10 * self.count


def context_of(name: str, communicator: Any = None, **changes: Any) -> Context:
    fixed: dict[str, Any] = {
        "info": find_strategy(name), "communicator": communicator, "num_workers": 2, "num_servers": 1,
        "exchange": ExchangeConfig(), "optimizer": OptimizerConfig(), "elastic": ElasticConfig(), "in_place": True,
    }  # fmt: skip
    return Context(**{**fixed, **changes})


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.lock_free])
def test_an_exchange_that_breaks_leaves_the_last_center_whole(name: str) -> None:
    link = Breaking(breaks_at=3)
    kind = ElasticReplica if METHODS[name].elastic else PullingReplica
    replica: CenterReplica = kind(context_of(name), link)
    assert replica.part() is None
    start = numpy.full(8, 5, numpy.float32)
    replica.start(start, [8])
    begun = replica.part()
    assert begun is not None and begun.count == 0 and (begun.values == 5).all()
    for step in range(2):
        replica.before_step(step)
        replica.step(numpy.zeros(8, numpy.float32))
    own = replica.weights.copy()
    replica.before_step(2)
    with pytest.raises(BrokenGroup):
        replica.step(numpy.ones(8, numpy.float32))
    replica.abandon()
    part = replica.part()
    assert part is not None and (part.count, part.held) == (2, False) and (part.values == 20).all()
    kept = replica.kept()
    assert ("replica/weights" in kept) == METHODS[name].elastic
    numpy.testing.assert_array_equal(kept.get("replica/weights", own), own)


def test_a_worker_keeps_what_it_was_given_until_the_servers_have_it() -> None:
    """A worker keeps the recovered center until the servers have it: after another loss it may have the only copy."""
    link = Breaking(breaks_at=0)
    replica = PullingReplica(context_of("async-msgd"), link)
    values = numpy.full(4, 3, numpy.float32)
    replica.take_center(Center(values=values, velocity=values / 3, count=12, num_copied=0, copied_count=0))
    given_part = replica.part()
    assert given_part is not None and given_part.count == replica.count == 12 and given_part.velocity is not None
    replica.start(values, [4])
    assert link.count == 12 and (link.velocity == 1).all()
    part = replica.part()
    assert part is not None and part.count == 12 and part.velocity is None


@pytest.mark.parametrize("in_place", [True, False])
def test_in_place_a_server_does_not_continue_without_a_dead_worker(in_place: bool) -> None:
    """In place a server does not continue without a dead worker, but without one that was left behind it does."""
    channel: Any = SimpleNamespace(failed=lambda: {1})
    server = CenterServer(context_of("async-sgd", in_place=in_place), MomentumDescent(0.9), channel=channel)
    server._sending, server._pending = {}, {}
    if in_place:
        with pytest.raises(BrokenGroup):
            server._go_on_without(BrokenGroup("dead"))
        assert not server._lost
    else:
        server._go_on_without(BrokenGroup("dead"))
        assert server._lost == {1}
    server._lost.clear()
    server._go_on_without(RankError("rank 1 was left behind"))
    assert server._lost == {1}


@pytest.mark.parametrize("count", [7, 10])
def test_a_center_that_has_all_its_updates_takes_no_more(count: int) -> None:
    """Survivors of a finished center begin again with the steps that were counted."""

    def rank(inner: threads.ThreadCommunicator) -> Any:
        context = context_of("async-sgd", observe(inner))
        strategy: Any = load_strategy(context.info)
        if not context.is_worker:
            server = strategy.server(context)
            assert isinstance(server, HoldsCenter) and server.part() is None
            details = server.serve()
            return details["updates"], server.part()
        replica = strategy.replica(context)
        replica.count, replica.total = count, 10
        replica.start(numpy.ones(4, numpy.float32), [4])
        while not replica.stopped:
            replica.step(numpy.ones(4, numpy.float32))
        replica.finish()
        return replica.count

    *workers, (updates, part) = threads.run(3, rank)
    assert workers == [10, 10] and updates == 10
    assert part.held and part.count == 10 and part.values.size == 4
