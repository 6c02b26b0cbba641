"""The adapter to TensorFlow; no other test file of this folder imports TensorFlow."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hpcdl.data
from hpcdl.core.errors import HpcdlError, SourceError, UsageError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.read.pipeline import Augmentation
from tests.data.sharding import everything, image_folder, make, numbers, pixels, same_samples

tf = pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    np.savez(folder / "a.npz", images=pixels(103, (12, 10, 3)), labels=numbers(103, 5))
    make(folder / "a.npz", folder / "out", shards=3, split="train=0.7,val=0.3", max_ranks=8)
    return folder / "out"


def taken(batches: Any, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    found = [tuple(item.numpy() for item in next(batches)) for _ in range(count)]
    batches.close()
    return found


def test_training_batches(data: Path) -> None:
    from hpcdl.data.read.pipeline import training_batches

    dataset = open_dataset(str(data))
    one = taken(training_batches(dataset, batch_size=24, seed=2), 9)
    assert one[0][0].dtype == np.uint8 and one[0][1].dtype == np.int64 and one[0][0].shape == (24, 12, 10, 3)
    two = [taken(training_batches(dataset, batch_size=12, worker=w, num_workers=2, seed=2), 9) for w in range(2)]
    for step in range(9):
        for place in range(2):
            assert np.array_equal(one[step][place], np.concatenate([two[0][step][place], two[1][step][place]]))
    late = taken(training_batches(dataset, batch_size=24, seed=2, start_step=7), 2)
    assert all(np.array_equal(late[k][i], one[7 + k][i]) for k in range(2) for i in range(2))
    assert same_samples_of(one[:3], data, "train")
    with pytest.raises(UsageError, match="batch size x workers"):
        training_batches(dataset, batch_size=200)
    for worker, num_workers in ((2, 2), (-1, 2), (0, 0)):  # a worker beyond the last would read the next step's samples
        with pytest.raises(UsageError, match=r"workers are numbered from 0 to num_workers - 1"):
            hpcdl.data.open(str(data), batch_size=12, worker=worker, num_workers=num_workers)


def test_autograph_writes_nothing_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoGraph writes no files: they would stay in the temporary folder for ever if a rank were killed."""
    from hpcdl.data.read.pipeline import evaluation_batches, training_batches

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dataset, augment = open_dataset(str(data)), Augmentation(flip=True, crop_padding=1, mean=(0.5,) * 3, std=(0.2,) * 3)
    taken(training_batches(dataset, batch_size=8, augment=augment), 1)
    taken(evaluation_batches(dataset, dataset.splits["val"], batch_size=8, augment=augment), 1)
    assert not list(tmp_path.iterdir())
    tf.data.Dataset.range(1).map(lambda number: number + 1)
    assert list(tmp_path.iterdir()), "this is what it would have left"


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 72])
def test_batches_read_together_are_those_of_their_steps(data: Path, batch_size: int, *, in_graph: bool) -> None:
    """Batches read together equal those of single steps, from any step, across epochs and across calls."""
    from hpcdl.data.read.pipeline import training_batches
    from hpcdl.data.read.windows import open_stream

    dataset = open_dataset(str(data))
    found = taken(training_batches(dataset, batch_size=batch_size, seed=3, start_step=5, in_graph=in_graph), 80)
    stream = open_stream(dataset, batch_size=batch_size, worker=0, num_workers=1, seed=3)
    for step, batch in enumerate(found, 5):
        assert all(np.array_equal(*pair) for pair in zip(batch, stream.batch(step), strict=True))
    stream.close()


