"""Kinds of data that could be read wrongly without any message: labels, tables and pictures from public reports."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.data.published import ASKED, PIXELS, REFUSED, RIGHT, Case, Save, X, Y, hdf5, images, listing, npz, only
from tests.data.test_asked import PICTURE, pictures, product
from tests.data.test_formats import example, framed, tar

NOISE = np.random.default_rng(11)
TARGET = {"target": "y"}


def rows(head: str, *lines: str, times: int = 4) -> Save:
    """A table that repeats its lines `times` times."""
    return only("t.csv", head + "\n" + "\n".join(lines * times) + "\n")


def labelled(*labels: str, head: str = "file,label") -> Save:
    """A list of pictures with these labels, each label used up to twice."""
    every = (*labels, *labels)[:6]
    return listing(head + "\n" + "".join(f"{number}.png,{label}\n" for number, label in enumerate(every)))


def archive(**members: bytes) -> Save:
    """A zip archive; `__` in a name stands for a slash."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        for name, own in members.items():
            made.writestr(name.replace("__", "/").replace("_csv", ".csv") + (".png" if own == PICTURE else ""), own)
    return only("a.zip", content.getvalue())


def packed(*names: str) -> Save:
    """A tar archive of pictures."""
    return lambda root: tar(root / "a.tar", dict.fromkeys(names, PICTURE))


def twice_of_one_name(root: Path) -> Path:
    with zipfile.ZipFile(root / "a.zip", "w") as made:
        made.writestr("a/0.png", PICTURE)
        made.writestr("b/0.png", PICTURE)
        made.filelist[1].filename = "a/0.png"
        made.filelist[1].orig_filename = "a/0.png"
    return root / "a.zip"


def moving(number: int) -> Image.Image:
    return Image.fromarray(NOISE.integers(0, 255, (6, 6), dtype=np.uint8))


def animated(ending: str) -> Save:
    more = [moving(number) for number in range(2)]
    return images(moving, ending, save_all=True, append_images=more)


def turned(root: Path) -> Path:
    """Turn every other picture by its EXIF orientation, as smartphones store them."""
    upright, aside = Image.Exif(), Image.Exif()
    upright[0x0112], aside[0x0112] = 1, 6
    for number in range(4):
        path = root / "s" / ("cats", "dogs")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        moving(number).save(path, exif=(upright, aside)[number % 2])
    return root / "s"


def pairs_in(ending: str, mode: str) -> Save:
    """A folder of images and a folder of masks."""

    def save(root: Path) -> Path:
        for folder, end in (("images", "png"), ("masks", ending)):
            (root / "s" / folder).mkdir(parents=True)
            for number in range(4):
                made = Image.fromarray(np.full((6, 6), number, np.uint8))
                if mode == "P" and folder == "masks":
                    made.putpalette([200, 0, 0, 0, 200, 0] + [0] * 762)
                made.save(root / "s" / folder / f"{number}.{end}")
        return root / "s"

    return save


def unlike_in_split(*names: str) -> Save:
    return pictures(*product(["train"], ["a", "b"]), *product(["val"], names))


def onehot_of_two(number: int) -> Image.Image:
    return Image.fromarray(PIXELS[number]).convert("1")


def beside(folder: str, table: str) -> Save:
    """A folder of pictures, and a list of their labels beside it; SOURCE is the list if `table` names it."""

    def save(root: Path) -> Path:
        pictures(folder)(root)
        (root / "s" / (table or "labels.csv")).write_text("file,label\n0.png,a\n1.png,b\n")
        return root / "s" / table

    return save


def in_files(**splits: dict[str, np.ndarray]) -> Save:
    """One Parquet file per split, including train."""

    def save(root: Path) -> Path:
        (root / "p").mkdir()
        for name, found in {"train": {"a": X[:, 0], "label": Y}, **splits}.items():
            pq.write_table(pa.table(found), root / "p" / f"{name}.parquet")
        return root / "p"

    return save


def only_table(**columns: object) -> Save:
    """One Parquet file."""

    def save(root: Path) -> Path:
        pq.write_table(pa.table(columns), root / "t.parquet")
        return root / "t.parquet"

    return save


def records_of_splits(root: Path) -> Path:
    (root / "s").mkdir()
    for name, made in {"train": example(image=PICTURE, label=0), "test": example(image=PICTURE)}.items():
        (root / "s" / f"{name}.tfrecord").write_bytes(framed([made]))
    return root / "s"


