from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.core.errors import UsageError
from hpcdl.data.format.order import (
    Epoch,
    Layout,
    continues_at,
    mixed,
    pass_slice,
    permuted,
    steps_per_epoch,
)
from hpcdl.data.read.windows import Share

shards = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(num=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_permuted_is_a_permutation(num: int, key: int) -> None:
    found = permuted(np.arange(num, dtype=np.int64), num, key)
    assert np.array_equal(np.sort(found), np.arange(num))


def test_permuted_spreads_evenly_and_keys_differ() -> None:
    positions = np.arange(10_000, dtype=np.int64)
    one, two = (permuted(positions, 10_000, mixed(key)) for key in (1, 2))
    assert np.mean(one == two) < 0.01
    counts, _ = np.histogram(one[:1000], bins=10, range=(0, 10_000))
    assert counts.min() > 50 and counts.max() < 160  # expected 100, standard deviation under 10
    assert abs(np.corrcoef(positions, one)[0, 1]) < 0.05


def test_permuted_never_changes() -> None:
    """The order of samples never changes, since a resumed run relies on it."""
    assert permuted(np.arange(8, dtype=np.int64), 8, 42).tolist() == [6, 7, 4, 2, 0, 3, 5, 1]
    assert mixed(1, 2, 3) == mixed(1, 2, 3) != mixed(1, 3, 2)


@given(by_shard=shards, block=st.integers(1, 9), window=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_an_epoch_holds_every_sample_once(by_shard: list[int], block: int, window: int, seed: int) -> None:
    layout = Layout.of_shards(by_shard, block, window)
    assert layout.num_samples == sum(by_shard)
    epoch = Epoch(layout, seed, 3)
    assert np.array_equal(np.sort(epoch.ids(0, layout.num_samples)), np.arange(layout.num_samples))
    assert not (set(layout.starts[1:-1].tolist()) - set(range(1, layout.num_samples)))


@given(by_shard=shards, block=st.integers(1, 9), total=st.integers(1, 30), workers=st.integers(1, 6))
@settings(max_examples=60)
def test_workers_share_the_same_global_batch_and_steps(
    by_shard: list[int], block: int, total: int, workers: int
) -> None:
    layout = Layout.of_shards(by_shard, block, 4)
    if total > layout.num_samples:
        with pytest.raises(UsageError, match="batch size x workers"):
            steps_per_epoch(layout.num_samples, total)
        return
    steps = steps_per_epoch(layout.num_samples, total)
    assert 0 <= layout.num_samples - steps * total < total  # fewer samples than one global batch are dropped
    seen: list[int] = []
    for step in range(steps):
        epoch = Epoch(layout, 1, 2)  # a new object: no step needs the previous ones
        whole = epoch.ids(step * total, (step + 1) * total)
        shares = [
            Share(steps_per_epoch=steps, global_batch=total, rows=pass_slice(total, w, workers)) for w in range(workers)
        ]
        assert max(share.batch_size for share in shares) - min(share.batch_size for share in shares) <= 1
        parts = [epoch.ids(*share.positions(2 * steps + step)[1:]) for share in shares]
        assert np.array_equal(np.concatenate(parts), whole)
        seen += whole.tolist()
    assert len(set(seen)) == len(seen)


@given(num=st.integers(30, 400), batches=st.lists(st.integers(1, 30), min_size=2, max_size=4), data=st.data())
@settings(max_examples=100)
def test_an_epoch_that_continues_with_other_global_batches_takes_every_sample_once(
    num: int, batches: list[int], data: st.DataObject
) -> None:
    """An epoch continued with other global batches drops less than one of the last; the next epoch is as usual."""
    batches.sort(reverse=True)  # the number of workers decreases
    epoch, samples, taken = 3, 0, []
    for number, batch in enumerate(batches):
        per_epoch = num // batch
        step, shift = continues_at(epoch, samples, num_samples=num, global_batch=batch)
        share = Share(steps_per_epoch=per_epoch, global_batch=batch, rows=range(batch), shift=shift)
        left = (epoch + 1) * per_epoch - step
        lost_after = left if number == len(batches) - 1 else data.draw(st.integers(0, left - 1))
        for now in range(step, step + lost_after):
            found, start, stop = share.positions(now)
            assert found == epoch
            taken += range(start, stop)
        samples += lost_after * batch
    assert taken == list(range(len(taken))) and num - len(taken) < batches[-1]
    assert share.positions((epoch + 1) * per_epoch) == (epoch + 1, 0, batches[-1])


def test_epochs_and_seeds_differ_and_mix_shards() -> None:
    layout = Layout.of_shards([500, 500], 10, 20)
    first, second = Epoch(layout, 0, 0).ids(0, 1000), Epoch(layout, 0, 1).ids(0, 1000)
    other = Epoch(layout, 1, 0).ids(0, 1000)
    assert np.mean(first == second) < 0.05 and np.mean(first == other) < 0.05
    assert 40 < np.sum(first[:200] < 500) < 160  # 20 blocks of 100: 10 from each shard, standard deviation 2
