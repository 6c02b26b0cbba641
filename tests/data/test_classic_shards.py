"""Shards of images with a class are, byte by byte, what the first version of the format wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpcdl.data.format.manifest import SCHEMA, read_manifest
from tests.data.sharding import cifar_folder, contents, idx_folder, make, numbers, pixels

WRITTEN = json.loads((Path(__file__).parent / "classic_shards.json").read_text())
"""SHA-256 of every shard, by case: of files as version 0.2.0 wrote them, but for the version that stands in them."""


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", images=pixels(40, (8, 8, 3)), labels=numbers(40, 4))
    return folder / "a.npz"


CASES = {
    "gzip": (npz, {"compression": "gzip"}),
    "npz": (npz, {"block_size": "512"}),
    "idx": (lambda folder: idx_folder(folder / "idx")[0], {}),
    "cifar": (lambda folder: cifar_folder(folder / "c", pickled=False, hundred=False)[0], {}),
    "syn": (lambda folder: "synthetic:8x8x1:3:float16@30", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_shards_are_what_they_were(case: str, tmp_path: Path) -> None:
    source, options = CASES[case]
    make(source(tmp_path), tmp_path / "out", **options)
    manifest, _ = read_manifest(tmp_path / "out")
    assert manifest.schema == SCHEMA and "fields" not in (tmp_path / "out" / "manifest.json").read_text()
    found = {name: digest for name, digest in contents(tmp_path / "out").items() if name.endswith(".h5")}
    if manifest.hpcdl_version == "0.3.0":  # it stands in every shard
        assert found == WRITTEN[case]


def test_the_version_of_the_digests_is_this_one() -> None:
    """With another version write `classic_shards.json` anew, from the commit before: the digests hold its number."""
    import hpcdl

    assert hpcdl.__version__ == "0.3.0"
