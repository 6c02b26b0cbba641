"""Every network is as the table says, accepts other classes and sizes, and can learn."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy
import pytest

from hpcdl.core.errors import UsageError
from hpcdl.models.load import load_model
from hpcdl.models.table import MODELS
from tests.models.model_size import measure_size

SMALL = {"alexnet": 67, "caffenet": 67, "googlenet": 64, "googlenet-aux": 65, "resnet50": 64}
"""Fast sizes for networks that need more than 32x32; the others use 32."""
PAPER = {
    "lenet": (431_080, 2.293),
    "cifar10-quick": (145_578, 12.354),
    "cifar10-full": (89_578, 12.298),
    "alexnet": (62_378_344, 1_135.256),
    "caffenet": (60_965_224, 724.407),
    "googlenet": (6_998_552, 1_582.672),
    "googlenet-aux": (13_378_280, 1_591.044),
    "resnet50": (25_557_032, 3_857.973),
    "vgg19": (143_667_240, 19_632.062),
    "hepcnn": (594_178, 2_630.025),
}
"""Parameters and millions of MACs, computed by hand from the papers' layers, not by this package."""


VARIANTS = {"caffenet": "alexnet", "googlenet": "googlenet-aux"}
"""Networks with the layers of another one, in another order or without a part."""


def with_variants_soaked(names: Iterable[str]) -> list[Any]:
    """Mark variants as soak tests: they are trained and saved there only; the other tests check all networks' sizes."""
    return [pytest.param(name, marks=pytest.mark.soak) if name in VARIANTS else name for name in names]


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build models without initialising weights: shapes suffice, and VGG-19 costs nothing."""
    with keras.StatelessScope(initialize_variables=False):
        yield
    keras.backend.clear_session()


@pytest.fixture(scope="module", autouse=True)
def _tidy() -> Iterator[None]:
    yield
    keras.backend.clear_session()


def small_shape(name: str) -> tuple[int, int, int]:
    size = SMALL.get(name, 32)
    return size, size, MODELS[name].input_shape[2]


@pytest.mark.parametrize("name", MODELS)
def test_size_is_as_the_table_and_the_papers_say(name: str) -> None:
    info = MODELS[name]
    with without_weights():
        size = measure_size(load_model(name))
    assert (size.parameters, size.moving_statistics, size.macs) == (info.parameters, info.moving_statistics, info.macs)
    assert size.gradient_bytes == info.gradient_bytes
    assert (size.parameters, round(size.macs / 1e6, 3)) == PAPER[name]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_another_number_of_classes(name: str) -> None:
    info = MODELS[name]
    with without_weights():
        model = load_model(name, classes=7)
        default = measure_size(load_model(name)).parameters
    outputs = model.outputs
    assert [tuple(output.shape) for output in outputs] == [(None, 7)] * len(info.loss_weights)
    # The last dense layer has one column and one bias per class.
    widths = [layer.input.shape[-1] for layer in model.layers if layer.name.endswith("logits")]
    assert measure_size(model).parameters == default - sum((width + 1) * (info.classes - 7) for width in widths)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_smallest_size_builds_and_one_less_is_refused(name: str, channels: int) -> None:
    smallest = MODELS[name].smallest_size
    with without_weights():
        for shape in [(smallest, smallest, channels), (smallest + 5, smallest, channels)]:
            model = load_model(name, input_shape=shape)
            assert model.input_shape == (None, *shape)
            assert all(extent > 0 for layer in model.layers for extent in _extents(layer)), name
    if smallest > 1:
        with pytest.raises(UsageError, match=rf"smallest it takes is {smallest}x{smallest}.*--image-size {smallest}"):
            load_model(name, input_shape=(smallest, smallest - 1, channels))


def _extents(layer: Any) -> Iterator[int]:
    shape = layer.output[0].shape if isinstance(layer.output, list) else layer.output.shape
    yield from (extent for extent in shape if extent is not None)


@pytest.mark.parametrize("name", [name for name, info in MODELS.items() if info.smallest_size > 1])
def test_the_smallest_size_is_not_too_careful(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest size is exact: without the check, one pixel less fails inside Keras."""
    info = MODELS[name]
    module = sys.modules[info.target.partition(":")[0]]
    monkeypatch.setattr(module, "check_input", lambda *_: None)
    build = getattr(module, info.target.partition(":")[2])
    less = info.smallest_size - 1
    with without_weights(), pytest.raises((ValueError, ZeroDivisionError)):
        model = build(10, (less, less, 3))
        if any(extent < 1 for layer in model.layers for extent in _extents(layer)):
            raise ValueError("an empty layer")


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 0), (28,), (0, 28, 1), ()])
def test_no_image_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="HxWxC, by default 28x28x1"):
        load_model("lenet", input_shape=shape)


def test_no_classes_is_refused() -> None:
    with pytest.raises(UsageError, match="0 classes; give 1 or more"):
        load_model("lenet", classes=0)


