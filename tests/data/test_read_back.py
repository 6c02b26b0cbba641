"""Every value and label in files of instruments and other tools is read back, or the user is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hpcdl.core.errors import SourceError
from hpcdl.data.format.manifest import Manifest
from hpcdl.data.write.writing import dry_run
from tests.data.sharding import everything, image_folder, make, report, request
from tests.data.test_everyday_formats import record
from tests.data.test_formats import framed, npy, tar, values

X = np.arange(60, dtype=np.float32).reshape(12, 5)
Y = np.arange(12, dtype=np.int32) % 3


def plan_of(source: Path) -> list[str]:
    return [*dry_run(request(source, source.parent / "not-made")).facts.remarks]


def hdf5(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


@pytest.mark.parametrize("order", ["<", ">"])
def test_unsigned_numbers_of_netcdf_in_both_orders_of_bytes(order: str, tmp_path: Path) -> None:
    raw = (np.arange(60, dtype=np.uint16) * 1000).reshape(12, 5)
    source = hdf5(tmp_path / "a.nc", x=raw.view(np.int16).astype(f"{order}i2"), y=Y)
    with h5py.File(source, "r+") as file:
        file["x"].attrs.update(_Unsigned="true", scale_factor=0.5, _FillValue=np.array(-1, f"{order}i2"))
    manifest = make(source, tmp_path / "out")
    assert sorted(values(tmp_path / "out", manifest, "x")) == (raw * 0.5).tolist()


@pytest.mark.parametrize(
    ("dtype", "fill"), [("<f4", 9.969209968386869e36), (">f8", 9.969209968386869e36), ("<i4", -2147483647)]
)
def test_what_netcdf_fills_an_array_with_is_no_value(dtype: str, fill: float, tmp_path: Path) -> None:
    """netCDF's default fill value is treated as missing, although no attribute declares it."""
    source = hdf5(tmp_path / "a.nc", y=Y)
    with h5py.File(source, "r+") as file:
        file.create_dataset("x", (12,), dtype, fillvalue=fill, chunks=(4,))[:8] = np.arange(8)
    with pytest.raises(SourceError, match="--nan skip"):
        make(source, tmp_path / "asked")
    manifest = make(source, tmp_path / "out", nan="skip")
    assert sorted(values(tmp_path / "out", manifest, "x")) == list(range(8))
    with h5py.File(source, "r+") as file:
        file["x"][8:] = 9
    assert sorted(values(tmp_path / "whole", make(source, tmp_path / "whole"), "x")) == [*range(8), 9, 9, 9, 9]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", ">f8", "bool"])
def test_lists_of_any_length_in_both_orders_of_bytes(dtype: str, tmp_path: Path) -> None:
    wanted = [np.arange(number).astype(dtype) for number in range(12)]
    source = hdf5(tmp_path / "a.h5", y=Y)
    with h5py.File(source, "r+") as file:
        lists = file.create_dataset("x", (12,), h5py.vlen_dtype(np.dtype(dtype)))
        for number, own in enumerate(wanted[1:], 1):
            lists[number] = own
    manifest = make(source, tmp_path / "out")
    assert sorted(values(tmp_path / "out", manifest, "x"), key=len) == [own.tolist() for own in wanted]


@pytest.mark.parametrize("name", ["images", "labels"])
def test_images_and_classes_that_stand_for_none_are_asked_about(name: str, tmp_path: Path) -> None:
    images = np.arange(12 * 64, dtype=np.uint16).reshape(12, 8, 8).astype(np.uint8)
    source = hdf5(tmp_path / "a.h5", images=images, labels=Y)
    with h5py.File(source, "r+") as file:
        file[name].attrs["_FillValue"] = file[name].dtype.type(2)
    with pytest.raises(SourceError, match=rf"{name} of sample \d+ is not finite"):
        make(source, tmp_path / "out")
    with pytest.raises(SourceError, match=rf"{name} has \d+ values that mean missing .*--input images=NAME"):
        make(source, tmp_path / "named", image_field="images", label_field="labels")
    with h5py.File(source, "r+") as file:
        file[name].attrs["_FillValue"] = file[name].dtype.type(99 if name == "labels" else 2)
        file["images"][...] = 3
    assert make(source, tmp_path / "whole").class_names == ("0", "1", "2")


