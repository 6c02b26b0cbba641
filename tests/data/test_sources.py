from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from hpcdl.core.errors import HpcdlError, SourceError, UsageError
from hpcdl.data.sources import SOURCES
from hpcdl.data.sources.base.source import recognise
from tests.data.sharding import cifar_folder, everything, idx_folder, image_folder, make, numbers, pixels, same_samples
from tests.data.test_formats import FORMATS

Made = tuple[Path, np.ndarray, np.ndarray]


def npz(tmp_path: Path) -> Made:
    images, labels = pixels(15, (8, 8, 3)), numbers(15, 4)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    return tmp_path / "a.npz", images, labels


def packed_npz(tmp_path: Path) -> Made:
    planes, labels = np.random.default_rng(0).random((15, 3, 8, 9)), numbers(15, 4)  # float64, channels first
    np.savez_compressed(tmp_path / "a.npz", x=planes, y=labels)
    return tmp_path / "a.npz", planes.transpose(0, 2, 3, 1).astype(np.float32), labels


def npy(tmp_path: Path) -> Made:
    images, labels = pixels(15, (8, 8)), numbers(15, 4)
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "images.npy", images)
    np.save(tmp_path / "arrays" / "labels.npy", labels.astype(np.int32))
    return tmp_path / "arrays", images[..., None], labels


def hep(tmp_path: Path) -> Made:
    planes, labels = np.random.default_rng(0).random((15, 3, 8, 8), dtype=np.float32), numbers(15, 2)
    with h5py.File(tmp_path / "events.h5", "w") as file:
        file.create_dataset("all_events/images", data=planes, chunks=(4, 3, 8, 8), compression="gzip")
        file["all_events/y"] = labels.astype(np.float32)
    return tmp_path / "events.h5", planes.transpose(0, 2, 3, 1), labels


def half(tmp_path: Path) -> Made:
    images, labels = np.random.default_rng(0).random((15, 8, 8, 3)).astype(np.float16), numbers(15, 2)
    with h5py.File(tmp_path / "half.h5", "w") as file:
        file["images"], file["labels"] = images, labels
    return tmp_path / "half.h5", images, labels


