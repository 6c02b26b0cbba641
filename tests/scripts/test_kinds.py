"""Kinds of variables, and callbacks that act inside an epoch, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, run_script, succeed

pytestmark = pytest.mark.mpi
INSIDE = [
    "evaluate",
    "evaluate at the end too",
    "evaluate on rank 0",
    "predict on rank 0",
    "a second fit",
    "a second fit of the model itself",
    "evaluate over the ranks",
]


@pytest.mark.long
def test_variables_are_averaged_summed_compared_or_a_ranks_own_by_their_kind(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "kinds_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be") == 2
    (line,) = [line for line in finished.err.splitlines() if "no gradient moves them" in line]
    assert line.startswith("hpcdl: kept/usual, kept/queue: ") and "hpcdl.combine(variable" in line


@pytest.fixture(scope="module")
def inside(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What both ranks report for each case."""
    folder = tmp_path_factory.mktemp("inside")
    return succeed(run_script(session_hpcdl, HERE / "inside_script.py", ranks=2, cwd=folder)).out


@pytest.mark.long
@pytest.mark.parametrize("case", INSIDE)
def test_what_a_callback_does_inside_an_epoch_leaves_the_fit_as_it_is(inside: str, case: str) -> None:
    found = sorted(re.findall(rf"^CASE (\d) {case}: (.*)$", inside, re.MULTILINE))
    assert found == [("0", "as without"), ("1", "as without")]


def test_data_are_shuffled_alike_and_layers_adapted_over_all_ranks(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "data_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be") == 2
    assert finished.err.count("hpcdl: warning: outside: adapted to other data on each rank") == 1
    assert finished.err.count("hpcdl: warning: at the end of fit a callback changed ") == 1
    assert "choose settings alike" not in finished.err  # ranks with parts of different sizes


@pytest.mark.long
def test_every_way_to_save_is_one_ranks_and_whole(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "saving_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be []") == 2


BEST = """
import hpcdl
hpcdl.init(60)
import keras, numpy as np, sys, tensorflow as tf
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = hpcdl.DistributedOptimizer("sgd")
last = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), "last", max_to_keep=None)
best = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), "best", max_to_keep=None)
for epoch in range(4):
    optimizer.apply([np.full(weight.shape, 0.1) for weight in model.weights], model.weights)
    if epoch in ((0, 2), (0, 1, 3))[hpcdl.rank()]:  # a rank's own validation is better than before
        model.save_weights("best.weights.h5") if sys.argv[1] == "file" else best.save()
    model.save("last.keras")
    last.save()
    if hpcdl.rank() == 0:
        model.save("of rank 0.keras")
"""


@pytest.mark.parametrize(
    ("kind", "name"), [("file", "best.weights.h5"), pytest.param("numbered", "best/ckpt", marks=pytest.mark.long)]
)
def test_a_model_that_ranks_save_at_different_steps_is_named(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str, name: str
) -> None:
    (tmp_path / "script.py").write_text(BEST)
    finished = succeed(run_script(session_hpcdl, tmp_path / "script.py", kind, ranks=2, cwd=tmp_path))
    (line,) = [line for line in finished.err.splitlines() if " times and rank 1 " in line]
    assert f"rank 0 saved {name} 2 times and rank 1 3 times" in line


READS = """
import sys
import hpcdl
hpcdl.init(60)
import keras, numpy as np
accuracy = keras.metrics.BinaryAccuracy()
optimizer = hpcdl.DistributedOptimizer("sgd")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer.apply([np.full(weight.shape, 0.1) for weight in model.weights], model.weights)
own = [1.0, 0.0, 1.0 - hpcdl.rank(), 1.0]
accuracy.update_state([1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0] if "the whole" in sys.argv[1] else own)
if hpcdl.rank() == 0 or "on rank 0" not in sys.argv[1]:
    result = accuracy.result()
if sys.argv[1] == "a mean":
    hpcdl.allreduce(result)
if "begun again" in sys.argv[1]:
    accuracy.reset_state()
"""


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("a part", 1),
        ("a part on rank 0, begun again", 1),
        pytest.param("a part on rank 0", 1, marks=pytest.mark.long),
        pytest.param("the whole", 0, marks=pytest.mark.long),
        pytest.param("the whole on rank 0", 0, marks=pytest.mark.long),
        ("a mean", 0),
    ],
)
def test_a_metric_of_a_ranks_own_samples_is_named(
    session_hpcdl: CommandLine, tmp_path: Path, how: str, number: int
) -> None:
    (tmp_path / "script.py").write_text(READS)
    finished = succeed(run_script(session_hpcdl, tmp_path / "script.py", how, ranks=2, cwd=tmp_path))
    read = "which reads it, and 0.75" if "on rank 0" in how else "and 0.75"
    assert len(re.findall(f"warning: .*result\\(\\) .* 1 on rank 0,? {read} on rank 1", finished.err)) == number
    assert finished.err.count("result() ") == number


