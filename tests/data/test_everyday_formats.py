"""Everyday file formats: TFRecord with fields, HDF5 with unusual names, records, MATLAB files, CSV headers."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from hpcdl.core.errors import SourceError, UsageError
from hpcdl.data.format.manifest import Manifest
from hpcdl.data.sources.base.source import recognise
from hpcdl.data.sources.layouts.records import example_class
from tests.data.sharding import contents, everything, make, numbers, pixels, same_samples
from tests.data.test_fields import stored
from tests.data.test_formats import framed, png, tar


def record(**values: Any) -> bytes:
    """Return a tf.train.Example: bytes, floats or integers by name."""
    made = example_class()()
    for name, value in values.items():
        own = made.features.feature[name]
        value = value if isinstance(value, list) else [value]
        kind = {bytes: own.bytes_list, float: own.float_list}.get(type(value[0]), own.int64_list)
        kind.value.extend(value)
    content: bytes = made.SerializeToString()
    return content


def found(folder: Path, manifest: Manifest, split: str = "all") -> list[str]:
    samples = stored(folder, manifest, split).values()
    return sorted(repr([np.asarray(own[item.name]).tolist() for item in manifest.fields]) for own in samples)


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda content: content, "gzip": gzip.compress, "zlib": zlib.compress,
    "zlib, best": lambda content: zlib.compress(content, 9),
}  # fmt: skip


@pytest.mark.parametrize("packed", PACKINGS)
def test_tfrecord_of_volumes_as_cosmoflow_has_them(packed: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    volumes, targets = rng.integers(-9, 9999, (6, 4, 4, 4, 2)).astype("<i2"), rng.random((6, 4)).astype("<f4")
    content = framed([record(x=x.tobytes(), y=y.tobytes()) for x, y in zip(volumes, targets, strict=True)])
    source = tmp_path / ("a.tfrecord.gz" if packed == "gzip" else "a.tfrecord")
    source.write_bytes(PACKINGS[packed](content))
    assert recognise(str(source)) == "tfrecord"
    manifest = make(source, tmp_path / "out", input="x=x:int16:4x4x4x2", target="y=y:float32:4")
    assert {item.name: (item.dtype, item.shape) for item in manifest.fields} == {
        "x": ("int16", (4, 4, 4, 2)), "y": ("float32", (4,)),
    }  # fmt: skip
    assert found(tmp_path / "out", manifest) == sorted(
        repr([x.tolist(), y.tolist()]) for x, y in zip(volumes, targets, strict=True)
    )


def test_tfrecord_of_tables_lists_and_text(tmp_path: Path) -> None:
    made = [
        record(features=[float(n), 2.0, 3.0], ids=list(range(1 + n % 3)), note=f"é{n}".encode(), label=n % 2)
        for n in range(7)
    ]
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "train-0.tfrecord").write_bytes(framed(made[:4]))
    (folder / "test-0.tfrecord").write_bytes(framed(made[4:]))
    manifest = make(folder, tmp_path / "usual", input="features=x", target="label=y")
    expected = sorted(repr([[float(n), 2.0, 3.0], n % 2]) for n in (4, 5, 6))
    assert found(tmp_path / "usual", manifest, "test") == expected
    manifest = make(folder, tmp_path / "all", input="ids=ids,note=note,features=f::3x1", target="label=y")
    kinds = {item.name: (item.kind, item.dtype, item.variable) for item in manifest.fields}
    assert kinds["ids"] == ("numbers", "int64", True) and kinds["note"][0] == "text" and kinds["f"][1] == "float32"
    rows = {bytes(own["note"]).decode(): own for own in stored(tmp_path / "all", manifest, "train").values()}
    for n in range(4):
        assert rows[f"é{n}"]["ids"].tolist() == list(range(1 + n % 3))
        assert rows[f"é{n}"]["f"].tolist() == [[n], [2], [3]] and rows[f"é{n}"]["y"] == n % 2


@pytest.mark.parametrize("packed", PACKINGS)
def test_tfrecord_of_pictures_with_names_of_classes(packed: str, tmp_path: Path) -> None:
    pictures, labels = pixels(6, (4, 5, 3)), np.array([0, 1, 0, 2, 1, 0])
    names = [b"cat", b"dog", b"eel"]
    content = framed([record(image=png(one), label=names[own]) for one, own in zip(pictures, labels, strict=True)])
    source = tmp_path / "a.tfrecord"
    source.write_bytes(PACKINGS[packed](content))
    manifest = make(source, tmp_path / "out")
    assert manifest.class_names == ("cat", "dog", "eel")
    assert same_samples(everything(tmp_path / "out", manifest, "all"), pictures, labels)


PICTURE = png(pixels(1, (4, 4, 3))[0])
TFRECORDS: dict[str, tuple[list[bytes], dict[str, Any], str]] = {
    "bytes of no type": ([record(x=b"\xff\x00", y=1)], {"input": "x=x"}, "give their type and shape: FEATURE=NAME"),
    "other shape": ([record(x=b"\0" * 8, y=1)], {"input": "x=x:int16:3"}, "has 4 values, and the shape 3 has 3"),
    "part of a number": ([record(x=b"\0" * 7, y=1)], {"input": "x=x:int16"}, "7 bytes, not a whole number of int16"),
    "type of a list": ([record(x=[1.0, 2.0], y=1)], {"input": "x=x:int16"}, "is a list of float32, not of int16"),
    "odd type": ([record(x=b"\0", y=1)], {"input": "x=x:int33"}, "there is no type 'int33'"),
    "no such feature": ([record(x=1.0, y=1)], {"input": "z=z"}, "has no array 'z'; it has 'x' .1 float32., 'y'"),
    "a record without": ([record(x=1.0, y=1), record(y=1)], {"input": "x=x"}, "record 1 of a.* has no value of 'x'"),
    "float label of a picture": ([record(image=PICTURE, label=1.0)], {}, "classes or quantities. Give --input"),
}  # fmt: skip


@pytest.mark.parametrize("name", TFRECORDS)
def test_tfrecords_that_are_asked_about(name: str, tmp_path: Path) -> None:
    made, options, reason = TFRECORDS[name]
    (tmp_path / "a.tfrecord").write_bytes(framed(made))
    with pytest.raises(UsageError, match=reason):
        make(tmp_path / "a.tfrecord", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("packing", ["gzip", "zlib"])
def test_a_damaged_packing_is_named(packing: str, tmp_path: Path) -> None:
    content = bytearray(PACKINGS[packing](framed([record(x=[float(n)] * 500, y=n % 2) for n in range(50)])))
    words = rf"a\.tfrecord: cannot be unpacked \({packing}\)|a\.tfrecord: damaged or cut short"
    for damaged in (content[:-40], content[:200] + bytes(40) + content[240:]):
        (tmp_path / "a.tfrecord").write_bytes(damaged)
        with pytest.raises(SourceError, match=words):
            make(tmp_path / "a.tfrecord", tmp_path / "out", input="x=x", target="y=y")


def test_a_length_that_begins_like_zlib_is_no_packing(tmp_path: Path) -> None:
    """A plain file whose length is 0x9c78 begins with the two bytes of a zlib stream, yet is read as plain."""
    content = record(x=b"\0" * 40_000, y=1)
    content = record(x=b"\0" * (40_000 + 0x9C78 - len(content)), y=1)
    assert len(content) == 0x9C78
    (tmp_path / "a.tfrecord").write_bytes(framed([content, content]))
    manifest = make(
        tmp_path / "a.tfrecord", tmp_path / "out", input="x=x:uint8", target="y=y", target_kind="regression"
    )
    assert manifest.splits["all"].num_samples == 2


@pytest.mark.parametrize("name", ["scan.nxs", "x.h5ad", "noending", "data.dat"])
def test_hdf5_by_any_name_is_known_by_its_signature(name: str, tmp_path: Path) -> None:
    images, labels = pixels(8, (6, 6, 3)), numbers(8, 3)
    for source in (tmp_path / name, tmp_path / "folder" / name):
        source.parent.mkdir(exist_ok=True)
        with h5py.File(source, "w", userblock_size=512) as file:
            file["images"], file["labels"] = images, labels
    for number, source in enumerate((tmp_path / name, tmp_path / "folder")):
        assert recognise(str(source)) == "hdf5"
        manifest = make(source, tmp_path / f"out{number}")
        assert same_samples(everything(tmp_path / f"out{number}", manifest, "all"), images, labels)


@pytest.mark.parametrize("kind", ["npz", "packed npz", "csv"])
def test_files_of_a_folder_are_parts_of_one_source(kind: str, tmp_path: Path) -> None:
    """Each value comes from its file; a column's type fits the values of all files."""
    folder = tmp_path / "s"
    folder.mkdir()
    for number, name in enumerate(("train-0", "train-1", "val")):
        x, y = np.arange(4) + 4.0 * number + (number == 1) / 2, np.array(["u", "v"] * 2)
        if kind == "csv":
            lines = [f"{own:g},{label}" for own, label in zip(x, y, strict=True)]
            (folder / f"{name}.csv").write_text("\n".join(["x,y", *lines]))
        else:
            save = np.savez if kind == "npz" else np.savez_compressed
            save(folder / f"{name}.npz", x=x[:, None].astype("f4"), y=y)
    manifest = make(folder, tmp_path / "out")
    expected = {"train": [0, 1, 2, 3, 4.5, 5.5, 6.5, 7.5], "val": [8, 9, 10, 11]}
    for split, own in expected.items():
        rows = sorted(repr([[value], number % 2]) for number, value in enumerate(map(float, own)))
        assert found(tmp_path / "out", manifest, split) == rows
    assert {item.name: list(item.class_names) for item in manifest.fields}["y"] == ["u", "v"]