UNLABELLED = listing("file,label,split\n0.png,a,train\n1.png,b,train\n2.png,,test\n")
DIVIDED = listing("file,label,is_test\n0.png,a,0\n1.png,b,0\n2.png,a,1\n")
PAIRED = {"input": "images=x", "target": "masks=m"}
TWINS = "differ in case or spaces alone"

DOUBTFUL: dict[str, dict[str, Case]] = {
    "image-folder": {
        "class folders that differ in case": (pictures("Cat", "cat", "dog"), {}, ASKED, f"'Cat' and 'cat' {TWINS}"),
        "class folders that end in a space": (pictures("cat", "cat ", "dog"), {}, ASKED, f"'cat' and 'cat ' {TWINS}"),
        "letters, A and a": (pictures("A", "a", "b"), {"target_kind": "class"}, RIGHT, "3 classes"),
        "val in other case than train": (unlike_in_split("A", "B"), {}, ASKED, f"'A' and 'a' {TWINS}"),
        "a class in val alone": (unlike_in_split("a", "c"), {}, RIGHT, "classes in val that train does not have: 'c'"),
        "a folder called nan, as pandas writes one": (pictures("x", "y", "nan"), {}, ASKED, "'nan' is among the c"),
        "animated GIF": (animated("gif"), {}, REFUSED, "3 pages"),
        "animated PNG": (animated("png"), {}, REFUSED, "3 pages"),
        "animated WebP": (animated("webp"), {}, REFUSED, "3 pages"),
        "black and white of one bit": (images(onehot_of_two, "png"), {}, RIGHT, "8x8x1 uint8"),
        "grey with transparency": (images(lambda n: moving(n).convert("LA"), "png"), {}, ASKED, "2 bands, the last is"),
        "photographs turned by EXIF": (turned, {}, RIGHT, "EXIF rotation is not applied, and dogs/1.jpg has one"),
        "masks with a palette": (pairs_in("png", "P"), PAIRED, RIGHT, "target m: 6x6 uint8"),
        "a list beside one folder of pictures": (beside("images", ""), {}, ASKED, "'labels.csv' may list their labels"),
        "folders fold0, fold1": (pictures("fold0", "fold1"), {}, ASKED, "'fold0', 'fold1': parts of a data set, or"),
        "trainA, trainB, testA, testB": (
            pictures("trainA", "trainB", "testA", "testB"),
            {},
            ASKED,
            "'trainB': parts of a data set, or classes",
        ),
        "LR and HR, files of the same names": (
            pictures("LR", "HR"),
            {},
            ASKED,
            "'HR' hold files of the same names: pairs of images",
        ),
        "inputs and outputs": (pictures("input", "output"), {}, ASKED, "'input' and 'output': images and their masks"),
        "a folder called unlabeled": (
            pictures("good", "bad", "unlabeled"),
            {},
            ASKED,
            "'unlabeled' is among the classes",
        ),
        "PPM images": (images(moving, "ppm"), {}, REFUSED, "is a P.M image.*save it as PNG"),
        "masks as JPEG": (pairs_in("jpg", "L"), PAIRED, RIGHT, "JPEG files, whose values are smeared"),
    },
    "csv": {
        "labels in two cases": (labelled("Cat", "cat", "dog"), {}, ASKED, f"'Cat' and 'cat' {TWINS}"),
        "labels with spaces around": (labelled("cat", " cat", "dog "), {}, RIGHT, "2 classes"),
        "nan among labels": (labelled("cat", "nan", "dog"), {}, ASKED, "'nan' is among the classes"),
        "an empty label": (labelled("cat", "", "dog"), {}, REFUSED, "line 3: the label is empty"),
        "several labels in one": (labelled("Edema|Mass", "Mass", "Edema"), {}, ASKED, "several labels of one sample"),
        "several labels in one, said to be one": (
            labelled("Edema|Mass", "Mass", "Edema"),
            {"target_kind": "class"},
            RIGHT,
            "3 classes",
        ),
        "labels of several words": (labelled("hot dog", "dog", "cat"), {}, RIGHT, "3 classes"),
        "a test without labels": (UNLABELLED, {}, REFUSED, "line 4: the label is empty.*--leave-out test"),
        "a test without labels, left out": (
            UNLABELLED,
            {"leave_out": "test"},
            RIGHT,
            "train 2; .*left out: the split test",
        ),
        "a test whose labels are -1": (
            listing("file,label,split\n0.png,0,train\n1.png,1,train\n2.png,-1,test\n"),
            {},
            ASKED,
            "every label of test is -1",
        ),
        "a list above its folder of files": (
            beside("train", "train.csv"),
            {},
            REFUSED,
            "it is in train: write train/",
        ),
        "a file with two labels": (listing("file,label\n0.png,a\n1.png,b\n0.png,b\n"), {}, ASKED, "as 'a' and as 'b'"),
        "labels that are lists, as pandas writes them": (
            labelled('"[0, 2]"', '"[1]"'),
            {},
            ASKED,
            r"is '\[0, 2\]' a class, or several labels",
        ),
        "prices in thousands": (labelled("1000", "4000", "9000"), {}, ASKED, "3 different .* from 1000 to 9000: cl"),
        "labels of several numbers": (labelled("0 1", "1"), {}, ASKED, "is '0 1' a class, or several labels"),
        "a column is_test": (DIVIDED, {}, ASKED, "does the column 'is_test' divide the files"),
        "a column is_test, left out": (DIVIDED, {"leave_out": "is_test"}, RIGHT, "columns not used: 'is_test'"),
        "a file in two splits": (
            listing("file,label,split\n0.png,a,train\n1.png,b,train\n0.png,a,test\n"),
            {},
            RIGHT,
            "files in more than one split: '0.png'",
        ),
    },
    "table": {
        "decimal commas": (rows("a;b;y", "0,5;1;0", "1,5;2;1"), TARGET, REFUSED, "'a' holds numbers written as '0,5'"),
        "decimal commas in the target": (rows("a;y", "1;0,5", "2;1,25"), TARGET, REFUSED, "'y' holds numbers written"),
        "marks of thousands": (rows("a,y", '"1,500",0', '"2,500",1'), TARGET, REFUSED, "numbers written as '1,500'"),
        "percent": (rows("a,y", "5%,0", "7 %,1"), TARGET, REFUSED, "numbers written as '5%'"),
        "hexadecimal": (rows("a,y", "0x1f,0", "0x20,1"), TARGET, REFUSED, "numbers written as '0x1f'"),
        "postal codes": (rows("zip,a,y", "01067,1,0", "80331,2,1"), TARGET, ASKED, "'zip' holds '01067': a number, or"),
        "postal codes, said to be numbers": (
            rows("zip,y", "01067,0", "80331,1"),
            {"input": "zip=zip", "target": "y=y"},
            RIGHT,
            "input zip: one int64",
        ),
        "numbers of 19 digits": (rows("a,y", f"{1 << 62},0", f"{(1 << 62) + 1},1"), TARGET, ASKED, "a number, or a co"),
        "answers in two cases": (rows("a,y", "1,Yes", "2,yes", "3,no"), TARGET, ASKED, f"'Yes' and 'yes' {TWINS}"),
        "NaN among words": (rows("a,y", "1,x", "2,NaN", "3,z"), TARGET, ASKED, "'NaN' is among the classes"),
        "a class called none": (rows("a,y", "1,none", "2,ring"), TARGET, RIGHT, "one of 2 classes"),
        "classes as 0.0 and 1.0": (rows("a,y", "1,0.0", "2,1.0"), TARGET, ASKED, "classes or quantities"),
        "pandas' row numbers": (rows(",a,y", "0,1,0", "1,2,1"), TARGET, ASKED, "'Unnamed: 0' a feature, or a number"),
        "a first line of values": (rows("5.1,cat", "4.9,cat", "6.3,dog"), {}, ASKED, "is the first line a sample"),
        "a mark at the start of the file (BOM)": (rows("\ufeffy,a", "0,1.5", "1,2"), TARGET, RIGHT, "y: one of 2"),
        "times with a zone": (rows("t,a,y", "2020-01-01T00:00+02:00,1,0"), TARGET, ASKED, "'t' holds text"),
        "prices in thousands": (rows("a,y", "1,0", "2,4000"), TARGET, ASKED, "2 different .* from 0 to 4000: classes"),
        "yes, true and 1": (rows("a,y", "1,yes", "2,1", "3,no", "4,0"), TARGET, ASKED, "several words for yes or no"),
        "Fortran's exponents": (rows("a,y", "1.5D+03,0", "1D0,1"), TARGET, REFUSED, r"numbers written as '1.5D\+03'"),
        "currencies": (rows("a,y", "$1.50,0", "$2,1"), TARGET, REFUSED, r"numbers written as '\$1.50'"),
        "a column fold": (rows("a,fold,y", "1,0,0", "2,1,1"), TARGET, ASKED, "does the column 'fold' divide the rows"),
        "a column set": (
            rows("a,set,y", "1,train,0", "2,test,1"),
            TARGET,
            ASKED,
            "'set' divide the rows.*call it split",
        ),
        "a column test_score": (rows("a,test_score,y", "1,2,0", "2,3,1"), TARGET, RIGHT, "input x: 2 float32"),
        "a table in UTF-16": (only("t.csv", "a,y\n1,0\n".encode("utf-16")), TARGET, REFUSED, "it is not UTF-8"),
    },
    "hdf5": {
        "classes with a gap": (
            hdf5(images=PIXELS, labels=np.array([0, 1, 7])[Y]),
            {},
            RIGHT,
            "5 of 8 classes have no sample",
        ),
        "255 for nothing, said to be a class": (
            hdf5(images=PIXELS, labels=np.array([0, 1, 255])[Y]),
            {"target_kind": "class"},
            RIGHT,
            "253 of 256 classes have no sample",
        ),
        "255 for nothing, not said": (
            hdf5(images=PIXELS, labels=np.array([0, 1, 255])[Y]),
            {},
            ASKED,
            "3 different whole numbers from 0 to 255: classes",
        ),
        "channels first": (
            hdf5(images=PIXELS.transpose(0, 3, 1, 2), labels=Y),
            {},
            RIGHT,
            "images: 3x8x8 in the source, taken as channels first, and stored as 8x8x3",
        ),
        "two arrays of labels": (hdf5(images=PIXELS, labels=Y, coarse=Y // 2), {}, RIGHT, "not used: 'coarse'"),
        "NaN among labels": (
            hdf5(images=PIXELS, labels=np.where(Y == 2, np.nan, Y)),
            {},
            REFUSED,
            "labels of sample 2 is not finite",
        ),
    },
    "parquet": {
        "labels in lists": (
            only_table(a=X[:, 0], y=[[0], [0, 1]] * 6),
            TARGET,
            ASKED,
            "y holds lists of whole numbers, of unequal length",
        ),
        "lists, said to be a sequence": (
            only_table(a=X[:, 0], y=[[0], [0, 1]] * 6),
            {"target": "y", "target_kind": "regression"},
            RIGHT,
            "target y: up to 2 int64",
        ),
        "a test without labels, left out": (in_files(test={"a": X[:, 0]}), {"leave_out": "test"}, RIGHT, "train 12"),
        "a test without labels": (in_files(test={"a": X[:, 0]}), {}, REFUSED, "other columns .*--leave-out"),
        "a test whose labels are -1": (
            in_files(test={"a": X[:, 0], "label": 0 * Y - 1}),
            {},
            ASKED,
            "every label of test is -1",
        ),
    },
    "tfrecord": {
        "a test without labels, left out": (
            records_of_splits,
            {"leave_out": "test"},
            RIGHT,
            "left out: the split test",
        ),
    },
    "webdataset": {
        "folders of pictures, as they are": (packed("a/0.png", "b/1.png"), {}, REFUSED, "pictures alone.*tar -xf"),
    },
    "numpy": {
        "words in two cases": (npz(x=X, y=np.array(["Cat", "cat", "dog"])[Y]), {}, ASKED, f"'Cat' and 'cat' {TWINS}"),
        "a test without labels": (npz(x_train=X, y_train=Y, x_test=X), {}, REFUSED, "the split test has no y"),
        "a test without labels, left out": (
            npz(x_train=X, y_train=Y, x_test=X),
            {"leave_out": "test"},
            RIGHT,
            "train 12; .*left out: the split test",
        ),
    },
    "zip": {
        "folders fold0, fold1": (archive(fold0__0=PICTURE, fold1__1=PICTURE), {}, ASKED, "parts of a data set, or"),
        "a list beside pictures of one folder": (
            archive(labels_csv=b"file,label\n", i__0=PICTURE, i__1=PICTURE),
            {},
            ASKED,
            "'labels.csv' may list their labels",
        ),
        "a list beside class folders": (
            archive(labels_csv=b"file,label\n", a__0=PICTURE, b__1=PICTURE),
            {},
            RIGHT,
            "left out, no pictures: 'labels.csv'",
        ),
        "two pictures of one name": (twice_of_one_name, {}, REFUSED, "two pictures are called 'a/0.png'"),
    },
}
