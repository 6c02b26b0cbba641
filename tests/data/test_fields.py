"""Samples of named fields keep every byte through shard, h5py and the training stream; bad fields are refused."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import hpcdl.data
from hpcdl.core.errors import CorruptError, HpcdlError, SourceError
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.hdf5 import shard_map
from hpcdl.data.format.manifest import DTYPES, FIELDS_SCHEMA, Manifest, write_manifest
from hpcdl.data.read.reader import open_reader
from hpcdl.data.read.windows import TrainingStream
from hpcdl.data.show.inspection import inspect, verify
from hpcdl.data.write.repair import repair
from tests.conftest import CommandLine
from tests.data.sharding import contents, image_folder, make

COUNT = 12
Samples = dict[int, dict[str, Any]]


def stored(folder: Path, manifest: Manifest, split: str = "all") -> Samples:
    """Return every field of every sample, by id, read with plain h5py."""
    found: Samples = {}
    for entry in manifest.splits[split].shards:
        with h5py.File(folder / entry.file) as file:
            for place in range(entry.num_samples):
                sample = {}
                for item in manifest.fields:
                    if item.variable:
                        begin, end = file[f"offsets/{item.name}"][place : place + 2]
                        sample[item.name] = file[item.name][begin:end]
                    else:
                        sample[item.name] = file[item.name][place]
                found[len(found)] = sample
    return found


def streamed(dataset: Dataset, workers: int) -> Samples:
    """Return every field of the samples of an epoch, by id, as training reads them."""
    found: Samples = {}
    for worker in range(workers):
        stream = TrainingStream(
            open_reader(dataset, dataset.train_split),
            batch_size=4 // workers,
            worker=worker,
            num_workers=workers,
            seed=3,
        )
        try:
            for step in range(stream.steps_per_epoch):
                batch = stream.batch(step)
                for row, sample in enumerate(stream.ids(step).tolist()):
                    values = zip(dataset.fields, batch, strict=True)
                    found[sample] = {item.name: np.array(value[row]) for item, value in values}
        finally:
            stream.close()
    return found


@pytest.mark.parametrize("encoding", ["raw", "encoded"])
def test_a_picture_with_its_class_is_two_fields(encoding: str, tmp_path: Path) -> None:
    """A picture with its class has two fields in memory, although the manifest of format 1 does not name them."""
    image_folder(tmp_path / "source", {"a": 3, "b": 4})
    made = make(tmp_path / "source", tmp_path / "out", encoding=encoding, image_size="8x8")
    assert "fields" not in json.loads((tmp_path / "out" / "manifest.json").read_text())
    for found in (made.fields, open_dataset(str(tmp_path / "out")).fields):
        assert [(item.name, item.role, item.dtype, tuple(item.shape)) for item in found] == [
            ("images", "input", "uint8", (8, 8, 3)),
            ("labels", "target", "int64", ()),
        ]
        assert found[0].encoded == (encoding == "encoded") and list(found[1].class_names) == ["a", "b"]
    made_up = open_dataset("synthetic:8x8x3:2")
    assert [item.name for item in made_up.fields] == ["images", "labels"] and made_up.pictures


def test_a_manifest_of_named_fields_that_are_encoded_is_refused(tmp_path: Path) -> None:
    """Format 2 has no encoded named fields, so such a manifest is refused."""
    np.savez(tmp_path / "a.npz", x=np.zeros((COUNT, 4, 4, 3), np.uint8), y=np.arange(COUNT) % 2)
    made = make(tmp_path / "a.npz", tmp_path / "out", input=("x",), target=("y",))
    first = dataclasses.replace(made.fields[0], kind="encoded")
    write_manifest(tmp_path / "out", dataclasses.replace(made, fields=[first, *made.fields[1:]]))
    with pytest.raises(CorruptError, match=r"manifest\.json is damaged"):
        open_dataset(str(tmp_path / "out"))


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(value)
    return array.dtype.newbyteorder("=").name, array.shape, array.tobytes()


def same(one: Samples, other: Samples) -> bool:
    return {k: {n: bits(v) for n, v in s.items()} for k, s in one.items()} == {
        k: {n: bits(v) for n, v in s.items()} for k, s in other.items()
    }


@st.composite
def fields(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from([*DTYPES, ">f4", ">i2"]))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, max_side=4))
    return draw(arrays.arrays(np.dtype(dtype), (COUNT, *shape)))


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(first=fields(), second=fields(), third=fields())
@example(first=np.zeros(COUNT, bool), second=np.full(COUNT, 1.7e305), third=np.full(COUNT, 1.7e306))
def test_every_type_and_shape_comes_back_bit_by_bit(
    first: np.ndarray, second: np.ndarray, third: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fields")
    np.savez(folder / "a.npz", a=first, b=second, c=third)
    options = {"input": "a=a,b=b", "target": "c=c", "target_kind": "regression", "nan": "keep", "shards": 2}
    manifest = make(folder / "a.npz", folder / "out", **options)
    written = stored(folder / "out", manifest)
    given_ = [
        {
            name: bits(value[row].astype(value.dtype.newbyteorder("=")))
            for name, value in zip("abc", (first, second, third), strict=True)
        }
        for row in range(COUNT)
    ]
    assert sorted(map(repr, given_)) == sorted(
        repr({name: bits(value) for name, value in sample.items()}) for sample in written.values()
    )
    dataset = open_dataset(str(folder / "out"))
    assert all(same(written, streamed(dataset, workers)) for workers in (1, 2))


def test_whole_numbers_below_zero_in_one_shard_and_large_ones_in_another(tmp_path: Path) -> None:
    """Each shard uses the narrowest type: int64 in one and uint64 in another, which numpy would combine to floats."""
    values = np.array([-1] + [2**62 + 1] * (COUNT - 1))
    np.savez(tmp_path / "a.npz", a=np.zeros(COUNT, bool), c=values)
    options = {"input": "a=a", "target": "c=c", "target_kind": "regression", "shards": 2}
    manifest = make(tmp_path / "a.npz", tmp_path / "out", **options)
    assert same(stored(tmp_path / "out", manifest), streamed(open_dataset(str(tmp_path / "out")), 1))


VARYING = h5py.vlen_dtype(np.dtype("<f4"))


def events(path: Path) -> Path:
    """Write an HDF5 file with lists of any length, text, a class by name, a mask and a number."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        lists = file.create_dataset("raw/hits", (COUNT,), VARYING)
        for number in range(COUNT):
            lists[number] = rng.random(number % 5, dtype=np.float32)
        file["note"] = [f"né {number} " * (number % 3) for number in range(COUNT)]
        file["particle"] = [["muon", "pion"][number % 2] for number in range(COUNT)]
        file.create_dataset("mask", data=rng.random((COUNT, 6, 5)) > 0.5, chunks=(5, 6, 5), compression="gzip")
        file["energy"] = rng.random(COUNT)
    return path


