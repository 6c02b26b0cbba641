"""Parameter servers on threads: their means, their cost, and the effect of backup workers. No TensorFlow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from hpcdl.collectives.slices import Workspace
from hpcdl.comm import threads
from hpcdl.core.errors import RankError, StoppedEarly
from hpcdl.core.protocols import Communicator
from hpcdl.strategies.parameter_server.among_workers import ServersAmongWorkers
from hpcdl.strategies.parameter_server.placement import NUM_FLAGS, PLACEMENTS
from hpcdl.strategies.parameter_server.server import MAX_LAG, AveragingServer, QuorumServer, Rounds
from hpcdl.strategies.parameter_server.worker import ServerClient
from tests.conftest import patience
from tests.rounds import TracingCommunicator

LENGTHS = [700, 3, 64, 1200, 1, 333]
BUCKET_BYTES, MESSAGE_BYTES = 4000, 1000
STEPS = 3

Body = Callable[[ServerClient, int], Any]


def gradient(worker: int, step: int, variable: int) -> numpy.ndarray:
    generator = numpy.random.default_rng([worker, step, variable])
    return generator.standard_normal(LENGTHS[variable]).astype(numpy.float32)


def exchange_step(client: ServerClient, worker: int, step: int) -> dict[int, numpy.ndarray]:
    """Send this worker's gradients of a step; return the means by variable."""
    client.announce(step)
    client.lay_out(LENGTHS)
    means = {}
    for number, bucket in enumerate(client.buckets):
        parts = [gradient(worker, step, index) for index in bucket.variables]
        buffer = numpy.concatenate(parts)
        client.exchange(number, buffer)
        ends = numpy.cumsum([part.size for part in parts])[:-1]
        means |= dict(zip(bucket.variables, numpy.split(buffer, ends), strict=True))
    client.take_answer()
    return means


def run(
    num_workers: int,
    num_servers: int,
    body: Body,
    *,
    placement: str = "split",
    backup_workers: int = 0,
    wrap: Callable[[Communicator], Communicator] = lambda communicator: communicator,
) -> list[Any]:
    """Return the results of `body` on the workers, then of `serve` on the servers."""

    def rank(plain: Communicator) -> Any:
        communicator = wrap(plain)
        if plain.rank < num_workers:
            client = ServerClient(communicator, num_servers, placement, BUCKET_BYTES, MESSAGE_BYTES)
            return body(client, plain.rank)
        answers = plain.rank == num_workers
        if backup_workers:
            needed = num_workers - backup_workers
            return QuorumServer(communicator, num_workers, needed, answers=answers).serve()
        return AveragingServer(communicator, num_workers, answers=answers).serve()

    return threads.run(num_workers + num_servers, rank)


def train(client: ServerClient, worker: int) -> Any:
    means = [exchange_step(client, worker, step) for step in range(STEPS)]
    client.leave()
    return means


def in_rank_order(num_workers: int, step: int, variable: int) -> numpy.ndarray:
    total = gradient(0, step, variable)
    for worker in range(1, num_workers):
        total += gradient(worker, step, variable)
    return total * numpy.float32(1 / num_workers)


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
@pytest.mark.parametrize(("num_workers", "num_servers"), [(1, 1), (2, 1), (3, 2), (2, 4), (4, 3)])
def test_every_worker_gets_the_mean_in_rank_order(placement: str, num_workers: int, num_servers: int) -> None:
    results = run(num_workers, num_servers, train, placement=placement)
    for worker in range(num_workers):
        for step in range(STEPS):
            for variable in range(len(LENGTHS)):
                expected = in_rank_order(num_workers, step, variable)
                assert numpy.array_equal(results[worker][step][variable], expected)


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_bytes_are_gradients_headers_and_answers(placement: str) -> None:
    num_workers, num_servers = 3, 2
    traced: dict[int, TracingCommunicator] = {}
    clients: dict[int, ServerClient] = {}

    def wrap(plain: Communicator) -> Communicator:
        traced[plain.rank] = TracingCommunicator(plain)
        return traced[plain.rank]

    def body(client: ServerClient, worker: int) -> Any:
        clients[worker] = client
        return train(client, worker)

    results = run(num_workers, num_servers, body, placement=placement, wrap=wrap)
    header_bytes, answer_bytes = 8 * (2 + NUM_FLAGS), 8 * (1 + NUM_FLAGS)
    gradient_bytes = 4 * sum(LENGTHS)
    for worker in (1, 2):  # worker 0 also sends the layout
        beside = (STEPS + 1) * num_servers * header_bytes
        assert traced[worker].counts.bytes == STEPS * gradient_bytes + beside
    served = results[num_workers:]
    assert sum(server["held_bytes"] for server in served) == gradient_bytes
    for number, server in enumerate(served):
        beside = STEPS * num_workers * answer_bytes if number == 0 else 0
        counted = traced[num_workers + number].counts.bytes
        assert counted == STEPS * num_workers * server["held_bytes"] + beside
        assert server["steps"] == STEPS and server["busy_seconds_per_step"] > 0
    loads = clients[0].as_json()["server_bytes"]
    assert loads == [server["held_bytes"] for server in served]


