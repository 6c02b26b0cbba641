"""Common mistakes in sources: exit 2, the true reason, the flag that helps, no leftovers."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hpcdl.core.errors import HpcdlError, SourceError
from hpcdl.data.sources.base.source import recognise
from tests.data.sharding import image_folder, make
from tests.data.test_formats import IMAGE, LABEL, example, feature, framed, npy, png, run_plan, tar, tensor

Save = Callable[[Path], Path]
COUNT = 12
X, Y = np.ones((COUNT, 5), np.float32), np.linspace(0, 1, COUNT)


def archive(**members: bytes) -> Save:
    """A .tar of two samples with these members; those named `one_...` belong to the first sample only."""

    def save(folder: Path) -> Path:
        both = {name: value for name, value in members.items() if not name.startswith("one_")}
        content = {f"{number}.{name.replace('__', '.')}": value for number in (0, 1) for name, value in both.items()}
        first = {f"0.{name[4:]}": value for name, value in members.items() if name.startswith("one_")}
        return tar(folder / "a.tar", {**content, **first})

    return save


def columns(**found: Any) -> Save:
    def save(folder: Path) -> Path:
        pq.write_table(pa.table(found), folder / "t.parquet")
        return folder / "t.parquet"

    return save


def files(**found: bytes | str) -> Save:
    """A folder of files by name; __ stands for a dot, ___ for a slash."""

    def save(folder: Path) -> Path:
        for name, content in found.items():
            path = folder / "s" / name.replace("___", "/").replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / "s"

    return save


def only(name: str, content: bytes | str) -> Save:
    """A single file."""

    def save(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / name

    return save


def hdf5(**found: Any) -> Save:
    def save(folder: Path) -> Path:
        with h5py.File(folder / "a.h5", "w") as file:
            for name, value in found.items():
                file[name.replace("__", "/")] = value
        return folder / "a.h5"

    return save


def tfds(
    features: dict[str, Any], *made: bytes, spoil: Callable[[Path], object] = lambda _: None, count: int | None = None
) -> Save:
    def save(folder: Path) -> Path:
        source = run_plan(folder / "d" / "1.0.0", features, {"train": [list(made)]})
        if count is not None:
            info = json.loads((source / "dataset_info.json").read_text())
            info["splits"][0]["shardLengths"] = [count]
            (source / "dataset_info.json").write_text(json.dumps(info))
        spoil(source)
        return folder / "d"

    return save


def twice(folder: Path) -> Path:
    for version in ("1.0.0", "2.0.0"):
        run_plan(folder / "d" / version, {"image": IMAGE, "label": LABEL}, {"train": [[PICTURE]]})
    return folder / "d"


def two_sizes(folder: Path) -> Path:
    image_folder(folder / "s", {"a": 1}, size=8)
    image_folder(folder / "s" / "more", {"b": 1}, size=9)
    return folder / "s"


def listed(lines: str) -> Save:
    def save(folder: Path) -> Path:
        Image.new("L", (4, 4)).save(folder / "p.png")
        (folder / "list.csv").write_text(lines)
        return folder / "list.csv"

    return save


def other_columns(folder: Path) -> Path:
    for split, name in (("train", "y"), ("test", "z")):
        pq.write_table(pa.table({"x": Y, name: Y}), folder / f"{split}.parquet")
    return folder


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


IMAGE_BYTES = png(np.zeros((4, 4, 3), np.uint8))
OTHER_BYTES = png(np.zeros((4, 5, 3), np.uint8))
PICTURE = example(image=IMAGE_BYTES, label=1)
PICTURES = {"image": IMAGE, "label": LABEL}
NUMBER = {"x": tensor("float32", 2), "y": tensor("float32")}
RAW = {"input": "x.dat=x:float32:5", "target": "y.dat=y:float64"}
SERIES = npy(np.ones(3, np.float32))
RECORDS = framed([example(image=IMAGE_BYTES, label=0), example(image=IMAGE_BYTES, label=1)])

Case = tuple[Save, dict[str, Any], str]
WRONG: dict[str, dict[str, Case]] = {
    "webdataset": {
        "no archive": (only("a.tar", b"no tar" * 200), {}, "is no .tar archive, or cut short"),
        "compressed": (only("a.tar.gz", gzip.compress(b"x")), {}, r"is compressed; unpack it \(gzip -d\)"),
        "no samples": (archive(), {}, "hold no samples; members are called NAME.jpg"),
        "a member is missing": (
            archive(png=IMAGE_BYTES, one_cls=b"1"),
            {},
            "sample '1' of a.tar has no .cls, which others have",
        ),
        "a class is missing": (
            archive(png=IMAGE_BYTES, one_cls=b"1"),
            {"label_field": "cls"},
            "sample '1' of a.tar has no .cls .*--label-field",
        ),
        "no image so called": (archive(png=IMAGE_BYTES, cls=b"1"), {"image_field": "jpg"}, "has an image .jpg"),
        "labels of two kinds": (archive(png=IMAGE_BYTES, json=b'{"label": [1]}'), {}, r"found \[1\]"),
        "JSON without a label": (archive(png=IMAGE_BYTES, json=b'{"a": 1}'), {}, "no 'label'; .*KEY one of 'a'"),
        "no JSON": (archive(png=IMAGE_BYTES, json=b"{1"), {}, "sample '0' of a.tar: .json is no JSON"),
        "JSON that is a list": (archive(png=IMAGE_BYTES, json=b"[1]"), {}, "values by name are needed"),
        "a label is negative": (archive(png=IMAGE_BYTES, cls=b"x\xff"), {}, ".cls is not UTF-8"),
        "a text that is no number": (
            archive(npy=SERIES, cls=b"many"),
            {},
            "sample '0' of a.tar: .cls holds 'many'; a whole number",
        ),
        "no array": (archive(npy=b"no numpy", cls=b"1"), {}, "sample '0' of a.tar: .npy is no array of numbers"),
        "a pickled array": (
            archive(npy=npy(np.array([None])), cls=b"1"),
            {},
            ".npy is no array of numbers: Object arrays cannot be loaded",
        ),
        "arrays of two types": (
            archive(npy=SERIES, cls=b"1", one_npy=npy(np.ones(3))),
            {},
            r"is 3 float32, those before it 3 float64; make them alike",
        ),
        "members of another kind": (
            archive(mp4=b"film", cls=b"1"),
            {"input": "mp4=x"},
            ".mp4 is not taken; members are images, .npy",
        ),
        "masks of two sizes": (
            archive(mask__png=IMAGE_BYTES, x__npy=SERIES, **{"one_mask.png": OTHER_BYTES}),
            {"input": "x=x", "target": "mask=mask"},
            "is 4x4x3 uint8, those before it 4x5x3 uint8",
        ),
        "text in a caption": (archive(txt=b"caf\xe9", cls=b"1"), {}, "sample '0' is not UTF-8; save text"),
        "JSON with holes": (
            archive(npy=SERIES, json=b'{"y": null}'),
            {"input": "npy=x", "target": "json/y=y"},
            "sample '0' of a.tar: 'y' is None; numbers",
        ),
    },
    "parquet": {
        "no Parquet": (only("a.parquet", b"PAR1 or so"), {}, "cannot be read as Parquet"),
        "no rows": (columns(x=pa.array([], pa.float32()), y=pa.array([], pa.float32())), {}, "holds no samples"),
        "which target": (columns(a=Y, b=Y), {}, r"which column is the target\? Give --target COLUMN=NAME"),
        "text among the inputs": (
            columns(a=Y, b=["u"] * COUNT, y=Y),
            {},
            r"the column 'b' holds text\. .*--input COLUMN=NAME",
        ),
        "a date": (
            columns(t=pa.array([1] * COUNT, pa.timestamp("s")), y=Y),
            {},
            r"t is timestamp\[m?s\]; .*save dates and decimals as numbers",
        ),
        "a text is missing": (columns(t=["a", None], y=[0.5, 0.7]), {}, r"t has no value in 1 rows \(null\)"),
        "a list is missing": (columns(t=[[1], None], y=[0.5, 0.7]), {}, r"t has no value in 1 rows"),
        "a list with a hole": (columns(t=[[1, None], [1, 2]], y=[0.5, 0.7]), {}, r"lists in t have holes"),
        "ragged inside": (columns(t=[[[1], [1, 2]]], y=[0.5]), {}, "only the first axis may vary"),
        "a number is missing": (columns(x=[1, None], y=[0.5, 0.7]), {}, "x of sample 1 is not finite .*--nan skip"),
        "a split of another name": (columns(x=Y, y=Y, split=["one"] * COUNT), {}, "write train, val or test"),
        "splits of other columns": (other_columns, {}, r"the files of \w+ have other columns \('[yz]'\)"),
        "no such column": (columns(x=Y, y=Y), {"input": "w=w"}, "has no array 'w'; it has 'x'"),
        "no image column": (columns(x=Y, y=Y), {"image_field": "x"}, "the column 'x' holds no image files"),
        "which label": (columns(image=[IMAGE_BYTES], a=[1]), {}, r"which column is the label\? Give --label-field"),
        "a label is missing": (columns(image=[IMAGE_BYTES] * 2, label=[1, None]), {}, "found None"),
        "an image is missing": (columns(image=[IMAGE_BYTES, None], label=[0, 1]), {}, "image of row 1 has no bytes"),
    },
    "text": {
        "labels beside": (
            only("a.txt", "u\nv\n"),
            {},
            r"where are the labels of its lines\? .*--label-field FILE.*--format table",
        ),
        "labels elsewhere": (only("a.txt", "u\nv\n"), {"label_field": "n.txt"}, "n.txt is not beside it"),
        "unequal counts": (files(a__txt="u\nv\n", a__labels__txt="1\n"), {}, "has 2 lines and a.labels.txt 1"),
        "a label is empty": (files(a__txt="u\nv\n", labels__txt="1\n\n"), {}, "labels.txt line 2 is empty"),
        "no UTF-8": (files(u__txt=b"a\n", v__txt=b"caf\xe9\n"), {}, "text of sample 1 is not UTF-8"),
        "no lines": (files(u__txt="", v__txt=""), {}, "holds no samples"),
        "very many labels": (
            files(a__txt="u\n" * 60, labels__txt="".join(f"{n}\n" for n in range(60))),
            {},
            "60 different whole numbers in 60 samples: are these classes",
        ),
    },
    "memmap": {
        "type not stated": (
            files(x__dat=X.tobytes()),
            {},
            "do not tell their type; give --input FILE=NAME:DTYPE:SHAPE",
        ),
        "no target": (files(x__dat=X.tobytes()), {"input": RAW["input"]}, "give --target FILE=NAME:DTYPE:SHAPE"),
        "no type": (files(x__dat=X.tobytes()), {**RAW, "input": "x.dat=x"}, "--input 'x.dat=x': write FILE=NAME"),
        "no such type": (files(x__dat=b""), {**RAW, "input": "x.dat=x:real:5"}, "there is no type 'real'"),
        "complex": (files(x__dat=b""), {**RAW, "input": "x.dat=x:complex64:5"}, "complex64 is not a type of plain"),
        "no such file": (files(x__dat=X.tobytes()), RAW, "has no file 'y.dat'"),
        "cut short": (
            files(x__dat=X.tobytes()[:-1], y__dat=Y.tobytes()),
            RAW,
            r"x.dat has 239 bytes, and samples of 5 float32 have 20: no whole number",
        ),
        "a side of nothing": (files(x__dat=b"", y__dat=b""), {**RAW, "input": "x.dat=x:float32:0"}, "no whole number"),
        "unequal counts": (files(x__dat=X.tobytes(), y__dat=Y.tobytes()[:-8]), RAW, r"\(x.dat 12, y.dat 11\)"),
        "a header in it": (
            files(x__dat=b"HEAD" + X.tobytes(), y__dat=Y.tobytes()),
            {**RAW, "input": "x.dat=x:float32:5:400"},
            "no whole number",
        ),
    },
    "tfds": {
        "two versions": (twice, {}, "several prepared data sets: 1.0.0, 2.0.0; give the folder of one"),
        "a file is missing": (
            tfds(PICTURES, PICTURE, spoil=lambda folder: next(folder.glob("*.tfrecord*")).unlink()),
            {},
            "the split train has 0 of the 1 files",
        ),
        "records are missing": (
            tfds(PICTURES, PICTURE, count=2),
            {},
            "holds 1 records, and dataset_info.json states 2",
        ),
        "cut short": (
            tfds(PICTURES, PICTURE, spoil=lambda folder: cut(next(folder.glob("*.tfrecord*")), 30)),
            {},
            "damaged or cut short at byte 0",
        ),
        "another file format": (
            tfds(PICTURES, PICTURE, spoil=write("dataset_info.json", '{"fileFormat": "array_record"}')),
            {},
            "is prepared as 'array_record'; prepare it as TFRecord",
        ),
        "no JSON": (
            tfds(PICTURES, PICTURE, spoil=write("features.json", "{")),
            {},
            "features.json cannot be read as JSON",
        ),
        "JSON of another kind": (
            tfds(PICTURES, PICTURE, spoil=write("features.json", '{"featuresDict": 1}')),
            {},
            "is not as TensorFlow Datasets writes it",
        ),
        "no samples": (tfds(PICTURES, count=0), {}, "holds no samples; prepare it again"),
        "which target": (
            tfds({"a": NUMBER["x"], "b": NUMBER["y"]}, example(a=[0.5, 1.0], b=0.5)),
            {},
            "--target PATH=",
        ),
        "a label out of range": (tfds(PICTURES, example(image=IMAGE_BYTES, label=7)), {}, "7, but there are 3 classes"),
        "no image file": (tfds(PICTURES, example(image=b"none", label=1)), {}, "record 0 .* image is no image file"),
        "a value is missing": (tfds(PICTURES, example(image=IMAGE_BYTES)), {}, "'label' has 0 values"),
        "another shape": (tfds(NUMBER, example(x=[0.5] * 3, y=0.5)), {}, r"'x' has 3 values, .* shape \(2,\)"),
        "no such feature": (
            tfds(PICTURES, PICTURE),
            {"label_field": "l"},
            "has no feature 'l'; it has 'image', 'label'",
        ),
        "a feature of another kind": (
            tfds({**NUMBER, "film": feature("video_feature.Video")}, example(x=[0.5, 1.0], y=0.5)),
            {"input": "film=x"},
            "film is Video of an unknown type .*not taken",
        ),
    },
    "tfrecord": {
        "no image": (
            only("a.tfrecord", framed([example(a=1, b=2, label=0)])),
            {},
            r"which array is the input\? Give --input",
        ),
        "no label": (only("a.tfrecord", framed([example(image=IMAGE_BYTES)])), {}, "a label is one whole number"),
        "a label is negative": (
            only("a.tfrecord", framed([example(image=IMAGE_BYTES, label=-1)])),
            {},
            r"found \[-1\] in 'label'",
        ),
        "no Example": (only("a.tfrecord", framed([b"\xff\xff"])), {}, "the record is not a tf.train.Example"),
        "cut short": (only("a.tfrecord", RECORDS[:-5]), {}, "damaged or cut short at byte"),
        "compressed": (only("a.tfrecord", bz2.compress(RECORDS)), {}, "or compressed by other than gzip or zlib"),
    },
    "hdf5": {
        "cut short": (lambda folder: [path := hdf5(x=X, y=Y)(folder), cut(path, 900)][0], {}, "no HDF5 file"),
        "unequal counts": (hdf5(x=X, y=Y[:-1]), {}, "unequal numbers of samples"),
        "no such path": (hdf5(a__x=X, y=Y), {"input": "a/z=z"}, "has no array 'a/z'; it has"),
        "a single value": (hdf5(x=1.0, y=Y), {"input": "x=x"}, "single value|has no array"),
        "no arrays": (hdf5(), {}, "holds no arrays"),
        "complex": (hdf5(x=X.astype(np.complex64), y=Y), {}, "real and imaginary part"),
        "NaN in the target": (hdf5(x=X, y=np.where(Y > 0.9, np.nan, Y)), {}, "y of sample 10 is not finite"),
    },
    "images": {
        "a list of what is not there": (listed("file,label\nq.png,1\n"), {}, r"cannot read 'q.png'"),
        "a list from Windows": (
            listed("file,label\n.\\p.png,1\n"),
            {},
            r"cannot read .*; './p.png' is there: write / in place of \\ in the list",
        ),
        "a list without labels": (listed("file,label\np.png\n"), {}, "write file,label or file,label,split"),
        "a list with an odd split": (listed("file,label,split\np.png,1,a b\n"), {}, "a split cannot be called 'a b'"),
        "sizes differ": (two_sizes, {}, "--image-size"),
        "split in two": (
            listed("file,label,split\np.png,1,train\n"),
            {"split": "train=0.5,val=0.5"},
            "already divided",
        ),
        "fractions": (listed("file,label\np.png,1\n"), {"split": "train=0.5,val=0.1"}, "must sum to 1"),
        "too few to divide": (listed("file,label\np.png,0\n"), {"split": "train=0.5,val=0.5"}, "without a sample"),
    },
}
CASES = {f"{kind}: {name}": case for kind, own in WRONG.items() for name, case in own.items()}


@pytest.mark.parametrize("name", CASES)
def test_wrong_sources_are_refused_with_their_reason_and_leave_nothing(name: str, tmp_path: Path) -> None:
    save, options, words = CASES[name]
    (tmp_path / "in").mkdir()
    source = save(tmp_path / "in")
    with pytest.raises(HpcdlError, match=words) as caught:
        make(source, tmp_path / "new" / "out", **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "head", "what"),
    [
        ("a.fits", b"SIMPLE  =", "it is a FITS file: give a reader of your own"),
        ("a.nii.gz", b"\x1f\x8b", "it is a NIfTI file: give a reader of your own"),
        ("a.csv.gz", b"\x1f\x8b", "it is packed with gzip: unpack it"),
        ("scan", bytes(128) + b"DICM", "it is a DICOM file: give a reader of your own"),
        ("a.csv.bz2", b"BZh9", "it is packed with bzip2: unpack it"),
        ("a.arff", b"@relation iris\n@attribute a numeric\n@data\n1\n", "it is ARFF: save the lines below @data"),
        ("a1a", b"-1 3:1 11:0.5\n+1 4:1e-3\n", "it is LIBSVM's: x, y = sklearn.datasets.load_svmlight_file"),
        ("a.jpg", b"\xff\xd8\xff\xe0", "it is one image: give the folder"),
        ("a.json", b"[{}]", "it is JSON: convert rows with pandas"),
    ],
)
def test_single_files_of_known_formats_are_named(name: str, head: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(head + bytes(300))
    with pytest.raises(SourceError, match=f"has no format that hpcdl reads; {what}"):
        recognise(str(tmp_path / name))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["a.csv.gz", "b.csv.gz"], "of its file a.csv.gz: it is packed with gzip: unpack it"),
        (["1.nii.gz"], "of its file 1.nii.gz: it is a NIfTI file: give a reader"),
    ],
)
def test_folders_of_files_of_one_known_format_are_named(names: list[str], what: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\x1f\x8b" + bytes(300))
    with pytest.raises(SourceError, match=f"has no format that hpcdl reads; {what}"):
        recognise(str(tmp_path))


def flipped(path: Path, part: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[content.index(part)] ^= 64
    path.write_bytes(content)
    return path


def test_flipped_bits_of_arrays_are_found_where_the_format_has_checksums(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    with pytest.raises(SourceError, match=r"a\.npz: x\.npy is damaged: Bad CRC-32"):
        make(flipped(tmp_path / "a.npz", X.tobytes()[:8]), tmp_path / "out")
    table = pa.table({"a": X[:, 0], "y": Y})
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "a.parquet", **plain)
    path = flipped(tmp_path / "a.parquet", X[:, 0].tobytes()[:8])
    with pytest.raises(SourceError, match="CRC checksum verification failed"):
        make(path, tmp_path / "out", target="y", target_kind="regression")
