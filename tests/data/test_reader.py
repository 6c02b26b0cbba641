from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.data.format.dataset import open_dataset, parse_spec
from hpcdl.data.format.prefetch import ALIGNMENT, BufferPool, Prefetched
from hpcdl.data.read.reader import SplitReader, open_reader
from hpcdl.data.read.windows import GatheredWindows, OwnSamples, ScatteredWindows, TrainingStream
from tests.data.sharding import make, numbers, pixels


def folder(tmp_path: Path, side: int, num: int = 203, **options: object) -> Path:
    np.savez(tmp_path / "a.npz", images=pixels(num, (side, side, 3)), labels=numbers(num, 7))
    make(tmp_path / "a.npz", tmp_path / "out", shards=3, max_ranks=12, **options)
    return tmp_path / "out"


def stream(data: str, batch_size: int, worker: int, num_workers: int, seed: int = 5) -> TrainingStream:
    dataset = open_dataset(data)
    reader = open_reader(dataset, dataset.train_split)
    return TrainingStream(reader, batch_size=batch_size, worker=worker, num_workers=num_workers, seed=seed)


@pytest.mark.parametrize(
    "side, options, ways",
    [
        (8, {}, (GatheredWindows, GatheredWindows)),
        (40, {}, (ScatteredWindows, ScatteredWindows)),
        (300, {}, (ScatteredWindows, OwnSamples)),
        (8, {"compression": "gzip"}, (GatheredWindows, GatheredWindows)),
    ],
    ids=["small", "medium", "large", "compressed"],
)
def test_same_samples_for_every_number_of_workers_from_any_step(
    side: int, options: dict[str, str], ways: tuple[type, type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcdl.data.read.reader.WINDOW_BYTES", 60 * side * side * 3)  # gives several windows per epoch
    data = str(folder(tmp_path, side, **options))
    one, five = stream(data, 20, 0, 1), [stream(data, 4, worker, 5) for worker in range(5)]
    assert (type(one._sources["images"]), type(five[0]._sources["images"])) == ways
    kept = []
    for step in range(2 * one.steps_per_epoch + 3):
        images, labels = one.batch(step)
        parts = [worker.batch(step) for worker in five]
        assert np.array_equal(images, np.concatenate([part for part, _ in parts]))
        assert np.array_equal(labels, np.concatenate([part for _, part in parts]))
        assert np.array_equal(one.ids(step), np.concatenate([worker.ids(step) for worker in five]))
        kept.append((images.copy(), labels))
    for step in (2 * one.steps_per_epoch + 2, 4, 5, one.steps_per_epoch - 1, one.steps_per_epoch):
        late = stream(data, 20, 0, 1)
        for reached in (late.batch(step), one.batch(step)):  # started at this step, and jumped to it
            assert np.array_equal(reached[0], kept[step][0]) and np.array_equal(reached[1], kept[step][1])
        late.close()
    reader = one.reader
    truth = plain(data)
    for step in (0, one.steps_per_epoch + 1):
        ids = one.ids(step)
        assert np.array_equal(kept[step][0], truth[0][ids]) and np.array_equal(kept[step][1], truth[1][ids])
        assert np.array_equal(reader.read(reader.fields[0], ids), truth[0][ids])
    epoch = np.concatenate([one.ids(step) for step in range(one.steps_per_epoch)])
    assert len(set(epoch.tolist())) == len(epoch) and 203 - len(epoch) < 20
    for opened in (one, *five):
        opened.close()


def plain(data: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all samples in the order of their ids, read with plain h5py."""
    images, labels = [], []
    for path in sorted(Path(data).glob("*.h5")):
        with h5py.File(path, locking=False) as file:
            images.append(file["images"][:])
            labels.append(file["labels"][:])
    return np.concatenate(images), np.concatenate(labels)


def test_encoded_files_come_back_byte_by_byte(tmp_path: Path) -> None:
    from tests.data.sharding import image_folder

    source = image_folder(tmp_path / "s", {"a": 9, "b": 9}, kind="jpg")
    make(source, tmp_path / "out", encoding="encoded", shards=2)
    opened = stream(str(tmp_path / "out"), 6, 0, 1)
    found = [bytes(content) for step in range(3) for content in opened.batch(step)[0]]
    assert sorted(found) == sorted(path.read_bytes() for path in source.rglob("*.jpg"))
    opened.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_few_files_stay_open(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(80, (4, 4)), labels=numbers(80, 2))
    make(tmp_path / "a.npz", tmp_path / "out", shards=40)
    dataset = open_dataset(str(tmp_path / "out"))
    reader = open_reader(dataset, dataset.train_split)
    assert isinstance(reader, SplitReader)
    reader._most_open = 5
    before = open_files()
    for _ in range(2):
        out = reader.read(dataset.inputs[0], np.arange(80, dtype=np.int64))
        assert open_files() - before <= 5
    assert np.array_equal(out, plain(str(tmp_path / "out"))[0])
    reader.close()
    assert open_files() == before


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}], ids=["plain", "compressed"])
def test_threads_that_read_from_more_shards_than_may_be_open_take_no_file_from_each_other(
    options: dict[str, str], tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(203, (8, 8, 3)), labels=numbers(203, 7))
    make(tmp_path / "a.npz", tmp_path / "out", shards=40, **options)
    dataset = open_dataset(str(tmp_path / "out"))
    reader = open_reader(dataset, dataset.train_split)
    assert isinstance(reader, SplitReader)
    wanted = np.asarray(reader.read(dataset.inputs[0], np.arange(reader.layout.num_samples)))
    reader._most_open = 2

    def reads(seed: int) -> bool:
        ids = np.random.default_rng(seed).permutation(len(wanted))
        found, labels = (reader.read(item, ids) for item in dataset.fields)
        return bool((found == wanted[ids]).all() and len(labels) == len(ids))

    before = open_files()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(reads, range(40)))
    reader.close()
    assert open_files() < before, "what was open before is closed too"
    assert reads(0), "closed files are opened again"


def test_a_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    data = folder(tmp_path, 40)
    opened = stream(str(data), 20, 0, 1)
    opened.batch(0)
    for path in data.glob("*.h5"):
        os.truncate(path, 20_000)
    with pytest.raises(CorruptError, match="--verify"):
        for step in range(1, 40):
            opened.batch(step)
    opened.close()


def test_buffers_are_used_again_once_nobody_holds_them() -> None:
    pool = BufferPool((4, 5), np.float32)
    first = pool.take()
    assert first.ctypes.data % ALIGNMENT == 0
    view = first[1:2]
    del first
    assert pool.take() is not view.base and len(pool) == 2  # the view still uses the first buffer
    del view
    for _ in range(5):
        pool.take()
    assert len(pool) == 2


def test_prefetched_hands_over_items_errors_and_the_end() -> None:
    def broken() -> object:
        yield 1
        raise CorruptError("here")

    released = []
    items = Prefetched(broken, release=lambda: released.append(True))  # type: ignore[arg-type]
    assert next(items) == 1
    with pytest.raises(CorruptError, match="here"):
        next(items)
    assert released == [True]
    with pytest.raises(StopIteration):
        next(items)
    assert list(Prefetched(lambda: iter(range(5)))) == [0, 1, 2, 3, 4]
    endless = Prefetched(lambda: iter(int, 1))
    assert next(endless) == 0
    endless.close()
    with pytest.raises(StopIteration):
        next(endless)


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    for data, message in ((str(tmp_path / "no"), "no such data folder"), (str(tmp_path), "hpcdl shard")):
        with pytest.raises(UsageError, match=message):
            open_dataset(data)
    with pytest.raises(UsageError, match=r"global batch of 300 .* 203 samples .* batch size x workers"):
        stream(str(folder(tmp_path, 8)), 100, 0, 3)


def test_synthetic_names() -> None:
    assert open_dataset("synthetic:hep").dtype == "float32"
    assert open_dataset("synthetic:imagenet").train_split.num_samples == 1_281_167
    own = parse_spec("synthetic:227x227x3:1000@64")
    assert (own.sample_shape, own.num_classes, own.num_samples, own.dtype) == ((227, 227, 3), 1000, 64, "uint8")
    assert parse_spec("synthetic:8x8x3:2:float16").dtype == "float16"
    for wrong in ("synthetic:", "synthetic:lsun", "synthetic:0x8x3:2", "synthetic:mnist@0", "synthetic:mnist@x"):
        with pytest.raises(UsageError):
            parse_spec(wrong)
    assert open_dataset("synthetic:mnist").evaluation_split is None
    one, two = stream("synthetic:mnist@100", 10, 0, 1), stream("synthetic:mnist@100", 5, 1, 2)
    assert np.array_equal(one.batch(3)[0][5:], two.batch(3)[0])