COLOURS = {"red": 2, "green": 5, "blue": 9}


@pytest.mark.parametrize("kind", ["fields", "images", "records"])
def test_classes_have_the_names_of_their_enumeration(kind: str, tmp_path: Path) -> None:
    numbers = np.array([2, 5, 9], np.int8)[Y]
    dtype = h5py.enum_dtype(COLOURS, np.int8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if kind == "records":
            table = np.zeros(12, [("x", np.float32, (5,)), ("y", dtype)])
            table["x"], table["y"] = X, numbers
            file["t"] = table
        else:
            file["images" if kind == "images" else "x"] = np.ones((12, 8, 8), np.uint8) if kind == "images" else X
            file.create_dataset("y", data=numbers, dtype=dtype)
    wishes = {"input": "t/x", "target": "t/y"} if kind == "records" else {}
    manifest = make(tmp_path / "a.h5", tmp_path / "out", **wishes)
    names = manifest.class_names if kind == "images" else manifest.fields[-1].class_names
    assert list(names) == ["red", "green", "blue"]
    if kind != "images":
        inputs, classes = (values(tmp_path / "out", manifest, name) for name in ("x", "y"))
        found = dict(zip(map(tuple, inputs), classes, strict=True))
        assert found == {tuple(x): ["red", "green", "blue"][y] for x, y in zip(X.tolist(), Y.tolist(), strict=True)}


ANIMALS = np.array(["cat", "dog", "emu"])


@pytest.mark.parametrize("kind", ["npz", "npy", "npz of images", "array", "attribute", "file", "images", "flags"])
@pytest.mark.parametrize("first", [0, 1])
def test_classes_have_the_names_that_a_list_beside_the_labels_gives(kind: str, first: int, tmp_path: Path) -> None:
    pictures, source = np.ones((12, 8, 8, 3), np.uint8), tmp_path / ("a.npz" if "npz" in kind else "a.h5")
    labels = Y + first
    if kind == "npz":
        np.savez_compressed(source, x=X, y=labels, label_names=ANIMALS)
    elif kind == "npy":
        source = tmp_path / "arrays"
        source.mkdir()
        for name, array in (("x", X), ("y", labels), ("classes", ANIMALS)):
            np.save(source / f"{name}.npy", array)
    elif kind == "npz of images":
        np.savez(source, images=pictures, labels=labels, class_names=ANIMALS)
    else:
        arrays: dict[str, Any] = {"images": pictures} if kind == "images" else {"x": X}
        lists = {"class_names": ANIMALS.astype("S")} if kind in ("array", "images") else {}
        hdf5(source, **arrays, **lists, y=labels * 10 if kind == "flags" else labels)
        with h5py.File(source, "r+") as file:
            if kind == "attribute":
                file["y"].attrs["class_names"] = ANIMALS.tolist()
            elif kind == "file":
                file.attrs["classes"] = ANIMALS.tolist()
            elif kind == "flags":
                file["y"].attrs["flag_values"] = (np.arange(3) + first) * 10
                file["y"].attrs["flag_meanings"] = " ".join(ANIMALS)
    found = report(source, tmp_path / "out")
    names = found.manifest.class_names if "images" in kind else found.manifest.fields[-1].class_names
    assert list(names) == ANIMALS.tolist()
    plan = " ".join(plan_of(source))
    assert "classes are called as in the source: 'cat', 'dog', 'emu'" in plan
    assert "not used" not in plan and "renumbered" not in plan


@pytest.mark.parametrize("attribute", [np.zeros(0, "S3"), 3, np.arange(3)], ids=["empty", "number", "numbers"])
def test_attributes_that_list_no_classes_are_passed_over(attribute: Any, tmp_path: Path) -> None:
    hdf5(tmp_path / "a.h5", images=np.ones((12, 8, 8, 3), np.uint8), y=Y, class_names=ANIMALS.astype("S"))
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["y"].attrs["classes"] = attribute
        file["label_names"] = np.zeros(0, "S3")
    assert list(report(tmp_path / "a.h5", tmp_path / "out").manifest.class_names) == ANIMALS.tolist()


def test_a_list_that_may_count_from_0_or_1_gives_no_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y + 1, class_names=np.array(["a", "b", "c", "d"]))
    plan = " ".join(plan_of(tmp_path / "a.npz"))
    assert "arrays not used: 'class_names'" in plan and "labels are renumbered: 1 -> 0" in plan


