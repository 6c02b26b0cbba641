from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from hpcdl.tuning.search import Search
from hpcdl.tuning.space import factors_of
from hpcdl.tuning.surrogate import Surrogate

GRID = [{"intra_op_threads": threads, "binding": binding} for threads in (1, 2, 4, 8, 16) for binding in ("a", "b")]


def speed(index: int) -> float:
    point = GRID[index]
    return 10 * float(str(point["intra_op_threads"])) ** 0.5 * (1.2 if point["binding"] == "b" else 1.0)


def run(search: Search, measure: object = speed, limit: int = 200) -> None:
    while (asked := search.ask(2)) and search.num_samples < limit:
        for index in asked:
            search.tell(index, measure(index))  # type: ignore[operator]


def test_the_best_is_found_and_the_search_ends_by_itself() -> None:
    search = Search(GRID)
    run(search)
    choice = search.best()
    assert choice is not None
    assert GRID[choice.index] == {"intra_op_threads": 16, "binding": "b"}
    assert search.ask(4) == []
    assert search.num_samples < 60
    assert choice.probability_best > 0.9
    assert abs(choice.images_per_second - 48) < 2


def test_anchors_come_first_and_every_level_is_tried_early() -> None:
    candidates = [{"x": x, "y": y, "z": z} for x, y, z in itertools.product(range(6), range(4), "abc")]
    search = Search(candidates, anchors=[7, 3])
    asked = search.ask(20)
    assert asked[:2] == [7, 3]
    for name in "xyz":
        assert {candidates[index][name] for index in asked} == {item[name] for item in candidates}


def test_nothing_measured_has_no_best() -> None:
    search = Search(GRID)
    search.tell(0, None)
    assert search.best() is None
    assert 0 not in search.ask(3)


def test_when_everything_fails_each_is_tried_once() -> None:
    search = Search(GRID)
    run(search, lambda index: None)
    assert search.num_samples == len(GRID)
    assert search.best() is None


def test_one_candidate_is_measured_and_chosen() -> None:
    search = Search([{"intra_op_threads": 1}], precision=0.05)
    dice = random.Random(0)
    run(search, lambda index: 50 * dice.gauss(1, 0.02))
    choice = search.best()
    assert choice is not None
    assert choice.index == 0
    assert 2 <= search.num_samples <= 30


def test_failing_candidates_are_left_alone_and_never_win() -> None:
    search = Search(GRID, seed=3)
    asked: list[int] = []

    def measure(index: int) -> float | None:
        asked.append(index)
        return None if GRID[index]["intra_op_threads"] == 16 else speed(index)

    run(search, measure)
    choice = search.best()
    assert choice is not None
    assert GRID[choice.index] == {"intra_op_threads": 8, "binding": "b"}
    assert max(asked.count(8), asked.count(9)) == 1


def test_values_that_are_no_speed_count_as_failures() -> None:
    search = Search(GRID)
    for value in (math.nan, math.inf, -1.0, 0.0):
        search.tell(0, value)
    assert search.failures == {0: 4}


def test_a_given_number_of_samples_is_never_exceeded() -> None:
    search = Search(GRID, max_samples=9)
    run(search, limit=100)
    assert search.num_samples <= 9
    assert search.best() is not None


def test_precision_is_reached() -> None:
    dice = random.Random(5)
    search = Search(GRID, precision=0.02)
    run(search, lambda index: speed(index) * dice.gauss(1, 0.05), limit=400)
    choice = search.best()
    assert choice is not None
    assert choice.ci95 <= 0.02 * choice.images_per_second


def test_the_same_seed_asks_the_same() -> None:
    first, second = Search(GRID, seed=4), Search(GRID, seed=4)
    run(first)
    run(second)
    assert first.samples == second.samples


def test_an_interval_of_the_model_covers_the_truth() -> None:
    """The winner's 95 % interval covers its true speed about that often, over many noisy grids."""
    covered = 0
    for seed in range(40):
        dice = random.Random(seed)
        search = Search(GRID, seed=seed, max_samples=30)
        run(search, lambda index, dice=dice: speed(index) * math.exp(dice.gauss(0, 0.06)))
        choice = search.best()
        assert choice is not None
        covered += abs(choice.images_per_second - speed(choice.index)) <= choice.ci95
    assert covered >= 33


def test_the_evidence_gradient_is_the_derivative() -> None:
    candidates = [
        {"ranks_per_node": ranks, "intra_op_threads": threads, "binding": binding}
        for ranks, threads, binding in itertools.product((1, 2, 4), (1, 2, 4, 8), "xy")
    ]
    surrogate = Surrogate(factors_of(candidates), len(candidates))
    random_numbers = np.random.default_rng(0)
    rows = np.arange(0, 24, 2)
    values, counts = random_numbers.normal(size=12), random_numbers.integers(1, 4, 12).astype(float)
    theta = surrogate.theta + 0.3 * random_numbers.normal(size=len(surrogate.theta))
    _, gradient = surrogate._negative_evidence(theta, rows, values, counts, 0.3, 5)
    for place in range(len(theta)):
        step = np.zeros(len(theta))
        step[place] = 1e-5
        above = surrogate._negative_evidence(theta + step, rows, values, counts, 0.3, 5)[0]
        below = surrogate._negative_evidence(theta - step, rows, values, counts, 0.3, 5)[0]
        assert gradient[place] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-4)


def test_factors_order_numbers_and_multiply_ranks_with_threads() -> None:
    candidates = [
        {"ranks_per_node": "1", "intra_op_threads": "16", "note": "a", "flat": "1"},
        {"ranks_per_node": "4", "intra_op_threads": "4", "note": "b", "flat": "1.0"},
        {"ranks_per_node": "2", "intra_op_threads": "4", "note": "7", "flat": "1"},
    ]
    factors = {factor.name: factor for factor in factors_of(candidates)}
    assert factors["intra_op_threads"].ordered
    assert not factors["note"].ordered  # one value is not a number
    assert not factors["flat"].ordered  # two spellings of one number have no order
    product = factors["ranks_per_node*intra_op_threads"]
    assert product.levels[0] == product.levels[1] != product.levels[2]
