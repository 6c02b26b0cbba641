"""Sources with two possible readings: the user is asked to choose by a flag; an unambiguous source is read as it is.

Each test builds a published layout: those of public data sets, and of reports about them.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hpcdl.core.errors import HpcdlError, SourceError, UsageError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.sources.base.source import recognise
from hpcdl.data.sources.checks.numbers import spreads_apart
from hpcdl.data.sources.checks.pictures import inverted
from hpcdl.data.write.writing import dry_run
from tests.data.sharding import make, request
from tests.data.test_formats import example, framed, npy, png, tar, values

Save = Callable[[Path], Path]
PICTURE = png(np.full((6, 6, 3), 7, np.uint8))
RANDOM = np.random.default_rng(5)


def pictures(*folders: str, count: int = 2) -> Save:
    """A source with `count` pictures in each of these folders."""

    def save(root: Path) -> Path:
        for folder in folders:
            for number in range(count):
                path = root / "s" / folder / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(PICTURE)
        return root / "s"

    return save


def product(*levels: Iterable[str]) -> list[str]:
    paths = [""]
    for level in levels:
        paths = [f"{path}/{name}" if path else name for path in paths for name in level]
    return paths


def arrays(**files: dict[str, Any]) -> Save:
    """A folder of HDF5 files, or a single file if it is named `only`."""

    def save(root: Path) -> Path:
        (root / "s").mkdir()
        for name, content in files.items():
            with h5py.File(root / "s" / f"{name}.h5", "w") as file:
                for path, value in content.items():
                    file[path] = value
        return root / "s" / "only.h5" if list(files) == ["only"] else root / "s"

    return save


def members(*names: str) -> Save:
    """An archive of pictures, each with a class."""

    def save(root: Path) -> Path:
        made = {f"{name}.{ending}": own for name in names for ending, own in (("png", PICTURE), ("cls", b"1"))}
        return tar(root / "a.tar", made)

    return save


def archives(*names: str) -> Save:
    def save(root: Path) -> Path:
        (root / "s").mkdir()
        for name in names:
            tar(root / "s" / f"{name}.tar", {"0.png": PICTURE, "0.cls": b"0"})
        return root / "s"

    return save


def records(*names: str) -> Save:
    def save(root: Path) -> Path:
        (root / "s").mkdir()
        for name in names:
            (root / "s" / name).write_bytes(framed([example(image=PICTURE, label=0)]))
        return root / "s"

    return save


def table(text: str, name: str = "list.csv") -> Save:
    def save(root: Path) -> Path:
        for number in range(100):
            (root / f"{number}.png").write_bytes(PICTURE)
        (root / name).write_text(text)
        return root / name

    return save


def lines(labels: Iterable[object], head: str = "image,label\n", mark: str = ",") -> str:
    return head + "".join(f"{number}.png{mark}{label}\n" for number, label in enumerate(labels))


def both(*saves: Save) -> Save:
    def save(root: Path) -> Path:
        found = [one(root) for one in saves]
        return found[0]

    return save


def file(path: str, content: bytes = b"x") -> Save:
    def save(root: Path) -> Path:
        (root / "s" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "s" / path).write_bytes(content)
        return root / "s"

    return save


X, Y = np.zeros((8, 3), np.float32), np.arange(8) % 2
PIXELS = RANDOM.integers(0, 256, (64, 6, 6, 3), dtype=np.uint8)
PART = {"x": X, "y": Y}
AB = ("cats", "dogs")
SLICE = {"image": np.zeros((6, 6, 4), np.float32), "mask": np.zeros((6, 6, 1), np.uint8)}

ASKED: dict[str, tuple[Save, dict[str, Any], str]] = {
    "a test without classes": (
        both(pictures(*product(["train"], AB)), pictures("test")),
        {},
        "'test' is named after a split, and holds 2 files without class folders.*--leave-out test",
    ),
    "extra beside train and test": (
        pictures(*product(["train", "test", "extra"], AB)),
        {},
        "'extra' is not: a split or a class.*--leave-out extra, or --split-names keep .*--split-names ignore",
    ),
    "a class called train": (
        pictures("bus", "train", "plane"),
        {},
        "'train' beside 'bus', 'plane': a split or a class.*--split-names ignore",
    ),
    "only train and test": (pictures("train", "test"), {}, "'test', 'train': a split or a class"),
    "splits below classes": (
        pictures(*product(AB, ["train", "test"])),
        {},
        "cats/(train|test) is named after a split, and is in the class 'cats': give --split-names keep",
    ),
    "val and dev": (pictures(*product(["train", "val", "dev"], AB)), {}, "'dev' and 'val' both say val"),
    "a folder in a folder": (pictures(*product(["data"], AB)), {}, "holds one folder, 'data', .*'cats', 'dogs'"),
    "masks": (pictures("images", "masks"), {}, "images and their masks, or two classes.*--target masks=mask.*class"),
    "VOC": (pictures("JPEGImages", "SegmentationClass"), {}, "--input JPEGImages=image --target Seg.*Class=mask"),
    "masks within splits": (pictures(*product(["train", "val"], ["imgs", "labels"])), {}, "'imgs' and 'labels'"),
    "masks within classes": (
        pictures(*product(["COVID", "Normal"], ["images", "masks"])),
        {},
        "COVID: 'images' and 'masks': .*--leave-out masks",
    ),
    "files of one split and others": (
        arrays(train=PART, test=PART, more=PART),
        {},
        "'test.h5', 'train.h5' are named after a split, 'more.h5' not: which split .*--leave-out more.h5",
    ),
    "archives of one split and others": (archives("train-0", "train-1", "shard"), {}, "'shard.tar' not: which split"),
    "records of one split and others": (
        records("a-test.tfrecord", "b.tfrecord"),
        {},
        "'a-test.tfrecord' are named after a split, 'b.tfrecord' not",
    ),
    "members of one split and others": (
        members("train/0", "test/1", "2"),
        {},
        "'train/0' is in a folder that is named after a split, '2' is not",
    ),
    "arrays of one split and others": (
        arrays(only={"x": X, "y": Y, "train_mask": Y > 0, "test_mask": Y < 1}),
        {},
        "'test_mask', 'train_mask' are called by splits, 'x', 'y' are not: give --input",
    ),
    "a file a slice": (arrays(a=SLICE, b=SLICE, c=SLICE), {}, "3 files one sample, .*--sample-is file or .*row"),
    "energies": (
        arrays(only={"images": PIXELS, "label": RANDOM.integers(0, 5000, 64)}),
        {},
        "label holds 6[0-4] different whole numbers in 64 samples: classes or quantities",
    ),
    "an array of another name": (
        arrays(only={"images": PIXELS, "energy": RANDOM.integers(0, 50, 64)}),
        {},
        "which array is the target.*'energy'",
    ),
    "event numbers": (
        arrays(only={"images": PIXELS, "event_id": np.arange(64) // 4}),
        {"label_field": "event_id"},
        "event_id is named like a number of samples.*--target-kind",
    ),
    "ages in whole years": (table(lines(RANDOM.permutation(100))), {}, "100 different values in 100 lines.*regression"),
    "ages as 1.0 and 2.0": (table(lines(["1.0", "2.0"] * 3)), {}, "classes or quantities.*--target-kind"),
    "patients": (table(lines([0, 1] * 4, "image,patient_id\n")), {}, "'patient_id' holds .*are these classes"),
    "two columns left": (
        table("image,age,sex\n0.png,3,m\n1.png,4,f\n"),
        {},
        "which column is the label.*--label-field, one of 'age', 'sex'",
    ),
    "a point of each picture": (
        table("image,x,y\n0.png,0.5,0.25\n1.png,0.75,0.5\n"),
        {},
        "x and y may be one point, or x a number beside the label; give --label-field y",
    ),
    "two columns of files": (
        table("image,mask\n0.png,1.png\n2.png,3.png\n"),
        {},
        "'image', 'mask' name files: which are the images",
    ),
    "row numbers among features": (
        table("id,a,label\n101,0.5,0\n102,0.75,1\n", "t.csv"),
        {},
        "is the column 'id' a feature.*--leave-out id",
    ),
    "scores": (table(lines([1, 2, 3, 4, 5] * 4, "image,score\n")), {}, "'score' holds 5 .* from 1 to 5: "),
    "labels joined in two ways": (
        table(lines(["ice cream", "ice_cream", "tea"] * 4)),
        {},
        "the classes 'ice cream' and 'ice_cream' differ in spaces, _ or - alone: one class or two",
    ),
    "row numbers of two tables that were merged": (
        table("a,id_y,label\n0.5,107,0\n0.75,103,1\n", "t.csv"),
        {},
        "is the column 'id_y' a feature.*--leave-out id_y",
    ),
    "wine quality": (
        table("acid,quality\n" + "".join(f"{n}.5,{n % 4 + 3}\n" for n in range(40)), "t.csv"),
        {"target": "quality=quality"},
        "quality holds 4 different whole numbers from 3 to 6: classes or quantities",
    ),
    "numbers of cells": (
        arrays(only={"images": PIXELS, "num_cells": np.arange(64) % 5}),
        {"label_field": "num_cells"},
        "num_cells is named like a quantity.*--target-kind class or --target-kind regression",
    ),
    "numbers of series among features": (
        table("series,step,a,label\n" + "".join(f"{n // 5},{n % 5},0.5,{n // 5 % 2}\n" for n in range(20)), "t.csv"),
        {},
        "is the column 'series' a feature, or does it say which rows belong together.*--leave-out series",
    ),
    "time stamps among features": (
        table("time,a,label\n1700000001,0.5,0\n1700000002,0.75,1\n", "t.csv"),
        {},
        "'time' holds whole numbers up to 1700000002, which float32 rounds: give --leave-out time",
    ),
    "texts without a class": (
        both(*(file(f"train/{name}/1.txt", b"a") for name in ("neg", "pos", "unsup"))),
        {"format": "text"},
        "unsup: texts without a class, or a class called so",
    ),
    "a model beside class folders": (both(pictures(*AB), file("m.h5")), {}, "--format hdf5, or --format image-folder"),
    "four bands": (file("a/1.png", png(np.zeros((4, 4, 4), np.uint8))), {}, "4 bands.*--channels 3 .*--channels 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_two_readings_are_a_question(name: str, tmp_path: Path) -> None:
    save, options, message = ASKED[name]
    source = save(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        make(source, tmp_path / "out", **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def columns(**values: Any) -> Save:
    def save(root: Path) -> Path:
        pq.write_table(pa.table(values), root / "t.parquet")
        return root / "t.parquet"

    return save


def labelled(*labels: str) -> Save:
    """An archive of pictures whose .cls files hold these labels."""

    def save(root: Path) -> Path:
        made = {f"{n}.{end}": own for n, label in enumerate(labels) for end, own in (("png", PICTURE), ("cls", label))}
        return tar(
            root / "a.tar", {name: own if isinstance(own, bytes) else own.encode() for name, own in made.items()}
        )

    return save


def partitioned(root: Path) -> Path:
    pq.write_to_dataset(pa.table({"a": Y, "y": Y, "k": Y, "j": Y}), root / "s", partition_cols=["k", "j"])
    return root / "s"


A_WORD = "'unknown' among numbers .*--target-kind class"
ONE_WORD = "a,y\n" + "".join(f"{n}.5,{n % 5}\n" for n in range(50))
TWO_WAYS = "'007' and '7' are one number, written in two ways.*--target-kind class"
NO_LABEL = "'' is among the classes: one of them, or a label that is missing"
LEVELS = "'cats', 'dogs' hold no pictures but the folders 'a', 'b': which are the classes.*--target-kind class"
CAPTIONS = [f"{who} {what} on the {where}." for who, what, where in zip("abcde", "vwxyz", "klmno", strict=True)]
CAPTION = "5 different texts, such as .* captions or answers, or classes.*--target-kind class"
PATHS = "holds names of files, such as 'a/0.png', and no content of theirs"
SILENT: dict[str, tuple[Save, dict[str, Any], str]] = {
    "paths of pictures in a column": (columns(image=[f"a/{n}.png" for n in range(8)], y=[0, 1] * 4), {}, PATHS),
    "paths of pictures in an array": (arrays(a={"x": [f"a/{n}.png" for n in range(8)], "y": Y}), {}, PATHS),
    "captions in a list of pictures": (table(lines(CAPTIONS)), {}, CAPTION),
    "captions in a column": (columns(a=list("abcde"), y=CAPTIONS), {"input": "a", "target": "y"}, CAPTION),
    "a label of nothing in a column": (columns(a=Y, y=["u", ""] * 4), {"target": "y"}, NO_LABEL),
    "a label of nothing in an archive": (labelled("u", "", "v"), {}, NO_LABEL),
    "a word far down a target": (table(f"{ONE_WORD}0.5,unknown\n", "t.csv"), {}, f"y holds {A_WORD}"),
    "a word among quantities": (
        table(f"{ONE_WORD}0.5,unknown\n", "t.csv"),
        {"target_kind": "regression"},
        "y holds 'unknown' among numbers; correct it",
    ),
    "a word in the only input": (table(f"{ONE_WORD}none of it,1\n", "t.csv"), {}, "'a' holds numbers, and among them"),
    "a word in a list of pictures": (table(lines([0.5, 1.5, 2.5, "unknown"])), {}, f"'label' holds {A_WORD}"),
    "a word in a column of text": (columns(a=Y, y=["0", "1", "2", "unknown"] * 2), {"target": "y"}, A_WORD),
    "a word beside two numbers": (columns(a=Y, y=["0", "1", "unknown", "0"] * 2), {"target": "y"}, A_WORD),
    "a word beside two numbers in a list": (table(lines(["0", "1", "unknown"])), {}, f"'label' holds {A_WORD}"),
    "a word among folders of numbers": (pictures("0", "1", "2", "unknown"), {}, A_WORD),
    "codes in an archive": (labelled("007", "7", "8"), {}, TWO_WAYS),
    "codes in an archive, as a field": (labelled("007", "7"), {"input": "png=x", "target": "cls=y"}, TWO_WAYS),
    "codes as names of folders": (pictures("007", "7"), {}, TWO_WAYS),
    "codes in a column": (columns(a=Y, y=["7", "007"] * 4), {"target": "y"}, TWO_WAYS),
    "folders in every class": (pictures(*product(AB, ["a", "b"])), {}, LEVELS),
    "two formats": (both(arrays(a=PART), file("x.npy", npy(X))), {}, "--format numpy or --format hdf5"),
    "a partitioned table": (partitioned, {}, "partitioned.*'k=0/j=0'.*pandas.read_parquet"),
    "a group a sample": (arrays(only={f"s{n}/{k}": n for n in range(4) for k in "ab"}), {}, "one for each.*--reader"),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_was_once_taken_unasked_is_a_question(name: str, tmp_path: Path) -> None:
    save, options, message = SILENT[name]
    with pytest.raises(UsageError, match=message):
        make(save(tmp_path), tmp_path / "out", **options)


def test_codes_keep_their_zeros_in_the_names_of_classes(tmp_path: Path) -> None:
    for target, options in (("a", {}), ("b", {"input": "png=x", "target": "cls=y"})):
        source = tmp_path / f"{target}.source"
        source.mkdir()
        manifest = make(labelled("005", "007")(source), tmp_path / target, **options)
        assert manifest.class_names == ("005", "007")


def test_files_in_folders_that_are_not_read_are_reported(tmp_path: Path) -> None:
    source = both(arrays(a=PART), file("more/b.h5"))(tmp_path)
    assert "not read: the folders 'more', which hold such files too" in make(source, tmp_path / "out").understood


Result = tuple[set[str], dict[str, int]]
"""Names of classes, and number of samples by split."""
CATS = set(AB)
UNDERSTOOD: dict[str, tuple[Save, dict[str, Any], Result]] = {
    "Training, Testing": (pictures(*product(["Training", "Testing"], AB)), {}, (CATS, {"train": 4, "test": 4})),
    "TRN, TST, DEV": (pictures(*product(["TRN", "TST", "DEV"], AB)), {}, (CATS, {"train": 4, "test": 4, "val": 4})),
    "train2017, val2017": (pictures(*product(["train2017", "val2017"], AB)), {}, (CATS, {"train": 4, "val": 4})),
    "seg_train, seg_test": (pictures(*product(["seg_train", "seg_test"], AB)), {}, (CATS, {"train": 4, "test": 4})),
    "__MACOSX and hidden folders": (
        both(pictures(*product(["train", "val"], AB)), file("__MACOSX/train/._1.png"), file(".git/config")),
        {},
        (CATS, {"train": 4, "val": 4}),
    ),
    "words within names of classes": (
        pictures("test_tubes", "train_station"),
        {},
        ({"test_tubes", "train_station"}, {"all": 4}),
    ),
    "extra left out": (
        pictures(*product(["train", "test", "extra"], AB)),
        {"leave_out": "extra"},
        (CATS, {"train": 4, "test": 4}),
    ),
    "extra as a split": (
        pictures(*product(["train", "test", "extra"], AB)),
        {"split_names": "keep"},
        (CATS, {"train": 4, "test": 4, "extra": 4}),
    ),
    "a test without classes left out": (
        both(pictures(*product(["train"], AB)), pictures("test")),
        {"leave_out": "test"},
        (CATS, {"train": 4}),
    ),
    "a class called train": (
        pictures("bus", "train"),
        {"split_names": "ignore"},
        ({"bus", "train"}, {"all": 4}),
    ),
    "splits below classes": (
        pictures(*product(AB, ["train", "test"])),
        {"split_names": "keep"},
        (CATS, {"train": 4, "test": 4}),
    ),
    "masks are a class": (
        pictures("images", "masks"),
        {"target_kind": "class"},
        ({"images", "masks"}, {"all": 4}),
    ),
    "archives": (archives("imagenet-train-0", "imagenet-val-0"), {}, ({"0"}, {"train": 1, "val": 1})),
    "members": (members("train/0", "train/1", "test/0"), {}, ({"1"}, {"train": 2, "test": 1})),
    "records": (records("d-train.tfrecord", "d-testing.tfrecord"), {}, ({"0"}, {"train": 1, "test": 1})),
    "HDF5 files": (arrays(jets_trn=PART, jets_tst=PART), {}, ({"0", "1"}, {"train": 8, "test": 8})),
    "labels -1 and 1": (table(lines([-1, 1] * 3)), {}, ({"-1", "1"}, {"all": 6})),
    "semicolons": (table(lines(["a", "b"] * 3, "image;class\n", ";"), "l.csv"), {}, ({"a", "b"}, {"all": 6})),
    "tabs": (table(lines(["a", "b"] * 3, "path\tcategory\n", "\t"), "l.tsv"), {}, ({"a", "b"}, {"all": 6})),
    "a list with more columns": (
        table("label,image,split,age\na,0.png,training,3\nb,1.png,holdout,4\n"),
        {},
        ({"a", "b"}, {"train": 1, "val": 1}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_one_reading_is_taken(name: str, tmp_path: Path) -> None:
    save, options, (classes, splits) = UNDERSTOOD[name]
    manifest = make(save(tmp_path), tmp_path / "out", **options)
    assert set(manifest.class_names) == classes
    assert {split: entry.num_samples for split, entry in manifest.splits.items()} == splits


def test_what_is_left_out_is_shown_and_kept(tmp_path: Path) -> None:
    source = both(pictures(*AB), file("__MACOSX/1"), file("list.csv"), file("cats/Thumbs.db"))(tmp_path)
    reported = dry_run(request(source, tmp_path / "out")).facts.remarks
    assert list(reported) == ["left out: the folders '__MACOSX'", "left out: 2 files, such as 'list.csv', 'Thumbs.db'"]
    assert list(make(source, tmp_path / "out").understood) == list(reported)


def test_images_and_masks_are_pairs(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("val", 10)):
        for number in range(first, first + 5):
            for folder, ending, value in (("images", "jpg.png", number), ("masks", "jpg_mask.png", 100 + number)):
                path = tmp_path / "s" / split / folder / f"{number}.{ending}"
                path.parent.mkdir(parents=True, exist_ok=True)
                shape = (6, 6, 3) if folder == "images" else (6, 6)
                path.write_bytes(png(np.full(shape, value, np.uint8)))
    manifest = make(tmp_path / "s", tmp_path / "out", input="images=image", target="masks=mask")
    assert [(item.name, tuple(item.shape)) for item in manifest.fields] == [("image", (6, 6, 3)), ("mask", (6, 6))]
    for split, first in (("train", 0), ("val", 10)):
        found = [values(tmp_path / "out", manifest, name, split) for name in ("image", "mask")]
        pairs = {(int(np.max(image)), int(np.max(mask))) for image, mask in zip(*found, strict=True)}
        assert pairs == {(number, 100 + number) for number in range(first, first + 5)}
    (tmp_path / "s" / "val" / "masks" / "10.jpg_mask.png").unlink()
    with pytest.raises(UsageError, match=r"1 files of .* have no partner of the same name, such as .*10\.jpg\.png"):
        make(tmp_path / "s", tmp_path / "lost", input="images=image", target="masks=mask")


@pytest.mark.parametrize(("white", "line"), [(255, "mask: 2 numbers seen (0, 255): as classes they need"), (1, "")])
def test_masks_in_files_that_are_black_and_white_are_shown(white: int, line: str, tmp_path: Path) -> None:
    for number in range(4):
        for folder, pixels in (("images", np.full((6, 6, 3), number)), ("masks", np.eye(6) * white)):
            path = tmp_path / "s" / folder / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(pixels.astype(np.uint8)))
    reported = " ".join(make(tmp_path / "s", tmp_path / "out", input="images=image", target="masks=mask").understood)
    assert line in reported if line else "different numbers" not in reported


@pytest.mark.parametrize(("second", "said"), [((1, 0, 2), True), ((0, 1, 2), False), ((0, 1), False)])
def test_masks_with_other_palettes_are_said(second: tuple[int, ...], said: bool, tmp_path: Path) -> None:
    """A palette may be longer in one mask than in another; each colour has one number all the same."""
    for number, order in enumerate(((0, 1, 2), second)):
        mask = Image.fromarray((np.arange(36).reshape(6, 6) % len(order)).astype(np.uint8))
        mask.putpalette(COLOURS[list(order)].tobytes())
        for folder, picture in (("images", Image.fromarray(np.full((6, 6, 3), number, np.uint8))), ("masks", mask)):
            (tmp_path / "s" / folder).mkdir(parents=True, exist_ok=True)
            picture.save(tmp_path / "s" / folder / f"{number}.png")
    flags = {"input": ("images=image",), "target": ("masks=mask",)}
    remarks = dry_run(request(tmp_path / "s", tmp_path / "out", **flags)).facts.remarks
    assert any(line.startswith("mask: 0 has the palette's colour (0, 0, 0) in 0.png") for line in remarks) == said


@pytest.mark.parametrize("kind", ["csv", "hdf5"])
def test_quantities_of_images_stay_quantities(kind: str, tmp_path: Path) -> None:
    wanted = {number: number * 0.25 + 0.125 for number in range(12)}
    pixels = np.stack([np.full((4, 4, 3), number, np.uint8) for number in wanted])
    if kind == "csv":
        for number, own in enumerate(pixels):
            Image.fromarray(own).save(tmp_path / f"{number}.png")
        (tmp_path / "l.csv").write_text(lines(wanted.values(), "file,redshift\n"))
        manifest = make(tmp_path / "l.csv", tmp_path / "out")
    else:
        with h5py.File(tmp_path / "a.h5", "w") as made:
            made["images"], made["redshift"] = pixels, np.array(list(wanted.values()), np.float32)
        options = {"label_field": "redshift", "target_kind": "regression"}
        manifest = make(tmp_path / "a.h5", tmp_path / "out", **options)
    target = manifest.fields[1]
    assert (target.name, target.dtype, target.kind) == ("redshift", "float32", "numbers")
    images, found = (values(tmp_path / "out", manifest, item.name) for item in manifest.fields)
    assert {int(np.max(image)): value for image, value in zip(images, found, strict=True)} == wanted


def test_a_file_a_sample_with_a_label_is_understood(tmp_path: Path) -> None:
    made = {f"v{n}": {"volume": np.full((3, 4, 4), n, np.float32), "label": n % 2} for n in range(6)}
    manifest = make(arrays(**made)(tmp_path), tmp_path / "out", input="volume=volume", target="label=label")
    volumes, labels = (values(tmp_path / "out", manifest, name) for name in ("volume", "label"))
    assert {int(np.max(own)): label for own, label in zip(volumes, labels, strict=True)} == {
        n: str(n % 2) for n in range(6)
    }
    assert "each of the 6 files is one sample" in manifest.understood


def test_flags_that_a_source_does_not_know_are_refused_by_name(tmp_path: Path) -> None:
    source = pictures(*AB)(tmp_path)
    options = {"label_field": "a", "image_field": "a", "axes": "nchw", "sample_is": "file"}
    for flag, value in options.items():
        with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} is not for --format image-folder"):
            make(source, tmp_path / "out", **{flag: value})
    with pytest.raises(UsageError, match="--target-kind regression needs targets that are numbers"):
        make(source, tmp_path / "out", target_kind="regression")
    with pytest.raises(UsageError, match="has no folder nonsense"):
        make(source, tmp_path / "out", input="nonsense=x", target="foo=y")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_error_while_listing_is_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = pictures(*product(["train", "val"], AB), count=3)(tmp_path)
    real = os.scandir

    def broken(path: Any) -> Any:
        if str(path).endswith("train/dogs"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(UsageError, match=rf"cannot read .*train/dogs: {os.strerror(number)}"):
        make(source, tmp_path / "out", format="image-folder")


def test_linked_folders_are_followed_and_circles_refused(tmp_path: Path) -> None:
    source = pictures(*AB)(tmp_path)
    pictures("more")(tmp_path / "elsewhere")
    (source / "cats" / "linked").symlink_to(tmp_path / "elsewhere" / "s" / "more")
    assert make(source, tmp_path / "out").splits["all"].num_samples == 6
    for target in (source / "cats", source):
        (source / "cats" / "round").symlink_to(target)
        with pytest.raises(UsageError, match=r"cats/round is a link to a folder above it.*--leave-out round"):
            make(source, tmp_path / "round")
        (source / "cats" / "round").unlink()


def test_a_target_inside_the_source_is_no_class_of_it(tmp_path: Path) -> None:
    source = pictures(*AB)(tmp_path)
    with pytest.raises(UsageError, match="s/shards, the folder to write to, is inside the source"):
        make(source, source / "shards")
    assert sorted(path.name for path in source.iterdir()) == sorted(AB)
    assert make(source, source / "shards", leave_out="shards").class_names == tuple(sorted(AB))


def test_linked_folders_of_images_and_masks_are_followed(tmp_path: Path) -> None:
    """Linked folders of images and masks are followed; none is omitted silently."""
    source, options = tmp_path / "s", {"input": "images=image", "target": "masks=mask"}
    for folder in ("images", "masks"):
        for path in (source / folder / "0.png", tmp_path / "more" / folder / "1.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(np.zeros((6, 6, 3) if folder == "images" else (6, 6), np.uint8)))
        (source / folder / "more").symlink_to(tmp_path / "more" / folder)
    assert make(source, tmp_path / "out", **options).splits["all"].num_samples == 2
    for folder in ("images", "masks"):
        (source / folder / "round").symlink_to(source / folder)
    with pytest.raises(UsageError, match="images/round is a link to a folder above it"):
        make(source, tmp_path / "round", **options)


DEEP = {
    "float": np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8),
    "12 bits": (np.arange(48, dtype=np.uint16) * 85).reshape(6, 8),
    "32 bits": (np.arange(48, dtype=np.int32) * 70 - 100).reshape(6, 8),
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_images_keep_their_values(kind: str, tmp_path: Path) -> None:
    for name, dim in (("bright", 1), ("dim", 50)):
        (tmp_path / "s" / name).mkdir(parents=True)
        Image.fromarray(DEEP[kind] // dim if kind != "float" else DEEP[kind] / dim).save(
            tmp_path / "s" / name / "1.tif"
        )
    manifest = make(tmp_path / "s", tmp_path / "out")
    with h5py.File(tmp_path / "out" / manifest.shards()[0].file) as shard:
        found = {int(label): image for image, label in zip(shard["images"][:], shard["labels"][:], strict=True)}
    assert manifest.dtype == "float32" and "more than 8 bits" in manifest.understood[0]
    assert np.array_equal(found[0][:, :, 0], DEEP[kind].astype(np.float32))
    dim = DEEP[kind] // 50 if kind != "float" else DEEP[kind] / 50
    assert np.array_equal(found[1][:, :, 0], dim.astype(np.float32))


@pytest.mark.parametrize("kind", ["class", "regression"])
def test_files_that_a_list_names_and_nobody_has_can_be_left_out(kind: str, tmp_path: Path) -> None:
    for number in (1, 3):
        Image.fromarray(np.full((6, 8), number, np.uint8)).save(tmp_path / f"{number}.png")
    table = tmp_path / "l.csv"
    table.write_text("file,label\n" + "".join(f"{number}.png,{number % 2}\n" for number in range(5)))
    with pytest.raises(UsageError, match=r"cannot read '0.png': No such file or directory; .*--on-error skip"):
        make(table, tmp_path / "out", target_kind=kind)
    manifest = make(table, tmp_path / "out", target_kind=kind, on_error="skip")
    assert list(manifest.skipped) == ["0.png", "2.png", "4.png"] and manifest.splits["all"].num_samples == 2
    with h5py.File(tmp_path / "out" / manifest.shards()[0].file) as shard:
        images = shard["images" if kind == "class" else "image"][:]
        assert sorted(np.unique(images)) == [1, 3]
    table.write_text("file,label\nx.png,0\ny.png,1\n")
    with pytest.raises(UsageError, match=r"no file of it is there, such as 'x.png'"):
        make(table, tmp_path / "none", target_kind=kind, on_error="skip")


def test_classes_with_a_missing_value_are_classes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n0.5,0\n1.5,\n2.5,1\n3.5,1\n")
    manifest = make(tmp_path / "t.csv", tmp_path / "out", target="y=y", nan="skip")
    assert list(manifest.fields[1].class_names) == ["0", "1"] and manifest.splits["all"].num_samples == 3
    (tmp_path / "f.csv").write_text("a,y\n0.5,0.0\n1.5,\n2.5,1\n3.5,1\n")
    with pytest.raises(UsageError, match="classes or quantities"):
        make(tmp_path / "f.csv", tmp_path / "other", target="y=y", nan="skip")


def test_one_class_alone_is_shown(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n0.5,1\n1.5,1\n")
    assert "all samples are of one class: there is nothing to learn" in (
        make(tmp_path / "t.csv", tmp_path / "out", target="y=y").understood
    )


@pytest.mark.parametrize(
    ("shape", "axes", "made"),
    [((9, 9, 15), "nhwc", [9, 9, 15]), ((16, 9, 8), "nchw", [9, 8, 16]), ((4, 8, 8), "", [8, 8, 4]),
     ((1, 8, 9), "", [8, 9, 1]), ((9, 8, 3), "", [9, 8, 3]), ((3, 9, 9), "", [9, 9, 3])],
)  # fmt: skip
def test_channels_that_may_be_first_or_last_are_asked_about(
    shape: tuple[int, ...], axes: str, made: list[int], tmp_path: Path
) -> None:
    images = RANDOM.integers(0, 256, (4, *shape), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([0, 1, 0, 1]))
    if axes:
        with pytest.raises(UsageError, match=r"cannot tell the channels among .*; give --axes nhwc or nchw"):
            make(tmp_path / "a.npz", tmp_path / "asked")
    manifest = make(tmp_path / "a.npz", tmp_path / "out", **({"axes": axes} if axes else {}))
    assert list(manifest.sample_shape) == made


def archive_of_tables() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.csv", "a,y\n1,2\n")
    return content.getvalue()


def test_an_archive_of_tables_and_a_picture_is_one_of_tables(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("data/a.csv", "data/b.csv"):
            archive.writestr(name, "a,y\n1,2\n")
        archive.writestr("data/cover.png", png(RANDOM.integers(0, 256, (8, 8, 3), dtype=np.uint8)))
    with pytest.raises(SourceError, match=r"2 tables, such as 'data/a.csv', and 1 picture: .* unpack it"):
        make(tmp_path / "a.zip", tmp_path / "out")
    manifest = make(tmp_path / "a.zip", tmp_path / "out", leave_out="*.csv")
    assert list(manifest.class_names) == ["data"]


def test_a_split_whose_one_folder_is_no_class_is_asked_about(tmp_path: Path) -> None:
    """Tiny ImageNet has train/CLASS/images, val/images and test/images."""
    for number, folder in enumerate(["train/n01/images", "train/n02/images", "val/images", "test/images"]):
        (tmp_path / "s" / folder).mkdir(parents=True)
        (tmp_path / "s" / folder / "0.png").write_bytes(png(np.full((8, 8, 3), number, np.uint8)))
    with pytest.raises(SourceError, match=r"'test' holds the folder 'images' alone.*--leave-out test,val "):
        make(tmp_path / "s", tmp_path / "asked")
    assert list(make(tmp_path / "s", tmp_path / "left", leave_out="test,val").class_names) == ["n01", "n02"]
    manifest = make(tmp_path / "s", tmp_path / "kept", target_kind="class")
    assert list(manifest.class_names) == ["images", "n01", "n02"]


def test_class_folders_of_arrays_of_unequal_length_get_a_remedy_that_fits(tmp_path: Path) -> None:
    for number, folder in enumerate(["no", "yes"]):
        (tmp_path / "s" / folder).mkdir(parents=True)
        np.save(tmp_path / "s" / folder / "0.npy", np.zeros(100 + number))
    with pytest.raises(SourceError, match=r"is a numpy array.*samples of unequal length \(--reader FILE.py:NAME\)"):
        make(tmp_path / "s", tmp_path / "out")


def sparse_matrix() -> bytes:
    """A file as scipy.sparse.save_npz writes it."""
    content = io.BytesIO()
    parts = {"indices": np.zeros(2, np.int32), "indptr": np.array([0, 1, 2]), "shape": np.array([2, 2])}
    np.savez_compressed(content, format=b"csr", data=np.ones(2), **parts)
    return content.getvalue()


UNREAD = {
    "a.mat": (b"MATLAB 5.0 MAT-file", "version 5: save it with -v7.3"),
    "a.nc": (b"CDF\x01" + bytes(60), "it is netCDF-3: save it as netCDF-4"),
    "a.csv.gz": (gzip.compress(b"a,y\n1,0\n"), "it is packed with gzip: unpack it"),
    "a.jsonl": (b'{"x": 1}\n', r"convert it with pandas: pandas.read_json\(OLD, lines=True\).to_parquet\(NEW\)"),
    "a.xlsx": (b"PK\x03\x04", "it is a spreadsheet: save its sheet as CSV"),
    "a.pt": (b"PK\x03\x04", "it may be a pickle, which can run any code when it is read"),
    "a.zip": (archive_of_tables(), "it is an archive without images: unpack it"),
    "a.npy": (b"\x80\x04\x95", "it may be a pickle: save plain arrays"),
    "a.npz": (sparse_matrix(), r"is a sparse matrix of SciPy: save its rows \(.toarray\(\)\)"),
    "a.avro": (b"Obj\x01", "for any other format write a reader: --reader FILE.py:NAME"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_formats_that_no_source_reads_get_their_remedy(name: str, tmp_path: Path) -> None:
    content, message = UNREAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        make(tmp_path / name, tmp_path / "out")


def test_the_place_of_pixels_in_a_file_is_not_their_depth(tmp_path: Path) -> None:
    """Pillow keeps the offset of a TIFF's directory beside its pixels' type; one with a 16 in it was refused."""
    pixels = RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (tmp_path / "s" / "a").mkdir(parents=True)
    path = tmp_path / "s" / "a" / "1.tif"
    Image.fromarray(pixels).save(path, compression="tiff_lzw")
    with Image.open(path) as image:
        assert "16" in str(image.tile[0][3])
    manifest = make(tmp_path / "s", tmp_path / "out")
    with h5py.File(tmp_path / "out" / manifest.shards()[0].file) as shard:
        assert np.array_equal(shard["images"][0], pixels)


def test_values_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    pages = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (1, 2, 3)]
    cases: dict[str, tuple[Callable[[Path], object], str]] = {
        "pages": (lambda path: pages[0].save(path, save_all=True, append_images=pages[1:]), "has 3 pages"),
        "large": (lambda path: Image.fromarray(np.full((4, 4), 1 << 25, np.int32)).save(path), "over 2\\^24"),
    }
    for name, (save, message) in cases.items():
        (tmp_path / name / "a").mkdir(parents=True)
        save(tmp_path / name / "a" / "1.tif")
        with pytest.raises(HpcdlError, match=message):
            make(tmp_path / name, tmp_path / f"{name}-out")
    (tmp_path / "two" / "a").mkdir(parents=True)
    pages[0].save(tmp_path / "two" / "a" / "1.tif")
    Image.fromarray(DEEP["12 bits"][:4, :4]).save(tmp_path / "two" / "a" / "2.tif")
    with pytest.raises(UsageError, match=r"2\.tif has more than 8 bits a pixel, .*1\.tif has 8"):
        make(tmp_path / "two", tmp_path / "two-out")


@pytest.mark.parametrize("encoding", ["encoded", "raw"])
def test_a_damaged_png_is_not_packed(encoding: str, tmp_path: Path) -> None:
    good = png(RANDOM.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    bad = bytearray(good)
    bad[len(bad) // 2 : len(bad) // 2 + 50] = bytes(50)
    source = both(file("a/1.png", good), file("a/2.png", bytes(bad)))(tmp_path)
    with pytest.raises(HpcdlError, match=r"a/2\.png: damaged image: the checksum of its part IDAT is wrong"):
        make(source, tmp_path / "out", encoding=encoding)


REASONS: dict[str, tuple[Save, str]] = {
    "WAV": (both(pictures("b"), file("a/1.wav", b"RIFF\0\0\0\0WAVE")), r"1\.wav is a WAV or AVI file.*--reader"),
    "NIfTI": (both(pictures("b"), file("a/1.nii.gz", b"\x1f\x8b")), "is a NIfTI file.*--reader"),
    "DICOM": (both(pictures("b"), file("a/1", bytes(128) + b"DICM")), "is a DICOM file.*--reader"),
    "FITS": (both(pictures("b"), file("a/1.fits", b"SIMPLE  =  T")), "is a FITS file"),
    "arrays in folders": (both(pictures("b"), file("a/1.npy", npy(X))), "is a numpy array, .*--format numpy"),
    "YOLO": (both(pictures("b"), file("a/1.txt", b"0 1 1 1 1")), "not an image but text: .*YOLO.*--leave-out"),
    "zarr": (both(pictures("b"), file("a/.zarray", b"{}")), "a is zarr"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_what_the_file_is(name: str, tmp_path: Path) -> None:
    save, message = REASONS[name]
    with pytest.raises(UsageError, match=message) as caught:
        make(save(tmp_path), tmp_path / "out", format="image-folder")
    assert "--on-error skip" not in str(caught.value)  # --on-error skip would train on the remaining samples


def test_parquet_of_images_and_masks(tmp_path: Path) -> None:
    images = [{"bytes": png(np.full((4, 4, 3), n, np.uint8)), "path": None} for n in range(6)]
    masks = [{"bytes": png(np.full((4, 4), 10 + n, np.uint8)), "path": None} for n in range(6)]
    pq.write_table(pa.table({"image": images, "mask": masks}), tmp_path / "a.parquet")
    manifest = make(tmp_path / "a.parquet", tmp_path / "out", input="image=image", target="mask=mask")
    found, wanted = (values(tmp_path / "out", manifest, name) for name in ("image", "mask"))
    assert {(int(np.max(a)), int(np.max(b))) for a, b in zip(found, wanted, strict=True)} == {
        (n, 10 + n) for n in range(6)
    }


@pytest.mark.parametrize(
    "dtype, line", [("u1", "bytes, fed as they are in training"), ("i4", "over 16777216 to float32"), ("i2", "")]
)
def test_what_training_makes_of_numbers_is_shown(dtype: str, line: str, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", x=np.array([[(1 << 24) + 1 if dtype == "i4" else 7, 1]] * 6, dtype), y=np.linspace(0, 1, 6)
    )
    reported = make(tmp_path / "a.npz", tmp_path / "out", input="x=x", target="y=y").understood
    assert [line in one for one in reported] == ([True] if line else [])


MASKS = np.eye(8, dtype=np.uint8)[None].repeat(6, 0)
ODD = {
    "masks of 0 and 255": ({"y": MASKS * 255}, "y: 2 numbers seen (0, 255): "
        "as classes they need a network of 256 outputs; for classes write 0 to 1"),
    "masks with -1": ({"y": MASKS.astype(np.int8) - 1}, "y: 2 numbers seen (-1, 0); for"),
    "masks of 0 and 1": ({"y": MASKS}, ""),
    "masks of nothing": ({"y": MASKS * 0}, "y: all values seen are 0: is there anything to learn from them?"),
    "one quantity": ({"y": np.full(6, 2.5)}, "y: all values seen are 2.5: is there anything to learn from them?"),
    "zeros": ({"x": np.zeros((6, 4), np.float32)}, "x: all values seen are 0: is there anything to learn from them?"),
    "zeros among others": ({"x": np.array([[0, n] for n in range(6)], np.float32)}, ""),
    "pictures of 16 bits": ({"x": RANDOM.integers(0, 4096, (6, 8, 8, 1)).astype(np.uint16)}, "fed as they are"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_numbers_that_teach_nothing_or_the_wrong_thing_are_shown(case: str, tmp_path: Path) -> None:
    arrays, line = ODD[case]
    np.savez(tmp_path / "a.npz", **{"x": RANDOM.normal(size=(6, 4)), "y": RANDOM.normal(size=6), **arrays})
    reported = " ".join(make(tmp_path / "a.npz", tmp_path / "out", input="x=x", target="y=y").understood)
    assert line in reported if line else not reported


def test_values_that_are_not_valid_are_missing(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as made:
        made["t"], made["y"] = np.array([[1, 2], [3, 9999], [5, 6]], np.int16), np.array([0.5, 0.25, 0.75])
        made["t"].attrs["valid_range"] = np.array([0, 100], np.int16)
    with pytest.raises(UsageError, match="t of sample 1 is not finite"):
        make(tmp_path / "a.nc", tmp_path / "out", input="t=t", target="y=y")
    manifest = make(tmp_path / "a.nc", tmp_path / "out", input="t=t", target="y=y", nan="keep")
    found = sorted(values(tmp_path / "out", manifest, "t"), key=str)
    assert np.array_equal(
        np.array(found, np.float32), np.array([[1, 2], [3, np.nan], [5, 6]], np.float32), equal_nan=True
    )


def test_pictures_with_nan_are_asked_about(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).random((12, 8, 8, 1)).astype(np.float32)
    pictures[7, 3, 3] = np.nan
    np.savez(tmp_path / "a.npz", images=pictures, labels=np.arange(12) % 3)
    for number, pixels in enumerate(pictures[..., 0]):
        (tmp_path / "deep" / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "deep" / f"c{number % 2}" / f"{number}.tif")
    with pytest.raises(SourceError, match=r"image 7 of .*NaN or infinity.*, 1 sample in all; --nan skip"):
        make(tmp_path / "a.npz", tmp_path / "out")
    for call in (make, lambda *paths: dry_run(request(*paths))):
        with pytest.raises(SourceError, match=r"c1/7\.tif: it holds values that are not finite .*--nan skip"):
            call(tmp_path / "deep", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    for source in ("a.npz", "deep"):
        kept = make(tmp_path / source, tmp_path / f"{source}-kept", nan="keep")
        left = make(tmp_path / source, tmp_path / f"{source}-left", nan="skip")
        assert (kept.splits["all"].num_samples, left.splits["all"].num_samples) == (12, 11)
        assert len(left.skipped) == 1 and "7" in left.skipped[0]
    np.savez(tmp_path / "b.npz", images=np.zeros((12, 8, 8, 1), np.uint8), labels=np.arange(12) % 3)
    with pytest.raises(UsageError, match="--nan keep is for numbers that may be NaN or infinity, and these are uint8"):
        make(tmp_path / "b.npz", tmp_path / "b", nan="keep")


def test_classes_whose_accents_are_written_in_two_ways_are_asked_about(tmp_path: Path) -> None:
    source = pictures("Caf\u00e9", "Cafe\u0301")(tmp_path)
    with pytest.raises(SourceError, match=r"differ in how Unicode writes their accents.*--target-kind class"):
        make(source, tmp_path / "out")
    assert len(make(source, tmp_path / "out", target_kind="class").class_names) == 2


def test_a_data_folder_is_no_source_and_a_part_of_it_no_data_folder(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    make(pictures(*AB)(tmp_path), shards, split="train=0.5,val=0.5")
    for source in (shards, shards / "train"):
        with pytest.raises(SourceError, match=r"shards is a data folder of `hpcdl shard` already.*--format hdf5"):
            make(source, tmp_path / "out")
    assert make(shards / "train", tmp_path / "out", format="hdf5").class_names == ("0", "1")
    with pytest.raises(UsageError, match=r"train is one split of a data folder; give .*shards"):
        open_dataset(str(shards / "train"))
    (shards / "manifest.json").unlink()
    for lost in (shards, shards / "train"):
        with pytest.raises(UsageError, match=r"holds shards without their manifest\.json"):
            open_dataset(str(lost))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").touch()
    with pytest.raises(UsageError, match="is a run directory, not a data folder; `hpcdl runs "):
        open_dataset(str(tmp_path / "run"))


@pytest.mark.parametrize(("sides", "said"), [((30, 30), True), ((30, 40), False), ((15, 20), False), ((8, 11), False)])
@pytest.mark.parametrize("size", [None, (16, 16)])
def test_masks_of_another_aspect_are_said(
    tmp_path: Path, sides: tuple[int, int], said: bool, size: tuple[int, int] | None
) -> None:
    for number in range(3):
        for folder, shape in (("images", (30, 40, 3)), ("masks", sides)):
            (tmp_path / "s" / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ones(shape, np.uint8)).save(tmp_path / "s" / folder / f"{number}.png")
    flags = {"input": ("images=image",), "target": ("masks=mask",), "image_size": size}
    remarks = " ".join(dry_run(request(tmp_path / "s", tmp_path / "out", **flags)).facts.remarks)
    line = "3 of 3 pairs looked at differ in the ratio of height to width, such as images/0.png 30x40 and"
    assert (line in remarks) == said and ("cuts other parts" in remarks) == (said and size is not None), remarks


@pytest.mark.parametrize(("sides", "said"), [((30, 30), True), ((15, 20), False), ((17, 2), False)])
def test_masks_of_another_aspect_in_arrays_are_said(tmp_path: Path, sides: tuple[int, int], said: bool) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((20, 30, 40, 3), np.float32), y=RANDOM.integers(0, 9, (20, *sides)))
    remarks = " ".join(dry_run(request(tmp_path / "a.npz", tmp_path / "out")).facts.remarks)
    assert ("y: 30x30, and x 30x40: another ratio of height to width" in remarks) == said, remarks


def test_pairs_turned_by_exif_are_said(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[274] = 3
    for folder, options in (("images", {"exif": turned}), ("masks", {})):
        (tmp_path / "s" / folder).mkdir(parents=True)
        Image.fromarray(np.ones((8, 9), np.uint8)).save(tmp_path / "s" / folder / "1.png", **options)
    flags = {"input": ("images=image",), "target": ("masks=mask",)}
    remarks = dry_run(request(tmp_path / "s", tmp_path / "out", **flags)).facts.remarks
    assert any("EXIF rotation is not applied, and images/1.png has one" in line for line in remarks)


COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0]], np.uint8)


@pytest.mark.parametrize("files", [True, False])
@pytest.mark.parametrize(
    ("masks", "said"),
    [
        (COLOURS[RANDOM.integers(0, 3, (4, 9, 9))], True),
        (RANDOM.integers(0, 256, (4, 9, 9, 3), np.uint8), False),
        (np.eye(3, dtype=np.uint8)[RANDOM.integers(0, 3, (4, 9, 9))], False),
    ],
)
def test_masks_of_colours_are_said(tmp_path: Path, files: bool, masks: Any, said: bool) -> None:
    pixels, flags = RANDOM.integers(0, 256, (4, 9, 9, 3), np.uint8), {"input": ("x=x",), "target": ("y=y",)}
    for name, arrays_of in (("x", pixels), ("y", masks)) if files else ():
        (tmp_path / "s" / name).mkdir(parents=True)
        for number, own in enumerate(arrays_of):
            Image.fromarray(own).save(tmp_path / "s" / name / f"{number}.png")
    if not files:
        np.savez(tmp_path / "s.npz", x=pixels, y=masks)
    remarks = dry_run(request(tmp_path / ("s" if files else "s.npz"), tmp_path / "out", **flags)).facts.remarks
    assert any("y: 3 colours seen" in line for line in remarks) == said and not any("0, 128)" in n for n in remarks), (
        remarks
    )


@pytest.mark.parametrize(
    ("scales", "said"),
    [((1, 1e6), True), ((1e-9, 1, 1), True), ((1, 90), False), ((0, 1), False), ((5000,), True), ((255,) * 99, True)],
)
def test_numbers_of_large_and_uneven_scales_are_said(tmp_path: Path, scales: tuple[float, ...], said: bool) -> None:
    x = RANDOM.random((50, len(scales))) * scales
    x[0, 0] *= 1e5  # an outlier is no scale
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(50) % 2)
    for flags in ({}, {"normalise": "mean-std"}):
        remarks = dry_run(request(tmp_path / "a.npz", tmp_path / "out", **flags)).facts.remarks
        line = any("unless the model scales them, give --normalise mean-std" in remark for remark in remarks)
        assert line == (said and not flags), remarks


@pytest.mark.parametrize(("row", "what"), [([0, 0, 0], "1 without a 1"), ([1, 0, 1], "1 with several"), (None, "")])
@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_rows_that_are_one_hot_but_for_a_few_are_said(tmp_path: Path, row: Any, what: str, dtype: str) -> None:
    y = np.eye(3, dtype=dtype)[np.arange(60) % 3]
    y[5] = y[5] if row is None else row
    np.savez(tmp_path / "a.npz", x=RANDOM.random((60, 4)), y=y)
    remarks = dry_run(request(tmp_path / "a.npz", tmp_path / "out")).facts.remarks
    assert any(f"y: rows are one-hot but for {what}, the first is row 5" in line for line in remarks) == bool(what)
    if what:
        with pytest.raises(SourceError, match="One class a sample needs a 1 in each row"):
            make(tmp_path / "a.npz", tmp_path / "out", target_kind="class")


def test_several_labels_of_a_sample_are_no_odd_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=RANDOM.random((60, 4)), y=RANDOM.integers(0, 2, (60, 5)))
    assert not any("one-hot" in line for line in dry_run(request(tmp_path / "a.npz", tmp_path / "out")).facts.remarks)


@pytest.mark.parametrize(
    ("pixels", "line"),
    [
        (np.full((6, 9, 9, 1), 250, np.uint16), "x: uint16 up to 250, fed as they are"),
        (np.full((6, 9, 9), 250, np.int64), "x: int64 up to 250, fed as they are"),
        (np.full((6, 9, 9, 3), 250, np.float32), "x: float32 up to 250, fed as they are"),
        (np.full((6, 9, 9, 3), 0.9, np.float32), ""),
        (np.full((6, 9, 9), 250, np.float32), ""),
        (np.full((6, 9, 9, 3), 250, np.uint8), "x: bytes, scaled to 0..1"),
    ],
)
def test_pixels_that_training_does_not_scale_are_said(tmp_path: Path, pixels: Any, line: str) -> None:
    np.savez(tmp_path / "a.npz", x=pixels, y=np.linspace(0, 1, 6))
    flags = {"input": ("x=x",), "target": ("y=y",)}
    remarks = dry_run(request(tmp_path / "a.npz", tmp_path / "out", **flags)).facts.remarks
    assert [own for own in remarks if " as " in own and (not line or not own.startswith(line))] == []
    assert any(own.startswith(line) for own in remarks) or not line
    scaled = dry_run(request(tmp_path / "a.npz", tmp_path / "out", **flags, normalise="mean-std")).facts.remarks
    assert not any("fed as they are" in own or "scaled to 0..1" in own for own in scaled)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_joined_tables_are_said_to_be_samples(tmp_path: Path, count: int) -> None:
    (tmp_path / "s").mkdir()
    for number in range(count):
        lines = "".join(f"{row * 0.5},{row % 2}\n" for row in range(9))
        (tmp_path / "s" / f"run_{number}.csv").write_text("a,y\n" + lines)
    remarks = dry_run(request(tmp_path / "s", tmp_path / "out", target="y")).facts.remarks
    assert any("3 tables: each row is a sample" in line for line in remarks) == (count == 3)


@pytest.mark.parametrize("name", ["age_group", "label", "score"])
def test_names_of_quantities_are_not_asked_of_in_other_classes(tmp_path: Path, name: str) -> None:
    labels = ["lo", "hi", "mid"] if name == "score" else [0, 1, 2]  # words are classes
    source = both(table(lines(labels * 4, f"image,{name}\n")), *(file(f"{n}.png", PICTURE) for n in range(12)))(
        tmp_path
    )
    flags = {"format": "csv"}
    assert len(dry_run(request(tmp_path / "list.csv", tmp_path / "out", **flags)).facts.class_names) == 3, source


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (["cat"] * 60 + ["dog"] * 60 + ["dgo"], "1 of 3 classes have 1 or 2 samples: 'dgo'"),
        (["cat"] * 60 + ["dog"] * 60 + ["cow"] * 3, ""),
        (["yes"] + ["no"] * 30, "96 % of the samples are of the class 'no'"),
        (["yes"] * 4 + ["no"] * 30, ""),
        (["a", "b", "c", "d"], ""),
    ],
)
def test_classes_of_very_few_and_of_nearly_all_samples_are_shown(labels: list[str], line: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=RANDOM.normal(size=(len(labels), 4)), y=np.array(labels))
    reported = " ".join(make(tmp_path / "a.npz", tmp_path / "out", input="x=x", target="y=y").understood)
    assert line in reported if line else not reported


@pytest.mark.parametrize(
    ("factor", "line"),
    [
        (1e5, "and training does not scale targets"),
        (1e-6, "and training does not scale targets"),
        ([1.0, 1e5], "at index 1, and training does not scale targets"),
        (50.0, ""),
        ([1.0, 20.0], ""),
    ],
)
def test_targets_of_another_size_than_outputs_are_shown(factor: Any, line: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=RANDOM.normal(size=(40, 4)), y=RANDOM.normal(size=(40, 2)) * factor)
    flags = {"input": "x=x", "target": "y=y", "normalise": "mean-std"}
    reported = " ".join(make(tmp_path / "a.npz", tmp_path / "out", **flags).understood)
    assert line in reported if line else not reported


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "schön".encode().decode("cp1252"),
            "'schÃ¶n' seems to be text read in another encoding than UTF-8 ('Ã¶' for 'ö')",
        ),
        ("it’s".encode().decode("latin-1"), "seems to be text read in another encoding than UTF-8"),
        ("да".encode().decode("latin-1"), "seems to be text read in another encoding than UTF-8"),
        ("sch\ufffdn", "'sch\ufffdn' has lost a letter"),
        ("SÃO, Â, « café »", ""),
        ("да 日本", ""),
    ],
)
@pytest.mark.parametrize("kind", ["text", "words", "classes"])
def test_texts_in_a_wrong_encoding_are_said(text: str, line: str, kind: str, tmp_path: Path) -> None:
    words = [(text, "good", "fine")[number % 3] for number in range(30)]
    rows = [f'"{word}",{number % 2},{number / 7}' for number, word in enumerate(words)]
    (tmp_path / "s.csv").write_text("\n".join(["a,b,c", *rows, ""]))
    flags = {
        "text": {"input": ("a=a",), "target": ("b=b",)},
        "words": {"target": ("b",), "categories": ("a=codes",)},
        "classes": {"input": ("c=c",), "target": ("a=a",)},
    }
    plan = dry_run(request(tmp_path / "s.csv", tmp_path / "out", **flags[kind]))
    found = [own for own in plan.facts.remarks if "encoding" in own]
    assert (len(found) == 1 and line in found[0]) if line else not found, plan.facts.remarks


LENGTHS = np.arange(40) % 30 + 5
WITHIN = (np.arange(40) < LENGTHS[:, None]).astype(np.float32)
SERIES = RANDOM.normal(5, 1, (40, 40, 3))


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (SERIES * WITHIN[..., None], "x: 0 fills the ends of 40 of 40 samples looked at (5 to 34 of 40 are others)"),
        (SERIES[..., 0] * WITHIN[:, ::-1], "x: 0 fills the beginnings of 40 of 40"),
        (np.where(WITHIN, SERIES[..., 0], -1), "x: -1 fills the ends of 40"),
        (SERIES, ""),
        (np.maximum(SERIES - 5, 0)[..., 0], ""),  # zeros everywhere
        (np.pad(np.ones((40, 20, 20), np.float32), ((0, 0), (10, 10), (10, 10))), ""),  # pictures with a margin
        (RANDOM.poisson(20 * np.exp(-np.arange(60) / 8), (40, 60)), ""),  # histograms
    ],
)
def test_padding_of_series_is_said(x: Any, line: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=x, y=np.arange(40) / 7)
    remarks = dry_run(request(tmp_path / "s.npz", tmp_path / "out")).facts.remarks
    found = [own for own in remarks if "padding?" in own]
    assert (len(found) == 1 and line in found[0]) if line else not found, remarks


@pytest.mark.parametrize(
    ("answers", "codes"),
    [
        ((1, 2, 3, 9), "9"),
        ((1, 2, 7, 9), "7, 9"),
        ((0, 1, 2, 77, 88, 99), "77, 88, 99"),
        ((1, 2, 3, 4, -1), "-1"),
        ((1, 2, -8, -9), "-9, -8"),
        ((0, 1, -1), ""),
        ((1, 2, 3, 4, 5), ""),
        ((1, 2, 3, 4, 6, 8), ""),
        ((3, 4, 5, 6, 8), ""),
        (tuple(range(10)), ""),
    ],
)
@pytest.mark.parametrize("target", [False, True])
def test_codes_of_missing_answers_are_said(answers: tuple[int, ...], codes: str, target: bool, tmp_path: Path) -> None:
    rows = [f"{answers[number % len(answers)]},{number / 7}" for number in range(120)]
    (tmp_path / "s.csv").write_text("\n".join(["a,b", *rows, ""]))
    flags = {"input": ("b=b",), "target": ("a=a",), "target_kind": "class"} if target else {"target": ("b",)}
    remarks = dry_run(request(tmp_path / "s.csv", tmp_path / "out", **flags)).facts.remarks
    found = [own for own in remarks if "codes of a survey" in own]
    if not codes or (target and answers[0] == 0):
        assert not found, remarks
    else:
        assert len(found) == 1 and found[0].replace("'", "").removeprefix("x: ").startswith(codes), remarks


@pytest.mark.parametrize("stray", ["README.md", "README.txt", "plot.png"])
def test_a_folder_of_tables_beside_another_file_is_told_of_the_format(stray: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(f"{number / 7},{number % 2}\n" for number in range(20)))
    (tmp_path / stray).write_bytes(png(np.zeros((4, 4, 3), np.uint8)) if stray == "plot.png" else b"About\n")
    with pytest.raises(UsageError, match=r"for the tables alone, such as a\.csv, give --format table"):
        recognise(str(tmp_path))
    assert make(tmp_path, tmp_path / "out", format="table").splits["all"].num_samples == 40


@pytest.mark.parametrize(
    ("mode", "suffix", "said"),
    [
        ("L", "png", "all images seen of test are grey, those of train in colour"),
        ("RGB", "jpg", "all images seen of test are JPEG, those of train PNG"),
        ("RGB", "png", ""),
    ],
)
def test_splits_whose_images_differ_are_said(mode: str, suffix: str, said: str, tmp_path: Path) -> None:
    for split, (own, ending) in {"train": ("RGB", "png"), "test": (mode, suffix)}.items():
        for number in range(12):
            path = tmp_path / "s" / split / "ab"[number % 2] / f"{number}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(RANDOM.integers(0, 256, (8, 8, 3), np.uint8)).convert(own).save(path)
    remarks = dry_run(request(tmp_path / "s", tmp_path / "out")).facts.remarks
    found = [line for line in remarks if "all images seen" in line]
    assert (len(found) == 1 and said in found[0]) if said else not found, remarks


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("kind", ["files", "pixels", "fields"])
def test_splits_with_colours_in_two_orders_are_said(kind: str, swapped: bool, tmp_path: Path) -> None:
    pixels = np.clip(RANDOM.normal((180, 120, 60), 40, (60, 8, 8, 3)), 0, 255).astype(np.uint8)
    test = pixels[40:, ..., ::-1] if swapped else pixels[40:]
    if kind == "files":
        for split, own in (("train", pixels[:40]), ("test", test)):
            for number, one in enumerate(own):
                path = tmp_path / "s" / split / "ab"[number % 2] / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.ascontiguousarray(one)).save(path)
    else:
        labels = np.arange(60) % 2 if kind == "pixels" else np.arange(60) / 7
        arrays = {"x_train": pixels[:40], "x_test": test, "y_train": labels[:40], "y_test": labels[40:]}
        np.savez(tmp_path / "s.npz", **arrays)
    remarks = dry_run(request(tmp_path / ("s" if kind == "files" else "s.npz"), tmp_path / "out")).facts.remarks
    found = [line for line in remarks if "is one RGB and the other BGR" in line]
    assert len(found) == swapped and all("brighter than the last in train" in line for line in found), remarks


@pytest.mark.parametrize("factor", [1, 16])
@pytest.mark.parametrize(("kind", "channels"), [("files", 1), ("files", 3), ("pixels", 1), ("pixels", 3)])
def test_pictures_of_splits_in_two_scales_are_said(kind: str, channels: int, factor: int, tmp_path: Path) -> None:
    pixels = RANDOM.integers(0, 256, (60, 8, 8, channels), dtype=np.uint8)
    pixels[40:] //= factor
    if kind == "files":
        for number, one in enumerate(pixels):
            path = tmp_path / "s" / ("train" if number < 40 else "test") / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(one.squeeze()).save(path)
    else:
        labels = np.arange(60) % 2
        arrays = {"x_train": pixels[:40], "x_test": pixels[40:], "y_train": labels[:40], "y_test": labels[40:]}
        np.savez(tmp_path / "s.npz", **arrays)
    remarks = dry_run(request(tmp_path / ("s" if kind == "files" else "s.npz"), tmp_path / "out")).facts.remarks
    found = [line for line in remarks if line.startswith("images: most values are ")]
    assert len(found) == (factor > 1) and all(" in test, and " in line for line in found), remarks


WIDE, HALF = RANDOM.normal(size=(150, 4)), np.arange(150) % 2
RARE = (np.arange(150) % 20 == 0).astype(int)


@pytest.mark.parametrize(
    ("train", "test", "line"),
    [
        ((WIDE, HALF), (WIDE + 20, HALF), "x: most values are "),
        ((WIDE, HALF), (WIDE + 9 * np.eye(4)[2], HALF), "x: at index 2 most values are "),
        ((WIDE, HALF), (WIDE + 2, HALF), ""),
        ((WIDE, HALF), (RANDOM.random((150, 4)), HALF), "x: all values seen are from 0 to 1 in test, and many are neg"),
        ((WIDE * 9, HALF), (np.abs(WIDE * 9), HALF), ""),  # winter in one alone
        ((WIDE, WIDE[:, 0]), (WIDE, WIDE[:, 0] * 0), "y: all values seen are 0 in test, and most are "),
        ((WIDE, WIDE[:, 0]), (WIDE, WIDE[:, 1]), ""),
        ((WIDE, HALF), (WIDE, HALF * 0), "all samples of test are of the class '0', and those of train of 2"),
        ((WIDE, np.arange(150) // 15), (WIDE, np.arange(150) // 75 + 8), "classes of train that test has no sample of"),
        ((WIDE, RARE), (WIDE, 1 - RARE), "the class '0' is 95% of train, and 5% of test"),
        ((WIDE, RARE), (WIDE, HALF), ""),
        ((np.arange(300).reshape(150, 2) / 15, HALF), (np.arange(300, 400).reshape(50, 2) / 15, HALF[:50]), ""),
    ],
)
def test_splits_of_other_ranges_and_other_shares_of_classes_are_said(
    train: Any, test: Any, line: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "s.npz", x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
    remarks = dry_run(request(tmp_path / "s.npz", tmp_path / "out")).facts.remarks
    found = [own for own in remarks if " train" in own]
    assert (len(found) == 1 and found[0].startswith(line)) if line else not found, remarks


def test_splits_of_sparse_pictures_are_in_one_scale() -> None:
    spreads = []
    for rare in (0.045, 0.055):
        random = np.random.default_rng(1)
        spreads.append(np.where(random.random(20_000) < rare, random.integers(1, 256, 20_000), 0).astype(float))
    assert np.quantile(spreads[1], 0.95) > np.quantile(spreads[0], 0.95) == 0
    spreads[0] = np.concatenate([spreads[0], np.full(200, 1.0)])
    assert not spreads_apart({"train": spreads[0], "test": spreads[1]})


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize(
    ("low", "high", "held", "stored"),
    [
        (20, 240, "u1", "i1"),
        (-100, 100, "i1", "i1"),
        (-1000, 2000, "i2", "u2"),
        (0, 60_000, "u2", "u2"),
        (0, 60_000, "u2", "i2"),
        (-1000, 2000, "i2", "i2"),
    ],
)
def test_numbers_stored_with_the_wrong_sign_are_said(
    low: int, high: int, held: str, stored: str, kind: str, tmp_path: Path
) -> None:
    waves = np.sin(np.arange(20 * 16 * 16).reshape(20, 16, 16) / 40)
    found = (low + (high - low) * (waves + 1) / 2).astype(held).view(stored)
    source, target = tmp_path / f"a.{kind}", np.arange(20) / 7
    if kind == "npz":
        np.savez(source, x=found, y=target)
    else:
        with h5py.File(source, "w") as file:
            file.update(x=found, y=target)
    remarks = dry_run(request(source, tmp_path / "out")).facts.remarks
    said = [line for line in remarks if "neighbours differ by " in line]
    assert len(said) == (held != stored), remarks
    assert all(f"was {np.dtype(held)} stored as {np.dtype(stored)}" in line for line in said)


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("dtype", ["u2", "i2", "i4", "i8", "f4", "f8"])
def test_numbers_with_their_bytes_in_another_order_are_said(dtype: str, swapped: bool, tmp_path: Path) -> None:
    waves = (500 * np.sin(np.arange(20 * 16 * 16).reshape(20, 16, 16) / 40) + 700).astype(f"<{dtype}")
    np.savez(tmp_path / "a.npz", x=waves.view(f">{dtype}") if swapped else waves, y=np.arange(20) / 7)
    remarks = dry_run(request(tmp_path / "a.npz", tmp_path / "out", nan="keep")).facts.remarks
    found = [line for line in remarks if "x: values reach" in line]
    assert len(found) == swapped and all(
        "they reach 1.2e+03 with their bytes in the other order" in line for line in found
    )


def test_nan_of_bytes_in_another_order_is_said_to_be_so(tmp_path: Path) -> None:
    values = RANDOM.normal(size=(20, 100)).astype("<f4").view(">f4")
    assert np.isnan(values).any()
    np.savez(tmp_path / "a.npz", x=values, y=np.arange(20) / 7)
    with pytest.raises(SourceError, match=r"is not finite .* with their bytes in the other order.*x\.byteswap"):
        make(tmp_path / "a.npz", tmp_path / "out")


def test_numbers_that_are_all_nan_in_another_order_of_bytes_are_said_to_be_so(tmp_path: Path) -> None:
    bits = (RANDOM.integers(0x3F00, 0x3F80, (20, 4)).astype(np.uint32) << 16) | 0x807F
    np.savez(tmp_path / "a.npz", x=bits.view(np.float32).byteswap(), y=np.arange(20) / 7)
    with pytest.raises(SourceError, match=r"no value seen is finite, and they reach 0\.\d+ with their bytes in the"):
        make(tmp_path / "a.npz", tmp_path / "out")


@pytest.mark.parametrize(
    "values",
    [
        RANDOM.integers(0, 256, (20, 16, 16)).astype(np.uint16) << 8,  # 8 bits in the upper half
        RANDOM.integers(0, 1 << 16, (20, 16, 16)).astype(np.uint16),
        RANDOM.integers(0, 1 << 40, (20, 4)),
        RANDOM.random((20, 4)) * 1e-38,
        10 ** RANDOM.uniform(-30, 30, (20, 4)),
        np.zeros((20, 4)),
    ],
)
def test_noise_and_odd_scales_are_no_other_order_of_bytes(values: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=values, y=np.arange(20) / 7)
    assert not any(
        "other order" in line for line in dry_run(request(tmp_path / "a.npz", tmp_path / "out")).facts.remarks
    )


@pytest.mark.parametrize(("kind", "inverts"), [("pixels", True), ("fields", True), ("pixels", False)])
def test_splits_that_are_inverted_are_said(kind: str, inverts: bool, tmp_path: Path) -> None:
    pixels = np.where(RANDOM.random((60, 8, 8)) < 0.1, 250, 3).astype(np.uint8)
    test = 255 - pixels[40:] if inverts else pixels[40:]
    labels = np.arange(60) % 2 if kind == "pixels" else np.arange(60) / 7
    arrays = {"x_train": pixels[:40], "x_test": test, "y_train": labels[:40], "y_test": labels[40:]}
    np.savez(tmp_path / "s.npz", **arrays)
    remarks = dry_run(request(tmp_path / "s.npz", tmp_path / "out")).facts.remarks
    line = "most pixels are near 3 in train, and near 252 in test: is one of them inverted"
    assert any(line in own for own in remarks) == inverts, remarks


def test_black_and_white_in_equal_parts_are_not_inverted() -> None:
    halves = [np.where(np.arange(1000) < part, 0, 255).astype(float) for part in (450, 550)]
    assert not inverted({"train": halves[0], "test": halves[1]})


def test_words_of_a_column_in_two_cases_are_said(tmp_path: Path) -> None:
    source = table("city,a,label\n" + "".join(f"{('Paris', 'paris', 'Rome')[n % 3]},{n},{n % 2}\n" for n in range(30)))
    made = request(source(tmp_path), tmp_path / "out", format="table", categories="city=codes")
    assert any("'Paris' and 'paris' of 'city' differ in case" in line for line in dry_run(made).facts.remarks)


@pytest.mark.parametrize(("name", "said"), [("zipcode", True), ("Soil_Type", True), ("zip_area", False)])
@pytest.mark.parametrize("flags", [{}, {"categories": "{}=one-hot"}])
def test_codes_that_become_quantities_are_said(name: str, said: bool, flags: dict[str, str], tmp_path: Path) -> None:
    source = table(f"{name},a,label\n" + "".join(f"{n * 7 % 9 + 40},{n / 7},{n % 2}\n" for n in range(60)), "t.csv")
    given = {flag: (value.format(name),) for flag, value in flags.items()}
    remarks = dry_run(request(source(tmp_path), tmp_path / "out", target=("label",), **given)).facts.remarks
    found = [line for line in remarks if "is named like a code" in line]
    assert len(found) == (said and not flags) and all(f"--categories {name}=one-hot" in line for line in found)


@pytest.mark.parametrize(("count", "share", "said"), [(2, 0.94, True), (3, 0.94, True), (2, 0.6, False), (2, 0, False)])
def test_a_column_that_tells_most_classes_is_said(count: int, share: float, said: bool, tmp_path: Path) -> None:
    classes = RANDOM.integers(0, count, 500)
    column = np.where(RANDOM.random(500) < share, (classes + 1) % count, RANDOM.integers(0, count, 500))
    rows = [f"{one},{number / 7},{own}" for number, (one, own) in enumerate(zip(column, classes, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(["discharged,a,label", *rows, ""]))
    remarks = dry_run(request(tmp_path / "t.csv", tmp_path / "out", target=("label",))).facts.remarks
    assert any("the column 'discharged' names the class of 9" in line for line in remarks) == said, remarks


def test_columns_of_rare_events_do_not_tell_classes(tmp_path: Path) -> None:
    rows = [f"{int(n % 50 == 0)},{n / 7},{int(n % 19 == 0)}" for n in range(1000)]  # alike in 93 % of the rows
    (tmp_path / "t.csv").write_text("\n".join(["event,a,label", *rows, ""]))
    remarks = dry_run(request(tmp_path / "t.csv", tmp_path / "out", target=("label",))).facts.remarks
    assert not any("names the class" in line for line in remarks), remarks


AGES = RANDOM.uniform(20, 80, 100).round(1)


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (np.where(np.arange(100) % 9 == 3, -1.0, AGES), "11 values of -1, all others 2"),
        (np.where(np.arange(100) % 9 == 3, 999.0, AGES), "11 values of 999, all others 2"),
        (AGES + 273.15 * (np.arange(100) > 60), "which is 273.15 more: are there two units"),
        (AGES * 70.07, "numbers reach 5"),
        (AGES, ""),
    ],
)
def test_quantities_of_a_list_are_looked_at_as_those_of_arrays(labels: Any, line: str, tmp_path: Path) -> None:
    source = table(lines([f"{label:.2f}" for label in labels], "image,found\n"))(tmp_path)
    remarks = dry_run(request(source, tmp_path / "out")).facts.remarks
    found = [own for own in remarks if own.startswith("found: ")]
    assert (len(found) == 1 and line in found[0]) if line else not found, remarks
    assert not any("--nan" in own for own in found)  # a list refuses NaN


def test_files_of_quantities_in_two_lines_and_splits_are_said(tmp_path: Path) -> None:
    rows = "0.png,0.5,train\n1.png,0.25,train\n2.png,1.5,train\n0.png,0.75,train\n1.png,0.25,test\n"
    source = table("image,found,split\n" + rows)(tmp_path)
    remarks = dry_run(request(source, tmp_path / "out")).facts.remarks
    assert "files with different quantities in two lines: '0.png'" in remarks
    assert "files in more than one split: '1.png'" in remarks


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize(
    ("behind", "said"), [("_mask", True), ("_thumb", True), (" - Copy", True), ("_2", False), ("b", False)]
)
def test_files_called_as_others_with_a_word_behind_are_said(behind: str, said: bool, kind: str, tmp_path: Path) -> None:
    """Masks lie beside the pictures in the class folders of ultrasound sets."""
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for name in [f"{'ab'[n % 2]}/{n}{end}.png" for n in range(12) for end in ("", behind)]:
            own = png(RANDOM.integers(0, 256, (6, 6, 3), dtype=np.uint8))
            archive.writestr(name, own)
            file(name, own)(tmp_path)
    source = tmp_path / ("s" if kind == "folder" else "s.zip")
    remarks = dry_run(request(source, tmp_path / "out")).facts.remarks
    found = [line for line in remarks if "12 files are named like another one with" in line]
    assert len(found) == said, remarks
    if said:
        left = dry_run(request(source, tmp_path / "out", leave_out=(f"*{behind}.png",)))
        assert left.facts.num_samples == 12 and not any("another one" in line for line in left.facts.remarks)


BLOCKS = np.zeros(8, np.dtype([("index", "i8"), ("values_block_0", "f8", (3,))]))
FIXED = {"df/axis0": [b"a"], "df/axis1": np.arange(8), "df/block0_values": X, "df/block0_items": [b"a"]}
LONG = {"x": X.astype(np.longdouble), "y": Y}
HALVES = {"x_train": X, "y_train": np.eye(2)[Y], "x_test": X, "y_test": Y}
REMEDIES: dict[str, tuple[Save, str]] = {
    "addresses in a list": (table("image,label\nhttps://a.b/0.png,a\ns3://a/1.png,b\n"), "it is an address: copy the"),
    "a list joined to another": (table(lines("abab") + lines("ab")), "it repeats the first line: were lists joined"),
    "long double": (lambda root: np.savez(root / "a.npz", **LONG) or root / "a.npz", r"x holds .*astype\('float64'\)"),
    "one-hot beside numbers": (
        lambda root: np.savez(root / "a.npz", **HALVES) or root / "a.npz",
        r"make them alike \(of one-hot rows, y.argmax\(1\)",
    ),
    "pandas' table": (arrays(only={"df/table": BLOCKS}), "a table of pandas, .*pandas.read_hdf"),
    "pandas' blocks": (arrays(only=FIXED), "a table of pandas, .*pandas.read_hdf"),
}  # fmt: skip


@pytest.mark.parametrize("name", REMEDIES)
def test_what_other_tools_write_gets_a_remedy(name: str, tmp_path: Path) -> None:
    save, message = REMEDIES[name]
    with pytest.raises(UsageError, match=message):
        make(save(tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "said"),
    [("a (1).csv", True), ("a - Copy.csv", True), ("a copy.csv", True), ("a1.csv", False), ("b (1).csv", False)],
)
@pytest.mark.parametrize("alike", [True, False])
def test_files_called_as_copies_and_as_large_are_said(name: str, said: bool, alike: bool, tmp_path: Path) -> None:
    rows = "".join(f"{n / 7},{n % 2}\n" for n in range(30))
    for path, more in (("a.csv", ""), (name, "" if alike else "0.5,1\n")):
        file(path, ("x,label\n" + rows + more).encode())(tmp_path)
    made = request(tmp_path / "s", tmp_path / "out", target=("label",))
    found = [line for line in dry_run(made).facts.remarks if "is named like a copy of 'a.csv'" in line]
    assert len(found) == (said and alike)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("y_pred", "'y_pred' seems to hold predictions of a model: a feature"),
        ("label_hat", "'label_hat' seems to hold predictions of a model: a feature"),
        ("prediction", "seems to hold predictions"),
        ("site", "'site' a feature, or does it say which rows belong together"),
        ("hospital", "'hospital' a feature, or does it say"),
        ("predators", ""),
        ("hatch", ""),
        ("website_visits", ""),
    ],
)
def test_columns_of_predictions_and_sites_are_asked_about(name: str, asked: str, tmp_path: Path) -> None:
    source = table(f"a,{name},label\n" + "".join(f"{n / 7},{n // 9},{n % 2}\n" for n in range(40)), "t.csv")(tmp_path)
    if not asked:
        assert dry_run(request(source, tmp_path / "out", target=("label",))).facts.num_samples == 40
        return
    with pytest.raises(SourceError, match=asked):
        dry_run(request(source, tmp_path / "out", target=("label",)))