ARRAYS: dict[str, tuple[str, Callable[[Path], Made]]] = {
    "npz": ("numpy", npz),
    "npz compressed, float64, channels first": ("numpy", packed_npz),
    "npy folder": ("numpy", npy),
    "hdf5 chunked, channels first": ("hdf5", hep),
    "hdf5 float16": ("hdf5", half),
    "idx": ("mnist", lambda tmp: idx_folder(tmp / "idx")),
    "idx gz": ("mnist", lambda tmp: idx_folder(tmp / "idx", packed=True)),
    "cifar10 binary": ("cifar10", lambda tmp: cifar_folder(tmp / "c", pickled=False, hundred=False)),
    "cifar10 python": ("cifar10", lambda tmp: cifar_folder(tmp / "c", pickled=True, hundred=False)),
    "cifar100 binary": ("cifar100", lambda tmp: cifar_folder(tmp / "c", pickled=False, hundred=True)),
    "cifar100 python": ("cifar100", lambda tmp: cifar_folder(tmp / "c", pickled=True, hundred=True)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_unchanged(name: str, tmp_path: Path) -> None:
    kind, build = ARRAYS[name]
    source, images, labels = build(tmp_path)
    assert recognise(str(source)) == kind
    manifest = make(source, tmp_path / "out", shards=2)
    (split,) = manifest.splits
    assert same_samples(everything(tmp_path / "out", manifest, split), images, labels)
    assert manifest.source == {"format": kind, "name": source.name}
    if "cifar" in name:
        assert manifest.class_names[3] == "class3"


@pytest.mark.parametrize("kind", ["png", "bmp"])
def test_image_folder_with_its_own_division(kind: str, tmp_path: Path) -> None:
    image_folder(tmp_path / "s" / "train", {"cat": 5, "dog": 3}, kind=kind)
    image_folder(tmp_path / "s" / "validation", {"dog": 2}, kind=kind)
    manifest = make(tmp_path / "s", tmp_path / "out")
    assert {name: split.num_samples for name, split in manifest.splits.items()} == {"train": 8, "val": 2}
    assert list(manifest.class_names) == ["cat", "dog"]
    images, labels = everything(tmp_path / "out", manifest, "val")
    wanted = [np.asarray(Image.open(path)) for path in (tmp_path / "s" / "validation" / "dog").iterdir()]
    assert same_samples((images, labels), np.stack(wanted), np.array([1, 1]))


def test_csv_by_name_by_number_and_with_splits(tmp_path: Path) -> None:
    image_folder(tmp_path / "pictures", {"x": 4})
    lines = [
        f"pictures/x/{n:04d}.png,{label},{split}"
        for n, label, split in ((0, "b", "train"), (1, "a", "train"), (2, "b", "val"))
    ]
    (tmp_path / "list.csv").write_text("file,label,split\n" + "\n".join(lines) + "\n")
    manifest = make(tmp_path / "list.csv", tmp_path / "out")
    assert list(manifest.class_names) == ["a", "b"]
    assert everything(tmp_path / "out", manifest, "val")[1].tolist() == [1]
    (tmp_path / "numbers.csv").write_text("pictures/x/0000.png,0\npictures/x/0001.png,3\n")
    assert make(tmp_path / "numbers.csv", tmp_path / "out2").num_classes == 4
    (tmp_path / "signs.csv").write_text("pictures/x/0000.png,-1\npictures/x/0001.png,1\n")
    assert list(make(tmp_path / "signs.csv", tmp_path / "signs").class_names) == ["-1", "1"]
    (tmp_path / "gone.csv").write_text("nothing.png,1\n")
    with pytest.raises(SourceError, match=r"nothing\.png"):
        make(tmp_path / "gone.csv", tmp_path / "out3")
    assert not (tmp_path / "out3").exists()


def test_resizing_keeps_the_middle_and_grey_stays_grey(tmp_path: Path) -> None:
    (tmp_path / "s" / "a").mkdir(parents=True)
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 200
    Image.fromarray(wide).save(tmp_path / "s" / "a" / "wide.png")
    manifest = make(tmp_path / "s", tmp_path / "out", image_size="10")
    assert tuple(manifest.sample_shape) == (10, 10, 1)
    assert (everything(tmp_path / "out", manifest, "all")[0][:, :, 1:-1] == 200).all()
    assert make(tmp_path / "s", tmp_path / "rgb", image_size="8x12", channels=3).sample_shape == (8, 12, 3)
    Image.fromarray(wide[:, :30]).save(tmp_path / "s" / "a" / "other.png")
    with pytest.raises(UsageError, match="--image-size"):
        make(tmp_path / "s", tmp_path / "out2")


def test_palette_and_alpha_images(tmp_path: Path) -> None:
    (tmp_path / "s" / "a").mkdir(parents=True)
    Image.new("P", (4, 4), 3).save(tmp_path / "s" / "a" / "palette.png")
    Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(tmp_path / "s" / "a" / "alpha.png")
    with pytest.raises(SourceError, match=r"alpha\.png has 4 bands.*--channels 3 leaves it out, --channels 4 keeps it"):
        make(tmp_path / "s", tmp_path / "asked")
    for channels, wanted in ((3, (10, 20, 30)), (4, (10, 20, 30, 0))):
        manifest = make(tmp_path / "s", tmp_path / f"out{channels}", channels=channels)
        images, _ = everything(tmp_path / f"out{channels}", manifest, "all")
        assert images.shape == (2, 4, 4, channels) and wanted in {tuple(image[0, 0].tolist()) for image in images}


def test_synthetic_is_made_from_the_seed(tmp_path: Path) -> None:
    one = make("synthetic:hep", tmp_path / "one", samples=6)
    assert (one.dtype, tuple(one.sample_shape), one.splits["all"].num_samples) == ("float32", (224, 224, 3), 6)
    two = make("synthetic:hep", tmp_path / "two", samples=6)
    other = make("synthetic:hep", tmp_path / "three", samples=6, seed=9)
    images, labels = everything(tmp_path / "one", one, "all")
    assert np.array_equal(images, everything(tmp_path / "two", two, "all")[0])
    assert not np.array_equal(images, everything(tmp_path / "three", other, "all")[0])
    assert images.min() >= 0 and images.max() <= 1 and labels.max() <= 1


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/hpcdl-was-here",)


def broken_cases(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Return by name: the source, and the expected message."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "empty").mkdir()
    (folder / "noclass" / "a").mkdir(parents=True)
    (folder / "text" / "a").mkdir(parents=True)
    (folder / "text" / "a" / "notes.png").write_text("no picture")
    magic, _, _ = idx_folder(folder / "magic")
    (magic / "train-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x804, 20, 28, 28) + bytes(20 * 784))
    short, _, _ = idx_folder(folder / "short")
    with (short / "train-images-idx3-ubyte").open("r+b") as file:
        file.truncate(5000)
    torn, _, _ = idx_folder(folder / "torn", packed=True)
    path = torn / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:300])
    range_, _, _ = cifar_folder(folder / "range", pickled=False, hundred=False)
    content = bytearray((range_ / "data_batch_1.bin").read_bytes())
    content[3073 * 4] = 200
    (range_ / "data_batch_1.bin").write_bytes(content)
    cut, _, _ = cifar_folder(folder / "cut", pickled=False, hundred=False)
    (cut / "data_batch_1.bin").write_bytes(bytes(content[:4000]))
    evil, _, _ = cifar_folder(folder / "evil", pickled=True, hundred=False)
    (evil / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    np.savez(folder / "objects.npz", images=np.array([[[None]]], object), labels=np.array([1]))
    np.savez(folder / "short.npz", images=pixels(4, (3, 3)), labels=numbers(3, 2))
    (folder / "bad.h5").write_bytes(b"no HDF5")
    with h5py.File(folder / "many.h5", "w") as file:
        file["a"], file["b"] = pixels(3, (4, 4)), pixels(3, (4, 4))
    (folder / "bad.tfrecord").write_bytes(b"\1" * 40)
    latin = folder / "latin" / os.fsdecode(b"caf\xe9")
    latin.mkdir(parents=True)
    Image.new("L", (4, 4)).save(folder / "one.png")
    (folder / "one.png").rename(latin / "one.png")
    return {
        "no such source": (folder / "nothing", "no such source"),
        "empty folder": (folder / "empty", "is empty"),
        "no files in the classes": (folder / "noclass", "no files"),
        "no image": (folder / "text", r"notes\.png is not an image"),
        "IDX magic": (magic, "magic number 0x00000804"),
        "IDX cut short": (short, "cut short"),
        "gzip cut short": (torn, "cannot be unpacked"),
        "label out of range": (range_, "sample 4 has the label 200, out of range 0 to 9"),
        "CIFAR cut short": (cut, "cut short"),
        "a pickle that runs code": (evil, r"refused: it asks for \w+\.system"),
        "an array of objects": (folder / "objects.npz", "Python objects"),
        "labels missing": (folder / "short.npz", "one number for each of 4 samples"),
        "no HDF5": (folder / "bad.h5", "no HDF5 file"),
        "which data sets": (folder / "many.h5", "--target PATH=NAME, one of 'a'"),
        "no TFRecord": (folder / "bad.tfrecord", "damaged or cut short at byte 0"),
        "class name not UTF-8": (folder / "latin", "not UTF-8"),
    }


def test_unusable_sources_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, (source, message) in broken_cases(tmp_path).items():
        with pytest.raises(SourceError, match=message) as caught:
            make(source, tmp_path / "new" / "out")
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value), name
        assert not (tmp_path / "new").exists(), name
    assert not Path("/tmp/hpcdl-was-here").exists()


def test_file_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    image_folder(tmp_path / "s", {"a": 2})
    folder = tmp_path / "s" / "a"
    (folder / "0000.png").rename(folder / os.fsdecode(b"\xff\xfe.png"))
    assert make(tmp_path / "s", tmp_path / "out").splits["all"].num_samples == 2


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcdl.data.write import writing

    source = image_folder(tmp_path / "s", {"a": 12})
    real = writing.write_part

    def meddle(*args: object, **kwargs: object) -> object:
        Image.new("RGB", (16, 16)).save(source / "a" / "0003.png")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "write_part", meddle)
    with pytest.raises(HpcdlError, match=r"0003\.png changed after it was listed") as caught:
        make(source, tmp_path / "out")
    assert caught.value.exit_code == 1
    monkeypatch.setattr(writing, "write_part", real)
    with pytest.raises(UsageError, match="another source"):  # the source was replaced: the two are not mixed
        make(source, tmp_path / "out", resume=True)


def test_all_formats_are_tested() -> None:
    elsewhere = {"reader", "zip", "image-folder", "csv", "table", "synthetic", "tfrecord", *FORMATS}
    assert {kind for kind, _ in ARRAYS.values()} | elsewhere == set(SOURCES)