EVENTS = {"input": "raw/hits=hits,note=note", "target": "particle=kind,mask=mask,energy=energy"}


def test_lists_text_classes_and_masks(tmp_path: Path) -> None:
    source = events(tmp_path / "e.h5")
    manifest = make(source, tmp_path / "out", shards=2, **EVENTS)
    kinds = {item.name: (item.role, item.kind, item.variable, item.resident) for item in manifest.fields}
    assert kinds == {
        "hits": ("input", "numbers", True, False), "note": ("input", "text", True, False),
        "kind": ("target", "class", False, True), "mask": ("target", "numbers", False, False),
        "energy": ("target", "numbers", False, True),
    }  # fmt: skip
    assert manifest.schema == FIELDS_SCHEMA and manifest.class_names == ("muon", "pion")
    written = stored(tmp_path / "out", manifest)
    with h5py.File(source) as file:
        names = {"energy": "energy", "raw/hits": "hits", "mask": "mask"}
        given_ = {(bytes(file["note"][n]), *(bits(file[path][n]) for path in names)) for n in range(COUNT)}
    assert given_ == {(bytes(s["note"]), *(bits(s[name]) for name in names.values())) for s in written.values()}
    dataset = open_dataset(str(tmp_path / "out"))
    assert all(same(written, streamed(dataset, workers)) for workers in (1, 2))
    assert inspect(tmp_path / "out").splits[0].histogram == {"muon": 6, "pion": 6}


