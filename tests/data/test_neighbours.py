"""Samples that follow each other in a source and are alike: frames and rows of a series, which --split divides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.sharding import make

SAID = "samples that follow each other in the source differ by "


def walk(count: int, width: int) -> np.ndarray:
    """Return rows of a series whose neighbours are alike."""
    return np.sin(np.arange(count)[:, None] / (20 + 3 * np.arange(width)) + np.arange(width))


def understood(path: Path, folder: Path, split: str = "train=0.8,val=0.2", **flags: str) -> str:
    return " ".join(make(path, folder / "out", split=split, **flags).understood)


@pytest.mark.parametrize("kind", ["series", "shuffled", "sorted", "few columns"])
def test_rows_of_a_series_without_times_are_shown(kind: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    rows = walk(300, 3 if kind == "few columns" else 10) * 10
    if kind == "shuffled":
        rows = generator.permutation(rows)
    if kind == "sorted":
        rows = generator.normal(size=(300, 10))
        rows = rows[np.argsort(rows[:, 0])]
    lines = [",".join(f"{value:.3f}" for value in (*row, generator.normal())) for row in rows]
    head = ",".join([*(f"c{column}" for column in range(rows.shape[1])), "y"])
    (tmp_path / "t.csv").write_text("\n".join([head, *lines]) + "\n")
    assert (SAID in understood(tmp_path / "t.csv", tmp_path, target="y=y")) == (kind == "series")


@pytest.mark.parametrize("frames", [True, False])
@pytest.mark.parametrize("encoded", [True, False])
def test_frames_are_shown(frames: bool, encoded: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    pictures = (128 + 60 * walk(120, 32 * 32)).reshape(120, 32, 32) + generator.normal(size=(120, 32, 32))
    pictures = pictures if frames else generator.permutation(pictures)
    if not encoded:
        np.savez(tmp_path / "a.npz", images=pictures.astype(np.uint8), labels=np.arange(120) // 60)
        assert (SAID in understood(tmp_path / "a.npz", tmp_path)) == frames
        return
    for number, pixels in enumerate(pictures):
        path = tmp_path / "all" / "ab"[number // 60] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    assert (SAID in understood(tmp_path / "all", tmp_path)) == frames


def test_samples_that_cannot_be_compared_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(60)))
    (tmp_path / "labels.txt").write_text("".join(f"{'xy'[number % 2]}\n" for number in range(60)))
    assert SAID not in understood(tmp_path / "a.txt", tmp_path)
    np.savez(tmp_path / "one.npz", x=np.ones((2, 12)), y=np.array([0.5, 1.5]))
    (tmp_path / "few").mkdir()
    assert SAID not in understood(tmp_path / "one.npz", tmp_path / "few", split="train=0.5,val=0.5")


def test_samples_of_text_alone_have_no_neighbours(tmp_path: Path) -> None:
    rows = "".join(f"note {row % 7},{row % 9 / 7}\n" for row in range(200))
    (tmp_path / "t.csv").write_text("note,y\n" + rows)
    manifest = make(tmp_path / "t.csv", tmp_path / "out", split="train=0.5,val=0.5")
    assert [item.kind for item in manifest.fields] == ["text", "numbers"]