@pytest.mark.long
@pytest.mark.parametrize("name", with_variants_soaked(MODELS))
def test_it_is_alive_and_learns(name: str) -> None:
    """Every weight gets a finite non-zero gradient, and a small step lowers the loss of one batch."""
    keras.utils.set_random_seed(1)
    info, shape = MODELS[name], small_shape(name)
    model = load_model(name, classes=5, input_shape=shape)
    generator = numpy.random.default_rng(0)
    images, labels = generator.random((10, *shape), dtype="float32"), numpy.arange(10) % 5
    outputs = forward(model, images)
    assert len(outputs) == len(info.loss_weights)
    for output in outputs:
        logits = keras.ops.convert_to_numpy(output)
        assert logits.dtype == numpy.float32 and numpy.isfinite(logits).all()
        assert logits.std(axis=0).min() > 1e-4, "images cannot be separated"
    before, gradients = loss_and_gradients(model, images, labels, info.loss_weights)
    dead = [
        weight.path
        for weight, gradient in zip(model.trainable_weights, gradients, strict=True)
        if not (numpy.isfinite(gradient).all() and numpy.abs(gradient).max() > 0)
    ]
    assert not dead
    assert before < 1.3 * numpy.log(5) * sum(info.loss_weights), "a new network should know nothing, not be wrong"
    norm = numpy.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        weight.assign_sub(0.02 / norm * gradient)
    assert float(loss_of(forward(model, images), labels, info.loss_weights)) < before


@pytest.mark.parametrize("name", ["alexnet", "googlenet-aux", "resnet50", "cifar10-full"])
def test_logits_are_float32_under_mixed_precision(name: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with without_weights():
            model = load_model(name, input_shape=small_shape(name))
    finally:
        keras.config.set_dtype_policy(before)
    assert {output.dtype for output in model.outputs} == {"float32"}
    assert any(layer.compute_dtype == "bfloat16" for layer in model.layers)


def test_another_loss_goes_with_half_precision() -> None:
    """`--precision mixed_float16` sets the policy, and brings a loss scale: it is not the network's own."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = load_model("lenet", classes=10, input_shape=(28, 28, 1), loss="mse", output_shapes={"y": (10,)})
    finally:
        keras.config.set_dtype_policy(before)
    assert any(layer.compute_dtype == "float16" for layer in model.layers)


def forward(model: Any, images: numpy.ndarray) -> list[Any]:
    """Return the outputs, normalised with this batch's statistics but without dropout, which would differ by step."""
    normalised = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    outputs = model(images, training=normalised)
    return outputs if isinstance(outputs, list) else [outputs]


def loss_and_gradients(
    model: Any, images: numpy.ndarray, labels: numpy.ndarray, weights: tuple[float, ...]
) -> tuple[float, list[numpy.ndarray]]:
    import tensorflow

    with tensorflow.GradientTape() as tape:
        loss = loss_of(forward(model, images), labels, weights)
    return float(loss), [gradient.numpy() for gradient in tape.gradient(loss, model.trainable_weights)]


def loss_of(outputs: list[Any], labels: numpy.ndarray, weights: tuple[float, ...]) -> Any:
    losses = [keras.losses.sparse_categorical_crossentropy(labels, output, from_logits=True) for output in outputs]
    return sum(weight * keras.ops.mean(each) for weight, each in zip(weights, losses, strict=True))


LOAD_ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hpcdl":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import keras, numpy
folder = sys.argv[1]
for name in sys.argv[2:]:
    model = keras.models.load_model(f"{folder}/{name}.keras")
    outputs = model(numpy.load(f"{folder}/{name}.npy"), training=False)
    numpy.savez(f"{folder}/{name}.npz", *(outputs if isinstance(outputs, list) else [outputs]))
assert "hpcdl" not in sys.modules
"""


def saved(folder: Path, name: str) -> list[Any]:
    """Save a new network with some images, and return its outputs for them."""
    shape = small_shape(name)
    model = load_model(name, classes=4, input_shape=shape)
    images = numpy.random.default_rng(2).random((3, *shape), dtype="float32")
    model.save(folder / f"{name}.keras")
    numpy.save(folder / f"{name}.npy", images)
    outputs = model(images, training=False)
    return outputs if isinstance(outputs, list) else [outputs]


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [["cifar10-full", "googlenet-aux"], pytest.param(["alexnet", *VARIANTS], marks=pytest.mark.soak)],
    ids="-".join,
)
def test_saved_models_load_where_hpcdl_is_not_installed(tmp_path: Path, names: list[str]) -> None:
    expected = {name: saved(tmp_path, name) for name in names}
    command = [sys.executable, "-I", "-c", LOAD_ELSEWHERE, str(tmp_path), *names]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    for name in names:
        with numpy.load(tmp_path / f"{name}.npz", allow_pickle=False) as found:
            assert len(found.files) == len(expected[name])
            for key, output in zip(found.files, expected[name], strict=True):
                assert numpy.array_equal(found[key], output), name
