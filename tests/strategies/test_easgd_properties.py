"""Properties that hold for all numbers: conservation, stability, bytes, and results that do not depend on timing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.strategies.elastic.server import HEADER_BYTES, server_spans, sizes_within
from tests.strategies.elastic_ranks import run

QUICK = settings(max_examples=15)
ELASTIC = ["easgd", "async-easgd", "async-measgd", "hogwild-easgd", "sync-easgd"]


def still(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
    return np.zeros_like(weights)


@pytest.mark.parametrize("name", ELASTIC)
@given(workers=st.integers(2, 5), share=st.floats(0.05, 0.9), seed=st.integers(0, 1000))
@QUICK
def test_without_gradients_the_sum_of_all_weights_stays(name: str, workers: int, share: float, seed: int) -> None:
    """Conservation: worker and center move by the same amount, towards each other, so that the sum of weights stays."""
    generator = np.random.default_rng(seed)
    start = generator.normal(size=37)
    kick = generator.normal(size=(workers, 37))

    def kicked_once(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return kick[worker] if step == 0 else np.zeros_like(weights)

    alpha = share * 2 / (workers + 1)
    # Without orders a lock-free method could lose part of a write: here the workers take turns.
    orders = [generator.permutation(workers).tolist() for _ in range(12)] if name != "sync-easgd" else None
    if name == "easgd":
        orders = None
    found = run(
        name, start, kicked_once, workers=workers, steps=12, orders=orders, eta=0.5, mu=0.0, moving_rate=alpha
    )  # fmt: skip
    expected = (workers + 1) * start - 0.5 * kick.sum(0)
    assert np.abs(found.center + sum(found.weights) - expected).max() < 1e-4
    # The weights did move: the kicks pull the center.
    assert np.abs(found.center - start).max() > 1e-4


@given(
    workers=st.integers(1, 5),
    eta=st.floats(0.05, 2.5),
    alpha=st.floats(0.01, 1.2),
    curvature=st.floats(0.2, 2.0),
)
@QUICK
def test_the_stability_conditions_of_sync_easgd(workers: int, eta: float, alpha: float, curvature: float) -> None:
    """On f = h x^2 / 2 the trajectory shrinks inside the stated region and grows outside it."""
    a, beta = eta * curvature, workers * alpha
    margins = [4 - 2 * (a + alpha + beta) + a * beta, 4 - (a + alpha + beta)]
    if workers >= 2:
        margins.append(1 - abs(1 - a - alpha))
    if min(abs(margin) for margin in margins) < 0.1:
        return  # too near the border to decide in so few steps
    radius = max(abs(np.linalg.eigvals(linear_map(workers, a, alpha))))
    assert (radius < 1) == all(margin > 0 for margin in margins)
    steps = math.ceil(math.log(1e4) / abs(math.log(max(radius, 1e-3))))
    if steps > 150:
        return
    kick = np.linspace(-1, 1, workers) + 0.5  # unequal workers: their difference is a direction of its own

    def kicked_once(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return curvature * weights + (kick[worker] if step == 0 else 0.0)

    found = run(
        "sync-easgd", np.ones(2), kicked_once, workers=workers, steps=steps, eta=eta, moving_rate=alpha, variant="2"
    )
    largest = max(np.abs(values).max() for values in (found.center, *found.weights))
    assert largest < 0.3 if radius < 1 else largest > 3


def linear_map(workers: int, a: float, alpha: float) -> np.ndarray:
    """Return the matrix of one synchronous round on (W_1 .. W_P, center) for f = h x^2 / 2, a = eta h."""
    matrix = np.zeros((workers + 1, workers + 1))
    matrix[:workers, :workers] = np.eye(workers) * (1 - a - alpha)
    matrix[:workers, workers] = alpha
    matrix[workers, :workers] = alpha
    matrix[workers, workers] = 1 - workers * alpha
    return matrix


@pytest.mark.parametrize(("alpha", "stable"), [(0.45, True), (0.55, False)])
def test_sync_easgd_itself_diverges_beyond_the_limit(alpha: float, stable: bool) -> None:
    """Beyond alpha < 2 / (P + 1), here 0.5 for three workers and a learning rate near zero, sync-easgd diverges."""
    generator = np.random.default_rng(0)
    kick = generator.normal(size=(3, 8))

    def kicked_once(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return kick[worker] if step == 0 else np.zeros_like(weights)

    found = run("sync-easgd", np.zeros(8), kicked_once, workers=3, steps=80, eta=1.0, moving_rate=alpha)
    assert (np.abs(found.center).max() < 10) == stable


@pytest.mark.parametrize(("eta", "alpha"), [(0.5, 0.7), (1.5, 0.3), (0.5, 0.99), (1.9, 0.5)])
def test_the_stability_of_round_robin(eta: float, alpha: float) -> None:
    """h = 1: stable strictly inside 0 < eta < 2, 0 < alpha < (4 - 2 eta) / (4 - eta); three workers."""
    kick = np.array([1.0, -2.0, 3.0])

    def gradient(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return weights + (kick[worker] if step == 0 else 0.0)

    found = run("easgd", np.ones(1), gradient, workers=3, steps=120, eta=eta, moving_rate=alpha)
    inside = 0 < alpha < (4 - 2 * eta) / (4 - eta)
    assert (np.abs(found.center).max() < 1e-1) == inside


@given(length=st.integers(1, 500), servers=st.integers(1, 7), cuts=st.lists(st.integers(1, 60), max_size=8))
def test_servers_share_the_buffer_evenly(length: int, servers: int, cuts: list[int]) -> None:
    spans = server_spans(length, servers)
    held = [span.stop - span.start for span in spans]
    assert sum(held) == length and max(held) - min(held) <= 1
    sizes = [*cuts, length]
    total = sum(sizes)
    pieces = [sizes_within(sizes, span) for span in server_spans(total, servers)]
    assert sum(itertools.chain.from_iterable(pieces)) == total


LENGTH = 1000
PAYLOAD = 4 * LENGTH


@pytest.mark.parametrize("name", ["easgd", "async-sgd", "async-msgd", "async-easgd", "async-measgd"])
@pytest.mark.parametrize(("servers", "unpacked", "messages"), [(1, False, 1), (2, False, 2), (1, True, 1 + 3)])
def test_bytes_and_messages_of_an_exchange(name: str, servers: int, unpacked: bool, messages: int) -> None:
    """An exchange sends the weights once each way and a header per server; packed, it is one message to each server."""
    steps, workers = 5, 3
    found = run(
        name, np.ones(LENGTH), still, workers=workers, steps=steps, servers=servers, unpacked=unpacked,
        sizes=[600, 300, 100],
    )  # fmt: skip
    each = PAYLOAD + servers * HEADER_BYTES
    for worker, counts in enumerate(found.counts[:workers]):
        # Worker 0 also sent the servers their center.
        exchanges = steps + (1 if worker == 0 else 0)
        assert counts.bytes_in_steps == exchanges * each
        assert counts.observed == steps * each
        assert counts.messages_in_steps == exchanges * messages


@pytest.mark.parametrize("name", ["hogwild-sgd", "hogwild-easgd"])
def test_bytes_of_a_one_sided_exchange(name: str) -> None:
    """Between nodes a worker reads and adds to the other workers' parts of the center, and reads the board twice."""
    steps, workers = 5, 4
    found = run(name, np.ones(LENGTH), still, workers=workers, steps=steps, hosts=["a", "b", "c", "d"])
    theirs = PAYLOAD * (workers - 1) // workers
    board, note, probe = 24 * (workers + 1), 24, 24
    for worker, counts in enumerate(found.counts):
        # Worker 0 holds the board.
        far = worker > 0
        expected = steps * (2 * theirs + far * (2 * board + note)) + far * (board + probe)
        assert counts.bytes_in_steps == expected
        assert counts.observed == steps * (theirs + far * note)


