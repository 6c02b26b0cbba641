"""Placement of gradients on servers, tested for the imbalance that papers report; no ranks, no TensorFlow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.strategies.parameter_server.placement import (
    PLACEMENTS,
    greedy,
    held_bytes,
    imbalance,
    messages,
    plan,
    round_robin,
)

MIB = 1024**2


def resnet50() -> list[int]:
    """Return the elements of ResNet-50's trainable variables in creation order; convolutions without bias."""
    lengths = [7 * 7 * 3 * 64, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes = [(1, channels, 4 * width)] if block == 0 else []
            shapes += [(1, channels, width), (3, width, width), (1, width, 4 * width)]
            for side, taken, made in shapes:
                lengths += [side * side * taken * made, made, made]
            channels = 4 * width
    return [*lengths, 2048 * 1000, 1000]


def hepcnn() -> list[int]:
    sizes = [(3 * 3 * 3 * 128, 128), *[(3 * 3 * 128 * 128, 128)] * 4, (128 * 2, 2)]
    return [length for pair in sizes for length in pair]


def vgg19() -> list[int]:
    lengths, channels = [], 3
    for width, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            lengths += [3 * 3 * channels * width, width]
            channels = width
    for taken, made in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        lengths += [taken * made, made]
    return lengths


def loads(lengths: list[int], placement: str, num_servers: int) -> list[int]:
    return held_bytes(plan(lengths, num_servers, placement, 25 * MIB), num_servers)


@pytest.mark.parametrize(
    ("num_servers", "mean_mb", "by_turns", "by_bytes"),
    [(8, 12.78, 1.76, 1.30), (16, 6.39, 1.96, 1.83), (32, 3.19, 3.14, 3.12), (64, 1.60, 5.91, 5.91)],
)
def test_resnet50_is_as_uneven_as_reported(num_servers: int, mean_mb: float, by_turns: float, by_bytes: float) -> None:
    lengths = resnet50()
    assert sum(lengths) == 25_557_032
    assert sum(loads(lengths, "split", num_servers)) / num_servers / 1e6 == pytest.approx(mean_mb, abs=0.01)
    assert imbalance(loads(lengths, "round-robin", num_servers)) == pytest.approx(by_turns, abs=0.005)
    assert imbalance(loads(lengths, "greedy", num_servers)) == pytest.approx(by_bytes, abs=0.005)


def test_more_servers_hardly_help_the_busiest_of_whole_variables() -> None:
    busiest = {count: max(loads(resnet50(), "greedy", count)) for count in (32, 64)}
    assert busiest[64] == pytest.approx(0.95 * busiest[32], rel=0.01)


def test_biases_on_one_server_weights_on_the_other() -> None:
    assert sum(hepcnn()) == 594_178
    assert imbalance(loads(hepcnn(), "round-robin", 2)) == pytest.approx(2.0, abs=0.005)


def test_one_tensor_bounds_the_balance() -> None:
    assert sum(vgg19()) == 143_667_240
    assert imbalance(loads(vgg19(), "round-robin", 8)) == pytest.approx(5.9, abs=0.05)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("network", [resnet50, hepcnn, vgg19])
def test_split_is_even_within_a_hundredth(network: object, num_servers: int) -> None:
    assert callable(network)
    found = loads(network(), "split", num_servers)
    assert max(found) - min(found) <= 0.01 * min(found)


LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 6), st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 30_000))
def test_every_element_has_one_server(lengths: list[int], num_servers: int, placement: str, bucket_bytes: int) -> None:
    buckets = plan(lengths, num_servers, placement, bucket_bytes)
    assert sorted(index for bucket in buckets for index in bucket.variables) == list(range(len(lengths)))
    for bucket in buckets:
        assert len(bucket.bounds) == num_servers + 1
        assert (bucket.bounds[0], bucket.bounds[-1]) == (0, sum(lengths[index] for index in bucket.variables))
        assert list(bucket.bounds) == sorted(bucket.bounds)
    assert sum(held_bytes(buckets, num_servers)) == 4 * sum(lengths)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 30_000))
def test_whole_variables_lie_on_the_server_that_owns_them(lengths: list[int], num_servers: int, size: int) -> None:
    for name, place in (("round-robin", round_robin), ("greedy", greedy)):
        owners = place(lengths, num_servers)
        for bucket in plan(lengths, num_servers, name, size):
            end = 0
            for index in bucket.variables:
                start, end = end, end + lengths[index]
                assert bucket.bounds[owners[index]] <= start and end <= bucket.bounds[owners[index] + 1]


@given(LENGTHS, st.integers(1, 6), st.sampled_from(sorted(PLACEMENTS)), st.integers(4, 4000))
def test_messages_cover_a_bucket_once_and_in_order(
    lengths: list[int], num_servers: int, placement: str, message_bytes: int
) -> None:
    for bucket in plan(lengths, num_servers, placement, 8000):
        parts = messages(bucket, message_bytes)
        assert all(0 < part.stop - part.start <= max(1, message_bytes // 4) for part in parts)
        for server in range(num_servers):
            mine = [(part.start, part.stop) for part in parts if part.server == server]
            ends = [bucket.bounds[server], *(stop for _, stop in mine)]
            assert [start for start, _ in mine] == ends[:-1]
            assert ends[-1] == bucket.bounds[server + 1]


@given(LENGTHS, st.integers(1, 6), st.sampled_from(sorted(PLACEMENTS)), st.integers(4, 4000))
def test_workers_begin_with_different_servers_and_each_server_learns_the_same(
    lengths: list[int], num_servers: int, placement: str, message_bytes: int
) -> None:
    for bucket in plan(lengths, num_servers, placement, 8000):
        heard = set()
        for first in range(num_servers):
            parts = messages(bucket, message_bytes, first)
            heard.add(tuple(tuple(part for part in parts if part.server == server) for server in range(num_servers)))
            if bucket.bounds[first] < bucket.bounds[first + 1]:
                assert parts[0].server == first
        assert len(heard) == 1
