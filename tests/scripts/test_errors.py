"""hpcdl in a user's own script, on two ranks: errors end all of them, and loss scales agree."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import EITHER, CommandLine, Mpi, patience

pytestmark = pytest.mark.mpi

FAILING = """
import hpcdl; hpcdl.init()
if hpcdl.rank() == 1:
    raise ValueError("planted")
from hpcdl.scripts.process.session import communicator
communicator().barrier()
"""

OVERFLOWING = """
import os
import hpcdl; hpcdl.init()
import keras, numpy
policy_late = os.environ["POLICY"] == "late"
if not policy_late:
    keras.mixed_precision.set_global_policy("mixed_float16")
optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.01))
keras.mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(1)
inputs = keras.Input((4,))
model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(inputs))
model.compile(optimizer=optimizer, loss="mean_squared_error")
images, targets = numpy.ones((32, 4), "float32"), numpy.ones((32, 1), "float32")
if hpcdl.rank() == 1:
    images[8:16] = 1e34  # the second step overflows on this rank alone
before = None
model.fit(images, targets, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[hpcdl.callbacks()])
scale = float(model.optimizer.dynamic_scale)
digest = float(numpy.abs(numpy.concatenate([w.reshape(-1) for w in model.get_weights()])).sum())
assert numpy.isfinite(digest)
print(f"[{hpcdl.rank()} scale {scale:g} weights {digest.hex()}]", flush=True)
"""


WITHOUT_BATCH = """
import hpcdl; hpcdl.init()
import keras, numpy
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mean_squared_error")
rows = numpy.ones((1, 4), "float32")[hpcdl.rank() :: hpcdl.size()]
model.fit(rows, rows[:, :1], batch_size=8, verbose=0)
"""


IN_FUNCTION = """
import hpcdl; hpcdl.init()
import tensorflow as tf

@tf.function
def step(rows):
    if rows.shape[0] != 3:
        raise ValueError("three rows are needed")
    return rows

step(tf.ones(2))
"""


def run(mpi: Mpi, script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [*mpi.launcher, "-n", "2", sys.executable, "script.py"],
        cwd=folder, env=mpi.environment | env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_fewer_batches_than_ranks_are_counted(mpi: Mpi, tmp_path: Path) -> None:
    finished = run(mpi, WITHOUT_BATCH, tmp_path)
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("hpcdl: ")]
    assert finished.returncode != 0 and "the training data have 1 batch for 2 ranks, none for rank 1: use" in line


@EITHER
def test_an_error_on_one_rank_ends_all(mpi: Mpi, tmp_path: Path) -> None:
    began = time.monotonic()
    finished = run(mpi, FAILING, tmp_path)
    assert finished.returncode != 0
    assert time.monotonic() - began < patience(60)
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("hpcdl: ")]
    assert line.startswith("hpcdl: rank 1 on ") and line.endswith(": ValueError: planted")


@pytest.mark.soak
@pytest.mark.parametrize("mpi", ["default"], indirect=True)
def test_an_overflow_on_one_rank_skips_the_step_on_all(mpi: Mpi, tmp_path: Path) -> None:
    """An overflow on one rank skips the step on all; `make test-all` has a loss scale in test_optimizers."""
    finished = run(mpi, OVERFLOWING, tmp_path, POLICY="early")
    assert finished.returncode == 0, finished.stderr
    reported = sorted(part.split("]")[0].split(" ", 1) for part in finished.stdout.split("[")[1:])
    assert [rank for rank, _ in reported] == ["0", "1"]
    assert reported[0][1] == reported[1][1], "the ranks end with the same scale and weights"
    assert reported[0][1].startswith("scale 16384 ")


@pytest.mark.parametrize("mpi", ["default"], indirect=True)
def test_a_policy_that_comes_late_is_refused(mpi: Mpi, tmp_path: Path) -> None:
    refused = run(mpi, OVERFLOWING, tmp_path, POLICY="late")
    assert refused.returncode != 0
    assert "set the policy mixed_float16 before it is made" in refused.stderr


@pytest.mark.parametrize("mpi", ["default"], indirect=True)
def test_an_error_in_a_function_ends_with_the_scripts_own_line(mpi: Mpi, tmp_path: Path) -> None:
    finished = run(mpi, IN_FUNCTION, tmp_path)
    assert finished.returncode == 1, finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("hpcdl: ")]
    assert line.endswith(": ValueError: three rows are needed (script.py, line 8, in step)")


def test_the_same_under_hpcdl_run(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_FUNCTION)
    finished = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"])
    assert finished.code == 1
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    assert line.endswith(": ValueError: three rows are needed (script.py, line 8, in step)")
    assert "Traceback" in finished.err, "and what led to it"


OTHER_SHAPES = """
import hpcdl; hpcdl.init()
import keras, numpy
units = 3 + hpcdl.rank()  # as a vocabulary or a number of classes that each rank has counted in its own data
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="last")])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
model.fit(numpy.random.rand(8, 4), numpy.ones((8, units)), verbose=0)
"""


def test_models_of_other_shapes_on_each_rank_are_named(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OTHER_SHAPES)
    finished = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"])
    assert finished.code == 2, finished.err
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: rank")]
    assert "rank 0 has last/kernel: float32 (4, 3), rank 1 has last/kernel: float32 (4, 4)" in line.replace(
        "sequential/", ""
    )


WRAPPED = """
import sys
import hpcdl
import keras, numpy, tensorflow as tf
from hpcdl.scripts.process.exit import users_own


@tf.function
def gathered(rows):
    return tf.gather(rows, 7)


class Net(keras.Model):
    def __init__(self, how):
        super().__init__()
        self.how, self.last = how, keras.layers.Dense(1)

    def call(self, x):
        if self.how == "layer":
            raise KeyError("no such column: age")
        return tf.debugging.check_numerics(self.last(x) / 0.0, "bad")


def fitted(how):
    model = Net(how)
    model.compile("sgd", "mse")
    model.fit(numpy.ones((4, 2)), numpy.ones((4, 1)), verbose=0)


def bad_row(row):
    raise ValueError("bad row")


def mapped():
    for _ in tf.data.Dataset.range(4).map(lambda row: tf.py_function(bad_row, [row], tf.int64)):
        pass


for how in (lambda: gathered(tf.ones(3)), lambda: fitted("layer"), lambda: fitted("step"), mapped, lambda: 1 / 0):
    try:
        how()
    except Exception as error:
        print(users_own(error))
"""


def test_errors_that_libraries_have_wrapped_keep_the_scripts_text_and_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WRAPPED)
    finished = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=patience(120)
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "InvalidArgumentError: indices = 7 is not in [0, 3) (script.py, line 10, in gathered)",
        "KeyError: no such column: age (script.py, line 20, in call)",
        "InvalidArgumentError: bad : Tensor had Inf values (script.py, line 21, in call)",
        "ValueError: bad row (script.py, line 31, in bad_row)",
        "division by zero",
    ]
