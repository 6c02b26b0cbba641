from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.core.errors import UsageError
from hpcdl.data.write.division import quotas
from hpcdl.data.write.request import parse_split
from tests.data.sharding import everything, make, numbers, pixels


@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    parts=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 9),
)
@settings(max_examples=80)
def test_each_class_gets_its_share(counts: list[int], parts: list[int], seed: int) -> None:
    fractions = [part / sum(parts) for part in parts]
    by_class = np.array(counts, np.int64)
    limits = quotas(by_class, fractions, seed)
    sizes = np.diff(np.vstack([np.zeros_like(by_class), limits]), axis=0)
    assert (sizes >= 0).all() and (sizes.sum(axis=0) == by_class).all()
    for fraction, size in zip(fractions, sizes, strict=True):
        assert (np.abs(size - fraction * by_class) <= 2).all()
    if len(parts) == 2:
        assert abs(sizes[0].sum() - fractions[0] * by_class.sum()) <= 1


def test_split_is_stratified_seeded_and_disjoint(tmp_path: Path) -> None:
    images, labels = pixels(400, (6, 6)), np.repeat(np.arange(4), 100)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    manifest = make(tmp_path / "a.npz", tmp_path / "one", split="train=0.8,val=0.2", seed=4)
    train, val = (everything(tmp_path / "one", manifest, name) for name in ("train", "val"))
    assert np.bincount(train[1]).tolist() == [80] * 4 and np.bincount(val[1]).tolist() == [20] * 4
    keys = [image.tobytes() for image in (*train[0], *val[0])]
    assert len(set(keys)) == 400
    assert not np.array_equal(train[1], np.sort(train[1]))  # shuffled, not class by class
    again = make(tmp_path / "a.npz", tmp_path / "two", split="train=0.8,val=0.2", seed=4)
    assert again.splits == manifest.splits
    other = make(tmp_path / "a.npz", tmp_path / "three", split="train=0.8,val=0.2", seed=5)
    assert set(map(bytes, everything(tmp_path / "three", other, "val")[0])) != set(map(bytes, val[0]))


def test_classes_of_one_sample_still_reach_every_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(100, (4, 4)), labels=np.arange(100))
    manifest = make(tmp_path / "a.npz", tmp_path / "out", split="train=0.8,val=0.2", target_kind="class")
    assert (manifest.splits["train"].num_samples, manifest.splits["val"].num_samples) == (80, 20)


@pytest.mark.parametrize(
    "text", ["train", "train=0.8", "train=0.8,val=0.3", "train=0.8,train=0.2", "a b=1", "x=-1,y=2", ""]
)
def test_bad_splits_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_split(text)


def test_a_divided_source_is_not_divided_again(tmp_path: Path) -> None:
    arrays = {
        "x_train": pixels(9, (4, 4)),
        "y_train": numbers(9, 3),
        "x_test": pixels(9, (4, 4)),
        "y_test": numbers(9, 3),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match="already divided into train, test"):
        make(tmp_path / "a.npz", tmp_path / "out", split="train=0.5,val=0.5")
    assert not (tmp_path / "out").exists()
    assert set(make(tmp_path / "a.npz", tmp_path / "out").splits) == {"train", "test"}


@pytest.mark.parametrize(
    ("split", "reported"),
    [
        ("train=0.5,val=0.5", "classes that val gets no sample of, too few are there: '1'"),
        ("train=0.3,val=0.7", "classes in val that train does not have: '1'"),
    ],
)
def test_classes_too_rare_for_a_part_are_reported(split: str, reported: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(41, (4, 4)), labels=np.array([0] * 40 + [1]))
    manifest = make(tmp_path / "a.npz", tmp_path / "out", split=split)
    in_val = 1 in everything(tmp_path / "out", manifest, "val")[1]
    assert in_val == ("val=0.7" in split) and list(manifest.understood)[1:] == [reported]  # behind the share of class 0