def test_enumerations_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    for name, known in (("a", {"no": 0, "yes": 1}), ("b", {"yes": 0, "no": 1})):
        hdf5(tmp_path / f"{name}.h5", x=X)
        with h5py.File(tmp_path / f"{name}.h5", "r+") as file:
            file.create_dataset("y", data=Y % 2, dtype=h5py.enum_dtype(known, np.int8))
    with pytest.raises(SourceError, match=r"enumerations differ: .* write them alike"):
        make(tmp_path, tmp_path / "out", sample_is="row")


def test_samples_without_a_class_are_left_out_and_the_others_keep_theirs(tmp_path: Path) -> None:
    labels = Y.astype(np.float32)
    labels[3] = np.nan
    np.savez(tmp_path / "a.npz", x=X, y=labels)
    with pytest.raises(SourceError, match=r"whole numbers only .* Give --target-kind class or"):
        make(tmp_path / "a.npz", tmp_path / "asked", nan="skip")
    with pytest.raises(SourceError, match=r"y: missing values .* name no class; --nan skip"):
        make(tmp_path / "a.npz", tmp_path / "stop", target_kind="class")
    manifest = make(tmp_path / "a.npz", tmp_path / "out", nan="skip", target_kind="class")
    found = zip(values(tmp_path / "out", manifest, "x"), values(tmp_path / "out", manifest, "y"), strict=True)
    assert sorted(found) == [(X[row].tolist(), str(Y[row])) for row in range(12) if row != 3]


def coded(folder: Path, kind: str, codes: list[str]) -> Path:
    """Samples with these labels, in a table, a list of images or lines of text."""
    folder.mkdir()
    if kind == "text":
        (folder / "t.txt").write_text("".join(f"line {number}\n" for number in range(len(codes))))
        (folder / "labels.txt").write_text("".join(f"{code}\n" for code in codes))
        return folder / "t.txt"
    if kind == "list":
        image_folder(folder, {"c": len(codes)})
        names = [path.relative_to(folder) for path in sorted(folder.glob("c/*"))]
        rows = ["file,label", *(f"{name},{code}" for name, code in zip(names, codes, strict=True))]
    else:
        rows = ["x,y", *(f"{number}.5,{code}" for number, code in enumerate(codes))]
    (folder / "t.csv").write_text("\n".join(rows))
    return folder / "t.csv"


def classes(folder: Path, manifest: Manifest) -> list[str]:
    """Return the class name of every sample."""
    if manifest.fields:
        return values(folder, manifest, manifest.fields[-1].name)
    with h5py.File(folder / manifest.splits["all"].shards[0].file) as file:
        return [manifest.class_names[number] for number in file["labels"][:]]


@pytest.mark.parametrize("kind", ["table", "list", "text"])
def test_codes_keep_their_zeros_and_do_not_become_one_class(kind: str, tmp_path: Path) -> None:
    codes = ["0412", "39", "412", "0412", "39", "412"]
    source = coded(tmp_path / "s", kind, codes)
    target = {"target": "y"} if kind == "table" else {}
    with pytest.raises(SourceError, match=r"'0412' and '412' are one number.*--target-kind class to keep both"):
        make(source, tmp_path / "asked", **target)
    manifest = make(source, tmp_path / "both", target_kind="class", **target)
    assert sorted(classes(tmp_path / "both", manifest)) == sorted(codes)
    padded = ["00", "02", "01", "02", "10", "10"]
    manifest = make(coded(tmp_path / "p", kind, padded), tmp_path / "padded", **target)
    assert sorted(classes(tmp_path / "padded", manifest)) == sorted(padded)


def test_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(X[:, 0]), pa.array(X[:, 1]), pa.array(Y)], names=["a", "a", "y"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match="two columns called 'a'; rename one"):
        make(tmp_path / "t.parquet", tmp_path / "out", target="y")


