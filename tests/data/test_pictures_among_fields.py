"""Pictures as fields beside others: colours of inputs, numbers of masks, and unreadable ones, in every format alike."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hpcdl.core.errors import UsageError
from hpcdl.data.write.writing import dry_run
from tests.data.sharding import make, request
from tests.data.test_formats import example, framed, png, tar

RANDOM = np.random.default_rng(3)
COLOURS = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [9, 9, 9]], np.uint8)
COUNT = 6


def records(folder: Path, images: Sequence[bytes], masks: Sequence[bytes]) -> Path:
    rows = (example(image=image, mask=mask) for image, mask in zip(images, masks, strict=True))
    (folder / "a.tfrecord").write_bytes(framed(list(rows)))
    return folder / "a.tfrecord"


def columns(folder: Path, images: Sequence[bytes], masks: Sequence[bytes]) -> Path:
    pq.write_table(pa.table({"image": images, "mask": masks}), folder / "t.parquet")
    return folder / "t.parquet"


def members(folder: Path, images: Sequence[bytes], masks: Sequence[bytes]) -> Path:
    pairs = enumerate(zip(images, masks, strict=True))
    return tar(folder / "a.tar", {f"{n}.{key}.png": value for n, pair in pairs
                                  for key, value in zip(("image", "mask"), pair, strict=True)})  # fmt: skip


SOURCES: dict[str, tuple[Callable[[Path, Sequence[bytes], Sequence[bytes]], Path], str]] = {
    "tfrecord": (records, ""),
    "parquet": (columns, ""),
    "webdataset": (members, ".png"),
}


def in_palette(numbers: np.ndarray, colours: np.ndarray = COLOURS) -> bytes:
    """A PNG whose pixels are numbers of colours."""
    image = Image.frombytes("P", numbers.shape[::-1], numbers.tobytes())
    image.putpalette([*colours.reshape(-1), *[0] * 756])
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def sharded(name: str, folder: Path, images: Sequence[bytes], masks: Sequence[bytes], **flags: str) -> h5py.File:
    save, ending = SOURCES[name]
    wishes = {"input": f"image{ending}=image", "target": f"mask{ending}=mask"}
    manifest = make(save(folder, images, masks), folder / "out", **wishes, **flags)
    assert len(manifest.skipped) == (2 if flags else 0)
    return h5py.File(folder / "out" / manifest.shards()[0].file)


@pytest.mark.parametrize("name", SOURCES)
def test_a_palette_is_colours_of_an_image_and_numbers_of_a_mask(name: str, tmp_path: Path) -> None:
    numbers = RANDOM.integers(0, 4, (COUNT, 6, 8), dtype=np.uint8)
    files = [in_palette(own) for own in numbers]
    with sharded(name, tmp_path, files, files) as shard:
        assert sorted(map(bytes, shard["mask"][:])) == sorted(map(bytes, numbers))
        assert np.array_equal(shard["image"][:], COLOURS[shard["mask"][:]])


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_masks_with_other_palettes_are_said(name: str, same: bool, tmp_path: Path) -> None:
    save, ending = SOURCES[name]
    numbers = RANDOM.integers(0, 4, (COUNT, 6, 8), dtype=np.uint8)
    masks = [in_palette(own, COLOURS if same or n < 3 else COLOURS[::-1]) for n, own in enumerate(numbers)]
    wishes = {"input": f"image{ending}=image", "target": f"mask{ending}=mask"}
    remarks = dry_run(request(save(tmp_path, masks, masks), tmp_path / "out", **wishes)).facts.remarks
    found = [line for line in remarks if "has the palette's colour (200, 0, 0) in" in line]
    assert len(found) == (not same), remarks


def test_masks_of_another_split_have_the_same_palette(tmp_path: Path) -> None:
    numbers = RANDOM.integers(0, 4, (COUNT, 6, 8), dtype=np.uint8)
    for split, colours in {"train": COLOURS, "test": COLOURS[::-1]}.items():
        masks = [in_palette(own, colours) for own in numbers]
        columns(tmp_path, masks, masks).rename(tmp_path / f"{split}.parquet")
    remarks = dry_run(request(tmp_path, tmp_path / "out", input="image=image", target="mask=mask")).facts.remarks
    assert any("mask: 0 has the palette's colour" in line for line in remarks), remarks
    with pytest.raises(UsageError, match=r"the labels are files, such as masks.*--target MASK=mask"):
        make(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", SOURCES)
def test_an_unreadable_picture_is_named_or_left_out(name: str, tmp_path: Path) -> None:
    pixels = RANDOM.integers(0, 256, (COUNT, 6, 8, 3), dtype=np.uint8)
    masks = [png(np.full((6, 8), number, np.uint8)) for number in range(COUNT)]
    images = [png(own) for own in pixels]
    images[0], masks[4] = images[0][:60], b"nothing like it"
    with pytest.raises(UsageError, match=r"damaged image.*--on-error skip"):
        sharded(name, tmp_path, images, masks)
    with sharded(name, tmp_path, images, masks, on_error="skip") as shard:
        kept = shard["mask"][:, 0, 0]
        assert sorted(kept) == [1, 2, 3, 5]
        assert np.array_equal(shard["image"][:], pixels[kept])


def test_bytes_of_parquet_that_are_text_are_read_as_text(tmp_path: Path) -> None:
    labels = [b"dog", b"cat"] * 3
    kinds = {"binary": pa.binary(), "large": pa.large_binary(), "fixed": pa.binary(3), "text": pa.string()}
    images = [{"bytes": png(np.full((6, 8), number, np.uint8))} for number in range(COUNT)]
    for name, kind in kinds.items():
        column = pa.array([own.decode() for own in labels] if name == "text" else labels, kind)
        for what, inputs in {"fields": list(range(COUNT)), "images": images}.items():
            path = tmp_path / f"{name}-{what}.parquet"
            pq.write_table(pa.table({"image": inputs, "label": column}), path)
            manifest = make(path, tmp_path / f"{name}-{what}")
            names = manifest.class_names if what == "images" else manifest.fields[1].class_names
            with h5py.File(tmp_path / f"{name}-{what}" / manifest.shards()[0].file) as shard:
                values = np.ravel(shard["images"][:, 0, 0] if what == "images" else shard["x"][:])
                assert list(names) == ["cat", "dog"]
                key = "labels" if what == "images" else "label"
                assert [names[own].encode() for own in shard[key][:]] == [labels[int(own)] for own in values]
    numbers = [own.tobytes() for own in np.eye(4, dtype=np.uint8)]
    pq.write_table(pa.table({"x": numbers, "y": [0, 1, 0, 1]}), tmp_path / "n.parquet")
    with pytest.raises(UsageError, match="x of row 0 is bytes that are neither text nor an image file; save numbers"):
        make(tmp_path / "n.parquet", tmp_path / "out", input="x=x", target="y=y")


@pytest.mark.parametrize(("name", "ending"), [("tfrecord", "tfrecord"), ("parquet", "parquet"), ("webdataset", "tar")])
def test_files_of_splits_with_as_many_pictures_are_no_samples(name: str, ending: str, tmp_path: Path) -> None:
    files = [png(np.full((6, 8), number, np.uint8)) for number in range(COUNT)]
    (tmp_path / "s").mkdir()
    for split in ("train", "test"):
        SOURCES[name][0](tmp_path, files, files).rename(tmp_path / "s" / f"{split}.{ending}")
    wishes = {role: f"{key}{SOURCES[name][1]}={key}" for role, key in (("input", "image"), ("target", "mask"))}
    manifest = make(tmp_path / "s", tmp_path / "out", **wishes)
    assert {split: own.num_samples for split, own in manifest.splits.items()} == {"train": COUNT, "test": COUNT}


@pytest.mark.parametrize("name", SOURCES)
def test_transparency_is_kept_and_pages_are_refused(name: str, tmp_path: Path) -> None:
    masks = [png(np.full((6, 8), number, np.uint8)) for number in range(COUNT)]
    pixels = RANDOM.integers(0, 256, (COUNT, 6, 8, 4), dtype=np.uint8)
    with sharded(name, tmp_path, [png(own) for own in pixels], masks) as shard:
        assert np.array_equal(shard["image"][:], pixels[shard["mask"][:, 0, 0]])
    pages = [Image.fromarray(own[..., 0]) for own in pixels]
    content = io.BytesIO()
    pages[0].save(content, "PNG", save_all=True, append_images=pages[1:])
    with pytest.raises(UsageError, match="it has 6 pages"):
        (tmp_path / "2").mkdir()
        sharded(name, tmp_path / "2", [content.getvalue()] * COUNT, masks)