def test_what_is_not_hdf5_says_so(tmp_path: Path) -> None:
    (tmp_path / "old.mat").write_bytes(b"MATLAB 5.0 MAT-file" + b"\0" * 600)
    with pytest.raises(SourceError, match=r"nor HDF5's signature; MATLAB saves HDF5 with -v7\.3"):
        make(tmp_path / "old.mat", tmp_path / "out", format="hdf5")


def test_matrices_with_the_samples_last(tmp_path: Path) -> None:
    """MATLAB's 32 x 8 and 32 x 1 matrices are 8 x 32 and 1 x 32 in HDF5; --sample-axis last reads them."""
    values, labels = numbers(32, 8), numbers(32, 2)
    with h5py.File(tmp_path / "m.mat", "w", userblock_size=512) as file:
        file["x"], file["y"] = np.stack([values] * 8), labels[None]
    with pytest.raises(SourceError, match=r"\(x 8, y 1\).* all have 32 along their last: give --sample-axis last"):
        make(tmp_path / "m.mat", tmp_path / "out")
    manifest = make(tmp_path / "m.mat", tmp_path / "out", sample_axis="last", target="y=y", target_kind="class")
    assert manifest.splits["all"].num_samples == 32 and {item.name: item.shape for item in manifest.fields}["x"] == (8,)


