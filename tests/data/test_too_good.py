"""Samples that belong together, or that are none: the plan names them, since results on a random split are too good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import CommandLine

SPLIT = ("--split", "train=0.8,val=0.2")
SERIES = np.random.default_rng(4).random((400, 2)).cumsum(0)


@pytest.mark.parametrize("step", [1, 4])
def test_overlapping_windows_are_said_with_split(run_hpcdl: CommandLine, tmp_path: Path, step: int) -> None:
    windows = np.lib.stride_tricks.sliding_window_view(SERIES, 10, axis=0).transpose(0, 2, 1)[::step][:60]
    np.savez(tmp_path / "a.npz", x=windows, y=SERIES[:60, 0])
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", *SPLIT, "--dry-run"])
    assert made.code == 0 and f"samples are windows of a series, {step} apart: they overlap" in made.err
    np.savez(tmp_path / "b.npz", x=windows[::10], y=SERIES[: len(windows[::10]), 0])  # windows that do not overlap
    made = run_hpcdl(["shard", tmp_path / "b.npz", tmp_path / "out", *SPLIT, "--dry-run"])
    assert made.code == 0 and "windows" not in made.err


def test_times_are_said_with_split_alone(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    lines = "".join(f"{1990 + n},{n * 7 % 5},{n % 2}\n" for n in range(20))
    (tmp_path / "t.csv").write_text("year,x,y\n" + lines)
    made = run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out", *SPLIT, "--dry-run"])
    assert made.code == 0 and "samples near each other in 'year' may be in several splits" in made.err
    assert "near each other" not in run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out", "--dry-run"]).err


@pytest.mark.parametrize(("what", "factor"), [("sums", 1.0), ("means", 1 / 20)])
def test_a_row_of_totals_is_said(run_hpcdl: CommandLine, tmp_path: Path, what: str, factor: float) -> None:
    rows = np.random.default_rng(6).random((20, 2)).round(3)
    lines = [f"{a},{b},{n % 2}" for n, (a, b) in enumerate(rows.tolist())]
    total = (rows.sum(0) * factor).round(3).tolist()
    said = f"the last row holds the {what} of all others"
    for name, last in {"with": [f"{total[0]},{total[1]},1"], "without": []}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,y", *lines, *last]) + "\n")
        made = run_hpcdl(["shard", tmp_path / f"{name}.csv", tmp_path / "out", "--dry-run"])
        assert made.code == 0 and (said in made.err) == bool(last), made.err


def test_numbered_texts_may_be_samples_or_classes(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for number in range(4):
        (tmp_path / f"s/doc{number}.txt").write_text(f"first line {number}\nsecond line\n")
    asked = run_hpcdl(["shard", tmp_path / "s", tmp_path / "out"])
    assert asked.code == 2 and "is each of its 4 files a class whose lines are samples, or one text?" in asked.err
    assert run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--target-kind", "class"]).code == 0
    (tmp_path / "s/doc0.txt").rename(tmp_path / "s/sky.txt")
    assert run_hpcdl(["shard", tmp_path / "s", tmp_path / "names"]).code == 0


def test_bytes_of_many_channels_may_be_volumes(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    for channels, said in {3: False, 12: True}.items():
        pixels = np.random.default_rng(7).integers(0, 256, (12, 20, 20, channels), dtype=np.uint8)
        np.savez(tmp_path / "a.npz", x=pixels, y=np.arange(12) % 3)
        made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", "--dry-run"])
        assert made.code == 0 and ("taken as pictures of 12 channels, which training scales" in made.err) == said
