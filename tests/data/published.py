"""Small copies of published kinds of data, by format; docs/reference/sources.md says how `hpcdl shard` treats each."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.data.sharding import cifar_folder, idx_folder
from tests.data.test_asked import PICTURE, both, file, pictures, product
from tests.data.test_formats import IMAGE, LABEL, example, framed, png, run_plan, tar

Save = Callable[[Path], Path]
Case = tuple[Save, dict[str, Any], str, str]
"""How to make the source, the flags, the outcome (right, asked or refused), and a pattern of the message."""
RIGHT, ASKED, REFUSED = "right", "asked", "refused"
AB = ("cats", "dogs")
COUNT = 12
X, Y = np.ones((COUNT, 5), np.float32), np.arange(COUNT) % 3
PIXELS = np.random.default_rng(3).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)


def images(make: Callable[[int], Image.Image], ending: str, **options: Any) -> Save:
    """Two class folders of images; `make` builds an image from its number."""

    def save(root: Path) -> Path:
        for number in range(8):
            path = root / "s" / AB[number % 2] / f"{number}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            make(number).save(path, **options)
        return root / "s"

    return save


def several_pages(root: Path) -> Path:
    for number in range(4):
        path = root / "s" / AB[number % 2] / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        one = [Image.fromarray(np.full((6, 6), page, np.uint8)) for page in range(3)]
        one[0].save(path, save_all=True, append_images=one[1:])
    return root / "s"


def only(name: str, content: bytes | str) -> Save:
    def save(root: Path) -> Path:
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return root / name

    return save


def hdf5(name: str = "a.h5", **found: Any) -> Save:
    def save(root: Path) -> Path:
        with h5py.File(root / name, "w") as made:
            for path, value in found.items():
                made[path] = value
        return root / name

    return save


def folder(*saves: Save) -> Save:
    """A folder with the files of `saves`."""

    def save(root: Path) -> Path:
        (root / "s").mkdir()
        for one in saves:
            one(root / "s")
        return root / "s"

    return save


def lists_in_two_axes(root: Path) -> Path:
    with h5py.File(root / "a.h5", "w") as made:
        data = made.create_dataset("x", (COUNT, 2), h5py.vlen_dtype(np.float32))
        for number in range(COUNT):
            data[number] = [np.ones(number + 1, np.float32)] * 2
        made["y"] = Y
    return root / "a.h5"


def linked(root: Path) -> Path:
    hdf5("src.hdf", data=PIXELS)(root)
    return hdf5(images=h5py.ExternalLink("src.hdf", "/data"), labels=Y)(root)


def virtual(root: Path) -> Path:
    hdf5("src.hdf", data=PIXELS)(root)
    layout = h5py.VirtualLayout(PIXELS.shape, "u1")
    layout[:] = h5py.VirtualSource("src.hdf", "data", PIXELS.shape)
    with h5py.File(root / "a.h5", "w") as made:
        made.create_virtual_dataset("images", layout)
        made["labels"] = Y
    return root / "a.h5"


def storage(root: Path) -> Path:
    with h5py.File(root / "a.h5", "w") as made:
        made.create_dataset("images", PIXELS.shape, "u1", external=[("raw.dat", 0, PIXELS.nbytes)])
        made["labels"] = Y
    return root / "a.h5"


def packed(root: Path) -> Path:
    with h5py.File(root / "era.nc", "w") as made:
        made["t"], made["y"] = np.arange(COUNT, dtype=np.int16), Y
        made["t"].attrs.update(scale_factor=0.5, add_offset=273.0, _FillValue=np.int16(-1))
    return root / "era.nc"


def records(root: Path) -> Path:
    kind = np.dtype([("pt", "<f4"), ("label", "<i8")])
    return hdf5(jets=np.zeros(COUNT, kind))(root)


def matlab(root: Path) -> Path:
    with h5py.File(root / "svhn.mat", "w", userblock_size=512) as made:
        made["X"], made["y"] = PIXELS.transpose(0, 3, 2, 1), Y[None].astype(float)
        for array, kind in (("X", "uint8"), ("y", "double")):
            made[array].attrs["MATLAB_class"] = np.bytes_(kind)
    return root / "svhn.mat"


def chunk_of(num_bytes: int) -> Save:
    def save(root: Path) -> Path:
        with h5py.File(root / "a.h5", "w") as made:
            made.create_dataset("x", (num_bytes >> 20, 1 << 20), "u1", chunks=(num_bytes >> 20, 1 << 20))
            made["y"] = np.arange(num_bytes >> 20) % 2
        return root / "a.h5"

    return save


def large_volume(root: Path) -> Path:
    """Two volumes of 300 MiB each, in a sparse file."""
    (root / "s").mkdir()
    values = np.lib.format.open_memmap(root / "s" / "x.npy", "w+", np.uint8, (2, 300, 1024, 1024))
    values[:, 0, 0, 0] = 7
    np.save(root / "s" / "y.npy", np.array([0.5, 1.5], np.float32))
    return root / "s"


def npz(name: str = "a", /, **found: Any) -> Save:
    def save(root: Path) -> Path:
        np.savez(root / f"{name}.npz", **found)
        return root / f"{name}.npz"

    return save


def columns(**found: Any) -> Save:
    def save(root: Path) -> Path:
        pq.write_table(pa.table(found), root / "t.parquet")
        return root / "t.parquet"

    return save


def recorded(*made: bytes, pack: Callable[[bytes], bytes] = bytes) -> Save:
    return only("a.tfrecord", pack(framed(list(made))))


def zipped(*names: str) -> Save:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, PICTURE)
    return only("a.zip", content.getvalue())


def emnist(root: Path) -> Path:
    (root / "s").mkdir()
    for name, kind, sides, values in (
        ("images-idx3", 0x803, (COUNT, 8, 8), PIXELS[..., 0]),
        ("labels-idx1", 0x801, (COUNT,), Y),
    ):
        head = struct.pack(f">I{len(sides)}I", kind, *sides)
        content = head + np.ascontiguousarray(values, np.uint8).tobytes()
        (root / "s" / f"emnist-balanced-train-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return root / "s"


def prepared(root: Path) -> Path:
    made = [example(image=PICTURE, label=number % 3) for number in range(6)]
    run_plan(root / "d" / "1.0.0", {"image": IMAGE, "label": LABEL}, {"train": [made]})
    return root / "d"


def listing(text: str) -> Save:
    return both(only("list.csv", text), *(only(f"{number}.png", PICTURE) for number in range(6)))


WORDS = "mass,sex,species\n1.5,male,a\n2.5,female,b\n3.0,male,a\n"
COSMOS = [example(x=np.zeros((4, 4, 4, 4), "<i2").tobytes(), y=np.ones(4, "<f4").tobytes()) for _ in range(4)]
PAIRS = {"input": "images=image", "target": "masks=mask"}

PUBLISHED: dict[str, dict[str, Case]] = {
    "image-folder": {
        "pictures of floats (TIFF)": (
            images(lambda n: Image.fromarray(np.full((6, 6), n / 8, np.float32)), "tif"),
            {},
            RIGHT,
            "float32",
        ),
        "pictures of 12 bits in 16": (
            images(lambda n: Image.fromarray(np.full((6, 6), 500 * n, np.uint16)), "tif"),
            {},
            RIGHT,
            "6x6x1 float32",
        ),
        "8 and 16 bits in one set": (
            images(lambda n: Image.fromarray(np.full((6, 6), 9 * n, (np.uint8, np.uint16)[n % 2])), "png"),
            {},
            REFUSED,
            "more than 8 bits",
        ),
        "pictures of 32 bits with a sign": (
            images(lambda n: Image.fromarray(np.full((6, 6), 70 * n - 100, np.int32)), "tif"),
            {},
            RIGHT,
            "float32",
        ),
        "files of several pages": (several_pages, {}, REFUSED, "3 pages|several pages|pages"),
        "images and masks, named": (pictures("images", "masks"), PAIRS, RIGHT, "input image: .*target mask"),
        "COCO or YOLO: text files among the pictures": (
            both(pictures("images"), file("labels/0.txt", b"0 0.5 0.5 1 1"), file("labels/1.txt", b"1 0.5 0.5 1 1")),
            {},
            ASKED,
            "is not an image but text: of each image's boxes",
        ),
        "sounds in class folders (.wav)": (
            both(*(file(f"{name}/1.wav", b"RIFF\0\0\0\0WAVEfmt " + bytes(16)) for name in AB)),
            {},
            REFUSED,
            "wav|WAV|sound",
        ),
        "zarr": (both(file("x/.zarray", b"{}"), file("x/0.0", b"0")), {}, REFUSED, "zarr, .*--reader FILE.py:NAME"),
        "NIfTI in class folders": (
            both(*(file(f"{name}/1.nii.gz", gzip.compress(b"nifti")) for name in AB)),
            {},
            REFUSED,
            "--reader|reader",
        ),
        "--target-kind regression for folders": (
            pictures(*AB),
            {"target_kind": "regression"},
            REFUSED,
            "needs targets that",
        ),
        "--label-field for folders": (pictures(*AB), {"label_field": "y"}, REFUSED, "--label-field is not for"),
        "--input that folders do not have": (
            pictures(*AB),
            {"input": "no=x", "target": "foo=y"},
            REFUSED,
            "has no folder",
        ),
        "folders of splits, called by years": (
            pictures(*product(["train2017", "val2017"], AB)),
            {},
            RIGHT,
            "train 4, val 4",
        ),
    },
    "csv": {
        "measured numbers as labels": (
            listing("file,label\n" + "".join(f"{n}.png,{n * 0.37:.3f}\n" for n in range(6))),
            {},
            RIGHT,
            "target label: one float32",
        ),
        "a head of image,label": (listing("image,label\n0.png,a\n1.png,b\n"), {}, RIGHT, "2 classes"),
        "a head of image_path,class": (listing("image_path,class\n0.png,a\n1.png,b\n"), {}, RIGHT, "2 classes"),
        "a head of id,label": (listing("id,label\n0.png,a\n1.png,b\n"), {}, RIGHT, "2 classes"),
        "labels -1 and 1": (listing("file,label\n0.png,-1\n1.png,1\n"), {}, RIGHT, "2 classes.*-1 -> 0, 1 -> 1"),
    },
    "table": {
        "a column of words": (only("t.csv", WORDS), {"target": "species=y"}, ASKED, "'sex' holds text. As numbers"),
        "a column of words, one-hot": (
            only("t.csv", WORDS),
            {"target": "species=y", "categories": "sex=one-hot"},
            RIGHT,
            "female 1, male 2",
        ),
        "a table without a head": (only("t.csv", "1,2,0\n3,1,1\n"), {"target": "c3=y"}, ASKED, "--head none"),
        "a table without a head, said so": (
            only("t.csv", "1,2,0\n3,1,1\n"),
            {"target": "c3=y", "head": "none"},
            RIGHT,
            "x: 2 float32",
        ),
        "semicolons": (only("t.csv", "a;b;y\n1;2;0\n3;4;1\n"), {}, RIGHT, "x: 2 float32"),
        "a folder of tables": (
            folder(only("train.csv", "a,b,y\n1,2,0\n3,4,1\n"), only("test.csv", "a,b,y\n1,2,0\n")),
            {},
            RIGHT,
            "x: 2 float32.*train 2",
        ),
        "a folder of tables of other columns": (
            folder(only("train.csv", "a,y\n1,0\n"), only("test.csv", "a\n1\n")),
            {},
            REFUSED,
            "'test.csv' and 'train.csv' differ in their columns .'y'.; make them alike, or give --leave-out test.csv",
        ),
        "a folder of lists of files": (
            folder(only("l.csv", "image,label\n1.png,0\n")),
            {},
            REFUSED,
            r"cannot tell the format .* one of its files, such as l\.csv \(csv\)",
        ),
        "missing values": (only("t.csv", "a,y\n1,0\n,1\n"), {}, REFUSED, "not finite .*--nan skip"),
    },
    "hdf5": {
        "an external link": (linked, {}, ASKED, "link to /data in another file, src.hdf; give --follow-links"),
        "an external link, followed": (linked, {"follow_links": True}, RIGHT, "links followed to 'src.hdf'"),
        "a virtual data set": (virtual, {}, ASKED, "virtual data set, .*src.hdf.*--follow-links"),
        "a virtual data set, read": (virtual, {"follow_links": True}, RIGHT, "links followed to 'src.hdf'"),
        "external storage": (storage, {}, REFUSED, "external storage.*h5repack"),
        "one chunk of 300 MiB": (chunk_of(300 << 20), {}, REFUSED, "chunks of 300 MiB, and one of at most 256 MiB"),
        "an array that was never written": (chunk_of(257 << 20), {}, REFUSED, "chunks"),
        ".nxs of a light source": (hdf5("scan.nxs", images=PIXELS, labels=Y), {}, RIGHT, "8x8x3 uint8"),
        "MATLAB's pictures, samples last": (matlab, {}, ASKED, "X seems .*give --sample-axis last"),
        "MATLAB's pictures, said so": (
            matlab,
            {"sample_axis": "last", "target_kind": "class"},
            RIGHT,
            "input X: 8x8x3 uint8",
        ),
        "netCDF, packed": (packed, {"input": "t=t", "target": "y=y"}, RIGHT, "scale_factor 0.5, add_offset 273"),
        "records (compound types)": (
            records,
            {"input": "jets/pt=pt", "target": "jets/label=y"},
            RIGHT,
            "input pt: one float32",
        ),
        "lists of any length in two columns": (lists_in_two_axes, {}, REFUSED, "one list a sample is needed"),
        "bfloat16 as two opaque bytes": (
            hdf5(x=np.zeros(COUNT, "V2"), y=Y),
            {},
            REFUSED,
            "opaque values of 2 bytes .*bfloat16 as float32",
        ),
        "masks of a graph": (
            hdf5(x=X, y=Y, train_mask=Y > 1, test_mask=Y < 1),
            {"input": "x=x", "target": "y=y"},
            RIGHT,
            "input x: 5 float32",
        ),
    },
    "numpy": {
        "x_train and x_test": (npz(x_train=X, y_train=Y, x_test=X, y_test=Y), {}, RIGHT, "train 12, test 12"),
        "a folder of .npz of images": (
            folder(npz("train", images=PIXELS, labels=Y), npz("val", images=PIXELS, labels=Y)),
            {},
            RIGHT,
            "8x8x3 uint8, 3 classes; train 12, val 12",
        ),
        "a folder of .npz, each a sample": (
            folder(*(npz(f"{n}", x=X[:3], y=n % 2) for n in range(4))),
            {},
            RIGHT,
            "x: 3x5 float32.*each of the 4 files is one sample",
        ),
        "a folder of .npz, each a slice": (
            folder(*(npz(f"{n}", x=X[:, :4], mask=X[:, :4]) for n in range(3))),
            {},
            ASKED,
            "3 files one sample, .*--sample-is file or .*row",
        ),
        "volumes of 300 MiB": (large_volume, {}, RIGHT, "300x1024x1024 uint8"),
        "Fortran order": (npz(x=np.asfortranarray(X), y=Y), {}, RIGHT, "Fortran order"),
        "pickled objects": (npz(x=np.array([None] * 3), y=Y[:3]), {}, REFUSED, "holds Python objects"),
        "complex numbers": (npz(x=X.astype(np.complex64), y=Y), {}, REFUSED, "real and imaginary part"),
        "whole numbers over 2^24": (npz(x=np.full((COUNT, 2), 1 << 30), y=Y), {}, RIGHT, "rounds those over 16777216"),
    },
    "tfrecord": {
        "CosmoFlow: volumes as bytes": (
            recorded(*COSMOS),
            {"input": "x=x:int16:4x4x4x4", "target": "y=y:float32:4"},
            RIGHT,
            "4x4x4x4 int16",
        ),
        "CosmoFlow, packed by GZIP": (
            recorded(*COSMOS, pack=gzip.compress),
            {"input": "x=x:int16:4x4x4x4", "target": "y=y:float32:4"},
            RIGHT,
            "4x4x4x4 int16",
        ),
        "a table of numbers": (
            recorded(*(example(features=[float(n), 2.0], label=n % 2) for n in range(8))),
            {"input": "features=x", "target": "label=y"},
            RIGHT,
            "input x: 2 float32",
        ),
    },
    "webdataset": {
        "cifar-10-python.tar.gz": (
            only("cifar-10-python.tar.gz", gzip.compress(bytes(2048))),
            {},
            REFUSED,
            "unpack it|tar -x",
        ),
        "pictures with .cls": (
            lambda root: tar(root / "a.tar", {"0.png": PICTURE, "0.cls": b"1", "1.png": PICTURE, "1.cls": b"0"}),
            {},
            RIGHT,
            "2 classes",
        ),
    },
    "parquet": {
        "image and mask": (
            columns(image=[{"bytes": PICTURE}] * 4, mask=[{"bytes": png(np.zeros((6, 6), np.uint8))}] * 4),
            {"input": "image=image", "target": "mask=mask"},
            RIGHT,
            "target mask: 6x6",
        ),
        "words of a pandas category, as codes": (
            columns(mass=[1.5, 2.5], sex=pa.array(["m", "f"]).dictionary_encode(), y=[0, 1]),
            {"categories": "sex=codes"},
            RIGHT,
            "f 0, m 1",
        ),
        "Hugging Face's images with a label": (
            columns(image=[{"bytes": PICTURE, "path": "0.png"}] * 4, label=[0, 1] * 2),
            {},
            RIGHT,
            "2 classes",
        ),
    },
    "synthetic": {
        "ImageNet's shape": (
            lambda _: Path("synthetic:imagenet"),
            {"samples": 8},
            RIGHT,
            "224x224x3 uint8, 1000 classes",
        ),
    },
    "cifar10": {
        "the binary version": (
            lambda root: cifar_folder(root / "c", pickled=False, hundred=False)[0],
            {},
            RIGHT,
            "10 cl",
        ),
        "the python version": (
            lambda root: cifar_folder(root / "c", pickled=True, hundred=False)[0],
            {},
            RIGHT,
            "10 cl",
        ),
    },
    "cifar100": {
        "the python version": (
            lambda root: cifar_folder(root / "c", pickled=True, hundred=True)[0],
            {},
            RIGHT,
            "100 cl",
        ),
    },
    "tfds": {
        "an image with its class": (prepared, {}, RIGHT, "6x6x3 uint8, 3 classes"),
    },
    "mnist": {
        "IDX files, plain": (lambda root: idx_folder(root / "m")[0], {}, RIGHT, "28x28x1 uint8"),
        "EMNIST by its own names": (emnist, {}, RIGHT, "8x8x1 uint8"),
    },
    "zip": {
        "a folder per class": (zipped("cats/0.png", "dogs/0.png"), {}, RIGHT, "2 classes"),
        "train and val": (
            zipped("train/cats/0.png", "train/dogs/0.png", "val/cats/0.png", "val/dogs/1.png"),
            {},
            RIGHT,
            "train 2, val 2",
        ),
    },
    "text": {
        "a folder per class": (
            both(*(file(f"{name}/1.txt", b"a text") for name in ("neg", "pos"))),
            {},
            RIGHT,
            "2 classes",
        ),
    },
    "memmap": {
        "numbers without a header": (
            both(file("x.dat", X.tobytes()), file("y.dat", Y.astype("<i4").tobytes())),
            {"input": "x.dat=x:float32:5", "target": "y.dat=y:int32"},
            RIGHT,
            "input x: 5 float32",
        ),
    },
}
