"""Samples that belong together, or that are none: the plan names them, since results on a random split are too good."""

from __future__ import annotations

import datetime
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hpcdl.data.write.writing import dry_run
from tests.conftest import CommandLine
from tests.data.sharding import image_folder, request
from tests.data.test_asked import PICTURE
from tests.data.test_formats import tar

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


@pytest.mark.parametrize(("how", "said"), [("shuffled", True), ("in time", False), ("apart", False)])
def test_windows_that_two_splits_share_are_said(run_hpcdl: CommandLine, tmp_path: Path, how: str, said: bool) -> None:
    windows = np.lib.stride_tricks.sliding_window_view(SERIES, 10, axis=0).transpose(0, 2, 1)[
        :: 10 if how == "apart" else 1
    ]
    order = np.arange(len(windows)) if how == "in time" else np.random.default_rng(5).permutation(len(windows))
    train, val = np.split(windows[order], [len(windows) * 7 // 10])
    np.savez(tmp_path / "a.npz", x_train=train, y_train=train[:, -1, 0], x_val=val, y_val=val[:, -1, 0])
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", "--dry-run"])
    assert made.code == 0 and ("samples of val looked at overlap with samples of train" in made.err) == said, made.err


def test_times_are_said_with_split_alone(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    lines = "".join(f"{1990 + n},{n * 7 % 5},{n % 2}\n" for n in range(20))
    (tmp_path / "t.csv").write_text("year,x,y\n" + lines)
    made = run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out", *SPLIT, "--dry-run"])
    assert made.code == 0 and "samples near each other in 'year' may be in several splits" in made.err
    assert "near each other" not in run_hpcdl(["shard", tmp_path / "t.csv", tmp_path / "out", "--dry-run"]).err


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize(("begin", "said"), [(10, True), (20, False)])
def test_times_that_two_splits_share_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, kind: str, begin: int, said: bool
) -> None:
    for split, first in {"train": 0, "test": begin}.items():
        days = [datetime.date(2021, 1, 1) + datetime.timedelta(days=first + n) for n in range(20)]
        x, y = [first + n + 0.5 for n in range(20)], [n % 2 for n in range(20)]
        if kind == "csv":
            lines = [f"{day},{a},{label}\n" for day, a, label in zip(days, x, y, strict=True)]
            (tmp_path / f"{split}.csv").write_text("date,x,y\n" + "".join(lines))
        else:
            pq.write_table(pa.table({"date": days, "x": x, "y": y}), tmp_path / f"{split}.parquet")
    made = run_hpcdl(["shard", tmp_path, tmp_path / "out", "--leave-out", "date", "--dry-run"])
    line = "'date' of test (2021-01-11 to 2021-01-30) overlaps with that of train (2021-01-01 to 2021-01-20)"
    assert made.code == 0 and (line in made.err) == said, made.err


def test_a_time_of_any_name_is_said_with_split(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    when = [datetime.datetime(2021, 1, 1 + n, tzinfo=datetime.UTC) for n in range(20)]
    pq.write_table(
        pa.table({"when": when, "x": [0.5 * n for n in range(20)], "y": [0, 1] * 10}), tmp_path / "t.parquet"
    )
    made = run_hpcdl(["shard", tmp_path / "t.parquet", tmp_path / "out", *SPLIT, "--leave-out", "when", "--dry-run"])
    assert made.code == 0 and "samples near each other in 'when' may be in several splits" in made.err


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


@pytest.mark.parametrize("flags", [["--categories", "place=one-hot"], ["--input", "a=a", "--input", "b=b"]])
def test_a_row_of_totals_is_said_beside_words(run_hpcdl: CommandLine, tmp_path: Path, flags: list[str]) -> None:
    rows = np.random.default_rng(6).random((20, 3)).round(3)
    lines = [f"{'uvw'[n % 3]},{a},{b},{y}" for n, (a, b, y) in enumerate(rows.tolist())]
    total = ",".join(f"{value:.3f}" for value in rows.sum(0))
    for name, last in {"with": [f"Total,{total}"], "without": []}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["place,a,b,y", *lines, *last]) + "\n")
        made = run_hpcdl(["shard", tmp_path / f"{name}.csv", tmp_path / "out", "--dry-run", "--target", "y=y", *flags])
        assert made.code == 0 and ("the last row holds the sums of all others" in made.err) == bool(last), made.err


def named_pictures(root: Path, kind: str, names: list[str]) -> Path:
    """Save pictures of these names, in the folders a and b."""
    members = {f"{'ab'[number % 2]}/{name}.png": PICTURE for number, name in enumerate(names)}
    if kind == "tar":
        pictures = {f"{name}.{end}": own for name in names for end, own in {"png": PICTURE, "cls": b"0"}.items()}
        return tar(root / "s.tar", pictures)
    if kind == "zip":
        with zipfile.ZipFile(root / "s.zip", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return root / "s.zip"
    for name, content in members.items():
        (root / "s" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "s" / name).write_bytes(content)
    if kind == "csv":
        (root / "s/list.csv").write_text("".join(f"{name},{name[0]}\n" for name in members))
    return root / "s" / ("list.csv" if kind == "csv" else "")


PATIENTS = [f"patient{patient:02d}_img{number}" for number in range(4) for patient in range(20)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        *[(kind, PATIENTS, True) for kind in ("folder", "csv", "zip", "tar")],
        ("folder", [f"{number % 20:05d}_{number:03d}" for number in range(80)], True),
        ("folder", [f"SOB_M_{number % 20}-40-{number:03d}" for number in range(80)], True),
        ("folder", [f"IMG_{number}" for number in range(80)], False),
        ("folder", [f"{'ab'[number % 2]}.{number}" for number in range(80)], False),
        ("folder", [f"{number}_{number % 2}" for number in range(80)], False),
        ("folder", [f"case{number}" for number in range(80)], False),
    ],
)
def test_names_of_files_that_tell_of_patients_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, kind: str, names: list[str], said: bool
) -> None:
    source = named_pictures(tmp_path, kind, names)
    made = run_hpcdl(["shard", source, tmp_path / "out", *SPLIT, "--dry-run"])
    assert made.code == 0 and ("groups in the names of files are in several splits" in made.err) == said, made.err
    assert "groups in" not in run_hpcdl(["shard", source, tmp_path / "out", "--dry-run"]).err


