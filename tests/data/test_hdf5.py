from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.data.format import compression
from hpcdl.data.format.hdf5 import read_arrays, write_arrays
from tests.data.sharding import contents, everything, make, numbers, pixels


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4))
@settings(max_examples=15, deadline=None)
def test_arrays_come_back(shapes: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("arrays") / "a.h5"
    arrays = {f"group/{number}": np.random.default_rng(number).random(shape) for number, shape in enumerate(shapes)}
    write_arrays(path, arrays, {"step": 3, "name": "x"})
    found, attributes = read_arrays(path)
    assert set(found) == set(arrays) and all(np.array_equal(found[name], arrays[name]) for name in arrays)
    assert attributes["step"] == 3 and attributes["name"] == "x"


def test_a_damaged_file_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"nothing")
    with pytest.raises(CorruptError, match=r"a\.h5 is damaged"):
        read_arrays(tmp_path / "a.h5")


@pytest.mark.parametrize("name", ["gzip", "zstd", "blosc2"])
def test_compressed_blocks_are_smaller_and_exact(name: str, tmp_path: Path) -> None:
    images = pixels(60, (16, 16)) // 64
    np.savez(tmp_path / "a.npz", images=images, labels=numbers(60, 3))
    for folder in ("one", "two"):
        manifest = make(tmp_path / "a.npz", tmp_path / folder, compression=name, shards=2, max_ranks=6)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    found, _ = everything(tmp_path / "one", manifest, "all")
    assert sorted(map(bytes, found)) == sorted(map(bytes, images))
    plain = make(tmp_path / "a.npz", tmp_path / "plain", shards=2, max_ranks=6)
    with h5py.File(tmp_path / "one" / manifest.shards()[0].file, locking=False) as file:
        assert file["images"].chunks == (plain.block_samples, 16, 16, 1)
        assert file["images"].id.get_storage_size() < file["images"].nbytes


def test_a_missing_compressor_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    with pytest.raises(UsageError, match=r"hpcdl\[compression\]"):
        compression.filters("zstd")
