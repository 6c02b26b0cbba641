"""Models that would train something unintended, or fail later with a vaguer error, are refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.models.check import doubts
from hpcdl.models.load import load_model
from hpcdl.models.table import MODELS
from hpcdl.run.ended import one_line

SHAPE = (6, 5, 1)
START = """
import keras
from keras import layers


def classifier(units=4, activation=None, inputs=None):
    inputs = keras.Input((6, 5, 1)) if inputs is None else inputs
    return keras.Model(inputs, layers.Dense(units, activation=activation)(layers.Flatten()(inputs)))


class Own(keras.Model):
    def __init__(self, probabilities=False, by_name=False):
        super().__init__()
        self.gate = layers.Dense(4, activation="sigmoid")
        self.flatten, self.dense = layers.Flatten(), layers.Dense(4)
        self.probabilities, self.by_name = probabilities, by_name

    def call(self, images):
        flat = self.flatten(images)
        outputs = self.dense(flat) * self.gate(flat)
        outputs = keras.ops.softmax(outputs) if self.probabilities else outputs
        return {"digits": outputs} if self.by_name else outputs


class Attending(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(1, 2)

    def build(self, shape):
        self.attention.build((shape[0], 30, 1), (shape[0], 30, 1))

    def call(self, images):
        rows = layers.Reshape((30, 1))(images)
        return self.attention(query=rows, value=rows)


class Subtracted(layers.Layer):
    def call(self, images):
        return images - 116


class Divided(layers.Layer):
    def call(self, images):
        return images / 127.5 - 1


class Stepping(Own):
    def train_step(self, data):
        return super().train_step(data)


class Unwritten(Own):
    def __init__(self, function):
        super().__init__()


def compiled(model):
    model.compile("adam", loss="mse")
    return model


def two_inputs():
    both = [keras.Input((6, 5, 1)), keras.Input((3,))]
    joined = layers.concatenate([layers.Flatten()(both[0]), both[1]])
    return keras.Model(both, layers.Dense(4)(joined))


def frozen():
    model = classifier()
    model.trainable = False
    return model


def adapted():
    layer = layers.Normalization()
    layer.adapt(keras.random.normal((20, 6, 5, 1), 3, 2))
    return layer


class OwnHeads(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.first, self.second = layers.Flatten(), layers.Dense(4), layers.Dense(4)

    def call(self, images):
        return self.first(self.flatten(images)), self.second(self.flatten(images))


def heads(*units):
    inputs = keras.Input((6, 5, 1))
    flat = layers.Flatten()(inputs)
    return keras.Model(inputs, [layers.Dense(number)(flat) for number in units])
"""
CROSS, SPARSE = "cross-entropy", "sparse_categorical_crossentropy"
REFUSED = {
    "compiled": ("compiled(classifier())", CROSS, "was compiled in its function (Adam)"),
    "own step": ("Stepping()", CROSS, "has a train_step of its own in its class Stepping"),
    "half": ("keras.Sequential([classifier(), layers.Dense(4, dtype='mixed_float16')])", CROSS, "in float16"),
    "two inputs": ("two_inputs()", CROSS, "has 2 inputs"),
    "whole numbers": ("classifier(inputs=keras.Input((6, 5, 1), dtype='int32'))", CROSS, "leave out the dtype"),
    "another size": ("classifier(inputs=keras.Input((8, 8, 3)))", CROSS, "takes samples of (8, 8, 3)"),
    "frozen": ("frozen()", CROSS, "nothing to train"),
    "units": ("classifier(3)", CROSS, "outputs of shape (3,), but 4 classes need (4,)"),
    "units of a second head": ("heads(4, 7)", CROSS, "outputs of shape (7,)"),
    "unwritten": ("Unwritten(lambda x: x)", CROSS, "give the class a get_config()"),
    "by name": ("Own(by_name=True)", CROSS, "by name ('digits')"),
    "softmax": ("classifier(activation='softmax')", CROSS, "ends with a softmax"),
    "softmax as a layer": ("keras.Sequential([classifier(), layers.Softmax()])", CROSS, "ends with a softmax"),
    "softmax in call": ("Own(probabilities=True)", CROSS, "ends with a softmax"),
    "sigmoid": ("classifier(activation='sigmoid')", CROSS, "ends with a sigmoid"),
    "logits to probabilities": ("classifier()", SPARSE, "takes probabilities; end it with a softmax"),
    "ten numbers for one": ("classifier()", "mean_squared_error", "end it with Dense(1)"),
    "one-hot": ("classifier(activation='softmax')", "categorical_crossentropy", "one-hot"),
}
TAKEN = {
    "logits": ("classifier()", CROSS),
    "own class": ("Own()", CROSS),
    "auxiliary head": ("heads(4, 4)", CROSS),
    "relu": ("classifier(activation='relu')", CROSS),
    "probabilities": ("classifier(activation='softmax')", SPARSE),
    "regression": ("classifier(1)", "mean_squared_error"),
    "yes or no": ("classifier(1, 'sigmoid')", "binary_crossentropy"),
}


def built(folder: Path, body: str, loss: str, *, scaled: bool = False) -> Any:
    file = folder / "net.py"
    file.write_text(f"{START}\n\ndef build():\n    return {body}\n")
    return load_model(f"{file}:build", classes=4, input_shape=SHAPE, loss=loss, scaled=scaled)


RESCALED = {
    "bytes": ("layers.Rescaling(1 / 255)", True),
    "bytes to -1..1": ("layers.Rescaling(1 / 127.5, offset=-1)", True),
    "within a model": ("keras.Sequential([layers.RandomFlip(), layers.Rescaling(1 / 255)])", True),
    "operations": ("Divided()", True),
    "function of Keras": ("layers.Lambda(keras.applications.mobilenet_v2.preprocess_input)", True),
    "mean of bytes": ("layers.Normalization(mean=127, variance=70**2)", True),
    "mean of bytes alone": ("layers.Rescaling(1, offset=-116)", True),
    "mean of bytes, padded": ("keras.Sequential([Subtracted(), layers.ZeroPadding2D(1), layers.Conv2D(1, 3)])", True),
    "mean of 0..1": ("layers.Normalization(mean=0.5, variance=0.08)", False),
    "0..1 to -1..1": ("layers.Rescaling(2, offset=-1)", False),
    "back to bytes first": ("keras.Sequential([layers.Rescaling(255), layers.Rescaling(1 / 255)])", False),
}


@pytest.mark.parametrize("name", RESCALED)
def test_a_second_rescaling_is_found(name: str, tmp_path: Path) -> None:
    layer, wrong = RESCALED[name]
    body = f"keras.Sequential([keras.Input((6, 5, 1)), {layer}, classifier()])"
    assert isinstance(built(tmp_path, body, CROSS), keras.Model)  # correct for unscaled values
    if not wrong:
        assert isinstance(built(tmp_path, body, CROSS, scaled=True), keras.Model)
        return
    with pytest.raises(UsageError, match=r"turns its inputs into .*bytes from 0 to 1; leave its own scaling out"):
        built(tmp_path, body, CROSS, scaled=True)


def test_layers_called_by_keyword_are_taken(tmp_path: Path) -> None:
    attends = "keras.Model(flat := keras.Input((6, 5, 1)), layers.Dense(4)(layers.Flatten()(Attending()(flat))))"
    assert isinstance(built(tmp_path, attends, CROSS, scaled=True), keras.Model)


DOUBTFUL = {
    "not adapted": ("keras.Sequential([keras.Input((6, 5, 1)), layers.Normalization(), classifier()])", "not adapted"),
    "adapted": ("keras.Sequential([keras.Input((6, 5, 1)), adapted(), classifier()])", ""),
    "given": ("keras.Sequential([keras.Input((6, 5, 1)), layers.Normalization(mean=0, variance=1), classifier()])", ""),
    "relu": ("classifier(activation='relu')", "ends with relu"),
    "relu as a layer": ("keras.Sequential([classifier(), layers.ReLU()])", "ends with relu"),
    "logits": ("classifier()", ""),
    "own class": ("Own()", ""),
}


@pytest.mark.parametrize(
    ("loss", "reported"), [(CROSS, "each other adds 0.3"), ("sparse_categorical_crossentropy", "is not trained")]
)
@pytest.mark.parametrize("body", ["heads(4, 4)", "OwnHeads()"])
def test_outputs_beside_the_first_are_named(loss: str, reported: str, body: str, tmp_path: Path) -> None:
    model = built(tmp_path, body, CROSS)
    (line,) = doubts(model, "net.py:build", [loss])
    assert "gives 2 outputs for one target" in line and reported in line
    assert not doubts(model, "net.py:build", [loss, "mse"]) and not doubts(model, "googlenet-aux", [loss])


@pytest.mark.parametrize("name", DOUBTFUL)
def test_layers_that_train_but_are_likely_mistakes_are_named(name: str, tmp_path: Path) -> None:
    body, reported = DOUBTFUL[name]
    lines = doubts(built(tmp_path, body, CROSS), "net.py:build", [CROSS])
    assert len(lines) == bool(reported) and reported in "".join(lines)


def test_a_mean_over_a_picture_is_no_rescaling(tmp_path: Path) -> None:
    """Means of random pictures hardly differ: the probes are dark and bright."""
    file, pooled = tmp_path / "net.py", "layers.GlobalAveragePooling2D(), layers.Dense(4)"
    file.write_text(f"{START}\n\ndef build():\n    return keras.Sequential([keras.Input((64, 64, 1)), {pooled}])\n")
    assert load_model(f"{file}:build", classes=4, input_shape=(64, 64, 1), scaled=True)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_remedy(name: str, tmp_path: Path) -> None:
    body, loss, reported = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        built(tmp_path, body, loss)
    message = str(caught.value)
    assert reported in message and ("; " in message or ": every layer" in message), message
    assert "\n" not in message and len(message) < 400


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    layers_of = (
        "[keras.Input((6, 5, 1)), layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(3), layers.Softmax()]"
    )
    with pytest.raises(ConfigError) as caught:
        built(tmp_path, f"keras.Sequential({layers_of})", CROSS, scaled=True)
    reported = caught.value.problems
    assert [words in line for words, line in zip(("Rescaling", "4 classes", "softmax"), reported, strict=True)] == [
        True
    ] * 3
    assert one_line(caught.value).count("; also: ") == 2


@pytest.mark.parametrize("name", TAKEN)
def test_what_can_be_trained_is_taken(name: str, tmp_path: Path) -> None:
    assert isinstance(built(tmp_path, *TAKEN[name]), keras.Model)


@pytest.mark.parametrize("name", ["lenet", "cifar10-quick"])
def test_networks_of_the_table_are_held_against_other_losses(name: str) -> None:
    shape = MODELS[name].input_shape
    with pytest.raises(UsageError, match="takes probabilities"):
        load_model(name, classes=4, input_shape=shape, loss=SPARSE)


def test_outputs_like_one_hot_targets_get_their_loss_named(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{START}\n\ndef build(num_classes, input_shape):\n    return classifier(4)\n")
    with pytest.raises(UsageError, match=r"as the targets are: .*one-hot targets give --loss categorical_crossentropy"):
        load_model(f"{file}:build", classes=4, input_shape=SHAPE, loss="cross-entropy", output_shapes={"y": (4,)})


@pytest.mark.parametrize(
    ("loss", "activation"), [("categorical_crossentropy", "softmax"), ("binary_crossentropy", "sigmoid")]
)
def test_outputs_without_an_activation_get_theirs_named(tmp_path: Path, loss: str, activation: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{START}\n\ndef build(num_classes, input_shape):\n    return classifier(4)\n")
    with pytest.raises(UsageError, match=f"end it with activation='{activation}'"):
        load_model(f"{file}:build", classes=4, input_shape=SHAPE, loss=loss, output_shapes={"y": (4,)})