@pytest.mark.long
def test_a_first_pass_with_a_ranks_own_weights_is_warned_of(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "first_pass_script.py", ranks=2, cwd=tmp_path))
    reported: dict[str, list[str]] = {}
    for line in finished.err.splitlines():
        if line.startswith("begin "):
            begun = reported.setdefault(line.removeprefix("begin "), [])
        elif line.startswith("hpcdl: ") and line not in begun:
            begun.append(line)
    lines = {name: " ".join(found) for name, found in reported.items()}
    too_late = "the first forward pass used each rank's own"
    for name in ("a model made after the optimizer", "a target copied after it"):
        assert too_late in lines[name] and "hpcdl.broadcast_variables" in lines[name], name
    assert "begin as rank 0's" in lines["a target in a function"]
    for name in (
        "a model that was broadcast",
        "a model made before the optimizer",
        "a target copied before the optimizer was made",
        "a model that this rank keeps",
        "alike True",
        "kept True",
    ):
        assert lines[name] == "", name


OWN_STATISTICS = """
import sys
import hpcdl
hpcdl.init()
import keras, tensorflow as tf
norm = keras.layers.BatchNormalization(synchronized="alike" in sys.argv)
model = keras.Sequential([keras.Input((2,)), norm, keras.layers.Dense(1)])
optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1))
for step in range(2):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.fill([4, 2], float(hpcdl.rank() + step)), training=True) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    model.save("kept.keras")
"""


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("alike", [False, True])
def test_a_loop_that_saves_another_model_on_each_rank_has_a_warning(
    session_hpcdl: CommandLine, tmp_path: Path, alike: bool
) -> None:
    (tmp_path / "loop.py").write_text(OWN_STATISTICS)
    ended = succeed(run_script(session_hpcdl, tmp_path / "loop.py", "alike" * alike, ranks=2, cwd=tmp_path))
    assert ("kept.keras: the ranks save models that differ, and" in ended.err) == (not alike), ended.err
    assert ended.err.count("BatchNormalization(synchronized=True)") <= 2 * (not alike)


OWN_WEIGHTS = """
import hpcdl
hpcdl.init()
import keras, numpy as np
x = np.random.default_rng(hpcdl.rank()).normal(size=(8, 2))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
model.fit(x, x[:, :1], verbose=0)
model.save("first.keras")
model.set_weights([weight + hpcdl.rank() for weight in model.get_weights()])  # as a minimizer of scipy does
model.save("kept.keras")
"""


@pytest.mark.long
@pytest.mark.mpi
def test_saved_weights_that_each_rank_has_set_have_advice_of_their_own(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(OWN_WEIGHTS)
    ended = succeed(run_script(session_hpcdl, tmp_path / "script.py", ranks=2, cwd=tmp_path))
    (line,) = (line for line in ended.err.splitlines() if "the ranks save" in line)
    assert "kept.keras: the ranks save models that differ in their trainable weights" in line
    assert "L-BFGS" in line and "BatchNormalization" not in line


AGAIN = """
import hpcdl
hpcdl.init()
import keras, numpy as np
hpcdl.DistributedOptimizer("sgd")
x = np.random.default_rng(hpcdl.rank()).normal(size=(8, 2))
model, target = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2))
target.layers[0].name = "target"
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
for fit in range(3):
    if fit == 2:
        later = keras.layers.Dense(1, name="later")
        later.build((None, 2))
    target.set_weights([np.full(weight.shape, hpcdl.rank() + fit) for weight in target.weights])
    model.fit(x, x[:, :1], verbose=0)
    assert np.all(target.weights[0].numpy() == fit), target.weights
"""


@pytest.mark.long
@pytest.mark.mpi
def test_weights_that_differ_at_each_fit_are_named_once(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AGAIN)
    ended = succeed(run_script(session_hpcdl, tmp_path / "script.py", ranks=2, cwd=tmp_path))
    first, later = (line for line in ended.err.splitlines() if "begin as rank 0's" in line)
    assert "and 1 more differed" in first and "later/kernel differed" in later, ended.err
