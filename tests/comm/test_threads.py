"""Ranks as threads: messages, groups, and what happens when a rank fails."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.comm.threads import ThreadCommunicator, alone, run
from hpcdl.core.errors import HpcdlError, RankError


def test_messages_keep_their_order_for_each_tag() -> None:
    def body(communicator: ThreadCommunicator) -> list[int]:
        buffers = [numpy.array([value]) for value in range(6)]
        if communicator.rank == 0:
            requests = [communicator.isend(buffer, 1, tag=index % 2) for index, buffer in enumerate(buffers)]
        else:
            buffers = [numpy.zeros(1, numpy.int64) for _ in range(6)]
            order = [1, 3, 5, 0, 2, 4]  # all of tag 1 first
            requests = [communicator.irecv(buffers[index], 0, tag=index % 2) for index in order]
        for request in requests:
            request.wait()
        return [int(buffer[0]) for buffer in buffers]

    assert run(2, body)[1] == list(range(6))


def test_a_message_is_taken_when_both_sides_have_come() -> None:
    """A message is copied only when both sides are ready, so a buffer that is changed too early shows the mistake."""

    def body(communicator: ThreadCommunicator) -> float:
        buffer = numpy.zeros(1)
        if communicator.rank == 0:
            request = communicator.isend(buffer, 1)
            buffer[0] = 7
            communicator.barrier()
            request.wait()
        else:
            communicator.barrier()
            communicator.irecv(buffer, 0).wait()
        return float(buffer[0])

    assert run(2, body) == [7, 7]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), min_size=1, max_size=6))
def test_split_orders_groups_by_key_then_rank(answers: list[tuple[int, int]]) -> None:
    def body(communicator: ThreadCommunicator) -> tuple[int, list[int]]:
        color, key = answers[communicator.rank]
        group = communicator.split(color, key)
        return group.rank, group.allgather_json(communicator.rank)

    for rank, (position, members) in enumerate(run(len(answers), body)):
        color = answers[rank][0]
        expected = sorted((key, other) for other, (its_color, key) in enumerate(answers) if its_color == color)
        assert members == [other for _, other in expected]
        assert members[position] == rank


def test_duplicates_do_not_mix_messages() -> None:
    def body(communicator: ThreadCommunicator) -> list[float]:
        other = communicator.duplicate()
        first, second = numpy.array([1.0]), numpy.array([2.0])
        if communicator.rank == 0:
            requests = [communicator.isend(first, 1), other.isend(second, 1)]
        else:
            requests = [other.irecv(second, 0), communicator.irecv(first, 0)]
        for request in requests:
            request.wait()
        return [float(first[0]), float(second[0])]

    assert run(2, body)[1] == [1.0, 2.0]


def test_wait_any_returns_what_came_first() -> None:
    def body(communicator: ThreadCommunicator) -> list[int]:
        if communicator.rank:
            if communicator.rank == 1:
                communicator.irecv(numpy.zeros(1), 0, tag=9).wait()  # held back until rank 2's message was seen
            communicator.isend(numpy.zeros(1), 0).wait()
            return []
        requests = [communicator.irecv(numpy.zeros(1), rank) for rank in (1, 2)]
        first = communicator.wait_any(requests)
        communicator.isend(numpy.zeros(1), 1, tag=9).wait()
        requests[0].wait()
        return [first]

    assert run(3, body)[0] == [1]


def test_shared_array_is_one_array() -> None:
    def body(communicator: ThreadCommunicator) -> float:
        array = communicator.shared_array((communicator.size, 2), numpy.float64)
        array[communicator.rank] = communicator.rank + 1
        communicator.barrier()
        return float(array.sum())

    assert run(3, body) == [12, 12, 12]
    with pytest.raises(RankError, match="several nodes"):
        run(2, body, hosts=["a", "b"])


def test_a_rank_that_raises_wakes_the_others() -> None:
    seen: list[RankError] = []

    def body(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 1:
            raise KeyError("broken")
        try:
            communicator.barrier()
        except RankError as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="broken") as caught:
        run(4, body)
    assert "on rank 1 of 4 threads" in caught.value.__notes__
    assert len(seen) == 3 and all(error.rank == 1 for error in seen)


def test_a_rank_that_leaves_early_is_noticed() -> None:
    def body(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 0:
            communicator.irecv(numpy.zeros(1), 1).wait()

    with pytest.raises(RankError, match="rank 1 left"):
        run(2, body)


def test_lengths_must_agree() -> None:
    def body(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 0:
            communicator.isend(numpy.zeros(2), 1).wait()
        else:
            communicator.irecv(numpy.zeros(3), 0).wait()

    with pytest.raises(RankError, match="16 bytes were sent where 24 are expected"):
        run(2, body)


def test_abort_ends_the_job() -> None:
    def body(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 0:
            communicator.abort(3)
        communicator.barrier()

    with pytest.raises(HpcdlError, match="rank 0 aborted"):
        run(2, body)


def test_views_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        alone().isend(numpy.zeros(4)[::2], 0)


def test_alone() -> None:
    communicator = alone()
    buffer = numpy.arange(3.0)
    communicator.allreduce(buffer)
    communicator.broadcast(buffer)
    communicator.barrier()
    assert buffer.tolist() == [0, 1, 2]
    assert communicator.allgather_json({"a": [1]}) == [{"a": [1]}]
    incoming = numpy.zeros(3)
    send, receive = communicator.isend(buffer, 0), communicator.irecv(incoming, 0)
    send.wait()
    receive.wait()
    assert incoming.tolist() == [0, 1, 2]
