"""What every all-reduce of the table promises, on ranks that are threads."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.collectives import auto, hierarchical
from hpcdl.collectives.slices import Cost, Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.arithmetic import add_bfloat16, from_bfloat16, to_bfloat16
from hpcdl.comm.observed import EXCHANGE, Traffic, observe
from hpcdl.comm.threads import ThreadCommunicator, run
from tests.rounds import TracingCommunicator

LENGTHS = (0, 1, 7, 1000, 100003)
DTYPES = ("float32", "float64")
UNCOUNTED = ("mpi",)
"""The library's own messages cannot be counted."""
OWN = [name for name in COLLECTIVES if name not in UNCOUNTED]


def module(name: str) -> Any:
    return importlib.import_module(COLLECTIVES.entry(name).target.partition(":")[0])


def values(rank: int, length: int, dtype: str) -> numpy.ndarray[Any, Any]:
    return numpy.random.default_rng([rank, length]).standard_normal(length).astype(dtype)


@functools.cache
def outcome(name: str, num_ranks: int, hosts: tuple[str, ...] = ()) -> list[Any]:
    """For each rank, by dtype and length: its sums (rank 0), the digest of their bits, rounds and bytes."""

    def body(communicator: ThreadCommunicator) -> dict[tuple[str, int], tuple[Any, ...]]:
        workspace = Workspace(measure=False)
        results = {}
        for dtype in DTYPES:
            for length in LENGTHS:
                tracer = TracingCommunicator(communicator)
                own = Workspace(measure=False) if name == "hierarchical" else workspace
                buffer = values(communicator.rank, length, dtype)
                COLLECTIVES.load(name)(tracer, buffer, own)
                digest = hashlib.sha256(buffer.tobytes()).digest()
                kept = buffer if communicator.rank == 0 else None
                results[dtype, length] = (kept, digest, tracer.counts.rounds, tracer.counts.bytes)
        return results

    return run(num_ranks, body, hosts)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_sums_are_right_and_the_same_everywhere(name: str, num_ranks: int) -> None:
    results = outcome(name, num_ranks)
    for key in results[0]:
        dtype, length = key
        exact = sum(values(rank, length, dtype).astype(numpy.float64) for rank in range(num_ranks))
        scale = sum(numpy.abs(values(rank, length, dtype)).astype(numpy.float64) for rank in range(num_ranks))
        assert len({result[key][1] for result in results}) == 1
        assert results[0][key][0].dtype == dtype
        assert (numpy.abs(results[0][key][0] - exact) <= num_ranks * numpy.finfo(dtype).eps * scale).all()


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("name", OWN)
def test_counted_messages_are_what_cost_says(name: str, num_ranks: int) -> None:
    results = outcome(name, num_ranks)
    for dtype, length in results[0]:
        item_bytes = numpy.dtype(dtype).itemsize
        cost = module(name).cost(num_ranks, length * item_bytes, item_bytes)
        counted = [result[dtype, length][2:] for result in results]
        rounds, busiest = max(count[0] for count in counted), max(count[1] for count in counted)
        assert busiest == cost.bytes, (dtype, length)
        # Empty pieces are sent on as well, so rounds do not depend on the length.
        assert rounds == cost.rounds, (dtype, length)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("name", OWN)
def test_a_record_s_rounds_are_what_cost_says(name: str, num_ranks: int) -> None:
    """The rounds in a run's record, counted without clocks on its busiest rank, equal the cost formula's."""

    def body(communicator: ThreadCommunicator) -> Traffic:
        seen = observe(communicator).for_purpose(EXCHANGE)
        COLLECTIVES.load(name)(seen, numpy.ones(1000, numpy.float32), Workspace(measure=False))
        return seen.monitor.traffic()

    counted = run(num_ranks, body)
    cost = module(name).cost(num_ranks, 4000, 4)
    assert max(traffic.rounds for traffic in counted) == cost.rounds
    assert max(traffic.round_bytes for traffic in counted) == pytest.approx(cost.bytes_in_turn, rel=0.02)


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_the_same_bits_in_every_run(name: str) -> None:
    first = outcome(name, 5)
    outcome.cache_clear()
    second = outcome(name, 5)
    assert [first[0][key][1] for key in first[0]] == [second[0][key][1] for key in first[0]]


