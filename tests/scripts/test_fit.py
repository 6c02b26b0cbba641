"""A distributed `fit`: metrics, stops, files and unequal steps, on two ranks and in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, run_script, succeed
from tests.training_runs import record_of

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def found(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of meeting_script.py on both of two ranks and alone, and the messages of the two ranks."""
    folder = tmp_path_factory.mktemp("meeting")
    reported = succeed(run_script(session_hpcdl, HERE / "meeting_script.py", ranks=2, cwd=folder)).err
    logs = (folder / "log.csv").read_text()
    succeed(run_script(session_hpcdl, HERE / "meeting_script.py", ranks=1, cwd=folder))
    ranks = [json.loads((folder / f"found-2-{rank}.json").read_text()) for rank in range(2)]
    alone = json.loads((folder / "found-1-0.json").read_text())
    return {"ranks": ranks, "alone": alone, "said": reported, "logs": logs, "folder": folder}


def close(mine: Any, other: Any) -> bool:
    mine, other = numpy.asarray(mine, float), numpy.asarray(other, float)
    return bool(numpy.abs(mine - other).max() <= 1e-5 * numpy.abs(other).max() + 1e-7)


@pytest.mark.parametrize(
    "key", ["history", "norm", "unequal", "stop True", "stop False", "dataset", "refused", "rates", "rates model"]
)
def test_ranks_end_alike_whatever_one_of_them_does(found: dict[str, Any], key: str) -> None:
    first, second = found["ranks"]
    assert first[key] == second[key]


@pytest.mark.parametrize("name", ["loss", "accuracy", "auc", "precision", "f1", "val_loss", "val_auc", "val_f1"])
def test_metrics_are_those_of_all_samples(found: dict[str, Any], name: str) -> None:
    assert close(found["ranks"][0]["history"][name], found["alone"]["history"][name])


def test_synchronized_normalization_equals_one_process_with_the_whole_batch(found: dict[str, Any]) -> None:
    for mine, other in zip(found["ranks"][0]["norm"], found["alone"]["norm"], strict=True):
        assert close(mine, other)


def test_unequal_steps_and_files_are_reported_once(found: dict[str, Any]) -> None:
    lines = [line for line in found["said"].splitlines() if line.startswith("hpcdl: ")]
    assert sum("write files do so on rank 0 alone" in line for line in lines) == 1
    assert sum("(rank 0 4, rank 1 6)" in line for line in lines) == 5, "once an epoch of two fits"
    assert len(found["logs"].splitlines()) == 3, "a head and two epochs, by one rank"
    assert (Path(found["folder"]) / "best.keras").is_file()
    assert {path.name for path in Path(found["folder"]).glob("orbax-2-*")} == {"orbax-2-0-0", "orbax-2-0-1"}


def test_rates_are_products_of_all_factors_and_keep_what_others_change(found: dict[str, Any]) -> None:
    expected = [0.4 * (0.5 + 0.5 * batch / 6) for batch in range(4)] + [0.2] * 4 + [0.01] * 4
    assert close(found["ranks"][0]["rates"], expected)


def test_an_optimizer_that_is_not_distributed_is_refused_with_the_remedy(found: dict[str, Any]) -> None:
    assert "optimizer=hpcdl.DistributedOptimizer(SGD(...))" in found["ranks"][0]["refused"]


def test_a_stop_on_one_rank_is_one_on_all(found: dict[str, Any]) -> None:
    assert len(found["ranks"][0]["stop True"][0]) == 1 and len(found["ranks"][0]["stop False"][0]) == 2
    for epoch in (1, 2):
        assert found["said"].count(f"rank 1 has stopped fit in epoch {epoch}, and all ranks stop with it") == 1


EVALUATES = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np
x, y = np.random.default_rng(3).normal(size=(2, 32, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse", metrics=["mae"])
part = slice(hpcdl.rank(), None, 2)
model.fit(x[part], y[part], verbose=0)
model.evaluate(x[part], y[part], verbose=0, callbacks=[hpcdl.callbacks()])
model.evaluate(x, y, verbose=0)
hpcdl.allreduce(np.array(model.evaluate(x[part], y[part], verbose=0)))
model.evaluate(x, y, verbose=0)
if len(sys.argv) > 1:
    model.evaluate(x[part], y[part], verbose=0, return_dict=True)
elif hpcdl.rank() == 0:
    model.evaluate(x[:8], y[:8], verbose=0)
"""


@pytest.mark.long
def test_an_evaluation_of_a_ranks_own_samples_is_named_under_mpiexec_too(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(EVALUATES)
    ended = run_script(session_hpcdl, tmp_path / "script.py", "alone", ranks=2, cwd=tmp_path)
    assert succeed(ended).err.count("warning: model.evaluate gave") == 1


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["alone"]])
def test_an_evaluation_of_a_ranks_own_samples_is_named(
    session_hpcdl: CommandLine, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "script.py").write_text(EVALUATES)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", *words])
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if "model.evaluate gave" in line and "on rank 1" in line]
    noted = [one for one in record_of(tmp_path / "run")["warnings"] if one.startswith("model.evaluate gave")]
    assert len(lines) == len(words) == len(noted)


BATCHES = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np
x, y = np.random.default_rng(3).normal(size=(2, 64, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
part = slice(hpcdl.rank(), 32, 2)
model.train_on_batch(x[part], y[part])
model.reset_metrics()
numbers = model.test_on_batch(*((x[32:], y[32:]) if sys.argv[1] == "the whole" else (x[32:][part], y[32:][part])))
if sys.argv[1] == "combined":
    hpcdl.allreduce(np.array(numbers))
"""


@pytest.mark.parametrize(
    ("how", "count"),
    [("a part", 1), *(pytest.param(how, 0, marks=pytest.mark.long) for how in ("the whole", "combined"))],
)
def test_evaluated_batches_of_a_ranks_own_samples_are_named(
    session_hpcdl: CommandLine, tmp_path: Path, how: str, count: int
) -> None:
    (tmp_path / "script.py").write_text(BATCHES)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how])
    assert ended.code == 0, ended.err
    assert ended.err.count("warning: model.test_on_batch gave") == count == ended.err.count("warning"), ended.err


