"""Emulated networks, which wait instead of computing: their variables, their time, and every strategy with them."""

from __future__ import annotations

import time
from pathlib import Path

import keras
import numpy
import pytest
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import read_record
from hpcdl.models.load import load_model
from hpcdl.models.table import Emulation, check_model_spec, model_name, parse_emulation
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine, patience


def test_what_a_spec_says() -> None:
    assert parse_emulation("lenet") is None
    assert parse_emulation("emulated:resnet50:0.7s") == Emulation(network="resnet50", seconds=0.7)
    assert parse_emulation("emulated:lenet:20ms:5%") == Emulation(network="lenet", seconds=0.02, noise=0.05)
    assert model_name("emulated:lenet:20ms:5%") == "emulated-lenet-20ms-5"


@pytest.mark.parametrize(
    "spec", ["lenett:1s", "lenet", "lenet:", "lenet:0s", "lenet:nan", "lenet:2h", "lenet:1s:x", "lenet:1s:-5%"]
)
def test_other_specs_are_refused_before_anything_starts(spec: str) -> None:
    with pytest.raises(UsageError, match="lenet"):
        check_model_spec(f"emulated:{spec}")


def test_it_has_the_variables_of_its_network_and_takes_its_time(tmp_path: Path) -> None:
    model, network = load_model("emulated:lenet:0.3s", classes=7), load_model("lenet", classes=7)
    assert [item.shape for item in model.trainable_variables] == [item.shape for item in network.trainable_variables]
    images = numpy.zeros((2, 28, 28, 1), "float32")

    @tf.function
    def step() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(images, training=True)[:, 0])
        return loss, tape.gradient(loss, model.trainable_variables)

    step()
    began, used = time.perf_counter(), time.process_time()
    loss, gradients = step()
    assert 0.3 <= time.perf_counter() - began < patience(0.4)
    assert time.process_time() - used < patience(0.15)  # waiting uses no core
    assert float(loss) == pytest.approx(1 / 7)
    assert all(numpy.array_equal(item, numpy.zeros(item.shape)) for item in gradients)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for one, other in zip(model.trainable_variables, again.trainable_variables, strict=True):
        assert numpy.array_equal(one.numpy(), other.numpy())


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_it(run_hpcdl: CommandLine, tmp_path: Path, strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2 + (1 if STRATEGIES[strategy].features.servers else 0)
    done = run_hpcdl([
        "train", "--model", "emulated:lenet:0.05s", "--data", "synthetic:mnist", "--strategy", strategy,
        "--ranks", str(ranks), "--steps", "12", "--batch-size", "8", "--allow-grpc", "--run-dir", tmp_path / "run",
    ])  # fmt: skip
    assert done.code == 0, done.err
    record = read_record(tmp_path / "run")
    assert record.model == "emulated:lenet:0.05s"
    if record.parts:
        assert record.parts["compute"] >= 0.045


@pytest.mark.soak
@pytest.mark.mpi
def test_what_it_left_is_evaluated_and_exported_by_a_fresh_process(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    run, data = tmp_path / "run", ("--data", "synthetic:mnist@64")
    for words in (
        ["train", "--model", "emulated:lenet:0.02s", *data, "--strategy", "single", "--steps", "3", "--run-dir", run],
        ["evaluate", run, *data],
        ["export", run, "--to", "keras", tmp_path / "out"],
    ):
        done = run_hpcdl(words)
        assert done.code == 0, done.err