@pytest.mark.parametrize("kind", ["npy", "tfrecord"])
def test_files_that_a_mac_leaves_beside_arrays_and_records_are_no_data(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    if kind == "npy":
        np.save(folder / "x.npy", X)
        np.save(folder / "y.npy", Y)
    else:
        (folder / "a.tfrecord").write_bytes(framed([record(x=x.tolist(), y=int(y)) for x, y in zip(X, Y, strict=True)]))
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    manifest = make(folder, tmp_path / "out", input="x", target="y")
    assert sorted(values(tmp_path / "out", manifest, "x")) == X.tolist()


@pytest.mark.parametrize("kind", ["tfrecord", "parquet", "tar"])
def test_files_missing_among_numbered_ones_are_reported(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()

    def save(number: int) -> Path:
        path = folder / f"t-0000{number}-of-00003.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"x": X[:, 0], "y": Y}), path)
        elif kind == "tar":
            members = {f"{number}{row}.{name}": content for row in range(4) for name, content in
                       {"npy": npy(X[row]), "cls": b"%d" % Y[row]}.items()}  # fmt: skip
            tar(path, members)
        else:
            path.write_bytes(framed([record(x=x.tolist(), y=int(y)) for x, y in zip(X, Y, strict=True)]))
        return path

    wishes = {"input": "npy=x", "target": "cls=y"} if kind == "tar" else {"input": "x", "target": "y"}
    last = [save(number) for number in range(3)][-1]
    assert not [line for line in make(folder, tmp_path / "whole", **wishes).understood if "not there" in line]
    last.unlink()
    reported = make(folder, tmp_path / "part", **wishes).understood
    assert f"1 of 3 files are not there, as the others' names tell: 't-00002-of-00003.{kind}'" in reported


@pytest.mark.parametrize("kind", ["parquet", "hdf5"])
def test_values_missing_in_one_part_alone_leave_the_others_alike(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    for name, rows in (("train", slice(0, 8)), ("test", slice(8, 12))):
        labels = [None if row == 3 else int(Y[row]) for row in range(12)][rows]
        if kind == "parquet":
            pq.write_table(pa.table({"x": X[rows, 0], "y": pa.array(labels, pa.int64())}), folder / f"{name}.parquet")
        else:
            path = hdf5(folder / f"{name}.h5", x=X[rows, 0], y=np.array([-1 if y is None else y for y in labels]))
            with h5py.File(path, "r+") as file:
                file["y"].attrs["_FillValue"] = -1
    manifest = make(folder, tmp_path / "out", input="x", target="y", nan="skip", target_kind="class")
    for name, rows in (("train", [0, 1, 2, 4, 5, 6, 7]), ("test", [8, 9, 10, 11])):
        found = (values(tmp_path / "out", manifest, field, name) for field in ("x", "y"))
        assert sorted(zip(*found, strict=True)) == [(float(X[row, 0]), str(Y[row])) for row in rows]


def test_large_whole_numbers_beside_missing_ones_are_not_rounded(tmp_path: Path) -> None:
    source = hdf5(tmp_path / "a.h5", x=np.arange(12) + 2**53 + 1, y=Y)
    with h5py.File(source, "r+") as file:
        file["x"].attrs["_FillValue"] = -1
    assert make(source, tmp_path / "whole").fields[0].dtype == "int64"
    with h5py.File(source, "r+") as file:
        file["x"][5] = -1
    with pytest.raises(SourceError, match=r"x has missing values, and whole numbers over 2\^53"):
        make(source, tmp_path / "out", nan="skip")


@pytest.mark.parametrize("kind", ["fields", "images"])
def test_chunks_that_nobody_has_written_are_reported(kind: str, tmp_path: Path) -> None:
    inputs, labels = ("x", "y") if kind == "fields" else ("images", "labels")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        shape = (14, 5) if kind == "fields" else (14, 8, 8)
        file.create_dataset(inputs, shape, np.uint8, chunks=(4, *shape[1:]))[:12] = 1
        file.create_dataset(labels, (14,), np.uint8)
    reported = make(tmp_path / "a.h5", tmp_path / "out").understood
    assert f"{inputs}: 1 of its 4 chunks were never written, and read as 0" in reported
    assert f"{labels}: it was never written, and read as 0" in reported
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file[inputs][12:], file[labels][:] = 1, 0
    assert "never written" not in str(make(tmp_path / "a.h5", tmp_path / "whole").understood)


@pytest.mark.parametrize("value", [np.arange(1.0, 6.0), "0.1 K"], ids=["five", "text"])
def test_attributes_that_are_not_understood_are_shown_or_refused(value: Any, tmp_path: Path) -> None:
    source = hdf5(tmp_path / "a.h5", x=X, y=Y)
    with h5py.File(source, "r+") as file:
        file["x"].attrs.update(valid_min=value, valid_range=np.array([0.0, 99.0]), missing_value=-1.0)
    reported = make(source, tmp_path / "out").understood
    assert "x: not applied are its attributes valid_min, which are no numbers, or too many" in reported
    with h5py.File(source, "r+") as file:
        file["x"].attrs["scale_factor"] = value
    with pytest.raises(SourceError, match=r"its scale_factor is not one number: .*; correct it, or remove scale_fact"):
        make(source, tmp_path / "alone")
    with h5py.File(source, "r+") as file:
        file["x"].attrs["add_offset"] = 5.0
    with pytest.raises(
        SourceError, match="x is packed by scale_factor and add_offset, and its scale_factor is not one"
    ):
        make(source, tmp_path / "half")


def test_a_packing_whose_numbers_are_written_as_text_is_applied(tmp_path: Path) -> None:
    source = hdf5(tmp_path / "a.h5", x=X, y=Y)
    with h5py.File(source, "r+") as file:
        file["x"].attrs.update(scale_factor="0.5", add_offset=np.bytes_("5"))
    reported = make(source, tmp_path / "out").understood
    assert any("scale_factor 0.5, add_offset 5" in line for line in reported)


@pytest.mark.parametrize("mode", ["P", "RGB", "L"])
def test_transparency_that_is_no_band_is_asked_about(mode: str, tmp_path: Path) -> None:
    picture = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert(mode)
    for name in "ab":
        (tmp_path / "s" / name).mkdir(parents=True)
        picture.save(tmp_path / "s" / name / "0.png", transparency=(3, 3, 3) if mode == "RGB" else 3)
    less = 1 if mode == "L" else 3
    with pytest.raises(SourceError, match=rf"transparency or a band of its own: --channels {less} leaves it out"):
        make(tmp_path / "s", tmp_path / "out")
    for channels in (less, 4):
        out = tmp_path / f"{channels}"
        images, _ = everything(out, make(tmp_path / "s", out, channels=channels), "all")
        assert images.shape == (2, 8, 8, channels) and images[0, 0, 4, 0] == 4
        if channels == 4:
            assert images[0, 0, :5, 3].tolist() == [255, 255, 255, 0, 255]


def test_text_with_zero_bytes_old_line_ends_and_files_beside(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "cats.txt").write_bytes(b"one\rtwo\r")
    (folder / "noticed.txt").write_bytes(b"three\nfo\rur\n")
    (folder / "README.txt").write_text("Cats, and what was noticed.")
    manifest = make(folder, tmp_path / "out")
    found = zip(values(tmp_path / "out", manifest, "text"), values(tmp_path / "out", manifest, "label"), strict=True)
    assert sorted(found) == [("fo\rur", "noticed"), ("one", "cats"), ("three", "noticed"), ("two", "cats")]
    assert "left out, as what authors put beside data: 'README.txt'" in manifest.understood
    (folder / "cats.txt").write_bytes("one\ntwo\n".encode("utf-16-le"))
    with pytest.raises(SourceError, match=r"cats.txt holds zero bytes: .*UTF-16\? Save it as UTF-8"):
        make(folder, tmp_path / "wide")


def test_a_second_array_in_a_file_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    with (folder / "x.npy").open("wb") as file:
        np.save(file, X)
        np.save(file, X)
    np.save(folder / "y.npy", Y)
    reported = make(folder, tmp_path / "out").understood
    assert f"x: {128 + X.nbytes} bytes behind its array are not read: of a second one?" in reported