@pytest.mark.parametrize("apart", [True, False])
def test_patients_in_two_folders_of_splits_are_said(run_hpcdl: CommandLine, tmp_path: Path, apart: bool) -> None:
    for number in range(60):
        split = ("train", "val")[number // 5 % 2 if apart else number % 2]
        path = tmp_path / "s" / split / "ab"[number // 30] / f"p{number // 5}_{number % 5}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURE)
    made = run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--dry-run"])
    assert made.code == 0 and ("12 of 12 groups in the names" in made.err) == (not apart), made.err


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


@pytest.mark.parametrize(("factor", "said"), [(50.0, True), (0.02, True), (3.0, False)])
def test_splits_of_which_one_was_normalised_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, factor: float, said: bool
) -> None:
    x = np.random.default_rng(8).normal(size=(80, 6))
    np.savez(tmp_path / "a.npz", x_train=x[:40], y_train=x[:40, 0], x_test=x[40:] * factor, y_test=x[40:, 0])
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", "--dry-run"])
    assert made.code == 0 and ("was one of them normalised? Scale both alike" in made.err) == said, made.err


@pytest.mark.parametrize(("filled", "said"), [(60, True), (95, False), (100, False)])
def test_rows_that_were_never_filled_are_said(run_hpcdl: CommandLine, tmp_path: Path, filled: int, said: bool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x, y = file.create_dataset("x", (100, 8), "f4"), file.create_dataset("y", (100,), "i4")
        x[:filled], y[:filled] = np.random.default_rng(9).normal(size=(filled, 8)), np.arange(filled) % 2
    made = run_hpcdl(["shard", tmp_path / "a.h5", tmp_path / "out", "--dry-run"])
    line = "the last 40 samples of all are 0 in every array: rows that were never filled?"
    assert made.code == 0 and (line in made.err) == said and ("never" in made.err) == said, made.err


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ({"kind": "jpg"}, {}, "all images seen of 'a' are JPEG, those of 'b' PNG"),
        ({"grey": True}, {}, "all images seen of 'a' are grey, those of 'b' in colour"),
        ({"size": 20}, {}, "all images seen of 'a' are of 20x20 pixels, those of 'b' of 16x16 pixels"),
        ({}, {}, ""),
    ],
    ids=["format", "colour", "size", "alike"],
)
def test_what_tells_classes_apart_beside_content_is_said(
    run_hpcdl: CommandLine, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], line: str
) -> None:
    for name, flags in {"a": first, "b": second}.items():
        image_folder(tmp_path / "s", {name: 6}, **flags)
    made = run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--image-size", "8", "--dry-run"])
    assert made.code == 0 and line in made.err and ("images seen" in made.err) == bool(line), made.err


