"""`--fast-kernels` as a user types it: the record has the active kernels, and the saved model is plain Keras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.training_runs import record_of

pytestmark = pytest.mark.mpi

MODEL = """
import keras

def build(num_classes, input_shape):
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(6, 3)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dense(6, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(num_classes)(layers.Flatten()(x)))
"""
SCRIPT = """
import sys
import keras, numpy
import hpcdl

hpcdl.init()
if "fast" in sys.argv:
    print("in force:", ", ".join(hpcdl.fast_kernels()))
layers = keras.layers
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((6, 6, 2)), layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)])
model.compile(
    hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.05)), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)
samples = numpy.random.default_rng(hpcdl.rank()).normal(2.0, 3.0, (64, 6, 6, 2)).astype("float32")
history = model.fit(samples, numpy.arange(64) % 3, epochs=2, batch_size=16, verbose=0, shuffle=False).history
if hpcdl.rank() == 0:
    print("losses:", *history["loss"])
    print("replaced:", hasattr(keras.layers.BatchNormalization.call, "in_place_of"))
"""
TAPE = """
import keras, numpy
import tensorflow as tf
import hpcdl

hpcdl.init()
layers = keras.layers
keras.utils.set_random_seed(1)
inputs = keras.Input((8, 8))
x = layers.LSTM(6)(layers.Add()([inputs, layers.MultiHeadAttention(2, 4)(inputs, inputs)]))
model = keras.Model(inputs, layers.Dense(3, activation="gelu")(x))
optimizer = keras.optimizers.SGD(0.1)

@tf.function
def step(samples):
    with hpcdl.DistributedGradientTape() as tape:
        loss = tf.reduce_mean((model(samples, training=True) - 1.0) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

losses = [float(step(tf.ones((4, 8, 8)))) for _ in range(3)]
if hpcdl.rank() == 0:
    print("losses:", *losses)
"""
EVALUATED = """
import sys, keras, numpy
assert "hpcdl" not in sys.modules
model = keras.saving.load_model(sys.argv[1])
print(float(numpy.asarray(model(numpy.full((1, 28, 28, 1), 0.5, "float32"))).sum()))
assert "hpcdl" not in sys.modules
"""


def train(run_hpcdl: CommandLine, folder: Path, choice: str) -> Path:
    (folder / "net.py").write_text(MODEL)
    run_dir = folder / f"run-{choice}"
    finished = run_hpcdl(
        ["train", "--model", f"{folder / 'net.py'}:build", "--data", "synthetic:28x28x1:10@256", "--strategy", "ring",
         "--ranks", "2", "--batch-size", "16", "--steps", "6", "--deterministic", "--profile", "none",
         "--fast-kernels", choice, "--run-dir", run_dir]
    )  # fmt: skip
    assert finished.code == 0, finished.err
    reported = "fast kernels: batch normalization, layer normalization, gelu" in finished.err + finished.out
    journal = (run_dir / "metrics.jsonl").read_text()
    assert ("fast kernels: batch normalization, layer normalization, gelu" in journal) is (choice != "off"), reported
    return run_dir


def test_a_run_says_what_was_in_force_and_its_model_is_plain_keras(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    fast, plain = (train(run_hpcdl, tmp_path, choice) for choice in ("auto", "off"))
    assert record_of(fast)["fast_kernels"] == ["batch normalization", "layer normalization", "gelu"]
    assert record_of(plain)["fast_kernels"] == []
    assert record_of(fast)["loss"] == pytest.approx(record_of(plain)["loss"], rel=1e-4)
    for run in (fast, plain):
        finished = subprocess.run(
            [sys.executable, "-c", EVALUATED, str(run / "model.keras")], capture_output=True, text=True, timeout=300
        )
        assert finished.returncode == 0, finished.stderr
    report = run_hpcdl(["report", fast, "--out", tmp_path / "report"])
    assert report.code == 0, report.err
    assert "fast kernels" in (tmp_path / "report" / "report.md").read_text()


def of_script(
    run_hpcdl: CommandLine, folder: Path, *words: str, flags: tuple[str, ...] = ()
) -> tuple[list[float], str]:
    (folder / "script.py").write_text(SCRIPT)
    run_dir = folder / f"run{len(list(folder.glob('run*')))}"
    finished = run_hpcdl(["run", "--ranks", "2", "--run-dir", run_dir, *flags, folder / "script.py", *words])
    assert finished.code == 0, finished.err
    names = record_of(run_dir)["fast_kernels"]
    assert ("batch normalization" in names) is ("replaced: True" in finished.out) is bool(words or flags)
    line = next(line for line in finished.out.splitlines() if line.startswith("losses:"))
    return [float(word) for word in line.split()[1:]], finished.out


def test_a_script_has_them_where_it_or_its_command_asks(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    plain, reported = of_script(run_hpcdl, tmp_path)
    assert "replaced: False" in reported
    asked, reported = of_script(run_hpcdl, tmp_path, "fast")
    assert "replaced: True" in reported and "in force: batch normalization, layer normalization" in reported
    flagged, reported = of_script(run_hpcdl, tmp_path, flags=("--fast-kernels", "on"))
    assert "replaced: True" in reported
    assert asked == pytest.approx(plain, rel=1e-5) and flagged == pytest.approx(plain, rel=1e-5)


def test_a_tape_within_a_graph_has_them_all_and_their_trials_are_nobodys_weights(
    run_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "tape.py").write_text(TAPE)
    losses = {}
    for choice in ("on", "off"):
        run_dir = tmp_path / choice
        finished = run_hpcdl(
            ["run", "--ranks", "2", "--fast-kernels", choice, "--run-dir", run_dir, tmp_path / "tape.py"]
        )
        assert finished.code == 0, finished.err
        assert "different weights" not in finished.err
        assert ({"gelu", "attention", "lstm"} <= {*record_of(run_dir)["fast_kernels"]}) is (choice == "on")
        (line,) = [line for line in finished.out.splitlines() if line.startswith("losses:")]
        losses[choice] = [float(word) for word in line.split()[1:]]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-5)


def test_an_engine_of_tensorflow_1_goes_without_what_xla_compiles(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    finished = run_hpcdl(
        ["train", "--model", f"{tmp_path / 'net.py'}:build", "--data", "synthetic:28x28x1:10@64", "--strategy",
         "grpc-ps", "--allow-grpc", "--ranks", "2", "--steps", "2", "--run-dir", tmp_path / "run"]
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert record_of(tmp_path / "run")["fast_kernels"] == ["batch normalization", "layer normalization"]
