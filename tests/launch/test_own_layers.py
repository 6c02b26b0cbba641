"""Models with layers of the user's own: what `train` makes of them, the other commands can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine

MODELS = """
import keras
from keras import layers


def sized(layer):
    return keras.Sequential([keras.Input((28, 28, 1)), layer, layers.Flatten(), layers.Dense(10)])


@keras.saving.register_keras_serializable(package="mine")
class Registered(layers.Layer):
    def call(self, values):
        return values * 2


class Unknown(layers.Layer):
    def call(self, values):
        return values * 2


class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(10)

    def call(self, values):
        return self.dense(self.flatten(values * 2))


def plain():
    return sized(layers.Rescaling(2))


def registered():
    return sized(Registered())


def unknown():
    return sized(Unknown())


def function():
    return sized(layers.Lambda(lambda values: values * 2))


def network():
    return Network()
"""
DATA = ["--data", "synthetic:mnist@200"]


def train(hpcdl: CommandLine, folder: Path, function: str, *more: object) -> str:
    line = ["train", "--model", f"nets.py:{function}", *DATA, "--steps", "4", "--run-dir", f"run-{function}", *more]
    finished = hpcdl(line, cwd=folder)
    assert finished.code == 0, finished.err
    return finished.err


def loss(hpcdl: CommandLine, folder: Path, function: str) -> float:
    finished = hpcdl(["evaluate", f"run-{function}", *DATA, "--json"], cwd=folder)
    assert finished.code == 0, finished.err
    return float(json.loads(finished.out)["loss"])


@pytest.fixture(scope="module")
def trained(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each function: networks that compute the same, from the same first weights."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "nets.py").write_text(MODELS)
    for function in ("plain", "registered", "unknown", "function", "network"):
        train(session_hpcdl, folder, function)
    return folder


@pytest.fixture(scope="module")
def expected(session_hpcdl: CommandLine, trained: Path) -> float:
    """The loss of all these networks."""
    return loss(session_hpcdl, trained, "plain")


@pytest.mark.long
@pytest.mark.parametrize("function", ["registered", "unknown", "function", "network"])
def test_a_run_with_own_layers_is_evaluated_exported_and_applied(
    session_hpcdl: CommandLine, trained: Path, expected: float, function: str
) -> None:
    run = f"run-{function}"
    assert loss(session_hpcdl, trained, function) == pytest.approx(expected, rel=1e-6)
    exported = session_hpcdl(["export", run, "--to", "keras", f"out-{function}"], cwd=trained)
    assert exported.code == 0 and "names code of your own; import nets.py before you load it" in exported.err
    inferred = session_hpcdl(["infer", run, *DATA, "--out", f"inferred-{function}"], cwd=trained)
    assert inferred.code == 0, inferred.err


@pytest.mark.long
@pytest.mark.parametrize("function", ["unknown", "function", "network"])
def test_weights_with_own_layers_begin_another_run(session_hpcdl: CommandLine, trained: Path, function: str) -> None:
    weights = f"run-{function}/model.keras"
    reported = train(session_hpcdl, trained, function, "--init-weights", weights, "--run-dir", f"next-{function}")
    assert f"weights of all layers from {weights}" in reported


@pytest.mark.long
def test_what_the_file_lacks_is_reported(session_hpcdl: CommandLine, trained: Path, tmp_path: Path) -> None:
    elsewhere = session_hpcdl(["evaluate", trained / "run-unknown", *DATA], cwd=tmp_path)
    assert elsewhere.code == 2 and "type this in the folder in which the run began" in elsewhere.err
    alone = session_hpcdl(["infer", "run-unknown/model.keras", *DATA, "--scale", "0..1", "--out", "x"], cwd=trained)
    assert alone.code == 2 and "give the directory of the run that trained it" in alone.err
    for old, new, words in (
        ("values * 2", "values * 3", "warning: nets.py has changed since this run began"),
        ("Dense(10)])", "Dense(10, use_bias=False)])", "do not fit the model that nets.py:unknown makes now"),
        ("28, 28, 1", "28, 28, 3", "takes samples of (28, 28, 3)"),
    ):
        (tmp_path / "nets.py").write_text(MODELS.replace(old, new))
        changed = session_hpcdl(["evaluate", trained / "run-unknown", *DATA], cwd=tmp_path)
        assert bool(changed.code) != words.startswith("warning") and words in changed.err, changed.err


@pytest.mark.long
def test_an_error_in_a_layer_names_its_cause(session_hpcdl: CommandLine, trained: Path) -> None:
    finished = session_hpcdl(["evaluate", "run-network", "--data", "synthetic:cifar10@200"], cwd=trained)
    assert finished.code == 2 and "does not take synthetic:cifar10@200: Input 0" in finished.err, finished.err