def test_hogwild_on_one_node_sends_nothing() -> None:
    for name in ("hogwild-sgd", "hogwild-easgd"):
        found = run(name, np.ones(LENGTH), still, workers=3, steps=5)
        assert [counts.bytes_in_steps for counts in found.counts] == [0, 0, 0]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
@pytest.mark.parametrize("variant", ["1", "2", "3"])
def test_bytes_of_a_sync_exchange(workers: int, variant: str) -> None:
    """Variant 1: every rank but the root sends its sum up once; over all ranks there are P - 1 messages each way."""
    found = run("sync-easgd", np.ones(LENGTH), still, workers=workers, steps=4, variant=variant)
    sent = [counts.bytes_in_steps for counts in found.counts]
    assert sent == [counts.observed for counts in found.counts]
    if variant == "1":
        assert sum(sent) == 4 * 2 * (workers - 1) * PAYLOAD


@pytest.mark.parametrize("variant", ["2", "3"])
def test_half_precision_halves_the_bytes_of_a_sync_exchange(variant: str) -> None:
    sent = {
        compress: sum(
            counts.bytes_in_steps
            for counts in run(
                "sync-easgd", np.ones(LENGTH), still, workers=4, steps=4, variant=variant, compress=compress
            ).counts
        )
        for compress in ("none", "bf16", "fp16")
    }
    assert 2 * sent["bf16"] == sent["none"] and sent["fp16"] == sent["bf16"]


def test_float16_asks_how_far_apart_workers_are_where_the_center_does_not_tell() -> None:
    """float16 costs two rounds of recursive doubling of one float32 on four ranks; an overflow repeats the exchange."""

    def far(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return np.full(LENGTH, 1e6 * worker if step == 1 else 0.0)

    def sent(start: float, steps: int) -> int:
        found = run("sync-easgd", np.full(LENGTH, start), far, workers=4, steps=steps, eta=1.0, compress="fp16")
        return sum(counts.bytes_in_steps for counts in found.counts)

    asked = 4 * 2 * 4
    once = sent(1.0, 1)
    assert sent(0.0, 1) == once + asked
    assert sent(1.0, 3) == sent(1.0, 2) + once + asked + once


def test_staleness_of_taking_turns() -> None:
    """In a fixed order every worker finds the writes of all others between two of its own."""
    for name in ("async-easgd", "hogwild-sgd"):
        orders = [[2, 0, 1]] * 10
        found = run(name, np.ones(10), still, workers=3, steps=10, orders=orders)
        counts: dict[str, int] = {}
        for record in found.details:
            for staleness, number in record.get("staleness_counts", {}).items():
                counts[staleness] = counts.get(staleness, 0) + number
        # The first writes follow reads of the start: 0, 1, 2 writes of others came before.
        assert counts == {"0": 1, "1": 1, "2": 28}


def test_two_runs_of_sync_easgd_leave_the_same_bits() -> None:
    generator = np.random.default_rng(5)
    noise = generator.normal(size=(30, 400))

    def noisy(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return weights * (worker + 1) + noise[step]

    first, second = (
        run("sync-easgd", np.ones(400), noisy, workers=4, steps=30, eta=0.02).center.tobytes() for _ in range(2)
    )
    assert first == second