def test_more_servers_than_variables_leave_some_without_work() -> None:
    results = run(2, 8, train, placement="greedy")
    assert [server["held_bytes"] == 0 for server in results[2:]] == [False] * 6 + [True] * 2


def test_an_early_end_reaches_the_servers() -> None:
    def body(client: ServerClient, worker: int) -> None:
        exchange_step(client, worker, 0)
        client.leave(early=True)

    for backup_workers in (0, 1):
        with pytest.raises(StoppedEarly):
            run(2, 2, body, backup_workers=backup_workers)


def test_a_step_is_complete_although_its_first_message_is_done_with_before_its_second_comes() -> None:
    rounds = Rounds([3, 2], num_workers=1, num_needed=1)
    for number, length in enumerate(rounds.lengths):
        assert not rounds.step_complete(7)
        assert rounds.add(7, number, numpy.ones(length, numpy.float32))
        found = rounds.get(7, number)
        found.num_unserved, found.num_leaving = 0, 1
        if number == 0:
            rounds.sent(7, number)
    assert rounds.step_complete(7)
    rounds.sent(7, 1)
    assert rounds.get(8, 0).total.sum() == 0, "a buffer that is used again starts from zero"


@pytest.mark.parametrize("backup_workers", [0, 1])
def test_a_wish_is_granted_to_all_at_the_same_step(backup_workers: int) -> None:
    together = threading.Barrier(2)

    def body(client: ServerClient, worker: int) -> list[list[float]]:
        agreed = []
        for step in range(30):
            together.wait(60)
            if worker == 1 and step == 2:
                client.set_flags(numpy.array([1.0, 0.0, 0.0, 0.0]))
            exchange_step(client, worker, step)
            agreed.append(client.agreed().tolist())
        client.leave()
        return agreed

    results = run(2, 1, body, backup_workers=backup_workers)
    assert results[0] == results[1]
    assert [row[0] > 0 for row in results[0]].count(True) == 1
    assert backup_workers or results[0][2][0] == 1.0


def test_a_worker_that_dies_ends_the_others() -> None:
    def body(client: ServerClient, worker: int) -> None:
        exchange_step(client, worker, 0)
        if worker == 1:
            raise ValueError("dead")
        exchange_step(client, worker, 1)

    for backup_workers in (0, 1):
        with pytest.raises((ValueError, RankError), match="dead"):
            run(3, 1, body, backup_workers=backup_workers)


def test_the_late_gradient_is_dropped_and_all_means_are_the_same() -> None:
    """Worker 2 waits until the others have finished two steps; it then follows, and all get the same means."""
    ahead = threading.Event()

    def body(client: ServerClient, worker: int) -> Any:
        means, followed = [], 0
        for step in range(5):
            if worker == 2 and step == 0:
                assert ahead.wait(60)
            means.append(exchange_step(client, worker, step))
            followed += client.follows
            if worker != 2 and step == 1:
                ahead.set()
        client.leave()
        return means, followed

    results = run(3, 2, body, backup_workers=1)
    for step in range(5):
        for variable in range(len(LENGTHS)):
            assert all(
                numpy.array_equal(results[0][0][step][variable], other[0][step][variable]) for other in results[1:3]
            )
    late = numpy.float32(0.5) * (gradient(0, 0, 3) + gradient(1, 0, 3))
    assert numpy.array_equal(results[2][0][0][3], late)
    assert results[2][1] >= 1, "the late worker should have followed a step"
    assert sum(server["dropped_messages"] for server in results[3:]) > 0


def test_nobody_runs_further_ahead_than_the_servers_remember() -> None:
    reached = [0, 0, 0]
    gap = []

    def body(client: ServerClient, worker: int) -> None:
        for step in range(3 * MAX_LAG):
            if worker == 2 and step == 0:
                deadline_s = time.monotonic() + patience(60)
                while reached[0] < MAX_LAG and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                time.sleep(0.3)
                gap.append(reached[0])
            exchange_step(client, worker, step)
            reached[worker] = step + 1
        client.leave()

    run(3, 1, body, backup_workers=1)
    assert MAX_LAG <= gap[0] <= MAX_LAG + 1


@pytest.mark.parametrize("length", [1, 5, 100_003])
@pytest.mark.parametrize(("num_ranks", "num_servers"), [(2, 1), (2, 2), (3, 2), (5, 3)])
def test_servers_that_work_as_well_sum_like_an_all_reduce(num_ranks: int, num_servers: int, length: int) -> None:
    def body(communicator: threads.ThreadCommunicator) -> Any:
        buffer = numpy.random.default_rng(communicator.rank).normal(size=length).astype(numpy.float32)
        ServersAmongWorkers(num_servers).allreduce(communicator, buffer, Workspace(message_bytes=4096))
        return buffer

    found = threads.run(num_ranks, body)
    exact = sum(numpy.random.default_rng(rank).normal(size=length) for rank in range(num_ranks))
    assert all(numpy.array_equal(one, found[0]) for one in found), "bitwise the same everywhere"
    numpy.testing.assert_allclose(found[0], exact, rtol=0, atol=1e-5)