def test_damage_is_found_in_every_column_and_mended(tmp_path: Path) -> None:
    source = events(tmp_path / "e.h5")
    manifest = make(source, tmp_path / "out", shards=2, **EVENTS)
    before = contents(tmp_path / "out")
    entry = manifest.shards()[0]
    path = tmp_path / "out" / entry.file
    whole = path.read_bytes()
    place = shard_map(path)
    spots = {name: int(column.block_offsets[np.argmax(column.block_bytes)]) for name, column in place.columns.items()}
    spots |= {name: resident.offset for name, resident in place.residents.items()}
    for name, offset in spots.items():
        content = bytearray(whole)
        content[offset] ^= 1
        path.write_bytes(bytes(content))
        found = verify(tmp_path / "out").faults
        assert len(found) == 1 and ("header" if name in place.residents else f"of {name} ") in found[0], name
        with pytest.raises(CorruptError, match=r"damaged.*--verify"):
            streamed(open_dataset(str(tmp_path / "out")), 1)
    assert repair(tmp_path / "out", str(source), [entry.file]) == [entry.file]
    assert contents(tmp_path / "out") == before


def test_the_bytes_depend_on_source_and_plan_only(tmp_path: Path) -> None:
    source = events(tmp_path / "e.h5")
    make(source, tmp_path / "one", shards=3, **EVENTS)
    time.sleep(1.1)  # HDF5 stores times in whole seconds
    make(source, tmp_path / "two", shards=3, **{**EVENTS, "workers": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_what_is_usually_called_so_is_found(tmp_path: Path) -> None:
    series, target = np.ones((20, 8, 3), np.float32), np.linspace(0, 1, 20)
    np.savez(tmp_path / "splits.npz", X_train=series[:14], Y_train=target[:14], X_test=series[14:], Y_test=target[14:])
    with h5py.File(tmp_path / "groups.h5", "w") as file:
        for split, part in (("train", slice(14)), ("test", slice(14, 20))):
            file[f"{split}/data"], file[f"{split}/label"] = series[part], target[part]
    for name in ("splits.npz", "groups.h5"):
        manifest = make(tmp_path / name, tmp_path / f"{name}-out")
        assert {split: entry.num_samples for split, entry in manifest.splits.items()} == {"train": 14, "test": 6}
        assert [item.role for item in manifest.fields] == ["input", "target"]
        assert manifest.fields[0].shape == (8, 3) and manifest.num_classes == 0


def test_labels_are_numbered_again_and_reported(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((9, 4)), y=np.array([-1, 1, 5] * 3))
    done = ask_hpcdl(["shard", tmp_path / "a.npz", tmp_path / "out"])
    assert done.code == 0 and "-1 -> 0, 1 -> 1, 5 -> 2" in done.err, done.err
    assert inspect(tmp_path / "out").splits[0].histogram == {"-1": 3, "1": 3, "5": 3}


def test_means_and_ranges_are_those_of_the_training_samples(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(5, 3, (90, 7, 2)).astype(np.float32)
    y = np.arange(90) / 7
    np.savez(tmp_path / "a.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:] * 100, y_test=y[60:])
    manifest = make(tmp_path / "a.npz", tmp_path / "out", normalise="mean-std", shards=4, block_size="100")
    found = manifest.fields[0].statistics
    assert found is not None and manifest.fields[1].statistics is None
    part = x[:60].astype(np.float64)
    for name, wanted in {"mean": part.mean((0, 1)), "std": part.std((0, 1)), "low": part.min((0, 1))}.items():
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-12)


def saved(**given_: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        np.savez(folder / "a.npz", **given_)
        return folder / "a.npz"

    return save


def jpeg_files(folder: Path) -> Path:
    """Write images as lists of their files' bytes, which are of unequal length."""
    with h5py.File(folder / "a.h5", "w") as file:
        lists = file.create_dataset("images", (80,), h5py.vlen_dtype(np.uint8))
        for number in range(80):
            lists[number] = np.frombuffer(b"\xff\xd8\xff\xe0" + bytes(20 + number % 3), np.uint8)
        file["labels"] = np.arange(80) % 2
    return folder / "a.h5"


X, Y = np.ones((80, 5), np.float32), np.linspace(0, 1, 80)
PADDED = np.frombuffer(b"\x89PNG\r\n\x1a\n".ljust(30, b"\0") * 80, np.uint8).reshape(80, 30)
HOLED = np.where(np.arange(80) == 7, np.nan, Y)
WRONG: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "unequal counts": (saved(x=X, y=Y[:70]), {}, r"unequal numbers of samples \(x 80, y 70\)"),
    "images as files": (jpeg_files, {}, r"images holds image files \(JPEG, PNG, ...\), whose bytes are no pixels"),
    "images as files, padded": (saved(x=PADDED, y=Y), {}, "x holds image files"),
    "no samples": (saved(x=X[:0], y=Y[:0]), {}, "holds no samples"),
    "an empty field": (saved(x=X[:, :0], y=Y), {}, "at least one value"),
    "Python objects": (saved(x=np.array([[1], [1, 2]], object), y=Y[:2]), {}, "Python objects"),
    "complex numbers": (saved(x=X.astype(np.complex64), y=Y), {}, "real and imaginary part"),
    "dates": (saved(x=np.zeros(80, "M8[s]"), y=Y), {}, "dates are not taken"),
    "records": (saved(x=np.zeros(80, "f4,i4"), y=Y), {}, "an array of its own"),
    "NaN in the target": (saved(x=X, y=HOLED), {}, r"y of sample 7 is not finite .*--nan skip"),
    "infinity in the input": (saved(x=np.where(X > 0, np.inf, X), y=Y), {}, r"x of sample 0 .* 80 samples in all"),
    "a single value": (saved(x=np.float32(1), y=Y), {}, "a single value"),
    "which target": (saved(x=X, z=Y), {}, r"which array is the target\? Give --target PATH=NAME"),
    "which input": (saved(a=X, b=X, y=Y), {}, r"which array is the input\? Give --input PATH=NAME"),
    "no such array": (saved(x=X, y=Y), {"input": "w=w"}, "has no array 'w'; it has 'x'"),
    "a name that is none": (saved(x=X, y=Y), {"input": "x=a b"}, "no field can be called 'a b'"),
    "a name that shards use": (saved(x=X, y=Y), {"input": "x=offsets"}, "none of block_checksums"),
    "a name twice": (saved(x=X, z=X, y=Y), {"input": "x=a,z=a"}, "twice"),
    "input and target alike": (saved(x=X, y=Y), {"input": "x=a", "target": "y=a"}, "names an input and a target"),
    "very many whole numbers": (
        saved(x=X, y=np.arange(80)),
        {},
        r"80 different whole numbers .*--target-kind class, or",
    ),
    "very many strings": (saved(x=X, y=np.arange(80).astype("U")), {}, "80 different strings"),
    "whole numbers as floats": (saved(x=X, y=np.round(Y)), {}, "classes or quantities"),
    "no classes": (saved(x=X, y=Y), {"target_kind": "class"}, "name no classes"),
    "a split without a field": (saved(x_train=X, y_train=Y, x_test=X), {}, "the split test has no y"),
    "splits of two shapes": (saved(x_train=X, y_train=Y, x_test=X[:, :3], y_test=Y), {}, "differ in shape or type"),
    "splits of two types": (saved(x_train=X, y_train=Y, x_test=X, y_test=Y > 0), {}, "differ in shape or type"),
    "strings in a table": (saved(x=np.full((80, 2), "a"), y=Y), {}, "one a sample is needed"),
    "text that is not UTF-8": (saved(x=np.array([b"ok", b"caf\xe9"] * 40), y=Y), {}, "x of sample 1 is not UTF-8"),
    "labels that are not UTF-8": (saved(x=X, y=np.array([b"ok", b"\xff"] * 40)), {}, "y of sample 1 is not UTF-8"),
    "compression": (saved(x=X, y=Y), {"compression": "gzip"}, "--compression is for images"),
    "image size": (saved(x=X, y=Y), {"image_size": 8}, "--image-size is for image files"),
    "encoded": (saved(x=X, y=Y), {"encoding": "encoded"}, "packs JPEG and PNG"),
    "nothing to scale": (
        saved(x=X > 0, t=np.full(80, "ab"), y=Y),
        {"input": "t=t", "normalise": "0-1"},
        "scales numbers",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_with_its_reason_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    save, options, words = WRONG[case]
    source = save(tmp_path)
    with pytest.raises(HpcdlError, match=words) as caught:
        make(source, tmp_path / "new" / "out", **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_samples_with_nan_are_left_out_or_kept(tmp_path: Path) -> None:
    source = saved(x=X, y=HOLED)(tmp_path)
    assert make(source, tmp_path / "skip", nan="skip").splits["all"].num_samples == 79
    assert make(source, tmp_path / "keep", nan="keep").splits["all"].num_samples == 80


@pytest.mark.parametrize("mib", [300, pytest.param(1024, marks=pytest.mark.soak)])
def test_a_sample_may_be_large(mib: int, tmp_path: Path) -> None:
    volumes = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "uint8", (2, mib, 1024, 1024))
    volumes[0, -1, -1, -1], volumes[1, 0, 0, 0] = 7, 9
    np.save(tmp_path / "y.npy", np.array([0.5, 1.5], np.float32))
    make(tmp_path, tmp_path / "out", shards=1, max_ranks=1)
    dataset = open_dataset(str(tmp_path / "out"))
    with h5py.File(next((tmp_path / "out").glob("*.h5"))) as file:
        ends = {(int(file["x"][n, 0, 0, 0]), int(file["x"][n, -1, -1, -1])): float(file["y"][n]) for n in range(2)}
    assert ends == {(0, 7): 0.5, (9, 0): 1.5}
    assert [tuple(item.shape) for item in dataset.inputs] == [(mib, 1024, 1024)]
    assert not verify(tmp_path / "out").faults


def test_numbers_are_scaled_before_they_become_float32(tmp_path: Path) -> None:
    """Days with fractions are scaled before the conversion, as float32 would round them to a quarter of a day."""
    days = 2459000 + np.arange(8) / 64
    np.savez(tmp_path / "a.npz", x=np.stack([days, days * 2], 1), y=np.arange(8) % 2)
    for way, begin, wide in (("mean-std", days.mean(), days.std()), ("0-1", days[0], days[-1] - days[0])):
        make(tmp_path / "a.npz", tmp_path / way, normalise=way)
        ((found, _),) = hpcdl.data.open(str(tmp_path / way), batch_size=8, epochs=1)
        values = np.sort(np.asarray(found), 0)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, np.stack([(days - begin) / wide] * 2, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.float32(200), "images of float32 keep their values: training scales bytes alone to 0..1"),
        (np.int64(200), "images: int64 up to 200, fed as they are; pixels saved as uint8 are scaled to 0..1"),
    ],
)
def test_pictures_of_other_types_than_bytes_are_reported_to_be_fed_as_they_are(
    values: np.generic, words: str, tmp_path: Path
) -> None:
    images = np.full((12, 8, 8, 3), values)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(12) % 3)
    assert any(words in line for line in make(tmp_path / "a.npz", tmp_path / "out").understood)


def test_a_damaged_array_beside_the_one_that_is_given_does_not_matter(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((12, 2), np.float32))
    np.save(tmp_path / "y.npy", np.arange(12) % 3)
    (tmp_path / "notes.npy").write_bytes(b"\x80\x02cnumpy")
    assert make(tmp_path / "x.npy", tmp_path / "out").splits["all"].num_samples == 12
    with pytest.raises(SourceError, match=r"notes.npy is not a numpy array"):
        make(tmp_path / "notes.npy", tmp_path / "no")
    with pytest.raises(SourceError, match=r"notes.npy is not a numpy array"):
        make(tmp_path / "x.npy", tmp_path / "no", target="notes")
    (tmp_path / "y.npy").write_bytes(b"\x80\x02cnumpy")
    with pytest.raises(SourceError, match=r"y.npy is not a numpy array"):
        make(tmp_path / "x.npy", tmp_path / "no")