def test_pictures_that_look_black_are_said(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    image_folder(tmp_path / "s", {"a": 6, "b": 6})
    for path in (tmp_path / "s" / "b").iterdir():
        Image.fromarray(np.asarray(Image.open(path)) // 128).save(path)
    made = run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--dry-run"])
    assert made.code == 0 and "images seen of 'b' hold 0 and 1 alone, and look black" in made.err


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_pictures_that_are_cut_short_are_refused_by_the_plan(run_hpcdl: CommandLine, tmp_path: Path, kind: str) -> None:
    path = image_folder(tmp_path / "s", {"a": 6, "b": 6}, kind=kind) / "b" / f"0003.{kind}"
    path.write_bytes(path.read_bytes()[:-100])
    made = run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--dry-run"])
    assert made.code == 2 and f"b/0003.{kind}: damaged image" in made.err and "--on-error skip" in made.err
    assert run_hpcdl(["shard", tmp_path / "s", tmp_path / "out", "--on-error", "skip"]).code == 0
    members = {f"{n}.{end}": path.read_bytes() if end == kind else b"1" for n in range(4) for end in (kind, "cls")}
    made = run_hpcdl(["shard", tar(tmp_path / "a.tar", members), tmp_path / "tar", "--dry-run"])
    assert made.code == 2 and "of a.tar: damaged image" in made.err


@pytest.mark.parametrize(
    ("shape", "units", "line"),
    [
        ((6,), lambda x: x + 273.15, "x: values at index 0 are -"),
        ((6,), lambda x: (x + 90) * 100, ""),
        ((6,), lambda x: x + 500, ""),
        ((40, 2), lambda x: x * 1000, "x: standard deviations of samples are "),
        ((8, 8, 3), lambda x: x * 255, "images: standard deviations of samples are "),
        ((8, 8, 3), lambda x: x * 2, ""),
    ],
)
def test_two_units_in_one_array_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, shape: tuple[int, ...], units: Callable[[Any], Any], line: str
) -> None:
    x = np.random.default_rng(3).normal(size=(120, *shape)).astype(np.float32) * 8 + 15
    x[50:90] = units(x[50:90])
    name = "images" if len(shape) == 3 else "x"
    np.savez(tmp_path / "a.npz", **{name: x, "labels" if len(shape) == 3 else "y": np.arange(120) % 3})
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", "--dry-run"])
    assert made.code == 0 and line in made.err and ("are there two units?" in made.err) == bool(line), made.err


def test_a_gap_by_chance_among_many_columns_is_no_unit(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    spectra = np.random.default_rng(39).random((90, 64))
    np.savez(tmp_path / "a.npz", spectra=spectra, y=np.linspace(0, 1.5, 90))
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", "--target", "y", "--dry-run"])
    assert made.code == 0 and "two units" not in made.err, made.err


@pytest.mark.parametrize(("sides", "said"), [((24, 32), True), ((32, 24), False), ((16, 12), False)])
def test_masks_whose_sides_are_swapped_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, sides: tuple[int, int], said: bool
) -> None:
    x, masks = np.random.default_rng(3).random((20, 32, 24, 3)), np.zeros((20, *sides), np.uint8)
    masks[:, ::2] = 1
    np.savez(tmp_path / "a.npz", images=x, masks=masks)
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", "--dry-run"])
    line = "masks: 24x32, and images 32x24: are height and width of one swapped?"
    assert made.code == 0 and (line in made.err) == said and ("swapped" in made.err) == said, made.err


def test_what_some_files_alone_have_is_said_so(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = (
                np.arange(80, dtype=np.int16).reshape(20, 4),
                np.random.default_rng(number).random(20),
            )
            if number:
                file["x"].attrs["scale_factor"] = 0.5
    made = run_hpcdl(["shard", tmp_path, tmp_path / "out", "--sample-is", "row", "--dry-run"])
    assert made.code == 0 and "scale_factor 0.5, in 2 of 3 parts" in made.err, made.err


@pytest.mark.parametrize("other", ["K", "degC"])
def test_units_of_two_files_that_differ_are_said(run_hpcdl: CommandLine, tmp_path: Path, other: str) -> None:
    for split, unit in {"train": "K", "test": other}.items():
        with h5py.File(tmp_path / f"{split}.h5", "w") as file:
            file["x"], file["y"] = np.random.default_rng(len(split)).random((20, 4)), np.linspace(0, 1.5, 20)
            file["x"].attrs["units"] = unit
    made = run_hpcdl(["shard", tmp_path, tmp_path / "out", "--dry-run"])
    line = "x: its units differ, 'degC', 'K' (in test.h5:x, train.h5:x): write them alike"
    assert made.code == 0 and (line in made.err) == (other != "K") and ("units" in made.err) == (other != "K"), made.err


@pytest.mark.parametrize(
    ("name", "first", "second", "said"),
    [
        ("lat", (50, 40), (40, 50), "lat: 50 to 40 in a.nc:lat and 40 to 50 in b.nc:lat"),
        ("lon", (0, 300), (-180, 120), "lon: 0 to 300 in a.nc:lon and -180 to 120"),
        ("wavelength", (400, 900), (350, 850), "wavelength: 400 to 900 in"),
        ("lat", (50, 40), (50, 40), ""),
        ("lat", (50, 40), (40, 30), ""),  # tiles
    ],
)
@pytest.mark.parametrize("kind", ["nc", "npz"])
def test_coordinates_of_two_files_that_differ_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, name: str, first: tuple[int, int], second: tuple[int, int], said: str,
    kind: str,
) -> None:  # fmt: skip
    for number, ends in enumerate([first, second]):
        arrays = {
            "t": np.random.default_rng(number).random((30, 6, 5)),
            "y": np.linspace(0, 1.5, 30),
            "time": np.arange(30) + 30 * number,  # of the samples: it differs in each file
            name: np.linspace(*ends, 6).astype(["f4", "f8"][number]),
            "bounds": np.zeros((6, 2)),
            "mean": np.array([1, 3, 2, 5, 4]) + number,
        }
        if kind == "npz":
            np.savez(tmp_path / f"{'ab'[number]}.npz", **arrays)
            continue
        with h5py.File(tmp_path / f"{'ab'[number]}.nc", "w") as file:
            for path, values in arrays.items():
                file[path] = values
    names = ["--input", "t", "--target", "y", "--sample-is", "row", "--dry-run"]
    made = run_hpcdl(["shard", tmp_path, tmp_path / "out", *names])
    assert (
        made.code == 0 and said.replace(".nc", f".{kind}") in made.err and ("on one grid" in made.err) == bool(said)
    ), made.err


@pytest.mark.parametrize(
    ("order", "name", "said"),
    [("bacdef", "features", True), ("abcdef", "features", False), ("bacdef", "class_names", False)],
)
@pytest.mark.parametrize("kind", ["h5", "npz"])
def test_names_of_columns_in_two_orders_are_said(
    tmp_path: Path, order: str, name: str, said: bool, kind: str
) -> None:  # fmt: skip
    random = np.random.default_rng(4)
    for file, words in (("a", "abcdef"), ("b", order)):
        listed = {name: np.array([*words], "S"), "place": np.array([f"{file}{n}" for n in range(30)], "S")}
        arrays = {"x": random.random((30, 6)), "y": random.random(30), **listed}
        if kind == "npz":
            np.savez(tmp_path / f"{file}.npz", **arrays)
        else:
            with h5py.File(tmp_path / f"{file}.h5", "w") as made:
                made.update(arrays)
    remarks = dry_run(request(tmp_path, tmp_path / "out")).facts.remarks
    line = f"features: 'a' at index 0 in a.{kind}:features, and 'b' in b.{kind}:features"
    assert any(line in own for own in remarks) == said, remarks
    assert said or not any("same column" in own for own in remarks), remarks


@pytest.mark.parametrize("other", ["packed", "plain", "floats"])
def test_files_that_lack_the_scale_of_others_are_said(tmp_path: Path, other: str) -> None:
    values = np.random.default_rng(5).normal(size=(30, 6))
    for file in "ab":
        floats = file == "b" and other == "floats"
        with h5py.File(tmp_path / f"{file}.h5", "w") as made:
            made["x"] = values.astype("f4") if floats else (values * 100).astype("i2")
            made["y"] = np.arange(30) % 3
            if file == "a" or other == "packed":
                made["x"].attrs["scale_factor"] = 0.01
    remarks = dry_run(request(tmp_path, tmp_path / "out")).facts.remarks
    line = "x: scaled by attributes in 1 of 2 parts, and int16 as stored in 1: do these lack scale_factor"
    assert any(line in own for own in remarks) == (other == "plain"), remarks


@pytest.mark.parametrize("shift", [1, 0])
@pytest.mark.parametrize("pictures", [True, False])
def test_labels_of_a_split_that_count_from_another_number_are_said(
    tmp_path: Path, pictures: bool, shift: int
) -> None:  # fmt: skip
    shape = (40, 8, 8, 3) if pictures else (40, 5)
    train, test = np.random.default_rng(6).integers(0, 256, (2, *shape)).astype(np.uint8 if pictures else np.float32)
    labels = np.arange(40) % 3
    np.savez(tmp_path / "a.npz", x_train=train, y_train=labels, x_test=test, y_test=labels + shift)
    remarks = dry_run(request(tmp_path / "a.npz", tmp_path / "out")).facts.remarks
    assert any("'3'; its labels are train's plus 1: does one" in own for own in remarks) == bool(shift), remarks


@pytest.mark.parametrize(("dtype", "shape"), [("uint8", (16, 12, 3)), ("float32", (12, 12))])
@pytest.mark.parametrize(("turns", "said"), [(0, True), (1, True), (None, False)])
def test_mirrored_and_turned_copies_in_two_splits_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, dtype: str, shape: tuple[int, ...], turns: int | None, said: bool
) -> None:
    own = np.random.default_rng(6).integers(0, 256, (60, *shape)).astype(dtype)
    copies = np.random.default_rng(7).integers(0, 256, (60, *shape)).astype(dtype)
    if turns is not None:
        copies = np.rot90(own[:, :, ::-1], 2 * turns, (1, 2))
    np.savez(tmp_path / "a.npz", x=np.concatenate([own, copies]), y=np.arange(120) % 2)
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", *SPLIT])
    line = "samples of val looked at are samples of train, mirrored or turned: results on val are too good"
    assert made.code == 0 and (line in made.err) == said, made.err
    shown = run_hpcdl(["inspect", tmp_path / "out", "--show", "--out", tmp_path / "page"])
    assert (line in shown.err) == said, shown.err