TRAINS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np
x, y = np.random.default_rng(hpcdl.rank()).normal(size=(2, 16, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse", metrics=None if sys.argv[1] == "loss" else ["mae"])
for _ in range(2):
    numbers = model.train_on_batch(x, y)
if sys.argv[1] == "combined":
    hpcdl.allreduce(np.array(numbers))
"""


@pytest.mark.parametrize(
    ("how", "count"), [("mae", 1), *(pytest.param(how, 0, marks=pytest.mark.long) for how in ("loss", "combined"))]
)
def test_metrics_of_train_on_batch_of_a_ranks_own_samples_are_named(
    session_hpcdl: CommandLine, tmp_path: Path, how: str, count: int
) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    ended = succeed(session_hpcdl(["run", "-n", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how]))
    assert ended.err.count("warning: model.train_on_batch gave") == count == ended.err.count("warning"), ended.err


PREDICTS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
how, rank = sys.argv[1], hpcdl.rank()
x = np.random.default_rng(3).normal(size=(128, 4))
y = np.eye(3)[(x[:, :2] > 0).sum(1)]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
model.compile(hpcdl.DistributedOptimizer("sgd"), "categorical_crossentropy")
data = hpcdl.dataset(tf.data.Dataset.from_tensor_slices((x, y)), batch_size=8)
part = slice(rank, None, 2)
kept = [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.predict(x[part], verbose=0))]
model.predict(x[part], verbose=0)  # a target, perhaps: training follows
model.fit(data, epochs=2, verbose=0, callbacks=kept if how == "in an epoch" else [])
if how == "a part":
    model.predict(x[part], verbose=0)
elif how == "a part on rank 0" and rank == 0:
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
elif how == "the whole":
    model.predict(x[np.random.default_rng(rank).permutation(128)], verbose=0)
elif how == "gathered":
    hpcdl.allgather(model.predict(x[part], verbose=0))
elif how == "kept":
    np.save(f"own{rank}", model.predict(x[part], verbose=0))
elif how == "an action":
    model.predict(x[part][:16], verbose=0)
"""


@pytest.mark.parametrize(
    ("how", "functions"),
    [
        ("a part", ["predict"]),
        pytest.param("in an epoch", ["predict"], marks=pytest.mark.soak),
        pytest.param("a part on rank 0", ["evaluate", "predict"], marks=pytest.mark.long),
        *(pytest.param(how, [], marks=pytest.mark.long) for how in ("the whole", "gathered")),
        *(pytest.param(how, [], marks=pytest.mark.soak) for how in ("kept", "an action")),
    ],
)
def test_predictions_of_a_ranks_own_samples_are_named(
    session_hpcdl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, functions: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(PREDICTS)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how])
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if "warning: model." in line]
    assert [line.split("warning: model.")[1].split()[0] for line in lines] == functions, ended.err


MONITORS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np
how, rank = sys.argv[1], hpcdl.rank()
x = np.random.default_rng(rank).normal(size=(32, 4))
class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        value = np.std(self.model.predict(x, verbose=0))
        logs["spread"] = float(hpcdl.allreduce(value)) if how == "averaged" else value
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
monitor = "loss" if how == "not monitored" else "spread"
stop = keras.callbacks.EarlyStopping(monitor, mode="min", patience=9)
model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[Look(), stop])
"""


@pytest.mark.parametrize(
    "how",
    ["own", pytest.param("averaged", marks=pytest.mark.long), pytest.param("not monitored", marks=pytest.mark.soak)],
)
def test_a_monitored_value_of_each_ranks_own_is_named(session_hpcdl: CommandLine, tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(MONITORS)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how])
    assert ended.code == 0, ended.err
    assert ended.err.count("warning: EarlyStopping monitors spread, which is ") == (how == "own"), ended.err


DECAYS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
kind, how = sys.argv[1:3]
x, y = np.random.default_rng(3).normal(size=(2, 250, 4)).astype("float32")
data = hpcdl.dataset(tf.data.Dataset.from_tensor_slices((x, y)), batch_size=8)
steps = 4 * (250 // 8) // (hpcdl.size() if how == "of a rank" else 1)
schedule = getattr(keras.optimizers.schedules, kind)(0.1, steps, **({"decay_rate": 0.9} if "Exp" in kind else {}))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(schedule))
model.compile(optimizer, "mse")
if how == "loop":
    for _ in range(4):
        for inputs, targets in data:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs) - targets) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))
else:
    stop = [keras.callbacks.EarlyStopping("loss", min_delta=100, patience=3)]
    model.fit(data, epochs=8 if how == "stopped" else 4, verbose=0, callbacks=stop if how == "stopped" else [])
"""


