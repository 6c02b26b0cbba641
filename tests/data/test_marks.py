"""Numbers that stand for missing ones, and classes written one-hot, in whatever format the arrays are."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from hpcdl.core.errors import UsageError
from hpcdl.data.format.manifest import Manifest
from tests.data.sharding import make

COUNT = 24
X = np.random.default_rng(2).random((COUNT, 5))
Y = np.arange(COUNT) % 3


def sharded(root: Path, x: np.ndarray, y: np.ndarray = Y, **flags: str) -> Manifest:
    root.mkdir(exist_ok=True)
    np.savez(root / "a.npz", x=x, y=y)
    return make(root / "a.npz", root / "out", **flags)


@pytest.mark.parametrize(
    ("dtype", "scale", "mark"),
    [("f4", 1, -9999), ("f8", 1, -999), ("f4", 1, 1e20), ("f4", 1, 9.969209968386869e36), ("i2", 1000, -32768),
     ("f4", 1, -3.4028234663852886e38), ("f2", 1, -999), ("i4", 50, -99999), ("i4", 50, 999),
     ("f4", 1, -99), ("f8", 1, 999.9)],
)  # fmt: skip
def test_a_mark_of_missing_values_is_shown(dtype: str, scale: int, mark: float, tmp_path: Path) -> None:
    x = (X * scale).astype(dtype)
    assert not any("missing" in line for line in sharded(tmp_path / "none", x).understood)
    x[[3, 7], 2] = mark
    (line,) = [line for line in sharded(tmp_path / "some", x).understood if "missing" in line]
    assert f"x: 2 values of {mark:g} at index 2, all others" in line and "--nan skip" in line
    x = np.repeat(x[:, None, :], 4, 1)  # pixels alike
    (line,) = [line for line in sharded(tmp_path / "map", x).understood if "missing" in line]
    assert f"x: 8 values of {mark:g}, all others" in line


def test_a_mark_among_the_pixels_of_images_is_shown(tmp_path: Path) -> None:
    images = np.random.default_rng(3).random((COUNT, 6, 6, 1), dtype=np.float32)
    for name in ("none", "some"):
        np.savez(tmp_path / f"{name}.npz", images=images, labels=Y)
        for number, pixels in enumerate(images):
            path = tmp_path / name / "ab"[number % 2] / f"{number}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[:, :, 0]).save(path)
        images[5, 0, :2] = -9999
    for source in ("none", "none.npz"):
        assert not any("missing" in line for line in make(tmp_path / source, tmp_path / f"{source}-out").understood)
    for source in ("some", "some.npz"):
        manifest = make(tmp_path / source, tmp_path / f"{source}-out")
        assert any("images: 2 values of -9999, all others" in line for line in manifest.understood), source


def test_numbers_near_others_are_no_marks(tmp_path: Path) -> None:
    for number, x in enumerate(
        (np.arange(-1000.0, -1000 + COUNT), np.linspace(-9999, 9999, COUNT), np.full(COUNT, -999.0))
    ):
        assert not any("missing" in line for line in sharded(tmp_path / str(number), x[:, None]).understood)


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_one_hot_labels_of_images_become_classes_where_asked(ending: str, tmp_path: Path) -> None:
    images = np.repeat(np.arange(COUNT, dtype=np.uint8), 48).reshape(COUNT, 4, 4, 3)
    path = tmp_path / f"a.{ending}"
    if ending == "npz":
        np.savez(path, images=images, labels=np.eye(3)[Y])
    else:
        with h5py.File(path, "w") as file:
            file.update(images=images, labels=np.eye(3)[Y])
    assert any("--target-kind class" in line for line in make(path, tmp_path / "plain").understood)
    manifest = make(path, tmp_path / "out", target_kind="class")
    with h5py.File(tmp_path / "out" / manifest.shards()[0].file) as shard:
        assert np.array_equal(Y[shard["images"][:, 0, 0, 0]], shard["labels"][:])


def test_vectors_of_quantities_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="values that are not whole name no classes; give --target-kind regression"):
        sharded(tmp_path, X, X[:, :2], target_kind="class")


@pytest.mark.parametrize("kind", ["", "regression"])
def test_quantities_written_as_text_are_asked_about(kind: str, tmp_path: Path) -> None:
    values = np.array([f"{number / 7:.3f}" for number in range(COUNT)])
    with pytest.raises(UsageError, match=r"y holds numbers as text, such as '0.000': classes or quantities"):
        sharded(tmp_path, X, values, **({"target_kind": kind} if kind else {}))
    assert len(sharded(tmp_path / "class", X, values, target_kind="class").fields[1].class_names) == COUNT


@pytest.mark.parametrize("dtype", ["f4", "u1", "i8", "?"])
def test_one_hot_targets_become_classes_where_asked(dtype: str, tmp_path: Path) -> None:
    y = np.eye(4)[Y].astype(dtype)
    plain = sharded(tmp_path / "plain", X, y)
    assert plain.fields[1].shape == (4,) and any("--target-kind class" in line for line in plain.understood)
    asked = sharded(tmp_path / "asked", X, y, target_kind="class")
    assert list(asked.fields[1].class_names) == ["0", "1", "2", "3"]
    with h5py.File(tmp_path / "asked" / "out" / asked.shards()[0].file) as shard:
        expected = {row.tobytes(): label for row, label in zip(X, Y, strict=True)}
        assert [expected[row.tobytes()] for row in shard["x"][:]] == shard["y"][:].tolist()
    reported = sharded(tmp_path / "kept", X, y, target_kind="regression").understood
    assert not any("one-hot" in line for line in reported)
    several = sharded(tmp_path / "several", X, np.ones((COUNT, 4), dtype)).understood
    assert not any("one-hot" in line for line in several)


def test_marks_of_several_columns_are_shown(tmp_path: Path) -> None:
    x = X.astype("f4")
    x[[3, 7], 1] = x[[2, 4], 4] = -9999
    (line,) = [line for line in sharded(tmp_path / "some", x).understood if "missing" in line]
    assert "at index 1, all others" in line and "(and such at index 4): a mark of missing values?" in line