def test_pictures_that_mirroring_leaves_alone_are_no_copies(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    rings = np.hypot(*np.ogrid[-8:9, -8:9])[None] * np.arange(1, 101)[:, None, None]
    np.savez(tmp_path / "a.npz", x=rings.astype(np.float32), y=np.arange(100) % 2)
    made = run_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out", *SPLIT])
    assert made.code == 0 and "mirrored" not in made.err


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize(
    ("copied", "target", "line"),
    [
        (True, "class", "y: the input x holds one number for each class at index 2: a copy of the target?"),
        (True, "numbers", "y: the input x holds the same numbers at index 2: a copy of the target?"),
        (False, "class", ""),
        (False, "numbers", ""),
    ],
)
def test_targets_that_an_array_of_inputs_holds_are_said(
    run_hpcdl: CommandLine, tmp_path: Path, kind: str, copied: bool, target: str, line: str
) -> None:
    random = np.random.default_rng(8)
    x, y = (
        random.random((90, 4)).astype(np.float32),
        random.random(90) if target == "numbers" else np.arange(90) % 3 + 5,
    )
    if copied:
        x[:, 2] = y
    if kind == "npz":
        np.savez(tmp_path / "a.npz", x=x, y=y)
    else:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["x"], file["y"] = x, y
    made = run_hpcdl(["shard", tmp_path / f"a.{kind}", tmp_path / "out", "--dry-run"])
    assert made.code == 0 and line in made.err and ("copy of the target" in made.err) == bool(line), made.err


@pytest.mark.parametrize("scaled", [True, False])
def test_targets_that_an_array_holds_in_another_unit_are_said(scaled: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(8)
    x, y = random.normal(size=(90, 4)), random.normal(size=90)
    x[:, 2] = y * 1.8 + 32 + (0 if scaled else random.normal(size=90) / 9)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    remarks = dry_run(request(tmp_path / "a.npz", tmp_path / "out")).facts.remarks
    found = [line for line in remarks if "holds the same numbers, but for scale and offset, at index 2" in line]
    assert len(found) == scaled, remarks


@pytest.mark.parametrize(
    ("factors", "said"),
    [((1, 1, 100, 1), True), ((1, 0.01, 1), True), ((1, 1.5, 1), False), ((1, 10, 100, 1000), False)],
)
def test_a_file_whose_numbers_have_another_scale_is_said(
    factors: tuple[float, ...], said: bool, tmp_path: Path
) -> None:
    random = np.random.default_rng(8)
    for number, factor in enumerate(factors):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = random.random((50, 4)) * factor, random.normal(size=50)
    remarks = dry_run(request(tmp_path, tmp_path.parent / "out")).facts.remarks
    odd = next((number for number, factor in enumerate(factors) if factor in (100, 0.01)), 0) + 1
    assert any(f"x: in file {odd} of {len(factors)}, by name, " in line for line in remarks) == said, remarks


@pytest.mark.parametrize(("first", "said"), [((0, 0, 1), True), ((1, 0, 1, 1), True), ((0, 0, 0), False)])
def test_a_file_whose_labels_count_from_another_number_is_said(
    first: tuple[int, ...], said: bool, tmp_path: Path
) -> None:
    for number, start in enumerate(first):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = np.random.default_rng(number).random((50, 4)), np.arange(50) % 3 + start
    remarks = dry_run(request(tmp_path, tmp_path.parent / "out")).facts.remarks
    assert any("do some count from 0, and some from 1?" in line for line in remarks) == said, remarks


def test_files_of_a_list_that_is_sorted_by_class_do_not_count_otherwise(tmp_path: Path) -> None:
    for number, labels in enumerate(np.split(np.repeat(np.arange(6), 20), 4)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = np.random.default_rng(number).random((30, 4)), labels
    remarks = dry_run(request(tmp_path, tmp_path.parent / "out")).facts.remarks
    assert not any("count from 0" in line for line in remarks), remarks
