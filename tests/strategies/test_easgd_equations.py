"""Each method equals the simulator: the same order of arrival gives the same weights."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from hpcdl.comm.threads import ThreadCommunicator
from hpcdl.core.errors import RankError
from tests.strategies import simulator
from tests.strategies.elastic_ranks import Outcome, run

STEPS, WORKERS, ETA, ALPHA, MU = 50, 4, 0.05, 0.15, 0.9
LENGTH = 1500
RANDOM = np.random.default_rng(11)
START = RANDOM.normal(size=LENGTH)
CURVATURE = RANDOM.uniform(0.1, 2.0, size=(WORKERS, LENGTH))
TARGET = RANDOM.normal(size=(WORKERS, LENGTH))
NOISE = RANDOM.normal(size=(STEPS, LENGTH))


def gradient(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
    """Return the gradient of a quadratic that differs by worker, with noise, so that order and history matter."""
    return CURVATURE[worker] * (weights - TARGET[worker]) + 0.3 * NOISE[step] * (worker + 1)


def random_orders(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.permutation(WORKERS).tolist() for _ in range(STEPS)]


def agree(found: Outcome, expected: simulator.State) -> None:
    center, weights = expected
    scale = np.abs(center).max()
    assert np.abs(found.center - center).max() <= 1e-6 * scale
    for mine, theirs in zip(found.weights, weights, strict=True):
        assert np.abs(mine - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("servers", [1, 3])
def test_easgd_is_round_robin(servers: int) -> None:
    found = run("easgd", START, gradient, workers=WORKERS, steps=STEPS, servers=servers, eta=ETA, moving_rate=ALPHA)
    agree(found, simulator.round_robin_easgd(START, gradient, WORKERS, STEPS, ETA, ALPHA))


@pytest.mark.parametrize("variant", ["1", "2", "3"])
@pytest.mark.parametrize("unpacked", [False, True])
def test_sync_easgd(variant: str, unpacked: bool) -> None:
    found = run(
        "sync-easgd", START, gradient, workers=WORKERS, steps=STEPS, eta=ETA, moving_rate=ALPHA, variant=variant,
        unpacked=unpacked, sizes=[1000, 450, 50],
    )  # fmt: skip
    agree(found, simulator.sync_easgd(START, gradient, WORKERS, STEPS, ETA, ALPHA))


@pytest.mark.parametrize(("compress", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("unpacked", [False, True])
def test_sync_easgd_with_half_the_bytes(compress: str, tolerance: float, unpacked: bool) -> None:
    """Half the bytes give far more precision than weights in half precision would, because distances are rounded."""
    results = [
        run(
            "sync-easgd", START, gradient, workers=WORKERS, steps=STEPS, eta=ETA, moving_rate=ALPHA, variant=variant,
            unpacked=unpacked, sizes=[1000, 450, 50], compress=compress,
        )
        for variant in ("2", "3", "3")
    ]  # fmt: skip
    center, _ = simulator.sync_easgd(START, gradient, WORKERS, STEPS, ETA, ALPHA)
    assert 0 < np.abs(results[0].center - center).max() <= tolerance * np.abs(center).max()
    for other in results[1:]:
        assert other.center.tobytes() == results[0].center.tobytes()
        assert [w.tobytes() for w in other.weights] == [w.tobytes() for w in results[0].weights]


@pytest.mark.parametrize("far", [1.0, 1e6])
@pytest.mark.parametrize("compress", ["fp16", "bf16"])
def test_what_rounding_leaves_over_is_made_up_for(compress: str, far: float) -> None:
    """Without gradients all weights meet at the mean of their start, however coarse the numbers that are sent."""
    apart = far * RANDOM.normal(size=(3, LENGTH))

    def first_step_alone(worker: int, step: int, weights: np.ndarray) -> np.ndarray:
        return apart[worker] if step == 0 else np.zeros(LENGTH)

    found = run("sync-easgd", START, first_step_alone, workers=3, steps=80, eta=1.0, moving_rate=0.2, compress=compress)
    everybody = np.stack([found.center, *found.weights])
    assert np.ptp(everybody, axis=0).max() <= 1e-5 * far
    # Each exchange rounds what the center takes by 2^-11 or 2^-8 of it, but not the workers' own part.
    kept = START - apart.sum(axis=0) / 4
    assert np.abs(found.center - kept).max() <= {"fp16": 2**-10, "bf16": 2**-7}[compress] * np.abs(apart).max()


def test_distances_of_any_size_are_held() -> None:
    """Distances below float16's smallest number, 6e-8, are sent with a scale and arrive."""
    results = [
        run("sync-easgd", np.zeros(9), lambda *_: np.ones(9), workers=3, steps=4, eta=1e-10, compress=compress).center
        for compress in ("none", "fp16")
    ]
    assert results[0].max() < 0 and results[1] == pytest.approx(results[0], rel=1e-3)


def test_sync_easgd_with_a_period() -> None:
    found = run("sync-easgd", START, gradient, workers=3, steps=STEPS, eta=ETA, moving_rate=ALPHA, period=4)
    agree(found, simulator.sync_easgd(START, gradient, 3, STEPS, ETA, ALPHA, period=4))


def test_sync_easgd_variants_2_and_3_leave_the_same_bits() -> None:
    results = [
        run("sync-easgd", START, gradient, workers=WORKERS, steps=STEPS, eta=ETA, moving_rate=ALPHA, variant=variant)
        for variant in ("2", "3", "3")
    ]
    for other in results[1:]:
        assert other.center.tobytes() == results[0].center.tobytes()
        assert [w.tobytes() for w in other.weights] == [w.tobytes() for w in results[0].weights]


