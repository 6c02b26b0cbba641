"""`hpcdl run --from-horovod SCRIPT --check` lists every line that must change, and no other; nothing is run."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.scripts.horovod.changes import Change, changes_in
from tests.conftest import CommandLine
from tests.scripts.scripts import HERE

BEFORE, AFTER = HERE / "horovod_scripts", HERE / "from_horovod"
MOVED = sorted(path.name for path in AFTER.glob("*.py"))


def changed_lines(name: str) -> tuple[set[int], set[int]]:
    """Return the lines of the Horovod script that differ in the converted one, and the lines beside inserted ones."""
    before, after = ((folder / name).read_text().splitlines() for folder in (BEFORE, AFTER))
    changed, beside = set(), set()
    for kind, first, last, _, _ in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "insert":
            beside |= {first, first + 1}
        elif kind != "equal":
            changed |= {line + 1 for line in range(first, last) if before[line].strip()}
    return changed, beside


@pytest.mark.parametrize("name", MOVED)
def test_what_a_moved_script_changes_is_listed(name: str) -> None:
    """Every line that a converted script changes is listed; test_from_horovod.py trains these scripts on two ranks."""
    listed = {line for one in changes_in(BEFORE / name) for line in range(one.line, one.last + 1)}
    changed, _ = changed_lines(name)
    before = (BEFORE / name).read_text().splitlines()
    unlisted = [before[line - 1].strip() for line in sorted(changed - listed)]
    # Imports that are no longer needed may stay.
    assert [text for text in unlisted if not text.startswith(("import ", "from "))] == []


@pytest.mark.parametrize("name", MOVED)
def test_nothing_else_is_listed(name: str) -> None:
    changed, beside = changed_lines(name)
    for one in changes_in(BEFORE / name):
        assert set(range(one.line, one.last + 1)) & (changed | beside), str(one)


@pytest.mark.parametrize("name", MOVED)
def test_nothing_is_left_in_a_moved_script(name: str) -> None:
    assert changes_in(AFTER / name) == []


def listed(folder: Path, text: str) -> list[Change]:
    path = folder / "script.py"
    path.write_text(f"import horovod.tensorflow.keras as hvd\nimport keras\nimport tensorflow as tf\n{text}\n")
    first, *others = changes_in(path)
    assert first.instead == "import hpcdl as hvd"
    return others


KINDS = {
    "from horovod.keras import DistributedOptimizer": "from hpcdl import DistributedOptimizer",
    "from horovod.tensorflow import mpi_threads_supported": "leave it out: hpcdl always exchanges over MPI",
    "import horovod.torch as other": "stay with PyTorch's own",
    "import horovod.spark.keras": "`hpcdl shard`",
    "import tensorflow.compat.v1 as tf1": "import tensorflow as tf1",
    "from tensorflow.python.keras import layers": "what is in tensorflow.python is not Keras 3",
    "import tf_keras": "hpcdl trains with Keras 3",
    "hvd.init(comm=[0, 1])": "hvd.init(): it takes all ranks",
    "hvd.allreduce(1.0, False)": "name the argument",
    "hvd.allreduce(1.0, average=True)": "op=hvd.Average",
    "hvd.broadcast(1.0, 0, 'name')": "name the argument",
    "hvd.DistributedOptimizer('sgd', op=hvd.Adasum)": "hvd.Average: hpcdl has no Adasum",
    "hvd.DistributedGradientTape(tape, '/gpu:0')": "name the argument",
    "hvd.DistributedGradientTape(tape, device_dense='/gpu:0')": "leave it out",
    "hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.9**epoch)": "(int(epochs)) if epochs >= 0",
    "hvd.callbacks.Other()": "hpcdl has no such name",
    "hvd.broadcast_global_variables(0)": "hvd.broadcast_variables(model.variables)",
    "hvd.SyncBatchNormalization()": "keras.layers.BatchNormalization(synchronized=True)",
    "hvd.something_else()": "hpcdl has no such name",
    "hvd.elastic.TensorFlowKerasState(model, opt, batch=0)": "hvd.State(model, opt, batch=0)",
    "tf.device('/gpu:%d' % hvd.local_rank())": "shows each rank its own GPU",
    "gpus[hvd.local_rank()]": "gpus[0]",
    "os.environ['CUDA_VISIBLE_DEVICES'] = str(hvd.local_rank())": "shows each rank its own GPU",
    "os.environ['TF_USE_LEGACY_KERAS'] = '1'": "hpcdl trains with Keras 3",
    "keras.optimizers.Adam(0.1, decay=1e-4)": "InverseTimeDecay",
    "tf.keras.optimizers.legacy.Adam()": "tf.keras.optimizers.Adam",
    "keras.backend.set_value(model.optimizer.lr, 0.1)": "model.optimizer.learning_rate = 0.1",
    "keras.backend.set_value(model.optimizer.learning_rate, 0.1)": "model.optimizer.learning_rate = 0.1",
    "print(optimizer.lr)": "optimizer.learning_rate",
    "optimizer.get_weights()": "optimizer.variables",
    "optimizer.minimize(loss, variables)": "tf.GradientTape",
    "tf.train.AdamOptimizer(0.1)": "keras.optimizers.Adam",
    "tf.compat.v1.train.MonitoredTrainingSession()": "model.fit",
    "tf.compat.v1.disable_eager_execution()": "needs eager execution",
    "tf.compat.v1.get_variable('a')": "a TensorFlow 1 name",
    "keras.layers.CuDNNLSTM(3)": "keras.layers.LSTM",
    "keras.layers.Dense(3, batch_input_shape=(2, 3))": "keras.Input",
    "model.predict_generator(rows)": "model.predict",
    "model.fit(rows, use_multiprocessing=True)": "Keras 3 has no such argument",
    "model.save('folder')": "ends in .keras or .h5",
    "model.save_weights('weights.h5')": "ends in .weights.h5",
    "keras.callbacks.ModelCheckpoint('best', save_weights_only=True)": "ends in .weights.h5",
    "keras.callbacks.ModelCheckpoint('a.keras', period=2)": "save_freq=2",
    "keras.preprocessing.image.ImageDataGenerator()": "tf.keras.preprocessing.image.ImageDataGenerator",
}
"""A line of a script, and what its listed change says."""


@pytest.mark.parametrize("line", KINDS)
def test_each_kind_says_what_to_type(line: str, tmp_path: Path) -> None:
    (change,) = listed(tmp_path, line)
    assert KINDS[line] in change.instead
    assert change.line == 4


STAY = """
config = dict(lr=0.1)
args.lr, schedule.weights, model.get_weights(), layer.set_weights([])
tf.keras.backend.set_value(variable, 1.0)
tf.keras.preprocessing.image.ImageDataGenerator()
tf.compat.v1.logging.set_verbosity(0)
keras.backend.clear_session()
keras.callbacks.ModelCheckpoint("best-{epoch}.h5")
callbacks = []
callbacks.append(hvd.callbacks())
executor.save("folder")
optimizer.variables, optimizer.learning_rate
hvd.State(model, optimizer, batch=0)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True)
if hvd.local_rank() == 0: print(hvd.size(), hvd.local_size())
"""


@pytest.mark.parametrize("line", STAY.strip().splitlines())
def test_what_continues_working_stays(line: str, tmp_path: Path) -> None:
    assert listed(tmp_path, line) == []


def test_a_module_beside_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("import horovod.keras as hvd\n")
    (change,) = listed(tmp_path, "import layers")
    assert change.instead.startswith("layers.py imports Horovod too: hpcdl run --from-horovod")


def test_it_is_not_run_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    listed(tmp_path, "raise SystemExit(3)")
    assert "horovod" not in sys.modules


def test_a_script_without_horovod_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import keras\n")
    with pytest.raises(UsageError, match="imports neither horovod nor hpcdl"):
        changes_in(tmp_path / "script.py")


def test_the_command_lists_and_ends_with_2(session_hpcdl: CommandLine) -> None:
    finished = session_hpcdl(["run", "--from-horovod", BEFORE / "tf2_mnist.py", "--check"])
    assert finished.code == 2
    assert f"{BEFORE / 'tf2_mnist.py'}:3: import horovod.tensorflow as hvd\n    -> import hpcdl as hvd" in finished.out
    assert "3 lines to change" in finished.out


def test_the_command_ends_with_0_where_nothing_is_left(session_hpcdl: CommandLine) -> None:
    finished = session_hpcdl(["run", "--from-horovod", "--check", AFTER / "tf2_mnist.py"])
    assert (finished.code, finished.err) == (0, "")
    assert "nothing is left to change" in finished.out


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--check", "SCRIPT"], "--check: only with --from-horovod"),
        (["--from-horovod", "SCRIPT"], "so add --check"),
        (["--from-horovod", "SCRIPT", "--check", "--epochs", "3"], "leave --epochs 3 out"),
        (["--from-horovod", "gone.py", "--check"], "gone.py is not there"),
    ],
)
def test_other_words_are_refused(session_hpcdl: CommandLine, words: list[str], reported: str) -> None:
    finished = session_hpcdl(["run", *[str(AFTER / "tf2_mnist.py") if word == "SCRIPT" else word for word in words]])
    assert finished.code == 2
    assert reported in finished.err
    assert finished.err.count("\n") == 1
