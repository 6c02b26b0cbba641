"""Formats other than arrays and image folders: every sample is read back as it was written."""

from __future__ import annotations

import io
import itertools
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hpcdl.core.errors import HpcdlError, SourceError, UsageError
from hpcdl.data.format.manifest import Manifest, read_manifest
from hpcdl.data.sources.base.source import recognise
from hpcdl.data.sources.layouts.records import example_class, masked_crc
from hpcdl.data.write.repair import repair
from hpcdl.data.write.writing import dry_run
from tests.data.sharding import contents, everything, image_folder, make, pixels, request

FORMATS = ("memmap", "text", "parquet", "webdataset", "tfds")


def png(pixels_: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels_).save(out, format="PNG")
    return out.getvalue()


def values(folder: Path, manifest: Manifest, name: str, split: str = "all") -> list[Any]:
    """Return one field of every sample; text and lists keep their form."""
    found: list[Any] = []
    (item,) = [field for field in manifest.fields if field.name == name]
    for entry in manifest.splits[split].shards:
        with h5py.File(folder / entry.file) as file:
            content = file[name][:]
            if item.variable:
                starts = file[f"offsets/{name}"][:]
                parts = [content[i:j] for i, j in itertools.pairwise(starts)]
                found += [bytes(part).decode() for part in parts] if item.kind == "text" else map(list, parts)
            elif item.kind == "class":
                found += [item.class_names[number] for number in content]
            else:
                found += content.tolist()
    return found


def test_memmaps_with_a_stated_type(tmp_path: Path) -> None:
    x, y = np.arange(120, dtype=">i2").reshape(10, 4, 3), np.linspace(0, 1, 10, dtype=np.float32)
    (tmp_path / "x.dat").write_bytes(b"HEAD" + x.tobytes())
    (tmp_path / "y.dat").write_bytes(y.tobytes())
    options = {"input": "x.dat=x:>i2:4x3:4", "target": "y.dat=y:float32"}
    assert recognise(str(tmp_path)) == recognise(str(tmp_path / "x.dat")) == "memmap"
    for source in (tmp_path, tmp_path / "x.dat"):
        out = tmp_path / f"{source.name}-out"
        manifest = make(source, out, format="memmap", **options)
        assert [(item.dtype, tuple(item.shape)) for item in manifest.fields] == [("int16", (4, 3)), ("float32", ())]
        assert sorted(values(out, manifest, "x")) == x.tolist()
        assert sorted(values(out, manifest, "y")) == y.tolist()


POEMS = {"blue": ["sea\n", "sky né\r\n", "\n"], "red": ["rose\n", "fire"]}


def test_text_in_files_of_lines_and_in_folders(tmp_path: Path) -> None:
    wanted = sorted((name, line.strip()) for name, lines in POEMS.items() for line in lines)
    for name, lines in POEMS.items():
        for kind in ("lines", "tree/train", "tree/test"):
            (tmp_path / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "lines" / f"{name}.txt").write_text("".join(lines))
        for split in ("train", "test"):
            (tmp_path / "tree" / split / name).mkdir()
            for number, line in enumerate(lines):
                (tmp_path / "tree" / split / name / f"{number}.txt").write_text(line.strip())
    (tmp_path / "tree" / "README.md").write_text("about it")
    (tmp_path / "all.txt").write_text("\ufeff" + "\n".join(line for _, line in wanted) + "\n")
    (tmp_path / "all.labels.txt").write_text("\n".join(name for name, _ in wanted) + "\n")
    for source, splits in (("lines", ["all"]), ("all.txt", ["all"]), ("tree", ["train", "test"])):
        assert recognise(str(tmp_path / source)) == "text"
        out = tmp_path / f"{source}-out"
        manifest = make(tmp_path / source, out)
        assert sorted(manifest.splits) == sorted(splits) and manifest.class_names == ("blue", "red")
        for split in splits:
            pairs = zip(values(out, manifest, "label", split), values(out, manifest, "text", split), strict=True)
            assert sorted(pairs) == wanted, source


