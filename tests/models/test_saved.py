"""Saved models that unpack to too many bytes or contain code are refused by name, before Keras reads them."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy
import pytest

from hpcdl.core.storage import archives
from hpcdl.models.saved import check_saved, load_saved

MOST = 300 << 20
"""Unpacked size of the bombs in these tests: more than any file may have."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    path = tmp_path_factory.mktemp("saved") / "good.keras"
    layers = [keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.BatchNormalization()]
    model = keras.Sequential(layers)
    model.compile("adam")
    model.save(path)
    model.save(path.with_suffix(".h5"))
    return path


def changed(good: Path, path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """Write `good` with changed content."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(path, "w", method) as new:
        for member in old.infolist():
            new.writestr(member.filename, change(member.filename, old.read(member)))
    return path


def with_weights(good: Path, path: Path, weights: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    return changed(good, path, lambda name, content: weights if name.endswith(".h5") else content, method)


def hdf5(**settings: Any) -> bytes:
    """Return an HDF5 file with one array without stored values, all of which read as zero."""
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        opened.create_dataset("layers/a/vars/0", (MOST // 4,), "f4", **settings)
    return file.getvalue()


def lying_chunk(good: Path, path: Path) -> Path:
    """Write a 64 KiB chunk that unpacks to far more: HDF5 itself would allocate any size."""
    file, packer = io.BytesIO(), zlib.compressobj(1)
    content = b"".join(packer.compress(bytes(1 << 20)) for _ in range(12)) + packer.flush()
    with h5py.File(file, "w") as opened:
        array = opened.create_dataset("layers/a/vars/0", (1 << 14,), "f4", chunks=(1 << 14,), compression="gzip")
        array.id.write_direct_chunk((0,), content)
    return with_weights(good, path, file.getvalue())


def lying_directory(good: Path, path: Path) -> Path:
    """Write weights whose size in the directory is the true model's and whose checksum fits, followed by zeros."""
    with zipfile.ZipFile(good) as archive:
        weights = archive.read("model.weights.h5")
    content = bytearray(with_weights(good, path, weights + bytes(MOST), zipfile.ZIP_DEFLATED).read_bytes())
    at = content.rindex(b"PK\1\2", 0, content.rindex(b"model.weights.h5"))
    struct.pack_into("<I", content, at + 16, zlib.crc32(weights))
    struct.pack_into("<I", content, at + 24, len(weights))
    path.write_bytes(content)
    return path


BOMBS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "zeros in a zip": (
        lambda good, path: with_weights(good, path, bytes(MOST), zipfile.ZIP_DEFLATED), "would unpack to 300 MiB",
    ),
    "a directory that lies": (lying_directory, "holds more than the .* of its directory"),
    "bzip2": (lambda good, path: changed(good, path, lambda _, it: it, zipfile.ZIP_BZIP2), "packed by bzip2"),
    "an array that is not there": (lambda good, path: with_weights(good, path, hdf5()), "would unpack to 300 MiB"),
    "chunks that are not there": (
        lambda good, path: with_weights(good, path, hdf5(chunks=(1 << 16,), compression="gzip")), "would unpack to",
    ),
    "a chunk that lies": (lying_chunk, "chunks that .* than their shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_to_too_much_is_refused_unread(good: Path, tmp_path: Path, name: str) -> None:
    make, words = BOMBS[name]
    path = make(good, tmp_path / "bomb.keras")
    assert path.stat().st_size < 2 << 20
    with pytest.raises(ValueError, match=words) as raised:
        check_saved(path)
    assert "\n" not in str(raised.value)


def test_a_sparse_model_is_held_against_the_memory(tmp_path: Path) -> None:
    """A sparse model file uses no disk space, but its stated size is compared with the memory."""
    left = archives.memory_left()
    assert left is not None
    path = tmp_path / "holes.h5"
    with h5py.File(path, "w") as opened:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(opened.id, b"w", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((left,)), plan)
    with pytest.raises(ValueError, match="of memory are free here"):
        check_saved(path)


def layer(class_name: str, **more: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": class_name, "config": {}, "registered_name": None, **more}


CODE = {
    "torch": (layer("TorchModuleWrapper", config={"module": "gASV"}), "TorchModuleWrapper.*unpickles a PyTorch module"),
    "nested": (layer("TimeDistributed", config={"layer": layer("TorchModuleWrapper")}), "TorchModuleWrapper"),
    "registered": (layer("Wrapped", registered_name="my>TorchModuleWrapper"), "TorchModuleWrapper"),
    "lambda": (layer("Lambda"), "Lambda.*runs Python code"),
    "foreign model": (layer("TFSMLayer"), "TFSMLayer.*SavedModel"),
    "jax": (layer("JaxLayer"), "JaxLayer"),
    "by module": (layer("system", module="os"), "os.system.*neither a layer of Keras"),
    "fetches": (
        layer("Dense", config={"activation": layer("function", module="keras.utils", config="get_file")}),
        "keras.utils.get_file",
    ),
}


@pytest.mark.parametrize("name", CODE)
def test_layers_that_bring_code_are_refused_by_name(good: Path, tmp_path: Path, name: str) -> None:
    added, words = CODE[name]

    def change(member: str, content: bytes) -> bytes:
        if member != "config.json":
            return content
        document = json.loads(content)
        document["config"]["layers"].append(added)
        return json.dumps(document).encode()

    path = changed(good, tmp_path / "code.keras", change)
    with pytest.raises(ValueError, match=words):
        load_saved(path, {})


def test_a_config_cannot_ask_for_more_weights_than_the_file_has(good: Path, tmp_path: Path) -> None:
    def change(member: str, content: bytes) -> bytes:
        return content.replace(b'"units": 3', b'"units": 300000000') if member == "config.json" else content

    with pytest.raises(ValueError, match="holds too few weights"):
        load_saved(changed(good, tmp_path / "wide.keras", change), {})


def test_honest_models_are_taken_packed_or_not(good: Path, tmp_path: Path) -> None:
    packed = changed(good, tmp_path / "packed.keras", lambda _, content: content, zipfile.ZIP_DEFLATED)
    with h5py.File(good.with_suffix(".h5")) as old, h5py.File(tmp_path / "packed.h5", "w") as new:
        new.attrs.update(old.attrs)

        def copy(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.shape:
                new.create_dataset(name, data=item[()], chunks=item.shape, compression="gzip", shuffle=True)
            elif isinstance(item, h5py.Dataset):
                new[name] = item[()]
            else:
                new.require_group(name).attrs.update(item.attrs)

        old.visititems(copy)
    expected = load_saved(good, {}).get_weights()
    for path in (packed, good.with_suffix(".h5"), tmp_path / "packed.h5"):
        for mine, other in zip(load_saved(path, {}).get_weights(), expected, strict=True):
            numpy.testing.assert_array_equal(mine, other)