@pytest.mark.parametrize("scale", ["0..1", "auto", "none"])
def test_rows_of_tables_read_together_are_those_of_their_steps(
    scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of tables are scaled as the manifest says, and bytes are delivered as requested."""
    from hpcdl.data.read import pipeline

    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((50, 6), np.float32), "b": pixels(50, (5,)), "y": rng.random((50, 2))}
    np.savez(tmp_path / "a.npz", **arrays)
    make(tmp_path / "a.npz", tmp_path / "out", input=("x", "b"), target=("y",), normalise="0-1")
    plain = [dataclasses.replace(item, normalise="none") for item in open_dataset(str(tmp_path / "out")).fields]
    opened = open_dataset(str(tmp_path / "out"))
    for fields in (opened.fields, tuple(plain)):
        dataset = dataclasses.replace(opened, scale=scale, fields=fields)
        found = []
        for most in (32, 1):
            monkeypatch.setattr(pipeline, "_MOST_TOGETHER", most)
            batches = pipeline.training_batches(dataset, batch_size=7, seed=3, start_step=2)
            found.append([tf.nest.flatten(next(batches)) for _ in range(40)])
            batches.close()
        for together, alone in zip(*found, strict=True):
            for one, other in zip(together, alone, strict=True):
                assert one.dtype == other.dtype and np.array_equal(one, other)


def test_a_stream_that_is_closed_waits_for_no_tuning(data: Path) -> None:
    """The tuner of tf.data is off: it can delay the end of its iterator by its previous run time, up to a minute."""
    from hpcdl.data.read.pipeline import as_tf_dataset

    assert as_tf_dataset(str(data), batch_size=8).options().autotune.enabled is False


def same_samples_of(batches: list[tuple[np.ndarray, np.ndarray]], data: Path, split: str) -> bool:
    """Return whether each sample belongs to the split and has its own label."""
    dataset = open_dataset(str(data))
    assert dataset.manifest is not None
    images, labels = everything(data, dataset.manifest, split)
    known = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    return all(known.get(image.tobytes()) == label for batch in batches for image, label in zip(*batch, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_evaluation_sees_every_sample_exactly_once(data: Path, workers: int) -> None:
    from hpcdl.data.read.pipeline import evaluation_batches

    dataset = open_dataset(str(data))
    split = dataset.evaluation_split
    assert split is not None and split.name == "val" and dataset.manifest is not None
    found = []
    for worker in range(workers):
        batches = evaluation_batches(dataset, split, batch_size=4, worker=worker, num_workers=workers)
        found += [(images.numpy(), labels.numpy()) for images, labels in batches]
    images, labels = (np.concatenate([item[place] for item in found]) for place in range(2))
    assert same_samples(everything(data, dataset.manifest, "val"), images, labels)


def test_the_public_api_gives_a_tf_data_dataset(data: Path) -> None:
    import hpcdl.data

    batches = hpcdl.data.open(str(data), batch_size=10, epochs=2, seed=4)
    assert isinstance(batches, tf.data.Dataset)
    assert batches.cardinality().numpy() == 14
    assert batches.element_spec[0].shape.as_list() == [10, 12, 10, 3]
    found = [(images.numpy(), labels.numpy()) for images, labels in batches]
    assert len(found) == 14 and same_samples_of(found, data, "train")
    again = [labels.numpy() for _, labels in hpcdl.data.open(str(data), batch_size=10, epochs=2, seed=4, start_step=9)]
    assert np.array_equal(again, [labels for _, labels in found[9:]])
    with pytest.raises(UsageError, match="known: train, val"):
        hpcdl.data.open(str(data), split="tset")


def test_augmentation_is_seeded_and_the_same_for_every_number_of_workers(data: Path) -> None:
    from hpcdl.data.read.pipeline import training_batches

    dataset = open_dataset(str(data))
    change = Augmentation(flip=True, crop_padding=2, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.25))
    plain = taken(training_batches(dataset, batch_size=24), 2)
    one = taken(training_batches(dataset, batch_size=24, augment=change), 2)
    two = [
        taken(training_batches(dataset, batch_size=12, worker=w, num_workers=2, augment=change), 2) for w in range(2)
    ]
    assert one[0][0].dtype == np.float32
    assert np.array_equal(one[1][0], np.concatenate([two[0][1][0], two[1][1][0]]))
    assert not np.array_equal(
        one[0][0], taken(training_batches(dataset, batch_size=24, augment=change, seed=1), 1)[0][0]
    )
    flips = 0
    for image, changed in zip(plain[0][0], one[0][0], strict=True):
        flips += check_is_a_change_of(image, changed)
    assert 4 <= flips <= 20  # of 24


def check_is_a_change_of(image: np.ndarray, changed: np.ndarray) -> bool:
    """Return whether `changed` is mirrored; fails if it is no crop of `image`."""
    for mirrored in (False, True):
        base = image[:, ::-1] if mirrored else image
        padded = np.pad(base, ((2, 2), (2, 2), (0, 0))).astype(np.float32) / 255
        for row in range(5):
            for column in range(5):
                wanted = (padded[row : row + 12, column : column + 10] - [0.5, 0.4, 0.3]) / [0.2, 0.2, 0.25]
                if np.allclose(wanted, changed, atol=1e-5):
                    return mirrored
    raise AssertionError("no crop of the image")


@pytest.mark.parametrize("kind", ["uint8", "int16", "float32"])
def test_random_parts_are_resized(kind: str) -> None:
    """Random crops are resized. The images rise evenly along both axes, so that their values show the crop."""
    from hpcdl.data.read.pipeline import _augmented, _Rows

    height, width, count = 41, 31, 64
    ramp = np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1) * (1 if kind == "float32" else 4)
    images = tf.constant(np.repeat(ramp[None], count, 0).astype(kind))
    rows = _Rows(5, 0, count)
    parts, again = (
        _augmented(images, Augmentation(min_area=0.2), tf.constant(3, tf.int64), rows).numpy() for _ in range(2)
    )
    assert parts.dtype == kind and parts.shape == images.shape
    np.testing.assert_array_equal(parts, again)
    parts = parts.astype(float)
    spans = (parts[:, -1, -1] - parts[:, 0, 0]) / (1 if kind == "float32" else 4) + 1
    areas, ratios = spans[:, 0] * spans[:, 1] / (height * width), spans[:, 0] / spans[:, 1]
    assert 0.17 < areas.min() < 0.35 and 0.75 < areas.max() <= 1
    assert 0.7 < ratios.min() < 0.9 and 1.1 < ratios.max() < 1.45
    middle = parts[:, height // 2, width // 2]
    np.testing.assert_allclose(middle, (parts[:, 0, 0] + parts[:, -1, -1]) / 2, atol=1.01)


def test_bad_augmentation_is_refused() -> None:
    for wrong in (
        {"crop_padding": -1},
        {"min_area": 1.5},
        {"min_area": 0.1, "crop_padding": 1},
        {"mean": (0.5,)},
        {"mean": (0.5,), "std": (0.0,)},
    ):
        with pytest.raises(UsageError):
            Augmentation(**wrong)


def test_encoded_data_is_decoded_in_order(tmp_path: Path) -> None:
    """Encoded shards train on the same pixels as raw ones, in the same order: PNG is lossless."""
    from hpcdl.data.read.pipeline import evaluation_batches, training_batches

    source = image_folder(tmp_path / "s", {"a": 20, "b": 20}, size=9)
    for encoding in ("raw", "encoded"):
        make(source, tmp_path / encoding, encoding=encoding, block_size="1KiB", max_ranks=4)
    raw, encoded = (open_dataset(str(tmp_path / name)) for name in ("raw", "encoded"))
    two = taken(training_batches(encoded, batch_size=16), 5)
    assert two[0][0].shape == (16, 9, 9, 3) and two[0][0].dtype == np.uint8
    assert same_samples_of(two, tmp_path / "raw", "all")
    assert all(len({image.tobytes() for image in images}) == 16 for images, _ in two)
    passes = [list(evaluation_batches(dataset, dataset.train_split, batch_size=7)) for dataset in (raw, encoded)]
    assert passes[1][-1][0].shape == (5, 9, 9, 3)
    for one, other in zip(*passes, strict=True):
        assert all(np.array_equal(one[place], other[place]) for place in range(2))
    make(source, tmp_path / "small", encoding="encoded", image_size="6x5", channels=1)
    small = taken(training_batches(open_dataset(str(tmp_path / "small")), batch_size=8), 1)
    assert small[0][0].shape == (8, 6, 5, 1)


def test_encoded_pictures_of_any_size_are_cut_as_raw_ones_are(tmp_path: Path) -> None:
    """Encoded pictures are scaled to cover the size and cropped at the centre, as raw ones are, within 1 by
    rounding.
    """
    from hpcdl.data.read.pipeline import evaluation_batches

    for number, (height, width) in enumerate([(40, 90), (90, 40), (16, 24), (7, 5), (33, 31), (64, 64)]):
        noise = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        (tmp_path / "s" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(tmp_path / "s" / "ab"[number % 2] / f"{number}.png")
    found = {}
    for encoding in ("raw", "encoded"):
        make(tmp_path / "s", tmp_path / encoding, encoding=encoding, image_size="16x24")
        dataset = open_dataset(str(tmp_path / encoding))
        ((images, _),) = evaluation_batches(dataset, dataset.train_split, batch_size=6)
        found[encoding] = np.asarray(images).astype(int)
    assert found["raw"].shape == found["encoded"].shape == (6, 16, 24, 3)
    assert np.abs(found["raw"] - found["encoded"]).max() <= 1


def test_tfrecords_as_tensorflow_writes_them(tmp_path: Path) -> None:
    images, labels = pixels(12, (9, 9, 3)), numbers(12, 4)

    def write(path: Path, content: list[bytes], name: str, shape: bool = False) -> None:
        with tf.io.TFRecordWriter(str(path)) as out:
            for image, label in zip(content, labels.tolist(), strict=True):
                feature = {
                    name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                    "weight": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5])),
                }
                if shape:
                    sides = {"height": 9, "width": 9, "depth": 3}
                    feature |= {k: tf.train.Feature(int64_list=tf.train.Int64List(value=[v])) for k, v in sides.items()}
                out.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())

    encoded = [tf.io.encode_png(image).numpy() for image in images]
    (tmp_path / "s").mkdir()
    write(tmp_path / "s" / "train-00000-of-00002.tfrecord", encoded, "image/encoded")
    write(tmp_path / "s" / "validation-00000-of-00001.tfrecord", encoded, "image/encoded")
    manifest = make(tmp_path / "s", tmp_path / "out")
    assert set(manifest.splits) == {"train", "val"} and manifest.source["format"] == "tfrecord"
    assert same_samples(everything(tmp_path / "out", manifest, "train"), images, labels)
    packed = make(tmp_path / "s", tmp_path / "encoded", encoding="encoded")
    assert packed.splits["train"].num_samples == 12
    write(tmp_path / "raw.tfrecord", [image.tobytes() for image in images], "pixels", shape=True)
    manifest = make(tmp_path / "raw.tfrecord", tmp_path / "out2", image_field="pixels")
    assert same_samples(everything(tmp_path / "out2", manifest, "all"), images, labels)
    with pytest.raises(SourceError, match="--image-field"):
        make(tmp_path / "raw.tfrecord", tmp_path / "out3")
    damaged = bytearray((tmp_path / "raw.tfrecord").read_bytes())
    damaged[60] ^= 1
    (tmp_path / "raw.tfrecord").write_bytes(damaged)
    with pytest.raises(HpcdlError, match=r"record at byte 0 of raw\.tfrecord: its checksum is wrong"):
        make(tmp_path / "raw.tfrecord", tmp_path / "out4", image_field="pixels")
    manifest = make(tmp_path / "raw.tfrecord", tmp_path / "out5", image_field="pixels", on_error="skip")
    assert same_samples(everything(tmp_path / "out5", manifest, "all"), images[1:], labels[1:])


def test_bench_input(data: Path) -> None:
    from hpcdl.bench.input import InputResult, measure_input
    from hpcdl.comm.observed import observe
    from hpcdl.comm.threads import ThreadCommunicator, run
    from hpcdl.config.schema import InputBenchRun

    def measure(communicator: ThreadCommunicator, **wanted: Any) -> InputResult:
        dataset = open_dataset(str(data))
        return measure_input(
            dataset, InputBenchRun(batch_size=8, **wanted), observe(communicator), lambda done, what: None
        )

    found = run(1, lambda communicator: measure(communicator, steps=12, step_ms=20.0))[0]
    assert found.stored.samples_per_second > 0 and found.delivered.bytes_per_second > 0
    assert list(found.delivered.batch_seconds) == ["p50", "p90", "p99", "p100"]
    assert found.accelerator_utilisation is not None and 0.2 < found.accelerator_utilisation < 1
    assert found.waiting_fraction == 1 - found.accelerator_utilisation
    assert found.passes == (found.accelerator_utilisation >= 0.9)
    every = run(3, lambda communicator: measure(communicator, steps=2), hosts=["a", "a", "b"])
    assert every[0] == every[1] == every[2] and (every[0].ranks, every[0].nodes, every[0].passes) == (3, 2, None)
    assert every[0].delivered.slowest.host in "ab" and every[0].delivered.slowest.of_median <= 1
    local = run(3, lambda communicator: measure(communicator, steps=2, shuffle="local"), hosts=["a", "a", "b"])[0]
    opened = [found.metadata.first_epoch.all_ranks.opens for found in (local, every[0])]
    assert 0 < opened[0] < opened[1] and local.metadata.epochs >= 1, "a rank opens the shards of its node's share alone"
    with pytest.raises(UsageError, match="batch size x workers"):
        run(10, lambda communicator: measure(communicator, steps=2))


def test_bench_input_of_named_fields(tmp_path: Path) -> None:
    """Stored bytes count all fields, delivered bytes all tensors: here two inputs and a target."""
    from hpcdl.bench.input import measure_input
    from hpcdl.comm.observed import observe
    from hpcdl.comm.threads import alone
    from hpcdl.config.schema import InputBenchRun

    values = np.random.default_rng(0)
    series, target = values.normal(size=(40, 6, 2)).astype("f4"), values.normal(size=40).astype("f4")
    np.savez(tmp_path / "a.npz", x=series, y=target)
    make(tmp_path / "a.npz", tmp_path / "out")
    wanted = InputBenchRun(batch_size=8, steps=3)
    found = measure_input(open_dataset(str(tmp_path / "out")), wanted, observe(alone()), lambda done, what: None)
    for rates in (found.stored, found.delivered):
        assert rates.bytes_per_second == pytest.approx(rates.samples_per_second * (6 * 2 * 4 + 4))
