from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.core.errors import CorruptError, SourceError, UsageError
from hpcdl.data.format import hdf5 as compression
from hpcdl.data.format.hdf5 import shard_map
from tests.data.sharding import contents, everything, make, numbers, pixels


def external_link(file: h5py.File, name: str, other: Path) -> None:
    file[name] = h5py.ExternalLink(str(other), "/secret")


def deep_external_link(file: h5py.File, name: str, other: Path) -> None:
    file["inner/group"] = h5py.ExternalLink(str(other), "/")
    file[name] = h5py.SoftLink("/inner/group/secret")


def external_storage(file: h5py.File, name: str, other: Path) -> None:
    file.create_dataset(name, (4, 6, 6, 1), "u1", external=[(str(other), 0, 144)])


def virtual(file: h5py.File, name: str, other: Path) -> None:
    layout = h5py.VirtualLayout((4, 6, 6, 1), "u1")
    layout[:] = h5py.VirtualSource(str(other), "secret", (4, 6, 6, 1))
    file.create_virtual_dataset(name, layout)


def test_names_of_data_sets_may_hold_colons(tmp_path: Path) -> None:
    source, images = tmp_path / "a:b.h5", np.arange(4 * 6 * 6 * 3, dtype="u1").reshape(4, 6, 6, 3)
    with h5py.File(source, "w") as file:
        file["exp:images"], file["labels"] = images, [0, 1, 0, 1]
    make(source, tmp_path / "out", shards=1)
    with h5py.File(tmp_path / "out" / "shard-00000.h5") as file:
        assert sorted(map(bytes, file["images"][:])) == sorted(map(bytes, images))


@pytest.mark.parametrize("leads_out", [external_link, deep_external_link, external_storage, virtual])
def test_a_file_that_leads_to_others_is_refused(
    leads_out: Callable[[h5py.File, str, Path], None], tmp_path: Path
) -> None:
    """An HDF5 file with external links is refused: as a shard it is damaged (3), as a source it cannot be used (2)."""
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["secret"] = np.zeros((4, 6, 6, 1), "u1")
    make("synthetic:6x6x1:3", tmp_path / "out", samples=4, shards=1)
    shard = tmp_path / "out" / "shard-00000.h5"
    shard_map(shard)
    with h5py.File(shard, "r+", locking=False) as file:
        del file["images"]
        leads_out(file, "images", other)
    with pytest.raises(CorruptError, match=r"shard-00000\.h5 is damaged: .*(another file|other files)") as corrupt:
        shard_map(shard)
    source = tmp_path / "source.h5"
    with h5py.File(source, "w") as file:
        file["labels"] = np.zeros(4, "i8")
        leads_out(file, "images", other)
    remedy = "h5repack" if leads_out is external_storage else "give --follow-links"
    with pytest.raises(SourceError, match=rf"source\.h5: .*other.*{remedy}") as unusable:
        make(source, tmp_path / "made")
    assert (corrupt.value.exit_code, unusable.value.exit_code) == (3, 2)


def test_soft_links_are_no_reason(tmp_path: Path) -> None:
    """Soft links are accepted: without external links they cannot leave the file."""
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["images"] = np.zeros((4, 6, 6, 1), "u1")
        file["labels"] = np.zeros(4, "i8")
        file["again"], file["nowhere"] = h5py.SoftLink("/images"), h5py.SoftLink("/gone")
        file.create_dataset("regions", (4,), h5py.ref_dtype)
    made = make(tmp_path / "source.h5", tmp_path / "made")
    assert made.splits["all"].num_samples == 4
    line = "not read: nowhere (a link to /gone, which is not there), regions (references)"
    assert [remark for remark in made.understood if remark.startswith("not read")] == [line]


def test_a_filter_that_is_not_installed_is_no_damage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["y"] = np.zeros(4, "f4")
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((4, 5))
        settings.set_filter(499, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple((4, 5))
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, settings).write_direct_chunk((0, 0), b"abc")
    with pytest.raises(SourceError, match=r"x is packed by HDF5's filter 499, which is not installed here"):
        make(tmp_path / "source.h5", tmp_path / "made")


def test_a_file_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "writing", "w", libver="latest") as file:
        file["x"], file["y"] = np.zeros((4, 5), "f4"), np.zeros(4, "f4")
        file.swmr_mode = True
        shutil.copy(tmp_path / "writing", tmp_path / "source.h5")
    with pytest.raises(SourceError, match=r"source\.h5 is being written, or its writer was killed"):
        make(tmp_path / "source.h5", tmp_path / "made")


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


def test_a_missing_compressor_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    with pytest.raises(UsageError, match=r"hpcdl\[compression\]"):
        compression.filters("zstd")
