"""Shards of images with a class are byte by byte what the first version of the format wrote."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from hpcdl.data.format.manifest import SCHEMA, read_manifest
from tests.data.sharding import cifar_folder, contents, idx_folder, make, numbers, pixels

WRITTEN = json.loads((Path(__file__).parent / "classic_shards.json").read_text())
"""SHA-256 of every shard, by case, as earlier versions wrote it; only the version number inside the shard differs."""


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", images=pixels(40, (8, 8, 3)), labels=numbers(40, 4))
    return folder / "a.npz"


def png_folder(folder: Path, heights: int = 4) -> Path:
    """Pictures of several `heights` in two classes, written without a compression library whose bytes may change."""
    for number in range(12):
        height = 3 + number % heights
        lines = b"".join(b"\0" + line.tobytes() for line in pixels(height, (5, 3), seed=number))
        parts = ((b"IHDR", struct.pack(">IIBBBBB", 5, height, 8, 2, 0, 0, 0)), (b"IDAT", stored(lines)), (b"IEND", b""))
        content = b"".join(
            struct.pack(">I", len(own)) + kind + own + struct.pack(">I", zlib.crc32(kind + own)) for kind, own in parts
        )
        path = folder / "png" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return folder / "png"


def stored(content: bytes) -> bytes:
    """Return `content` in zlib format without compression, as one block."""
    head = b"\x78\x01\x01" + struct.pack("<HH", len(content), len(content) ^ 0xFFFF)
    return head + content + struct.pack(">I", zlib.adler32(content))


CASES = {
    "encoded": (png_folder, {"encoding": "encoded", "image_size": "4x4", "block_size": "256"}),
    "decoded": (lambda folder: png_folder(folder, 1), {"split": "train=0.5,val=0.5"}),
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
    if manifest.hpcdl_version == "0.3.0":  # the version is stored in every shard
        assert found == WRITTEN[case]


def test_the_version_of_the_digests_is_this_one() -> None:
    """If hpcdl's version changes, write `classic_shards.json` again from the commit before: it includes the number."""
    import hpcdl

    assert hpcdl.__version__ == "0.3.0"
