"""Plans of buckets: which variables are sent together, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.collectives.slices import FIRST_SHARE, plan_buckets

SIZES = st.lists(st.integers(0, 100), max_size=40)


@given(SIZES, st.integers(1, 150))
def test_every_gradient_leaves_once_the_last_layer_first(sizes: list[int], bucket_bytes: int) -> None:
    plan = plan_buckets(sizes, bucket_bytes)
    assert [index for bucket in plan for index in bucket] == list(reversed(range(len(sizes))))
    assert all(plan)


@given(SIZES, st.integers(1, 150))
def test_buckets_are_full_but_not_too_full(sizes: list[int], bucket_bytes: int) -> None:
    plan = plan_buckets(sizes, bucket_bytes)
    filled = [sum(sizes[index] for index in bucket) for bucket in plan]
    for bucket, total in zip(plan, filled, strict=True):
        assert total <= bucket_bytes or len(bucket) == 1
    for (total, _), follower in zip(zip(filled, plan, strict=True), plan[1:], strict=False):
        assert total + sizes[follower[0]] > bucket_bytes, "the next gradient would have fitted"


def test_a_large_tensor_is_a_bucket_of_its_own() -> None:
    # AlexNet's first fully connected layer between small ones.
    assert plan_buckets([10, 20, 151_000_000, 4096, 30], 25_000_000) == ((4, 3), (2,), (1, 0))


@given(SIZES, st.integers(1, 150))
def test_the_first_bucket_may_leave_early(sizes: list[int], bucket_bytes: int) -> None:
    plan = plan_buckets(sizes, bucket_bytes, small_first=True)
    assert [index for bucket in plan for index in bucket] == list(reversed(range(len(sizes))))
    if sum(sizes) <= bucket_bytes:
        assert len(plan) <= 1, "there is nothing to overlap with"
        return
    first = [sizes[index] for index in plan[0]]
    assert sum(first[:-1]) < bucket_bytes / FIRST_SHARE, "it would have held enough without the last"
    rest = len(sizes) - len(first)
    assert plan[1:] == plan_buckets(sizes[:rest], bucket_bytes)


@pytest.mark.parametrize("small_first", [False, True])
def test_an_empty_gradient_goes_with_a_bucket_that_is_full(small_first: bool) -> None:
    assert plan_buckets([0, 1], 1, small_first=small_first) == ((1, 0),)


def test_a_bucket_must_hold_something() -> None:
    assert plan_buckets([], 1) == ()
    with pytest.raises(ValueError, match="holds nothing"):
        plan_buckets([1], 0)
