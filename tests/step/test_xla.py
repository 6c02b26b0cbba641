"""`--xla`: the same training by another compiler, and a message if it cannot compile a model."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy
import pytest

from hpcdl.config.schema import OptimizerConfig
from hpcdl.core.errors import UsageError
from hpcdl.step.objective import Classification
from hpcdl.step.optimizers import build_optimizer
from hpcdl.step.step import build_step
from hpcdl.strategies.single import SingleWorker
from tests.conftest import CommandLine

SHAPE, CLASSES, BATCH = (8, 8, 3), 4, 16


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential([
        keras.Input(SHAPE), layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.Activation("relu"),
        layers.MaxPooling2D(), layers.Flatten(), layers.Dense(CLASSES),
    ])  # fmt: skip


def trained(*, xla: bool, accumulate: int = 1, steps: int = 5) -> tuple[list[float], list[numpy.ndarray]]:
    keras.utils.set_random_seed(3)
    model = network()
    optimizer = build_optimizer(OptimizerConfig(optimizer="momentum"), model.trainable_variables)
    optimizer.learning_rate = 0.05
    step = build_step(model, optimizer, SingleWorker(), Classification(), accumulate, xla=xla)
    rng = numpy.random.default_rng(0)
    images = rng.integers(0, 255, (BATCH * accumulate, *SHAPE), dtype=numpy.uint8)
    labels = rng.integers(0, CLASSES, BATCH * accumulate)
    losses = [float(step(images, labels)[0]) for _ in range(steps)]
    return losses, model.get_weights()


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_weights_and_moving_statistics_agree(accumulate: int) -> None:
    (plain_losses, plain), (losses, weights) = (trained(xla=xla, accumulate=accumulate) for xla in (False, True))
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert losses[-1] < losses[0]
    for one, other in zip(weights, plain, strict=True):
        assert abs(one - other).max() <= 1e-5 * max(abs(other).max(), 1e-3)


def test_a_model_that_xla_cannot_compile_is_named() -> None:
    import tensorflow as tf

    class Named(keras.layers.Layer):
        def call(self, inputs):  # type: ignore[no-untyped-def]
            return inputs + tf.strings.to_number(tf.strings.as_string(tf.reduce_mean(inputs)))

    model = keras.Sequential([keras.Input((4,)), Named(), keras.layers.Dense(CLASSES)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    step = build_step(model, optimizer, SingleWorker(), Classification(), xla=True)
    with pytest.raises(UsageError, match=r"^--xla: XLA cannot compile .*AsString.* of this model; leave --xla out$"):
        step(numpy.ones((2, 4), numpy.float32), numpy.zeros(2, numpy.int64))


@pytest.mark.mpi
@pytest.mark.parametrize("calls", ["1", "4"])
def test_pooling_that_xla_has_not_deterministic_is_said(run_hpcdl: CommandLine, tmp_path: Path, calls: str) -> None:
    line = ["train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--xla", "--deterministic", "--steps", "5"]
    finished = run_hpcdl([*line, "--steps-per-call", calls, "--run-dir", str(tmp_path / "run")])
    reported = "--xla with --deterministic: GPU MaxPool gradient ops do not yet have a deterministic XLA implementation"
    assert finished.code == 2 and f"{reported}; leave one of them out" in finished.err, finished.err


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--strategy", "grpc-ps", "--ranks", "2", "--allow-grpc"], "--xla: strategy 'grpc-ps' does not have it"),
        (["--trace", "full"], "--xla: forward and backward pass are one operation"),
        (["--fast-kernels", "on"], "--xla: XLA makes its own kernels"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    words: list[str], reported: str, ask_hpcdl: CommandLine, tmp_path: Path
) -> None:
    line = ["train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--xla", "--run-dir", str(tmp_path / "run")]
    finished = ask_hpcdl([*line, *words])
    assert finished.code == 2 and reported in finished.err, finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
def test_two_ranks_reach_the_same_weights_with_and_without(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = ["train", "--model", "lenet", "--data", "synthetic:28x28x1:10", "--ranks", "2", "--steps", "5"]
    for name, words in (("plain", []), ("xla", ["--xla"])):
        finished = run_hpcdl([*line, "--run-dir", str(tmp_path / name), *words])
        assert finished.code == 0, finished.err
    one, other = (keras.models.load_model(tmp_path / name / "model.keras").get_weights() for name in ("plain", "xla"))
    assert max(abs(a - b).max() / abs(b).max() for a, b in zip(one, other, strict=True)) <= 1e-4
