"""--preprocess: a user's function between the data and the model, on every path of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdl.comm.threads import run
from hpcdl.config.schema import DataConfig
from hpcdl.core.errors import UsageError
from hpcdl.data.format.dataset import Dataset, open_dataset
from tests.conftest import CommandLine
from tests.data.sharding import make, numbers, pixels
from tests.training_runs import record_of, same_run

SOURCE = '''
import keras, tensorflow as tf

def halved(inputs, targets, training, seed):
    """Half as wide and high, from 0 to 1; in training with noise that follows from the seed."""
    small = tf.nn.avg_pool2d(tf.cast(inputs, tf.float32) / 255, 2, 2, "VALID")
    noise = tf.random.stateless_normal(tf.shape(small), seed, stddev=0.05)
    return (small + noise if training else small), targets

def two(inputs, targets):
    return {"picture": inputs, "mean": tf.reduce_mean(tf.cast(inputs, tf.float32), [1, 2, 3])[:, None]}, targets

def seen(inputs, targets, seed):
    return tf.zeros_like(inputs), tf.fill(tf.shape(targets), seed[0] + seed[1])

def build(num_classes, input_shape):
    assert input_shape == (14, 14, 1), input_shape
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    return keras.Sequential(layers)

def one_of_two(inputs, targets): return inputs
def no_tensor(inputs, targets): return object(), targets
def fewer(inputs, targets): return inputs[:3], targets[:3]
def real_classes(inputs, targets): return inputs, tf.cast(targets, tf.float32)
def open_width(inputs, targets, seed): return inputs[:, :, : seed[1] + 1], targets
def fails(inputs, targets): return inputs["picture"], targets
def asks(inputs, targets): return (inputs if inputs[0, 0, 0, 0] > 3 else -inputs), targets
def more(inputs, targets, weather): return inputs, targets
number = 3

import numpy as np
order, noise = np.random.default_rng().permutation(12), tf.random.normal((12, 10, 1))
known = np.random.default_rng(0).permutation(12)
turns = keras.layers.RandomRotation(0.1)

def drawn_once(inputs, targets):
    return tf.cast(inputs, tf.float32) + np.random.default_rng().normal(size=(12, 10, 1)), targets

def permuted(inputs, targets): return tf.gather(inputs, order, axis=1), targets
def permuted_alike(inputs, targets): return tf.gather(inputs, known, axis=1), targets
def with_tensor(inputs, targets): return tf.cast(inputs, tf.float32) + noise, targets

def drawn_by_step(inputs, targets, training):
    turned = turns(tf.cast(inputs, tf.float32), training=training)
    return tf.map_fn(lambda one: one + tf.random.uniform([]), turned), targets
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "a.npz", images=pixels(60, (12, 10, 1)), labels=numbers(60, 5))
    make(folder / "a.npz", folder / "out", split="train=0.8,val=0.2", max_ranks=4)
    return open_dataset(str(folder / "out"))


def own(preprocess: str = "", scale: str = "auto") -> DataConfig:
    return DataConfig(data="data", preprocess=preprocess, scale=scale)


def batches_of(dataset: Dataset, count: int, **more: Any) -> list[Any]:
    from hpcdl.data.read.pipeline import training_batches

    batches = training_batches(dataset, batch_size=8, **more)
    found = [next(batches) for _ in range(count)]
    batches.close()
    return found


def test_shapes_values_and_seeds(source: Path, data: Dataset) -> None:
    from hpcdl.data.read.pipeline import evaluation_batches
    from hpcdl.step.preprocess import model_shapes, preprocessed

    changed = preprocessed(data, own(f"{source}:halved"))
    assert model_shapes(data)[0] == (12, 10, 1) and model_shapes(changed)[0] == (6, 5, 1)
    (plain,), (one,), (again,) = (batches_of(dataset, 1) for dataset in (data, changed, changed))
    small = plain[0].numpy().astype(np.float32).reshape(8, 6, 2, 5, 2, 1).mean((2, 4)) / 255
    difference = one[0].numpy() - small
    assert 0.03 < difference.std() < 0.07 and np.array_equal(one[1], plain[1])
    np.testing.assert_array_equal(one[0], again[0])
    for exact, other in zip(
        *(evaluation_batches(each, each.splits["val"], batch_size=5) for each in (data, changed)), strict=True
    ):
        small = exact[0].numpy().astype(np.float32).reshape(-1, 6, 2, 5, 2, 1).mean((2, 4)) / 255
        np.testing.assert_allclose(other[0], small, atol=1e-6)
    noted = preprocessed(data, own(f"{source}:seen"))
    seeds = [
        int(labels[0])
        for seed in range(2)
        for worker in range(2)
        for _, labels in batches_of(noted, 2, worker=worker, num_workers=2, seed=seed)
    ]
    assert len(set(seeds)) == 8, "each worker, step and run has its own"


@pytest.mark.parametrize(
    ("shape", "scale", "highest"),
    [
        ((9, 9, 3), "auto", 1), ((9, 9, 3), "none", 255), ((40, 4), "auto", 255), ((5,), "auto", 255),
        ((5,), "0..1", 1), ((9, 9), "none", 255), ((9, 9), "0..1", 1),
    ],
)  # fmt: skip
def test_bytes_are_scaled_where_they_are_pictures_or_as_it_is_asked(
    shape: tuple[int, ...], scale: str, highest: int, tmp_path: Path
) -> None:
    from hpcdl.run.plan import check_scale
    from hpcdl.step.preprocess import fed, preprocessed
    from hpcdl.step.step import as_model_input

    np.savez(tmp_path / "a.npz", x=np.full((16, *shape), 255, np.uint8), y=np.linspace(0, 1, 16))
    make(tmp_path / "a.npz", tmp_path / "out", input="x=x", target="y=y")
    opened = open_dataset(str(tmp_path / "out"))
    check_scale(opened, own(scale=scale))
    dataset = preprocessed(opened, own(scale=scale))
    ((inputs, _),) = batches_of(dataset, 1)
    fed_values = as_model_input(inputs).numpy()
    assert fed_values.dtype == np.float32 and fed_values.max() == pytest.approx(highest)
    assert f"from 0 to {highest}; --scale chooses" in fed(dataset)
    assert batches_of(opened, 1)[0][0].dtype == "uint8", "the public API gives bytes as they are stored"


def test_bytes_of_two_axes_are_asked_about_and_scale_none_needs_bytes(tmp_path: Path) -> None:
    from hpcdl.run.plan import check_scale

    for name, kind in (("bytes", np.uint8), ("floats", np.float32)):
        np.savez(tmp_path / f"{name}.npz", x=np.full((16, 9, 9), 2, kind), y=np.linspace(0, 1, 16))
        make(tmp_path / f"{name}.npz", tmp_path / name, input="x=x", target="y=y")
    with pytest.raises(UsageError, match=r"a picture or a table of numbers\? Give --scale 0\.\.1"):
        check_scale(open_dataset(str(tmp_path / "bytes")), own())
    with pytest.raises(UsageError, match="no input has such; leave it out"):
        check_scale(open_dataset(str(tmp_path / "floats")), own(scale="none"))


@pytest.mark.parametrize(("scale", "highest"), [("auto", 1), ("none", 255)])
def test_images_with_a_class_can_be_fed_as_they_are(data: Dataset, scale: str, highest: int) -> None:
    from hpcdl.step.preprocess import preprocessed
    from hpcdl.step.step import as_model_input

    ((plain, _),) = batches_of(data, 1)
    ((images, _),) = batches_of(preprocessed(data, own(scale=scale)), 1)
    np.testing.assert_allclose(as_model_input(images), plain.numpy() * (highest / 255), rtol=1e-6)


def test_several_inputs_by_name(source: Path, data: Dataset) -> None:
    from hpcdl.step.preprocess import model_shapes, preprocessed

    changed = preprocessed(data, own(f"{source}:two"))
    assert model_shapes(changed)[0] == {"picture": (12, 10, 1), "mean": (1,)}
    (inputs, _), *_ = batches_of(changed, 1)
    np.testing.assert_allclose(inputs["mean"][:, 0], inputs["picture"].numpy().mean((1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("one_of_two", "not inputs and targets"),
        ("no_tensor", "not a tensor"),
        ("fewer", "was given 8 samples and returned 3"),
        ("real_classes", "classes as float32"),
        ("open_width", "only the number of samples may be open"),
        ("fails", r"failed at .*own.py:\d+"),
        ("asks", r"failed at .*own.py:\d+: OperatorNotAllowedInGraphError"),
        ("more", "needs the argument 'weather'"),
        ("number", "is not a function but int"),
        ("halve", "did you mean .?halved"),
    ],
)
def test_what_is_wrong_is_one_line(source: Path, data: Dataset, name: str, word: str) -> None:
    from hpcdl.step.preprocess import preprocessed

    with pytest.raises(UsageError, match=word) as caught:
        batches_of(preprocessed(data, own(f"{source}:{name}")), 1)
    assert str(caught.value).startswith("preprocess ") or "preprocess function" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.mpi
@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["whole", "stopped"])
def test_a_run_is_the_same_stopped_and_resumed_and_evaluated(
    session_hpcdl: CommandLine, shards: Path, source: Path, tmp_path: Path, stopped: bool
) -> None:
    line = ["train", "--strategy", "ring", "--ranks", "2", "--profile", "none", "--deterministic", "--data", shards]
    line += ["--model", f"{source}:build", "--preprocess", f"{source}:halved", "--random-resized-crop", "0.5"]
    line += ["--epochs", "1", "--learning-rate", "0.1"]
    finished = session_hpcdl([*line, "--run-dir", tmp_path / "whole"])
    assert finished.code == 0, finished.err
    if stopped:
        assert session_hpcdl([*line, "--run-dir", tmp_path / "stopped", "--time-limit", "1ms"]).code == 75
        finished = session_hpcdl(["train", "--resume", "--run-dir", tmp_path / "stopped", "--time-limit", "1h"])
        assert finished.code == 0, finished.err
        same_run(tmp_path / "stopped", tmp_path / "whole")
    evaluated = session_hpcdl(["evaluate", tmp_path / "whole", "--data", shards, "--json"])
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json()["accuracy"] == record_of(tmp_path / "whole")["accuracy"] > 0.3


@pytest.mark.long
def test_what_can_be_seen_before_a_run_starts(session_hpcdl: CommandLine, shards: Path, source: Path) -> None:
    line = ["train", "--model", "lenet", "--data", shards, "--strategy", "single"]
    for text, word in (("nowhere.py:f", "there is no file"), (f"{source}:halve", "halved"), ("f", "not understood")):
        finished = session_hpcdl([*line, "--preprocess", text])
        assert finished.code == 2 and word in finished.err and finished.err.count("\n") == 1, finished.err
    finished = session_hpcdl([*line, "--random-resized-crop", "0.1", "--crop-padding", "2"])
    assert finished.code == 2 and "give one of them" in finished.err
    finished = session_hpcdl([*line, "--crop-padding", "28"])
    assert finished.code == 2 and "nothing of an image of 28x28; give less than 28" in finished.err


@pytest.mark.parametrize(("name", "reported"), [
    ("drawn_once", "draws random numbers once"), ("permuted", "each time its file is loaded"),
    ("with_tensor", "each time its file is loaded"), ("permuted_alike", ""), ("halved", ""), ("seen", ""),
    ("drawn_by_step", ""),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_that_are_constants_of_the_graph_are_named(
    source: Path, data: Dataset, name: str, reported: str, ranks: int
) -> None:
    """What NumPy draws inside the function is the same in every batch; what its file draws is each process's own."""
    from hpcdl.step.preprocess import doubts, preprocessed

    config = own(f"{source}:{name}")
    first, *others = run(ranks, lambda group: doubts(preprocessed(data, config), config, group))
    assert all(lines == first for lines in others)
    assert len(first) == bool(reported) and reported in "".join(first)
