"""The bundled images are the UCI digits: right numbers per class, right sizes, and LeNet can learn them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "share" / "hpcdl" / "examples" / "digits"
PER_CLASS = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
"""Images per class in the test set, as the UCI repository states."""
DIGEST = "b41ca9fd335466eee997366c2e6f6bbe0a1b4582afe091fc4eba35f4a254182f"


def pixels(path: Path) -> numpy.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG" and image.mode == "L" and image.size == (8, 8), path
        return numpy.asarray(image)


def test_each_class_has_its_images() -> None:
    assert tuple(len(list((DIGITS / str(label)).iterdir())) for label in range(10)) == PER_CLASS
    assert sorted(path.name for path in DIGITS.iterdir()) == [str(label) for label in range(10)]


def test_every_index_is_there_once() -> None:
    assert sorted(path.stem for path in DIGITS.glob("*/*.png")) == [f"{index:04d}" for index in range(1797)]


def test_images_are_grey_8x8_with_seventeen_levels() -> None:
    images = numpy.stack([pixels(path) for path in sorted(DIGITS.glob("*/*.png"), key=lambda path: path.stem)])
    levels = numpy.unique(images)
    assert numpy.array_equal(levels, numpy.round(numpy.arange(17) * 255 / 16).astype("uint8"))
    # All 1,797 images in the data set's order: the digest changes with any pixel.
    assert hashlib.sha256(images.tobytes()).hexdigest() == DIGEST


def test_the_source_and_licence_are_named() -> None:
    text = DIGITS.with_suffix(".md").read_text()
    for needed in ("Alpaydin", "Kaynak", "1998", "UCI", "CC BY 4.0", "scripts/make_digits.py"):
        assert needed in text


def enlarged(path: Path) -> numpy.ndarray:
    with Image.open(path) as image:
        return numpy.asarray(image.resize((28, 28), Image.Resampling.BILINEAR))[..., None]


@pytest.fixture(scope="module")
def split() -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return images (N,28,28,1) in [0, 1], labels, and which fifth of each class is held out."""
    images, labels, held_out = [], [], []
    for label in range(10):
        files = sorted((DIGITS / str(label)).iterdir())
        order = numpy.random.default_rng(label).permutation(len(files))
        for place, index in enumerate(order):
            images.append(enlarged(files[index]))
            labels.append(label)
            held_out.append(place < len(files) // 5)
    return numpy.stack(images).astype("float32") / 255, numpy.array(labels), numpy.array(held_out)


@pytest.mark.soak
def test_lenet_learns_them(split: tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]) -> None:
    """Keras alone learns the digits with LeNet; tests/launch/test_train_command.py covers `hpcdl train`."""
    import keras

    from hpcdl.models.load import load_model

    images, labels, held_out = split
    keras.utils.set_random_seed(0)
    model = load_model("lenet")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    model.fit(images[~held_out], labels[~held_out], batch_size=32, epochs=12, verbose=0)
    accuracy = model.evaluate(images[held_out], labels[held_out], verbose=0)[1]
    assert accuracy >= 0.97