@pytest.mark.parametrize("num_ranks", [2, 4, 5, 8])
def test_ring_sends_exactly_its_bound(num_ranks: int) -> None:
    def body(communicator: ThreadCommunicator) -> int:
        tracer = TracingCommunicator(communicator)
        COLLECTIVES.load("ring")(tracer, numpy.ones(num_ranks * 1000, numpy.float32), Workspace(message_bytes=512))
        return tracer.counts.bytes

    assert run(num_ranks, body) == [2 * 4000 * num_ranks * (num_ranks - 1) // num_ranks] * num_ranks


SLICED = [name for name in OWN if name != "auto"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("name", SLICED)
def test_slices_change_nothing(name: str, num_ranks: int) -> None:
    """Many slices, two in flight, change no sum and no byte, and need at most the rounds of one times the slices."""
    length = 5003

    def body(communicator: ThreadCommunicator) -> tuple[Any, int, int]:
        tracer = TracingCommunicator(communicator)
        buffer = values(communicator.rank, length, "float32")
        COLLECTIVES.load(name)(tracer, buffer, Workspace(message_bytes=400))
        return buffer, tracer.counts.bytes, tracer.counts.rounds

    results = run(num_ranks, body)
    exact = sum(values(rank, length, "float32").astype(numpy.float64) for rank in range(num_ranks))
    numpy.testing.assert_allclose(results[0][0], exact, atol=1e-5)
    assert len({buffer.tobytes() for buffer, _, _ in results}) == 1
    cost = module(name).cost(num_ranks, 4 * length)
    num_slices = -(-length // 100)
    assert max(rounds for _, _, rounds in results) <= num_slices * cost.rounds
    if name != "halving-doubling":  # its parts of a slice differ by an element, slice after slice
        assert max(num_bytes for _, num_bytes, _ in results) == cost.bytes


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "aba"])
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_each_part_is_reported_once_and_is_finished(name: str, hosts: str) -> None:
    """In many slices each part is reported once, with its final value, and none is omitted."""

    def body(communicator: ThreadCommunicator) -> tuple[Any, Any]:
        buffer = values(communicator.rank, 5003, "float32")
        reported = numpy.zeros_like(buffer)

        def finished(part: Any) -> None:
            start = (part.ctypes.data - buffer.ctypes.data) // 4
            reported[start : start + part.size] += part

        workspace = Workspace(message_bytes=400, measure=False)
        COLLECTIVES.load(name)(communicator, buffer, workspace, None, finished)
        return buffer, reported

    for buffer, reported in run(len(hosts), body, list(hosts)):
        numpy.testing.assert_array_equal(buffer, reported)


@pytest.mark.parametrize("num_ranks, length", [(1, 6), (3, 0)])
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_what_needs_no_exchange_is_finished(name: str, num_ranks: int, length: int) -> None:
    def body(communicator: ThreadCommunicator) -> list[Any]:
        reported: list[Any] = []
        buffer = numpy.ones((2, length // 2))
        COLLECTIVES.load(name)(communicator, buffer, Workspace(measure=False), None, reported.append)
        return reported

    assert [sum(part.size for part in reported) for reported in run(num_ranks, body)] == [length] * num_ranks


NODES = [["a", "a", "b", "b"], ["a", "b", "a", "b", "b"], ["a", "b", "c"], ["a"] * 6 + ["b"] * 6, ["a", "a", "a", "b"]]


@pytest.mark.parametrize("hosts", NODES, ids="".join)
def test_hierarchical_over_nodes(hosts: Sequence[str]) -> None:
    """Hierarchical over equal and unequal nodes, in any order of ranks; several calls through one window."""

    def body(communicator: ThreadCommunicator) -> tuple[list[Any], Any]:
        workspace = Workspace(message_bytes=1 << 12)
        tracer = TracingCommunicator(communicator)
        buffers = []
        for length in LENGTHS * 2:
            buffers.append(values(communicator.rank, length, "float32"))
            hierarchical.allreduce(tracer, buffers[-1], workspace)
        workspace.close()
        return buffers, tracer.counts

    results = run(len(hosts), body, hosts)
    for index, length in enumerate(LENGTHS * 2):
        exact = sum(values(rank, length, "float32").astype(numpy.float64) for rank in range(len(hosts)))
        numpy.testing.assert_allclose(results[0][0][index], exact, atol=1e-5)
        assert len({buffers[index].tobytes() for buffers, _ in results}) == 1


@pytest.mark.parametrize("ranks_per_node, num_nodes", [(1, 4), (2, 2), (2, 3), (6, 2)])
@pytest.mark.parametrize("length", [0, 1, 1000, 4801])
def test_hierarchical_sends_between_nodes_only(ranks_per_node: int, num_nodes: int, length: int) -> None:
    hosts = [f"node{node}" for node in range(num_nodes) for _ in range(ranks_per_node)]

    def body(communicator: ThreadCommunicator) -> tuple[int, int]:
        tracer = TracingCommunicator(communicator)
        hierarchical.allreduce(tracer, numpy.ones(length, numpy.float32), Workspace())
        return tracer.counts.rounds, tracer.counts.bytes

    counted = run(len(hosts), body, hosts)
    cost = hierarchical.cost(len(hosts), 4 * length, num_nodes=num_nodes)
    assert Cost(rounds=max(count[0] for count in counted), bytes=max(count[1] for count in counted)) == cost


@pytest.mark.parametrize("name", list(COLLECTIVES))
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once_per_addition(name: str, wire: str) -> None:
    """The sum of p half-precision numbers is off by at most p roundings, far less than a long sum in the wire type."""
    num_ranks, length = 6, 3001

    def body(communicator: ThreadCommunicator) -> Any:
        exact = values(communicator.rank, length, "float32")
        sent = to_bfloat16(exact) if wire == "bfloat16" else exact.astype(numpy.float16)
        add = add_bfloat16 if wire == "bfloat16" else None
        COLLECTIVES.load(name)(communicator, sent, Workspace(measure=False), add)
        return sent

    results = run(num_ranks, body)
    assert len({result.tobytes() for result in results}) == 1
    decoded = from_bfloat16(results[0]) if wire == "bfloat16" else results[0].astype(numpy.float32)
    parts = [values(rank, length, "float32").astype(numpy.float64) for rank in range(num_ranks)]
    rounding = 2.0**-8 if wire == "bfloat16" else 2.0**-11
    assert (numpy.abs(decoded - sum(parts)) <= num_ranks * rounding * sum(numpy.abs(part) for part in parts)).all()


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_integers_and_shapes(name: str) -> None:
    def body(communicator: ThreadCommunicator) -> Any:
        buffer = numpy.full((3, 4, 5), communicator.rank + 1, numpy.int64)
        COLLECTIVES.load(name)(communicator, buffer, None if name != "auto" else Workspace(measure=False))
        return buffer

    for buffer in run(4, body):
        assert buffer.shape == (3, 4, 5) and (buffer == 10).all()


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_one_rank_keeps_its_buffer(name: str) -> None:
    buffer = numpy.arange(5.0)
    run(1, lambda communicator: COLLECTIVES.load(name)(communicator, buffer))
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    assert module(name).cost(1, 20) == Cost(rounds=0, bytes=0)


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_gaps_are_refused(name: str) -> None:
    def body(communicator: ThreadCommunicator) -> None:
        COLLECTIVES.load(name)(communicator, numpy.zeros((4, 4))[:, :2], Workspace(measure=False))

    with pytest.raises(ValueError, match="contiguous"):
        run(2, body)


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_a_member_of_the_table_is_documented(name: str) -> None:
    documentation = inspect.getdoc(module(name)) or ""
    assert "ounds" in documentation and "bytes" in documentation
    assert COLLECTIVES.entry(name).summary


@settings(max_examples=40)
@given(
    st.sampled_from(SLICED), st.integers(1, 9), st.integers(0, 400), st.integers(1, 64),
    st.sampled_from(["float32", "float64", "float16"]),
)  # fmt: skip
def test_any_length_ranks_and_slices(name: str, num_ranks: int, length: int, message: int, dtype: str) -> None:
    """Integers are summed exactly, for any length, number of ranks and slices."""

    def body(communicator: ThreadCommunicator) -> Any:
        buffer = (numpy.arange(length) % 13 * (communicator.rank + 1)).astype(dtype)
        COLLECTIVES.load(name)(communicator, buffer, Workspace(message_bytes=message * 8))
        return buffer

    expected = numpy.arange(length) % 13 * (num_ranks * (num_ranks + 1) // 2)
    for buffer in run(num_ranks, body):
        assert (buffer == expected).all()


def test_auto_without_measuring_goes_by_the_model() -> None:
    assert auto.choose_by_model(16, 1000) == "recursive-doubling"
    assert auto.choose_by_model(16, 100_000_000) in ("halving-doubling", "ring")
    assert auto.choose_by_model(12, 100_000_000) == "ring"