@pytest.mark.parametrize(
    ("kind", "how", "number"),
    [
        ("CosineDecay", "of one process", 1),
        pytest.param("PolynomialDecay", "loop", 1, marks=pytest.mark.long),
        pytest.param("CosineDecay", "of a rank", 0, marks=pytest.mark.long),
        pytest.param("CosineDecay", "stopped", 0, marks=pytest.mark.soak),
        pytest.param("ExponentialDecay", "of one process", 0, marks=pytest.mark.soak),
    ],
)
def test_a_schedule_for_the_steps_of_one_process_is_named(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str, how: str, number: int
) -> None:
    (tmp_path / "script.py").write_text(DECAYS)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", kind, how])
    assert ended.code == 0, ended.err
    assert ended.err.count("changes the learning rate over 124 steps, and each of 2 ranks took 60") == number


CALLS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np
rank = hpcdl.rank()
x = np.random.default_rng(rank).normal(size=(32, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "sparse_categorical_crossentropy")
model.fit(x, np.arange(32) % 2, verbose=0, **eval(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("dict(epochs=1 + rank)", 2, "rank 0 has epochs=1, rank 1 has epochs=2"),
        pytest.param(
            *("dict(epochs=2, initial_epoch=rank)", 2, "rank 0 has initial_epoch=0, rank 1 has initial_epoch=1"),
            marks=pytest.mark.soak,
        ),
        ("dict(class_weight={0: 1.0, 1: 1.0 + rank})", 0, "warning: model.fit has class_weight/1 1 on rank 0, 2 on"),
        ("dict(class_weight={0: 1.0, 1: 2.0})", 0, ""),
        ("dict(class_weight={0: 1.0, 1: 2.0} if rank else None)", 2, "rank 0 has no class_weight, rank 1 has class_w"),
    ],
)
def test_a_fit_is_called_alike_on_all_ranks(
    session_hpcdl: CommandLine, tmp_path: Path, arguments: str, code: int, text: str
) -> None:
    (tmp_path / "script.py").write_text(CALLS)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", arguments])
    assert ended.code == code and text in ended.err
    assert ("all ranks train one model" in ended.err) == text.startswith("warning")


@pytest.mark.soak
def test_without_callbacks_a_fit_is_the_same_and_files_are_whole(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A fit without callbacks is the same. `make test-all` has callbacks above, and none in test_optimizers.py."""
    finished = succeed(run_script(session_hpcdl, HERE / "without_callbacks_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be []") == 2, "and no temporary file is left"
    lines = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    reported = [sum(word in line for line in lines) for word in ("XLA", "rank 0 alone", "(rank 0 4, rank 1 5)")]
    assert reported == [1, 1, 3], "once, once, and in each of three epochs"
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


TAPE_ALONE = """
import sys
import hpcdl
hpcdl.init(60)
import keras, numpy as np
class Own(keras.Sequential):
    def train_step(self, data):
        with hpcdl.DistributedGradientTape() as tape: loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.compute_metrics(data[0], data[1], self(data[0]))
x = np.random.default_rng(hpcdl.rank()).normal(size=(16, 3)).astype("float32")
model = Own([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
callbacks = [hpcdl.callbacks()] if sys.argv[1] == "given" else []
history = model.fit(x, x.sum(1), batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history
print("alike", len(set(map(str, hpcdl.allgather_object(history["mae"])))) == 1)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["given", "missing"])
def test_a_fit_with_a_tape_and_a_plain_optimizer_is_told_of_callbacks(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "script.py").write_text(TAPE_ALONE)
    finished = succeed(run_script(session_hpcdl, tmp_path / "script.py", kind, ranks=2, cwd=tmp_path))
    assert finished.out.count(f"alike {kind == 'given'}") == 2
    assert finished.err.count("give it callbacks=[hpcdl.callbacks()] on every rank") == (kind == "missing")


CHECKPOINT = """
import hpcdl
hpcdl.init()
import keras, numpy as np
x = np.random.default_rng(hpcdl.rank()).normal(hpcdl.rank(), 1, size=(32, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint("saved.keras")])
saved = keras.saving.load_model("saved.keras").get_weights()
assert all(map(np.array_equal, saved, model.get_weights())), "the file has the statistics of rank 0 alone"
"""


def test_a_checkpoint_without_validation_has_the_mean_of_moving_statistics(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(CHECKPOINT)
    succeed(run_script(session_hpcdl, tmp_path / "script.py", ranks=2, cwd=tmp_path))
