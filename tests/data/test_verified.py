"""A damaged byte never reaches a batch, on any reading path; the error names the shard and block."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.core.errors import CorruptError
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.hdf5 import shard_map
from hpcdl.data.read.reader import SplitReader, open_reader
from hpcdl.data.read.staging import resident, staged
from hpcdl.data.read.windows import TrainingStream
from hpcdl.data.show.inspection import look, write_pictures
from hpcdl.data.sources.base.source import UnreadableSample
from hpcdl.data.sources.layouts.images import decode
from hpcdl.data.write import listing
from hpcdl.data.write.plan import ShardJob
from hpcdl.data.write.repair import repair
from tests.conftest import CommandLine
from tests.data.sharding import contents, image_folder, make, numbers, pixels

SHARD = "shard-00001.h5"


def arrays(folder: Path, side: int, **options: object) -> Path:
    source = folder / "a.npz"
    np.savez(source, images=pixels(60, (side, side, 3)), labels=numbers(60, 7))
    make(source, folder / "out", shards=3, max_ranks=12, **options)
    return folder / "out"


def files(folder: Path) -> Path:
    make(image_folder(folder / "s", {"a": 30, "b": 30}, size=20), folder / "out", shards=3, encoding="encoded")
    return folder / "out"


def epoch(dataset: Dataset, workers: int = 1) -> None:
    """Read all batches of all workers of an epoch."""
    for worker in range(workers):
        reader = open_reader(dataset, dataset.train_split)
        stream = TrainingStream(reader, batch_size=12 // workers, worker=worker, num_workers=workers, seed=1)
        try:
            for step in range(stream.steps_per_epoch):
                stream.batch(step)
        finally:
            stream.close()


def in_order(dataset: Dataset) -> None:
    """Read the samples in order, as evaluation does."""
    reader = open_reader(dataset, dataset.train_split)
    assert isinstance(reader, SplitReader)
    try:
        for first in range(0, dataset.train_split.num_samples, 7):
            ids = np.arange(first, min(first + 7, dataset.train_split.num_samples))
            reader.read(dataset.inputs[0], ids)
    finally:
        reader.close()


WAYS: dict[str, tuple[Callable[[Path], Path], Callable[[Dataset], None]]] = {
    "gathered blocks": (lambda folder: arrays(folder, 8), epoch),
    "scattered blocks": (lambda folder: arrays(folder, 40), epoch),
    "scattered blocks, many workers": (lambda folder: arrays(folder, 40), functools.partial(epoch, workers=4)),
    "own samples": (lambda folder: arrays(folder, 300), functools.partial(epoch, workers=4)),
    "compressed blocks": (lambda folder: arrays(folder, 8, compression="gzip"), epoch),
    "files": (files, epoch),
    "evaluation": (lambda folder: arrays(folder, 8), in_order),
    "evaluation, compressed": (lambda folder: arrays(folder, 8, compression="gzip"), in_order),
    "evaluation, files": (files, in_order),
    "from memory": (lambda folder: arrays(folder, 40), lambda dataset: epoch(resident(dataset))),
}


@pytest.fixture(params=["now", "an earlier version's"])
def shards_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Shards as they are made, and shards without per-sample checksums."""
    if request.param != "now":
        monkeypatch.setattr(listing, "ShardJob", functools.partial(ShardJob, sample_checksums=False))
    return str(request.param)