@pytest.mark.parametrize("name", ["async-easgd", "hogwild-easgd"])
@pytest.mark.parametrize("unpacked", [False, True])
def test_elastic_exchange_by_arrival(name: str, unpacked: bool) -> None:
    orders = random_orders(1)
    found = run(
        name, START, gradient, workers=WORKERS, steps=STEPS, orders=orders, eta=ETA, moving_rate=ALPHA,
        unpacked=unpacked, sizes=[1000, 450, 50], servers=2,
    )  # fmt: skip
    agree(found, simulator.arriving_easgd(START, gradient, orders, ETA, ALPHA))


@pytest.mark.parametrize("name", ["easgd", "async-easgd", "hogwild-easgd"])
@pytest.mark.parametrize(("steps", "period"), [(12, 1), (12, 4), (21, 5), (12, 50), (100, 50)])
def test_a_run_has_the_steps_it_counts_whatever_the_period(name: str, steps: int, period: int) -> None:
    """The first exchange follows one step, not a period of them, and the run ends between two exchanges."""
    found = run(
        name, START, lambda worker, _, weights: gradient(worker, 0, weights), workers=WORKERS, steps=steps, eta=ETA,
        moving_rate=ALPHA, period=period, to_the_end=True,
    )  # fmt: skip
    taken = [counts.steps for counts in found.counts[:WORKERS]]
    counted = {counts.center_steps for counts in found.counts[:WORKERS]}
    assert len(counted) == 1 and steps * WORKERS <= counted.pop() <= sum(taken)
    # Each may take a few more while the others' last exchanges arrive.
    assert sum(taken) <= (steps + min(period, steps)) * WORKERS + WORKERS


def test_async_measgd_by_arrival() -> None:
    orders = random_orders(2)
    found = run(
        "async-measgd", START, gradient, workers=WORKERS, steps=STEPS, orders=orders, eta=0.01, mu=MU, moving_rate=ALPHA
    )
    agree(found, simulator.arriving_easgd(START, gradient, orders, 0.01, ALPHA, MU))


@pytest.mark.parametrize(("name", "mu"), [("async-sgd", 0.0), ("hogwild-sgd", 0.0), ("async-msgd", MU)])
def test_gradients_by_arrival(name: str, mu: float) -> None:
    orders, eta = random_orders(3), 0.01
    found = run(name, START, gradient, workers=WORKERS, steps=STEPS, orders=orders, eta=eta, mu=mu, servers=2)
    agree(found, simulator.arriving_sgd(START, gradient, orders, eta, mu))


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("name", ["hogwild-easgd", "hogwild-sgd"])
def test_hogwild_between_nodes(name: str, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hogwild between nodes uses one-sided access if MPI has windows, otherwise messages to every worker's server."""

    def no_windows(communicator: ThreadCommunicator, length: int, dtype: Any) -> NoReturn:
        raise RankError("not here", rank=communicator.rank)

    if not windows:
        monkeypatch.setattr(ThreadCommunicator, "remote_array", no_windows)
    orders, eta = random_orders(5), 0.01
    found = run(
        name, START, gradient, workers=WORKERS, steps=STEPS, orders=orders, eta=eta, hosts=["a", "a", "b", "c"],
        **({"moving_rate": ALPHA} if name == "hogwild-easgd" else {}),
    )  # fmt: skip
    expected = (
        simulator.arriving_easgd(START, gradient, orders, eta, ALPHA)
        if name == "hogwild-easgd"
        else simulator.arriving_sgd(START, gradient, orders, eta)
    )
    agree(found, expected)
    writes = sum(sum(record["staleness_counts"].values()) for record in found.details)
    assert writes == WORKERS * STEPS * (1 if windows else WORKERS)


def test_elasticity_follows_the_learning_rate() -> None:
    found = run("sync-easgd", START, gradient, workers=WORKERS, steps=STEPS, eta=ETA, elasticity=ALPHA / ETA)
    agree(found, simulator.sync_easgd(START, gradient, WORKERS, STEPS, ETA, ALPHA))


def test_the_default_moving_rate_is_nine_tenths_over_the_workers() -> None:
    found = run("sync-easgd", START, gradient, workers=3, steps=STEPS, eta=ETA)
    agree(found, simulator.sync_easgd(START, gradient, 3, STEPS, ETA, 0.3))


def test_without_momentum_measgd_is_easgd() -> None:
    orders = random_orders(4)
    results = [
        run(name, START, gradient, workers=WORKERS, steps=STEPS, orders=orders, eta=ETA, mu=0.0, moving_rate=ALPHA)
        for name in ("async-easgd", "async-measgd")
    ]
    assert np.abs(results[0].center - results[1].center).max() <= 1e-6


def test_one_worker_without_elasticity_is_sgd() -> None:
    weights = START.copy()
    for step in range(STEPS):
        weights = weights - ETA * gradient(0, step, weights)
    for name in ("easgd", "async-easgd"):
        found = run(name, START, gradient, workers=1, steps=STEPS, eta=ETA, moving_rate=0.0)
        assert np.abs(found.weights[0] - weights).max() <= 1e-6 * np.abs(weights).max()
        assert np.array_equal(found.center, START.astype(np.float32))
    assert np.abs(run("async-sgd", START, gradient, workers=1, steps=STEPS, eta=ETA).center - weights).max() <= 1e-5
