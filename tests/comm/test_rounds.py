"""Counts of messages, bytes and rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest

from hpcdl.comm.threads import ThreadCommunicator, run
from tests.rounds import Counts, TracingCommunicator


def chain(communicator: ThreadCommunicator) -> Counts:
    """Send a message from rank to rank: as many rounds as links."""
    tracer = TracingCommunicator(communicator)
    buffer = numpy.zeros(3)
    if tracer.rank > 0:
        tracer.irecv(buffer, tracer.rank - 1).wait()
    if tracer.rank < tracer.size - 1:
        tracer.isend(buffer, tracer.rank + 1).wait()
    return tracer.counts


def star(communicator: ThreadCommunicator) -> Counts:
    """Send from rank 0 to all others: one port, so as many rounds as receivers."""
    tracer = TracingCommunicator(communicator)
    buffer = numpy.zeros(3)
    requests = [tracer.irecv(buffer, 0)] if tracer.rank else [tracer.isend(buffer, to) for to in range(1, tracer.size)]
    for request in requests:
        request.wait()
    return tracer.counts


def swap(communicator: ThreadCommunicator) -> Counts:
    """Send in both directions at once: one round."""
    tracer = TracingCommunicator(communicator)
    requests = [tracer.isend(numpy.zeros(3), 1 - tracer.rank), tracer.irecv(numpy.zeros(3), 1 - tracer.rank)]
    for request in requests:
        request.wait()
    return tracer.counts


@pytest.mark.parametrize(
    "body, num_ranks, rounds, busiest_bytes", [(chain, 5, 4, 24), (star, 5, 4, 96), (swap, 2, 1, 24)]
)
def test_counts(body: Callable[[ThreadCommunicator], Counts], num_ranks: int, rounds: int, busiest_bytes: int) -> None:
    counts = run(num_ranks, body)
    assert max(count.rounds for count in counts) == rounds
    assert max(count.bytes for count in counts) == busiest_bytes


def test_groups_count_into_the_same_counts() -> None:
    def body(communicator: ThreadCommunicator) -> Counts:
        tracer = TracingCommunicator(communicator)
        for group in (tracer.duplicate(), tracer.split(0, -tracer.rank)):
            requests = [group.isend(numpy.zeros(1), 1 - group.rank), group.irecv(numpy.zeros(1), 1 - group.rank)]
            assert sorted([group.wait_any(requests), group.wait_any(requests)])[0] in (0, 1)
            for request in requests:
                request.wait()
        tracer.allreduce(numpy.zeros(1))
        return tracer.counts

    for counts in run(2, body):
        assert (counts.messages, counts.bytes, counts.library_calls) == (2, 16, 1)