def test_matlab_pictures_with_the_samples_last(tmp_path: Path) -> None:
    """Pictures as MATLAB's tools store them are read: H x W x C x N, here 6 x 5 x 3 x 20 with 20 labels."""
    pictures, labels = pixels(20, (6, 5, 3)), numbers(20, 3)
    for name, stored_as in (("last", (0, 3, 2, 1)), ("first", (3, 2, 1, 0))):
        with h5py.File(tmp_path / f"{name}.mat", "w", userblock_size=512) as file:
            file["X"], file["y"] = pictures.transpose(stored_as), labels[None].astype(float)
            for array, kind in (("X", "uint8"), ("y", "double")):
                file[array].attrs["MATLAB_class"] = np.bytes_(kind)
    flags = {"input": "X=image", "target": "y=y", "target_kind": "class"}
    with pytest.raises(SourceError, match=r"X seems .* the last: give --sample-axis last"):
        make(tmp_path / "last.mat", tmp_path / "out", **flags)
    with pytest.raises(SourceError, match=r"not for MATLAB's.* --input X=NAME --target y=NAME.*sample-axis last"):
        make(tmp_path / "last.mat", tmp_path / "out", image_field="X", label_field="y")
    expected = sorted(repr([one.tolist(), int(own)]) for one, own in zip(pictures, labels, strict=True))
    for name, axis in (("first", {}), ("last", {"sample_axis": "last"})):
        manifest = make(tmp_path / f"{name}.mat", tmp_path / name, **flags, **axis)
        assert found(tmp_path / name, manifest) == expected
    assert "X: its last axis counts samples" in manifest.understood