def test_lines_with_numbers_as_labels_and_splits_by_name(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 4)):
        (tmp_path / f"{split}.txt").write_text("".join(f"line {number}\n" for number in range(count)))
        (tmp_path / f"{split}.labels.txt").write_text("".join(f"{number % 2}\n" for number in range(count)))
    manifest = make(tmp_path, tmp_path / "out")
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 6, "test": 4}
    assert values(tmp_path / "out", manifest, "label", "test").count("1") == 2


def parquet(path: Path, /, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


COUNT = 8
NUMBERS = {"mass": [0.5, None, 1.5, 2.0] * 2, "charge": [1, -1, 0, 1] * 2, "ok": [True, False] * 4}


def test_parquet_columns_of_numbers_are_one_input(tmp_path: Path) -> None:
    index = pa.array(range(COUNT), pa.int64())
    source = parquet(tmp_path / "t.parquet", **NUMBERS, y=["a", "b"] * 4, __index_level_0__=index)
    assert recognise(str(source)) == "parquet"
    manifest = make(source, tmp_path / "out", nan="keep")
    assert [(item.name, tuple(item.shape)) for item in manifest.fields] == [("x", (3,)), ("y", ())]
    wanted = np.array([[np.nan if v is None else float(v) for v in row] for row in zip(*NUMBERS.values(), strict=True)])
    found = np.array(values(tmp_path / "out", manifest, "x"))
    np.testing.assert_array_equal(sorted(map(repr, found.tolist())), sorted(map(repr, wanted.tolist())))


def test_parquet_lists_text_and_splits(tmp_path: Path) -> None:
    columns = {
        "fixed": [[float(n), 2.0] for n in range(COUNT)],
        "square": pa.array([[[n, 1], [2, 3]] for n in range(COUNT)], pa.list_(pa.list_(pa.int16(), 2))),
        "hits": [list(range(n % 3)) for n in range(COUNT)],
        "note": pa.array([f"né {n % 2}" for n in range(COUNT)]).dictionary_encode(),
        "energy": np.arange(COUNT) / 7,
    }
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", **columns)
    options = {"input": "fixed=a,square=b,hits=c,note=d", "target": "energy=e"}
    manifest = make(tmp_path, tmp_path / "out", **options)
    assert list(manifest.splits) == ["train", "val"]
    assert [tuple(item.shape) for item in manifest.fields] == [(2,), (2, 2), (2,), (5,), ()]
    for name, column in zip("abcde", columns.values(), strict=True):
        given = column.to_pylist() if isinstance(column, pa.Array) else list(column)
        assert sorted(values(tmp_path / "out", manifest, name, "val")) == sorted(given), name


def test_parquet_of_images_as_hugging_face_saves_them(tmp_path: Path) -> None:
    images = pixels(6, (5, 4, 3))
    table = pa.table({"image": [{"bytes": png(one), "path": None} for one in images], "label": [0, 1, 2] * 2})
    features = '{"info": {"features": {"label": {"names": ["cat", "dog", "owl", "yak"], "_type": "ClassLabel"}}}}'
    pq.write_table(table.replace_schema_metadata({"huggingface": features}), tmp_path / "train.parquet")
    manifest = make(tmp_path, tmp_path / "out", workers=2, shards=2)
    assert manifest.class_names == ("cat", "dog", "owl", "yak") and tuple(manifest.sample_shape) == (5, 4, 3)
    found, labels = everything(tmp_path / "out", manifest, "all")
    wanted = {image.tobytes(): number % 3 for number, image in enumerate(images)}
    assert {image.tobytes(): int(label) for image, label in zip(found, labels, strict=True)} == wanted


@pytest.mark.parametrize("fields", [{"input": "image=x", "target": "label=y"}, {}])
@pytest.mark.parametrize("folder", ["one split", "two"])
def test_classes_that_hugging_face_numbers_in_two_ways_are_refused(fields: Any, folder: str, tmp_path: Path) -> None:
    """Each file of a Parquet data set lists its own names of classes."""
    files = ("train-1", "train-2") if folder == "one split" else ("train", "test")
    images = [{"bytes": png(one), "path": None} for one in pixels(6, (5, 4, 3))]
    for name, words in zip(files, (["cat", "dog"], ["dog", "cat"]), strict=True):
        features = json.dumps({"info": {"features": {"label": {"names": words, "_type": "ClassLabel"}}}})
        table = pa.table({"image": images, "label": [0, 1] * 3}).replace_schema_metadata({"huggingface": features})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(UsageError, match=r"label: enumerations differ: 0 is '(cat|dog)' in one file, 0 is"):
        make(tmp_path, tmp_path / "out", **fields)
    (tmp_path / f"{files[1]}.parquet").unlink()
    manifest = make(tmp_path, tmp_path / "out", **fields)
    assert (manifest.fields[-1].class_names if fields else manifest.class_names) == ("cat", "dog")


def test_parquet_columns_of_views_are_read_as_those_of_the_plain_type(tmp_path: Path) -> None:
    images = pixels(6, (5, 4, 3))
    columns = {
        "image": pa.array([png(one) for one in images], pa.binary_view()),
        "label": pa.array(["cat", "dog", "owl"] * 2, pa.string_view()),
        "spectrum": pa.array([[0.5, n] for n in range(6)], pa.list_view(pa.float32())),
        "split": pa.array(["train", "train", "test"] * 2, pa.string_view()),
    }
    source = parquet(tmp_path / "s.parquet", **columns)
    manifest = make(source, tmp_path / "out")
    assert manifest.class_names == ("cat", "dog", "owl") and tuple(manifest.sample_shape) == (5, 4, 3)
    made = make(source, tmp_path / "fields", input="image=image,spectrum=x", target="label=y")
    assert {name: split.num_samples for name, split in made.splits.items()} == {"train": 4, "test": 2}
    assert sorted(values(tmp_path / "fields", made, "x", "test")) == [[0.5, 2], [0.5, 5]]


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parquet(tmp_path / "t.parquet", **NUMBERS, y=range(COUNT))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'hpcdl\[parquet\]'"):
        make(source, tmp_path / "out")


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def npy(value: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


@pytest.mark.parametrize("label", ["cls", "json"])
def test_webdataset_of_images(label: str, tmp_path: Path) -> None:
    images = pixels(8, (5, 4, 3))
    for split, numbers in (("train", range(6)), ("val", range(6, 8))):
        members: dict[str, bytes] = {}
        for n in numbers:
            members[f"a/{n:04d}.PNG"] = png(images[n])
            members[f"a/{n:04d}.{label}"] = str(n % 3).encode() if label == "cls" else b'{"label": "c%d"}' % (n % 3)
        tar(tmp_path / f"{split}-000.tar", members)
    assert recognise(str(tmp_path)) == "webdataset"
    for encoding in ("raw", "encoded"):
        manifest = make(tmp_path, tmp_path / encoding, workers=2, encoding=encoding)
        assert sorted(manifest.splits) == ["train", "val"] and len(manifest.class_names) == 3
    found, labels = everything(tmp_path / "raw", read_manifest(tmp_path / "raw")[0], "train")
    wanted = {image.tobytes(): number % 3 for number, image in enumerate(images[:6])}
    assert {image.tobytes(): int(own) for image, own in zip(found, labels, strict=True)} == wanted


def test_webdataset_of_arrays_masks_json_and_text(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    members, series = {}, [rng.random((2 + n % 2, 3), dtype=np.float32) for n in range(COUNT)]
    for n in range(COUNT):
        members |= {f"{n}.jpg.png": png(pixels(1, (6, 6, 3), n)[0]), f"{n}.mask.png": png(np.full((6, 6), n, np.uint8))}
        members |= {f"{n}.x.npy": npy(series[n]), f"{n}.txt": f"né {n}".encode(), f"{n}.cls": b"%d" % (n % 2)}
        members[f"{n}.json"] = json.dumps({"energy": [1, 0.5][n % 2], "box": [n, 1], "who": "me"}).encode()
    source = tar(tmp_path / "a.tar", members)
    options = {"input": "x=x,txt=note,jpg=picture", "target": "mask.png=mask,json/energy=e,json/box=box,cls=kind"}
    manifest = make(source, tmp_path / "out", **options)
    kinds = {item.name: (item.dtype, tuple(item.shape), item.variable) for item in manifest.fields}
    assert kinds["x"] == ("float32", (3, 3), True) and kinds["picture"] == ("uint8", (6, 6, 3), False)
    assert kinds["e"] == ("float64", (), False) and kinds["box"] == ("int64", (2,), False)
    order = [mask[0][0] for mask in values(tmp_path / "out", manifest, "mask")]
    assert sorted(order) == list(range(COUNT))
    for row, n in enumerate(order):
        assert np.array_equal(values(tmp_path / "out", manifest, "x")[row], series[n])
        assert values(tmp_path / "out", manifest, "note")[row] == f"né {n}"
        assert values(tmp_path / "out", manifest, "kind")[row] == str(n % 2)
    small = tar(tmp_path / "b.tar", {name: one for name, one in members.items() if name[1:] in (".x.npy", ".cls")})
    assert [item.name for item in make(small, tmp_path / "guessed").fields] == ["x", "label"]


def example(**features: Any) -> bytes:
    """Return a tf.train.Example; __ in a name stands for /."""
    made = example_class()()
    for name, value in features.items():
        feature = made.features.feature[name.replace("__", "/")]
        several = value if isinstance(value, list) else [value]
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(several[0]) if several else int]
        getattr(feature, kind).value.extend(several)
    return bytes(made.SerializeToString())


def framed(contents_: list[bytes]) -> bytes:
    found = b""
    for content in contents_:
        head = struct.pack("<Q", len(content))
        found += head + struct.pack("<I", masked_crc(head)) + content + struct.pack("<I", masked_crc(content))
    return found


def feature(name: str, **parts: Any) -> dict[str, Any]:
    return {"pythonClassName": f"tensorflow_datasets.core.features.{name}", **parts}


def tensor(dtype: str, *shape: int, name: str = "Tensor") -> dict[str, Any]:
    dimensions = {"dimensions": [str(side) for side in shape]} if shape else {}
    return feature(name, tensor={"dtype": dtype, "encoding": "none", "shape": dimensions})


def run_plan(
    folder: Path, features: dict[str, Any], splits: dict[str, list[list[bytes]]], keys: tuple[str, str] | None = None
) -> Path:
    """A data set as TensorFlow Datasets prepares it, from the records of each file of each split."""
    folder.mkdir(parents=True)
    document = feature("features_dict.FeaturesDict", featuresDict={"features": features})
    (folder / "features.json").write_text(json.dumps(document))
    reported = [{"name": name, "shardLengths": [str(len(own)) for own in files]} for name, files in splits.items()]
    info: dict[str, Any] = {"name": "d", "version": "1.0.0", "fileFormat": "tfrecord", "splits": reported}
    if keys:
        info["supervisedKeys"] = {"tuple": {"items": [{"featureKey": key} for key in keys]}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for name, files in splits.items():
        for number, own in enumerate(files):
            (folder / f"d-{name}.tfrecord-{number:05d}-of-{len(files):05d}").write_bytes(framed(own))
    return folder


IMAGE, LABEL = feature("image_feature.Image"), feature("class_label_feature.ClassLabel", classLabel={"numClasses": "3"})


def test_tfds_of_images_from_the_root_of_the_data_set(tmp_path: Path) -> None:
    images = pixels(9, (5, 4, 3))
    made = [example(image=png(one), label=n % 2, id=b"x") for n, one in enumerate(images)]
    features = {"image": IMAGE, "label": LABEL, "id": feature("text_feature.Text")}
    folder = run_plan(tmp_path / "d" / "1.0.0", features, {"train": [made[:4], made[4:6]], "test": [made[6:]]})
    (folder / "label.labels.txt").write_text("cat\ndog\nowl\n")
    assert recognise(str(tmp_path)) == recognise(str(tmp_path / "d")) == recognise(str(folder)) == "tfds"
    manifest = make(tmp_path / "d", tmp_path / "out", workers=2)
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"test": 3, "train": 6}
    assert list(manifest.class_names) == ["cat", "dog", "owl"]
    found, labels = everything(tmp_path / "out", manifest, "train")
    wanted = {image.tobytes(): number % 2 for number, image in enumerate(images[:6])}
    assert {image.tobytes(): int(own) for image, own in zip(found, labels, strict=True)} == wanted


@pytest.mark.parametrize("kind", ["records", "tfds", "tfds of images"])
def test_a_record_with_a_wrong_checksum_is_named_and_can_be_left_out(kind: str, tmp_path: Path) -> None:
    pictures = kind == "tfds of images"
    made = [example(x=png(pixels(1, (4, 4, 3))[0]) if pictures else [float(n), 0.5], y=n % 2) for n in range(9)]
    features = {"x": IMAGE if pictures else tensor("float32", 2), "y": LABEL}
    source = run_plan(tmp_path / "s", features, {"train": [made]}, ("x", "y"))
    records = next(source.glob("*.tfrecord*"))
    content = bytearray(records.read_bytes())
    content[len(framed(made[:5])) - 5] ^= 1
    records.write_bytes(content)
    if kind == "records":
        source = records
    with pytest.raises(UsageError, match=r"record 4 of .*: its checksum is wrong; .* give --on-error skip"):
        make(source, tmp_path / "out")
    manifest = make(source, tmp_path / "out", on_error="skip")
    split = manifest.splits["all" if kind == "records" else "train"]
    assert split.num_samples == 8 and list(manifest.skipped) == [f"record 4 of {records.name}"]
    assert pictures or sorted(x for x, _ in values(tmp_path / "out", manifest, "x", next(iter(manifest.splits)))) == [
        n for n in range(9) if n != 4
    ]


def test_tfds_of_tensors_sequences_and_text(tmp_path: Path) -> None:
    made = [
        example(x=[float(n), 0.5, 1.0, 2.0], hits__t=list(range(n % 3)), note=f"né {n}".encode(), flag=n % 2, y=n / 7)
        for n in range(COUNT)
    ]
    features = {
        "x": tensor("float32", 2, 2), "note": feature("text_feature.Text"), "flag": tensor("bool", name="Scalar"),
        "hits": feature("sequence_feature.Sequence", sequence={"feature": feature(
            "features_dict.FeaturesDict", featuresDict={"features": {"t": tensor("int64", name="Scalar")}})}),
        "y": tensor("float32"),
    }  # fmt: skip
    source = run_plan(tmp_path / "d" / "v" / "2.1.0", features, {"train": [made]}, ("x", "y"))
    assert [item.name for item in make(source, tmp_path / "guessed").fields] == ["x", "y"]
    options = {"input": "x=x,hits/t=hits,note=note", "target": "flag=flag,y=y", "target_kind": "regression"}
    manifest = make(tmp_path, tmp_path / "out", **options)
    found = {name: values(tmp_path / "out", manifest, name, "train") for name in ("x", "hits", "note", "flag", "y")}
    for row, note in enumerate(found["note"]):
        n = int(note.split()[1])
        assert found["x"][row] == [[n, 0.5], [1, 2]] and found["hits"][row] == list(range(n % 3))
        assert found["flag"][row] is bool(n % 2) and found["y"][row] == np.float32(n / 7)


def test_what_is_beside_folders_of_images_is_not_taken_for_them(tmp_path: Path) -> None:
    image_folder(tmp_path / "s", {"a": 1, "b": 1})
    for name in ("train.tar", "list.parquet", "notes.txt", "x.dat", "a/attributes.txt"):
        (tmp_path / "s" / name).write_bytes(b"")
    assert recognise(str(tmp_path / "s")) == "image-folder"


@pytest.mark.parametrize("name", ["webdataset", "parquet", "tfds", "text"])
def test_damaged_shards_are_made_again_from_every_format(name: str, tmp_path: Path) -> None:
    picture = [png(one) for one in pixels(4, (4, 4, 3))]
    made = [example(image=one, label=n % 2) for n, one in enumerate(picture)]
    (tmp_path / "s.labels.txt").write_text("0\n1\n0\n1\n")
    (tmp_path / "s.txt").write_text("a\nb\nc\nd\n")
    members = {f"{n}.{kind}": own for n, one in enumerate(picture) for kind, own in (("png", one), ("cls", b"0"))}
    source = {
        "webdataset": tar(tmp_path / "s.tar", members),
        "parquet": parquet(tmp_path / "s.parquet", image=picture, label=[0, 1, 0, 1]),
        "tfds": run_plan(tmp_path / "s", {"image": IMAGE, "label": LABEL}, {"train": [made]}),
        "text": tmp_path / "s.txt",
    }[name]
    make(source, tmp_path / "out", shards=2)
    before = contents(tmp_path / "out")
    path = next((tmp_path / "out").rglob("*.h5"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert repair(tmp_path / "out", str(source), [path.relative_to(tmp_path / "out").as_posix()])
    assert contents(tmp_path / "out") == before


WEATHER = Path(__file__).with_name("weather.nc")
"""Written by netCDF4 1.7.5: t2m (24, 4, 5) packed as int16 with one value missing, rain (24) float32 with one missing,
quality (24) uint8, lat (4), and the dimensions sample (unlimited), x and y, two of them without values.
"""


def test_netcdf_is_read_as_its_attributes_say(tmp_path: Path) -> None:
    with h5py.File(WEATHER) as file:
        stored, rain = file["t2m"][:], file["rain"][:]
        assert stored.dtype == np.int16 and {"x", "sample"} < set(file)
    with pytest.raises(HpcdlError, match=r"one of 'lat' .*, 'quality' .*, 'rain' .*, 't2m' [^,]*; or"):
        make(WEATHER, tmp_path / "which")  # dimensions without values are not arrays
    names = {"input": "t2m=t", "target": "rain=rain"}
    with pytest.raises(
        HpcdlError,
        match=r"t of sample 3 is not finite .*, 1 sample in all .t2m: read as .* missing values as NaN.; --nan skip",
    ):
        make(WEATHER, tmp_path / "missing", **names)
    remarks = dry_run(request(WEATHER, tmp_path / "all", nan="keep", **names)).facts.remarks
    unpacked = "t2m: read as float32 by its attributes: scale_factor 0.01, add_offset 273.15, 1 missing values as NaN"
    assert unpacked in remarks
    manifest = make(WEATHER, tmp_path / "all", nan="keep", **names)
    wanted = np.where(stored == -32767, np.nan, stored * 0.01 + 273.15).astype(np.float32)
    found = {str(np.nan_to_num(r)): v for v, r in zip(
        values(tmp_path / "all", manifest, "t"), values(tmp_path / "all", manifest, "rain"), strict=True
    )}  # fmt: skip
    for number, amount in enumerate(np.where(rain == -9999, np.nan, rain).tolist()):
        assert np.array_equal(np.array(found[str(np.nan_to_num(amount))], np.float32), wanted[number], equal_nan=True)
    kept = make(WEATHER, tmp_path / "kept", nan="skip", **names)
    assert kept.splits["all"].num_samples == 22


@pytest.mark.parametrize("unsigned", [True, False])
def test_numbers_that_are_packed_in_other_ways(unsigned: bool, tmp_path: Path) -> None:
    """Packed numbers are read right: bytes as unsigned, a fill value that never occurs, and 32 bits scaled to 64."""
    raw = np.arange(-10, 10, dtype=np.int8)
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["x"], file["long"], file["plain"] = raw, np.arange(20, dtype=np.int32), np.arange(20, dtype=np.int16)
        file["y"] = np.linspace(0, 1, 20)
        file["x"].attrs["_Unsigned"] = "true" if unsigned else "false"
        file["long"].attrs["scale_factor"] = 1e-3
        file["plain"].attrs["_FillValue"] = np.int16(-1)
    names = {"input": "x=x,long=long,plain=plain", "target": "y=y"}
    manifest = make(tmp_path / "a.nc", tmp_path / "out", **names)
    order = np.argsort(values(tmp_path / "out", manifest, "y"))
    found = {name: np.array(values(tmp_path / "out", manifest, name))[order] for name in ("x", "long", "plain")}
    kinds = {field.name: field.dtype for field in manifest.fields}
    assert (kinds["x"], kinds["long"], kinds["plain"]) == ("float32" if unsigned else "int8", "float64", "int16")
    assert found["x"].tolist() == (raw.view(np.uint8) if unsigned else raw).tolist()
    assert np.allclose(found["long"], np.arange(20) * 1e-3) and found["plain"].tolist() == list(range(20))


@pytest.mark.parametrize(
    ("attributes", "line"),
    [
        ({"Slope": 0.1, "Intercept": -10.0}, "x: not applied are its attributes 'Intercept' (-10), 'Slope' (0.1): if"),
        ({"SCALE FACTOR": 0.01}, "x: not applied are its attributes 'SCALE FACTOR' (0.01): if"),
        ({"nodata": 0}, "x: not applied are its attributes 'nodata' (0): if"),
        ({"scale": 1, "offset": 0, "scales": 3.0, "gain": "high"}, ""),
        ({"scale_factor": 0.5}, ""),
    ],
)
def test_attributes_that_scale_by_other_names_are_shown(attributes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.arange(40, dtype=np.int16).reshape(20, 2), np.linspace(0, 1, 20)
        file["x"].attrs.update(attributes)
    understood = " ".join(make(tmp_path / "a.h5", tmp_path / "out", input="x=x", target="y=y").understood)
    assert (line in understood) if line else "not applied" not in understood


def test_packed_numbers_in_the_shape_of_images_are_not_taken_as_they_are_stored(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.arange(20 * 8 * 8, dtype=np.uint8).reshape(20, 8, 8)
        file["labels"] = np.arange(20) % 2
        file["images"].attrs["scale_factor"] = 0.5
    with pytest.raises(HpcdlError, match=r"images is packed \(scale_factor.*--input images=NAME --target labels=NAME"):
        make(tmp_path / "a.h5", tmp_path / "named", image_field="images", label_field="labels")
    manifest = make(tmp_path / "a.h5", tmp_path / "out", target_kind="class")
    assert [item.dtype for item in manifest.fields] == ["float32", "int64"]
    found = values(tmp_path / "out", manifest, manifest.fields[0].name)
    assert sorted(np.ravel(found).tolist()) == sorted((np.arange(1280, dtype=np.uint8) * 0.5).tolist())


@pytest.mark.parametrize("dtype", ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u2"])
def test_classes_come_in_every_whole_type(dtype: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number, known in enumerate(([0, 1], [0, 1, 2], [3, 7, 11], [1, 2], [-1, 1])):
        if (dtype == "bool" and known != [0, 1]) or (dtype.strip(">")[0] == "u" and known[0] < 0):
            continue
        labels = np.array(known)[random.integers(0, len(known), 40)].astype(dtype)
        inputs = random.normal(size=(40, 6)).astype(np.float32)
        np.savez(tmp_path / f"{number}.npz", x=inputs, y=labels)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = inputs, labels
        for kind in ("npz", "h5"):
            out = tmp_path / f"{number}-{kind}"
            manifest = make(tmp_path / f"{number}.{kind}", out, input="x=x", target="y=y", target_kind="class")
            found = sorted(float(name) for name in values(out, manifest, "y"))
            assert found == sorted(labels.astype(float).tolist()), (kind, known)


def test_empty_lines_of_text_are_reported(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "pos.txt").write_text("good\nfine\n")
    assert not make_of_two(tmp_path, "bad\npoor\n", "sound").understood
    manifest = make_of_two(tmp_path, "bad\n\npoor\n\n", "holes")
    assert "2 texts hold nothing (an empty line or file), and are samples too" in manifest.understood
    assert manifest.splits["all"].num_samples == 6


def make_of_two(folder: Path, lines: str, name: str) -> Manifest:
    (folder / "s" / "neg.txt").write_text(lines)
    return make(folder / "s", folder / name)


def test_arrays_called_by_the_split_of_their_file_are_fields_of_all_splits(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split, count in (("train", 12), ("test", 6)):
        with h5py.File(source / f"{split}_signs.h5", "w") as file:
            file[f"{split}_set_x"] = np.arange(count * 4, dtype=np.float32).reshape(count, 4)
            file[f"{split}_set_y"] = np.arange(count) % 2
            file["list_classes"] = [b"no", b"yes"]
    manifest = make(source, tmp_path / "out")
    assert [field.name for field in manifest.fields] == ["x", "y"] and manifest.class_names == ("no", "yes")
    assert {split: own.num_samples for split, own in manifest.splits.items()} == {"train": 12, "test": 6}


@pytest.mark.parametrize("num_labels", [6, 5])
def test_files_of_one_split_with_other_arrays_are_taken_together(num_labels: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split, count in (("train", 12), ("valid", num_labels)):
        with h5py.File(source / f"level_2_{split}_x.h5", "w") as file:
            file["x"] = np.arange(max(count, 6) * 4, dtype=np.float32).reshape(-1, 4)
        with h5py.File(source / f"level_2_{split}_y.h5", "w") as file:
            file["y"] = (np.arange(count) % 2).reshape(-1, 1, 1, 1)
    if num_labels < 6:
        with pytest.raises(SourceError, match=r"of the split val hold unequal numbers of samples \(x 6, y 5\)"):
            make(source, tmp_path / "out")
        return
    manifest = make(source, tmp_path / "out")
    assert {split: own.num_samples for split, own in manifest.splits.items()} == {"train": 12, "val": 6}
    assert any("taken together, row by row" in line for line in manifest.understood)


@pytest.mark.parametrize("names", [("trainX", "trainY"), ("Xtrain", "Ytrain"), ("trainData", "trainLabels")])
def test_arrays_whose_split_is_a_part_of_a_word_are_splits(names: tuple[str, str], tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2
    arrays = {
        name.replace("train", split): own
        for split in ("train", "test")
        for name, own in zip(names, (x, y), strict=True)
    }
    np.savez(tmp_path / "a.npz", **arrays)
    manifest = make(tmp_path / "a.npz", tmp_path / "out")
    assert {split: own.num_samples for split, own in manifest.splits.items()} == {"train": 20, "test": 20}
    assert [field.name for field in manifest.fields] == [name.replace("train", "") for name in names]


def test_an_input_and_a_target_in_files_of_their_own_are_taken_together(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "y.npz", y=y)
    manifest = make(tmp_path, tmp_path / "out")
    assert manifest.splits["all"].num_samples == 20 and [field.name for field in manifest.fields] == ["x", "y"]
    # Files of several arrays are parts of one whole, whatever the case of their names.
    np.savez(tmp_path / "x.npz", x=x, y=y)
    np.savez(tmp_path / "y.npz", X=x, Y=y)
    with pytest.raises(SourceError, match=r"a file has no x, but .*; name arrays alike"):
        make(tmp_path, tmp_path / "other")