def flipped(path: Path, positions: list[int]) -> None:
    content = bytearray(path.read_bytes())
    for place in positions:
        content[place] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_block_is_named_and_read_only_where_asked(way: str, shards_of: str, tmp_path: Path) -> None:
    made, read = WAYS[way]
    folder = made(tmp_path)
    with h5py.File(folder / SHARD, locking=False) as file:
        assert ("sample_checksums" in file) == (shards_of == "now" and "compressed" not in way)
    read(open_dataset(str(folder)))
    place = shard_map(folder / SHARD)
    block = place.num_blocks // 2
    flipped(folder / SHARD, [int(place.block_offsets[block] + place.block_bytes[block] // 2)])
    first, stop = place.block_range(block)
    words = rf"{SHARD}: block {block} \(samples {first} to {stop - 1}\) is damaged"
    with pytest.raises(CorruptError, match=words):
        read(open_dataset(str(folder)))
    if not place.columns[next(iter(place.columns))].compressed:  # gzip has its own checksum
        read(open_dataset(str(folder), verified=False))


@pytest.mark.parametrize("part", ["labels", "block_checksums", "sample_checksums", "offsets"])
def test_a_damaged_frame_is_met_when_the_shard_is_opened(part: str, tmp_path: Path) -> None:
    folder = files(tmp_path)
    with h5py.File(folder / SHARD, locking=False) as file:
        offset = file[part].id.get_offset()
    flipped(folder / SHARD, [offset])
    with pytest.raises(CorruptError, match=rf"{SHARD}: its header .* is damaged"):
        epoch(open_dataset(str(folder)))


def test_damage_that_comes_while_it_is_read_is_met(tmp_path: Path) -> None:
    """Damage that happens during a run is found: whole blocks are checked at every read."""
    folder = arrays(tmp_path, 40)
    dataset = open_dataset(str(folder))
    reader = open_reader(dataset, dataset.train_split)
    assert isinstance(reader, SplitReader)
    out = np.empty((60, *dataset.sample_shape), dataset.dtype)
    assert reader.read_block(0, out, "images") > 0
    path = folder / "shard-00000.h5"
    with path.open("r+b") as file:
        file.seek(int(shard_map(path).block_offsets[0]))
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(CorruptError, match=r"shard-00000\.h5: block 0 "):
        reader.read_block(0, out, "images")
    reader.close()


def test_a_staged_copy_is_checked_when_it_is_read(tmp_path: Path) -> None:
    folder, place = arrays(tmp_path, 40), tmp_path / "near"
    place.mkdir()
    with staged(open_dataset(str(folder)), place) as near:
        assert near.folder is not None and near.folder != folder
        epoch(near)
        flipped(near.folder / SHARD, [int(shard_map(near.folder / SHARD).block_offsets[0])])
        with pytest.raises(CorruptError, match=rf"{SHARD}: block 0 "):
            epoch(near)
        epoch(replace(near, verified=False))


def test_shards_of_an_earlier_version_are_written_again_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(listing, "ShardJob", functools.partial(ShardJob, sample_checksums=False))
        folder = arrays(tmp_path, 8)
    before = contents(folder)
    (folder / SHARD).write_bytes(b"")
    assert repair(folder, str(tmp_path / "a.npz"), [SHARD]) == [SHARD]
    assert contents(folder) == before


@pytest.fixture
def damaged(tmp_path: Path) -> Dataset:
    """Shards in which every block is damaged."""
    folder = arrays(tmp_path, 40, split="train=0.5,val=0.5")
    for path in folder.glob("*/*.h5"):
        flipped(path, shard_map(path).block_offsets.tolist())
    return open_dataset(str(folder))


def test_the_error_comes_through_tensorflow_as_it_was(damaged: Dataset) -> None:
    pytest.importorskip("tensorflow")
    from hpcdl.data.read.pipeline import as_tf_dataset, evaluation_batches, training_batches

    with pytest.raises(CorruptError, match=r"train/shard-\d+\.h5: block \d+ "):
        next(training_batches(damaged, batch_size=8))
    split = damaged.evaluation_split
    assert split is not None
    with pytest.raises(CorruptError, match=r"val/shard-00000\.h5: block 0 "):
        next(evaluation_batches(damaged, split, batch_size=8))
    with pytest.raises(Exception, match=r"CorruptError: shard .*train/shard-\d+\.h5: block"):
        next(iter(as_tf_dataset(str(damaged.folder), batch_size=8)))
    assert len(next(iter(as_tf_dataset(str(damaged.folder), batch_size=8, verify_data=False)))[0]) == 8


def undecodable(folder: Path, kind: str, **options: object) -> Path:
    """Encoded shards with valid checksums whose pictures b/0003 and b/0007 cannot be decoded."""
    source = image_folder(folder / "s", {"a": 30, "b": 30}, size=20, kind=kind)
    for name in ("0003", "0007"):
        path = source / "b" / f"{name}.{kind}"
        content = bytearray(path.read_bytes())
        # The first marker after SOI, and the start of the packed pixels: sharding looks at neither.
        if kind == "jpg":
            content[2:4] = b"\xff\xc4"
        else:
            end = 41 + int.from_bytes(content[33:37])
            content[41:43] = b"\0\0"
            content[end : end + 4] = zlib.crc32(content[37:end]).to_bytes(4)
        path.write_bytes(content)
    make(source, folder / "out", shards=3, encoding="encoded", split="train=0.5,val=0.5", **options)
    return folder / "out"


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_pictures_that_do_not_decode_are_named_by_verify(kind: str, tmp_path: Path, ask_hpcdl: CommandLine) -> None:
    folder = undecodable(tmp_path, kind)
    checked = ask_hpcdl(["inspect", folder, "--verify", "--json"])
    found = checked.json()
    assert checked.code == 3 and found["faults"] == [] and found["bad_shards"] == []
    assert len(found["undecodable"]) == 2
    for line in found["undecodable"]:
        name, place = re.fullmatch(r"(\S+\.h5): sample (\d+) \(class b\): .+", line).groups()  # type: ignore[union-attr]
        with h5py.File(folder / name) as file:
            begin, end = file["offsets"][int(place) : int(place) + 2]
            with pytest.raises(UnreadableSample):
                decode(file["bytes"][begin:end].tobytes(), size=None, channels=3)
        assert line in checked.err
    assert "2 of 60 pictures" in checked.err and "--on-error skip" in checked.err
    mended = ask_hpcdl(["shard", tmp_path / "s", tmp_path / "again", "--encoding", "encoded", "--on-error", "skip"])
    assert mended.code == 0 and all(f"skipped: b/{name}.{kind}" in mended.err for name in ("0003", "0007"))
    sound = ask_hpcdl(["inspect", tmp_path / "again", "--verify"])
    assert sound.code == 0 and "every picture of 58 decodes" in sound.err


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_picture_that_does_not_decode_is_named_by_training(in_graph: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    from hpcdl.data.read.pipeline import as_tf_dataset, evaluation_batches, training_batches

    dataset = open_dataset(str(undecodable(tmp_path, "jpg")))
    words = r"(train|val)/shard-\d+\.h5: sample \d+ is damaged: its picture does not decode \(.+\);"
    split = dataset.evaluation_split
    assert split is not None
    met = 0
    for batch_size in (4, 7, 30):
        try:
            batches = training_batches(dataset, batch_size=batch_size, in_graph=in_graph)
            for _ in range(30 // batch_size):
                next(batches)
            batches.close()
        except CorruptError as error:
            assert re.search(words, str(error)), error
            met += 1
        try:
            assert sum(len(labels) for _, labels in evaluation_batches(dataset, split, batch_size=batch_size)) == 30
        except CorruptError as error:
            assert re.search(words, str(error)), error
            met += 1
        with pytest.raises(Exception, match=rf"CorruptError: shard .*{words}"):
            for name in dataset.splits:
                for _ in as_tf_dataset(dataset, split=name, batch_size=batch_size, epochs=1):
                    pass
    assert met >= 3


def test_nothing_but_damaged_pictures_ends_in_an_error(tmp_path: Path) -> None:
    """If every picture is damaged, the pipeline stops with an error instead of searching for good ones for ever."""
    pytest.importorskip("tensorflow")
    from hpcdl.data.read.pipeline import evaluation_batches, training_batches

    source = image_folder(tmp_path / "s", {"a": 12, "b": 12}, kind="jpg")
    for path in source.rglob("*.jpg"):
        content = bytearray(path.read_bytes())
        content[2:4] = b"\xff\xc4"
        path.write_bytes(content)
    make(source, tmp_path / "out", encoding="encoded")
    dataset = open_dataset(str(tmp_path / "out"))
    with pytest.raises(CorruptError, match="does not decode"):
        next(training_batches(dataset, batch_size=5))
    with pytest.raises(CorruptError, match="does not decode"):
        next(evaluation_batches(dataset, dataset.train_split, batch_size=5))
    with pytest.raises(CorruptError, match=r"shard-00000\.h5: sample \d+ is damaged"):
        write_pictures(dataset, dataset.train_split, 1, tmp_path / "pictures")
    with pytest.raises(CorruptError, match=r"shard-00000\.h5: sample \d+ is damaged"):
        look(tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_no_place_of_a_damaged_picture_hides_it(number: int, tmp_path: Path) -> None:
    """A damaged picture is reported at any position, even as the last sample of the last batch."""
    pytest.importorskip("tensorflow")
    from hpcdl.data.read.pipeline import as_tf_dataset, evaluation_batches

    source = image_folder(tmp_path / "s", {"a": 3, "b": 3}, kind="jpg")
    path = sorted(source.rglob("*.jpg"))[number]
    content = bytearray(path.read_bytes())
    content[2:4] = b"\xff\xc4"
    path.write_bytes(content)
    make(source, tmp_path / "out", encoding="encoded")
    dataset = open_dataset(str(tmp_path / "out"))
    for batch_size in (1, 4, 6, 7):
        with pytest.raises(CorruptError, match="does not decode"):
            list(evaluation_batches(dataset, dataset.train_split, batch_size=batch_size))
    for batch_size in (1, 3, 6):
        with pytest.raises(Exception, match="does not decode"):
            list(as_tf_dataset(dataset, split="all", batch_size=batch_size, epochs=1))