@pytest.mark.parametrize("head", ["Image.Name,Label", "image.id,Image.Label", ""])
def test_names_with_a_point_over_a_list_of_files_are_its_head(tmp_path: Path, head: str) -> None:
    names = [f"{number}.png" for number in range(4)]
    for name in names:
        Image.fromarray(pixels(1, (8, 8, 3))[0]).save(tmp_path / name)
    lines = [head, *(f"{name},{'ab'[number % 2]}" for number, name in enumerate(names))]
    (tmp_path / "list.csv").write_text("\n".join(filter(None, lines)) + "\n")
    manifest = make(tmp_path / "list.csv", tmp_path / "out")
    assert list(manifest.class_names) == ["a", "b"] and manifest.splits["all"].num_samples == 4


@pytest.mark.parametrize(("first", "remedy"), [(10, "give --sample-axis last if"), (60, r"save them as labels.resh")])
def test_labels_in_one_row_get_their_remedy(tmp_path: Path, first: int, remedy: str) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((first, 12, 3, 60), np.uint8), labels=numbers(60, 3)[None])
    with pytest.raises(SourceError, match=rf"labels have the shape \(1, 60\).*{remedy}"):
        make(tmp_path / "a.npz", tmp_path / "out")


@pytest.mark.parametrize("names", [("images", "labels"), ("x", "y")], ids=["images", "fields"])
@pytest.mark.parametrize("kind", ["h5", "chunked.h5", "npz", "packed.npz", "fortran.npz", "npy", "packed.nc"])
def test_samples_along_the_last_axis_are_those_of_the_turned_array(
    kind: str, names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H x W x C x N arrays with N labels give the same shards as np.moveaxis, read a few samples at a time."""
    from hpcdl.data.format import hdf5_source
    from hpcdl.data.sources import numpy_files

    for module in (hdf5_source, numpy_files):
        monkeypatch.setattr(module, "_COPY_BYTES", 6 * 5 * 3 * 4)
    pictures, labels = pixels(21, (6, 5, 3)), numbers(21, 3)
    made = {}
    for order, values in (("first", pictures), ("last", np.moveaxis(pictures, 0, -1))):
        source = tmp_path / order / f"s.{kind}"
        source.parent.mkdir()
        values = np.asfortranarray(values) if kind == "fortran.npz" else np.ascontiguousarray(values)
        if kind.endswith("npz"):
            (np.savez_compressed if kind == "packed.npz" else np.savez)(
                source, **dict(zip(names, (values, labels), strict=True))
            )
        elif kind == "npy":
            source = source.with_suffix("")
            source.mkdir()
            np.save(source / f"{names[0]}.npy", values)
            np.save(source / f"{names[1]}.npy", labels)
        else:
            with h5py.File(source, "w") as file:
                file.create_dataset(names[0], data=values, chunks=kind == "chunked.h5" or None)
                file[names[1]] = labels
                if kind == "packed.nc":
                    file[names[0]].attrs["scale_factor"] = 0.5
        flags = {} if kind != "packed.nc" else {"input": f"{names[0]}=x", "target": f"{names[1]}=y"}
        manifest = make(source, tmp_path / f"out-{order}", sample_axis=order, **flags)
        made[order] = {
            name: own for name, own in contents(tmp_path / f"out-{order}").items() if name != "manifest.json"
        }
        if manifest.pictures:
            assert same_samples(everything(tmp_path / "out-first", manifest, "all"), pictures, labels)
    assert made["first"] == made["last"]
    assert f"{names[0]}: its last axis counts samples" in "; ".join(manifest.understood)


def test_matlab_arrays_have_their_own_order_of_axes(tmp_path: Path) -> None:
    """MATLAB 7.3 matrices (N x d and N x 1) are read right: their axes are reversed, their type is in an attribute."""
    rng = np.random.default_rng(0)
    spectra, ok = rng.random((9, 5)), rng.random(9) > 0.5
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        for name, values, kind in (("x", spectra, "double"), ("y", ok[:, None].astype(np.uint8), "logical")):
            file[name] = values.T
            file[name].attrs["MATLAB_class"] = np.bytes_(kind)
        file["title"] = np.frombuffer("spectra".encode("utf-16-le"), np.uint16)[:, None]
        file["title"].attrs["MATLAB_class"] = np.bytes_("char")
    manifest = make(tmp_path / "a.mat", tmp_path / "out")
    assert {item.name: (item.shape, item.dtype) for item in manifest.fields}["x"] == ((5,), "float64")
    expected = sorted(repr([x.tolist(), int(y)]) for x, y in zip(spectra, ok, strict=True))
    assert found(tmp_path / "out", manifest) == expected


@pytest.mark.parametrize("chunks", [None, (4,)], ids=["contiguous", "chunked"])
def test_parts_of_records_in_hdf5_are_arrays(chunks: tuple[int, ...] | None, tmp_path: Path) -> None:
    kind = np.dtype([("pt", "<f4"), ("hits", "<i2", (3,)), ("name", "S6"), ("label", "<i8")])
    rows = np.zeros(10, kind)
    rows["pt"], rows["hits"], rows["label"] = np.arange(10) / 7, np.arange(30).reshape(10, 3), np.arange(10) % 2
    rows["name"] = [f"n{number}" for number in range(10)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("run/events", data=rows, chunks=chunks)
    options = {"input": "run/events/pt=pt,run/events/hits=hits,run/events/name=name", "target": "run/events/label=y"}
    manifest = make(tmp_path / "a.h5", tmp_path / "out", **options)
    expected = sorted(
        repr([row["pt"].tolist(), row["hits"].tolist(), list(row["name"]), int(row["label"])]) for row in rows
    )
    assert found(tmp_path / "out", manifest) == expected
    with pytest.raises(SourceError, match=r"'run/events/pt' \(10 float32\), 'run/events/hits' \(10x3 int16\)"):
        make(tmp_path / "a.h5", tmp_path / "out2", input="run/events/no=x")


@pytest.mark.parametrize("kind", ["npy", "npz", "npz compressed"])
def test_arrays_in_fortran_order(kind: str, tmp_path: Path) -> None:
    x, y = np.asfortranarray(np.random.default_rng(0).random((7, 3, 4))), np.arange(7) % 2
    if kind == "npy":
        source = tmp_path / "s"
        source.mkdir()
        np.save(source / "x.npy", x)
        np.save(source / "y.npy", y)
    else:
        source = tmp_path / "s.npz"
        (np.savez if kind == "npz" else np.savez_compressed)(source, x=x, y=y)
    manifest = make(source, tmp_path / "out", input="x=x", target="y=y")
    expected = sorted(repr([a.tolist(), int(b)]) for a, b in zip(x, y, strict=True))
    assert found(tmp_path / "out", manifest) == expected


def test_pictures_in_fortran_order(tmp_path: Path) -> None:
    images, labels = pixels(9, (6, 5, 3)), numbers(9, 3)
    np.savez(tmp_path / "s.npz", images=np.asfortranarray(images), labels=labels)
    manifest = make(tmp_path / "s.npz", tmp_path / "out")
    assert same_samples(everything(tmp_path / "out", manifest, "all"), images, labels)


def test_tables_without_names_of_columns(tmp_path: Path) -> None:
    (tmp_path / "iris.csv").write_text("5.1,3.5,1.4,setosa\n4.9,3.0,1.4,other\n6.1,2.5,0.4,setosa\n")
    (tmp_path / "rising.csv").write_text("1,2,3\n4,5,6\n9,1,0\n")
    manifest = make(tmp_path / "iris.csv", tmp_path / "out", head="none", target="c4=kind")
    assert manifest.splits["all"].num_samples == 3 and manifest.class_names == ("other", "setosa")
    manifest = make(tmp_path / "rising.csv", tmp_path / "rise", head="none", target="c3=y", target_kind="regression")
    assert found(tmp_path / "rise", manifest) == sorted(
        repr([[a, b], y]) for a, b, y in ((1.0, 2.0, 3), (4.0, 5.0, 6), (9.0, 1.0, 0))
    )
    (tmp_path / "plain.csv").write_text("5.1,3.5,0\n4.9,3.0,1\n")
    with pytest.raises(SourceError, match="or give --head none, which calls them c1"):
        make(tmp_path / "plain.csv", tmp_path / "no", target="c3=y")


@pytest.mark.parametrize(
    "head", ["file,label", "image,label", "id,class", "image_path,class", "Image Name,Category", ""]
)
def test_lists_of_images_with_heads_and_labels_of_minus_one(head: str, tmp_path: Path) -> None:
    pictures, labels = pixels(6, (4, 4, 3)), np.array([-1, 1, 1, -1, 1, -1])
    for number, one in enumerate(pictures):
        Image.fromarray(one).save(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{label}" for number, label in enumerate(labels)]
    (tmp_path / "list.csv").write_text("\n".join([head, *lines] if head else lines))
    assert recognise(str(tmp_path / "list.csv")) == "csv"
    manifest = make(tmp_path / "list.csv", tmp_path / "out")
    assert manifest.class_names == ("-1", "1")
    assert same_samples(everything(tmp_path / "out", manifest, "all"), pictures, (labels > 0).astype(np.int64))


def test_a_table_of_ids_is_not_a_list_of_files(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,label\n17,0\n18,1\n")
    assert recognise(str(tmp_path / "t.csv")) == "table"


def test_a_test_split_without_labels_is_left_out_by_a_flag(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for split, count in (("train", 6), ("test", 4)):
            file[f"{split}/x"] = np.random.default_rng(0).random((count, 3))
        file["train/y"] = np.arange(6) % 2
    with pytest.raises(SourceError, match=r"the split test has no y"):
        make(tmp_path / "a.h5", tmp_path / "no", input="x=x", target="y=y")
    manifest = make(tmp_path / "a.h5", tmp_path / "out", input="x=x", target="y=y", leave_out="testing")
    assert {name: own.num_samples for name, own in manifest.splits.items()} == {"train": 6}


def test_what_leave_out_does_not_find_is_refused(tmp_path: Path) -> None:
    """--leave-out refuses an unknown name in arrays, folders and archives: a typing error would keep the data in."""
    y = np.array([0, 1])
    np.savez(tmp_path / "b.npz", x_train=np.zeros((2, 3)), y_train=y, x_test=np.zeros((2, 3)), y_test=y)
    members = {"cat/0.png": PICTURE, "dog/1.png": PICTURE, "odd/2.png": PICTURE}
    archive(tmp_path / "a.zip", members)
    for name, content in members.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True)
        (tmp_path / "folder" / name).write_bytes(content)
    for number, source in enumerate(("b.npz", "a.zip", "folder")):
        with pytest.raises(UsageError, match=r"--leave-out holdout: .* has no file, folder, array, column or split"):
            make(tmp_path / source, tmp_path / f"no{number}", leave_out="holdout")
    for number, source in enumerate(("a.zip", "folder")):
        manifest = make(tmp_path / source, tmp_path / f"out{number}", leave_out="odd")
        assert manifest.class_names == ("cat", "dog")


def test_a_zip_archive_of_webp_pictures_with_odd_splits(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "WEBP", lossless=True)
    content = buffer.getvalue()
    source = archive(tmp_path / "a.zip", {"train/cat/0.webp": content, "holdout/cat/1.webp": content})
    manifest = make(source, tmp_path / "out")
    assert {name: own.num_samples for name, own in manifest.splits.items()} == {"train": 1, "val": 1}
    inside = archive(tmp_path / "b.zip", {"cat/train/0.webp": content, "dog/train/1.webp": content})
    with pytest.raises(SourceError, match="'train' is named after a split, and is in the class 'cat'"):
        make(inside, tmp_path / "no")
    assert make(inside, tmp_path / "whole", split_names="ignore").class_names == ("cat", "dog")


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


@pytest.mark.parametrize("above", ["", "dataset/", "a/b/"])
def test_zip_archives_of_pictures(above: str, tmp_path: Path) -> None:
    pictures, names = pixels(6, (4, 5, 3)), ["cat", "dog"]
    members = {f"{above}{names[n % 2]}/{n}.png": png(one) for n, one in enumerate(pictures)}
    extra = {f"__MACOSX/{above}cat/._0.png": b"x", f"{above}cat/.hidden.png": b"x", f"{above}README.txt": b"x"}
    source = archive(tmp_path / "a.zip", members | extra)
    assert recognise(str(source)) == "zip"
    manifest = make(source, tmp_path / "out", shards=2, workers=2)
    assert manifest.class_names == ("cat", "dog")
    assert same_samples(everything(tmp_path / "out", manifest, "all"), pictures, np.arange(6) % 2)


def test_zip_archives_keep_their_splits(tmp_path: Path) -> None:
    pictures = pixels(4, (4, 4, 3))
    paths = ["Train/cat/0.png", "Train/dog/1.png", "validation/cat/2.png", "validation/dog/3.png"]
    source = archive(tmp_path / "a.zip", dict(zip(paths, map(png, pictures), strict=True)))
    manifest = make(source, tmp_path / "out")
    assert {name: own.num_samples for name, own in manifest.splits.items()} == {"train": 2, "val": 2}
    assert same_samples(everything(tmp_path / "out", manifest, "val"), pictures[2:], np.array([0, 1]))


ZIPS: dict[str, tuple[dict[str, bytes], str]] = {
    "splits beside classes": ({"train/a/0.png": PICTURE, "extra/0.png": PICTURE}, "splits, or classes"),
    "no class": ({"a/0.png": PICTURE, "1.png": PICTURE}, "'1.png' is in no folder of a class"),
    "splits without classes": ({"train/0.png": PICTURE, "test/1.png": PICTURE}, "is in no folder of a class"),
    "masks": ({"images/0.png": PICTURE, "masks/0.png": PICTURE}, "holds pictures and masks, not classes"),
    "not a picture": ({"a/0.png": b"text", "b/1.png": PICTURE}, "'a/0.png' is not an image"),
}


@pytest.mark.parametrize("name", ZIPS)
def test_zip_archives_that_are_refused(name: str, tmp_path: Path) -> None:
    members, reason = ZIPS[name]
    with pytest.raises(SourceError, match=reason):
        make(archive(tmp_path / "a.zip", members), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_zip_archive_is_named(tmp_path: Path) -> None:
    source = archive(tmp_path / "a.zip", {"a/0.png": PICTURE, "b/1.png": PICTURE})
    content = bytearray(source.read_bytes())
    content[60] ^= 255
    source.write_bytes(content)
    with pytest.raises(SourceError, match=r"a\.zip: 'a/0\.png' cannot be unpacked: .*or give --on-error skip"):
        make(source, tmp_path / "out")
    manifest = make(source, tmp_path / "out", on_error="skip")
    assert (manifest.splits["all"].num_samples, list(manifest.skipped)) == (1, ["a/0.png"])


def test_pictures_of_every_split_are_taken_and_unused_arrays_reported(tmp_path: Path) -> None:
    found = pixels(12, (4, 5, 3))
    parts = {"train": found[:6], "valid": found[6:9], "test": found[9:]}
    arrays = {f"x_{name}": own for name, own in parts.items()}
    arrays |= {f"y_{name}": np.arange(len(own)) % 2 for name, own in parts.items()}
    np.savez(tmp_path / "a.npz", x_more=found, **arrays)
    manifest = make(tmp_path / "a.npz", tmp_path / "out")
    assert {name: own.num_samples for name, own in manifest.splits.items()} == {"train": 6, "val": 3, "test": 3}
    assert manifest.pictures and "arrays not used: 'x_more'" in manifest.understood
    assert same_samples(everything(tmp_path / "out", manifest, "val"), parts["valid"], arrays["y_valid"])
    kept = make(tmp_path / "a.npz", tmp_path / "less", leave_out="*_valid,x_more")
    assert list(kept.splits) == ["train", "test"] and not kept.understood


@pytest.mark.parametrize("kind", ["npz", "h5"])
@pytest.mark.parametrize("name", ["x", "images"])
def test_arrays_without_a_split_beside_those_of_test_are_train(kind: str, name: str, tmp_path: Path) -> None:
    found, source = pixels(12, (4, 5, 3)), tmp_path / f"a.{kind}"
    classes = np.arange(12) % 2
    arrays = {name: found[:8], "labels" if name == "images" else "y": classes[:8]}
    arrays |= {f"{own}_test": values[8:] for own, values in zip(arrays, (found, classes), strict=True)}
    if kind == "npz":
        np.savez(source, **arrays)
    else:
        with h5py.File(source, "w") as file:
            file.update(arrays)
    manifest = make(source, tmp_path / "out")
    assert {split: own.num_samples for split, own in manifest.splits.items()} == {"train": 8, "test": 4}
    assert any("called by no split, and taken as train" in line for line in manifest.understood)
    whole = make(source, tmp_path / "whole", split_names="ignore", leave_out="*_test")
    assert {split: own.num_samples for split, own in whole.splits.items()} == {"all": 8}


def test_two_arrays_of_one_split_are_asked_about(tmp_path: Path) -> None:
    rows = np.zeros((6, 2), np.float32)
    arrays = {f"{name}_{split}": rows[:, 0] if name == "y" else rows for name in "xy" for split in ("train", "val")}
    np.savez(tmp_path / "a.npz", x_valid=rows, **arrays)
    with pytest.raises(SourceError, match="'x_valid', 'x_val' are both the x of val; give --leave-out x_val,"):
        make(tmp_path / "a.npz", tmp_path / "out", target_kind="regression")


TAR_ENDS = {
    "cut between members": (lambda content: content[: 4 * 1024], "a.tar is cut short: .*truncate -s [+]1024"),
    "a damaged header": (lambda content: content[:2049] + b"x" + content[2050:], "at byte 2048 is no member"),
    "two put together": (lambda content: content + content, "several archives that were put together"),
}


@pytest.mark.parametrize("how", TAR_ENDS)
def test_an_archive_that_ends_too_early_is_refused(how: str, tmp_path: Path) -> None:
    pictures = pixels(6, (4, 5, 3))
    members = {f"{n}.{kind}": png(one) if kind == "png" else b"%d" % (n % 2)
               for n, one in enumerate(pictures) for kind in ("png", "cls")}  # fmt: skip
    path = tar(tmp_path / "a.tar", members)
    assert make(path, tmp_path / "out").splits["all"].num_samples == 6
    change, message = TAR_ENDS[how]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SourceError, match=message):
        make(path, tmp_path / "again")


@pytest.mark.parametrize("layout", ["a folder per class", "series of two splits", "a label file"])
def test_texts_of_numbers_are_asked_about(layout: str, tmp_path: Path) -> None:
    numbers = "0.25, -1.5e-03,7\n 0.75,  2,8\n"
    names = {
        "a folder per class": {f"{kind}/{number}.txt": numbers for kind in ("bed", "sofa") for number in range(4)},
        "series of two splits": {
            f"{split}/{name}_{split}.txt": numbers for split in ("train", "test") for name in "Xy"
        },
        "a label file": {"x.txt": numbers, "x.labels.txt": "a\nb\n"},
    }[layout]
    for name, text in names.items():
        (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "s" / name).write_text(text)
    source = tmp_path / "s" / "x.txt" if layout == "a label file" else tmp_path / "s"
    with pytest.raises(SourceError, match=r"its texts are numbers, such as .*: series or arrays\? .*--target-kind"):
        make(source, tmp_path / "no")
    assert make(source, tmp_path / "out", target_kind="class").fields[0].kind == "text"


def test_few_texts_of_numbers_among_others_are_texts(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "ham.txt").write_text("0123 456789\n" + "Hello\n" * 5)
    (texts / "spam.txt").write_text("Win 100\n" * 5)
    assert make(texts, tmp_path / "out", target="").class_names == ("ham", "spam")


def test_a_list_of_images_and_masks_is_asked_about(tmp_path: Path) -> None:
    for number in range(6):
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(tmp_path / f"{number}.jpg")
    listed = tmp_path / "pairs.csv"
    listed.write_text("".join(f"{number}.jpg,{number}.png\n" for number in range(6)))
    with pytest.raises(SourceError, match=r"the second column names images, such as '0.png': masks\?"):
        make(listed, tmp_path / "no")


def test_files_relative_to_the_folder_above_the_list_are_found(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "set" / "0.png")
    (tmp_path / "set" / "t.csv").write_text("set/0.png,a\n")
    with pytest.raises(SourceError, match=r"relative to the folder above, .*: move the table there"):
        make(tmp_path / "set" / "t.csv", tmp_path / "no")


@pytest.mark.parametrize("name", ["id", "image", "id_code", "lesion"])
def test_names_of_images_without_their_ending_are_asked_about(name: str, tmp_path: Path) -> None:
    stems = [f"{number}" if name == "id" else f"scan_{number}" for number in range(12)]
    (tmp_path / "train").mkdir()
    for stem in stems:
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / f"{stem}.JPG", "jpeg")
    rows = "".join(f"{stem},{number / 7},{'ab'[number % 2]}\n" for number, stem in enumerate(stems))
    (tmp_path / "t.csv").write_text(f"{name},size,kind\n{rows}")
    with pytest.raises(SourceError, match=rf"the column '{name}' seems to name images, and 'train/{stems[0]}.JPG' is"):
        make(tmp_path / "t.csv", tmp_path / "no", target="kind")
    assert make(tmp_path / "t.csv", tmp_path / "out", target="kind", leave_out=name).fields[0].columns == ("size",)
