"""Bucket sizes that are worth a trial, and their measured times, which are kept for later runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdl.collectives.slices import plan_buckets
from hpcdl.config.schema import BUCKET_BYTES
from hpcdl.step.bucket_size import BucketTimes, load_times, save_times, sizes_worth_a_try, times_file

MIB = 1 << 20
FACTS = {"model": "lenet", "ranks": "2"}
TIMES = BucketTimes(facts=FACTS, seconds={str(BUCKET_BYTES): 1.0, str(MIB): 0.9})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("sizes_mib", "tried_mib"),
    [
        ([0.1, 0.2], [25]),
        ([0.5, 1.2], [25, 1]),
        ([10, 10, 10], [25, 30, 1]),
        ([1] * 70, [25, 70, 1, 4, 64]),
    ],
    ids=["all in one", "two", "each its own", "five ways"],
)
def test_sizes_that_divide_the_gradients_alike_are_tried_once(sizes_mib: list[float], tried_mib: list[int]) -> None:
    sizes = [int(size * MIB) for size in sizes_mib]
    tried = sizes_worth_a_try(sum(sizes), lambda size: plan_buckets(sizes, size, small_first=True))
    assert tried == tuple(size * MIB for size in tried_mib)


def test_the_default_stays_where_no_other_is_quicker_by_more_than_noise() -> None:
    assert TIMES.best == MIB
    assert BucketTimes(facts=FACTS, seconds={str(BUCKET_BYTES): 1.0, str(MIB): 0.995}).best == BUCKET_BYTES


def test_what_was_measured_is_found_again_by_the_same_facts_and_sizes_alone() -> None:
    save_times(TIMES)
    assert load_times(FACTS, [BUCKET_BYTES, MIB]) == TIMES
    assert load_times(FACTS, [BUCKET_BYTES, 4 * MIB]) is None
    assert load_times({**FACTS, "ranks": "3"}, [BUCKET_BYTES, MIB]) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"schema": "hpcdl.buckets/0"}', '{"schema": "hpcdl.buckets/1"}'])
def test_what_cannot_be_used_is_measured_again(content: str) -> None:
    save_times(TIMES)
    times_file(FACTS).write_text(content)
    assert load_times(FACTS, [BUCKET_BYTES, MIB]) is None
