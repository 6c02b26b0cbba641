"""Training on two ranks without any distribution is refused, and a distributed optimizer is found wherever it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import CommandLine, Finished
from tests.scripts.scripts import HERE, succeed
from tests.training_runs import record_of

pytestmark = pytest.mark.mpi

PLAIN = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
print("trained")
"""
WITH_INIT = """
import hpcdl; hpcdl.init()
"""
WARNED = {
    "a_loop": "a loop of its own with SGD",
    "a_clone": "model.fit with Adam",
    "a_clone_after_a_fit_of_the_other": "model.fit with RMSprop",
    "an_optimizer_from_its_config": "model.train_on_batch with SGD",
    "a_sum_of_numbers_before": "model.fit with Nadam",
    "half_of_a_pair": "a loop of its own with Adamax",
}
ALIKE = (
    "dict",
    "list",
    "object",
    "a list by hand",
    "copied callbacks",
    "a tape",
    "its own",
    "sums",
    "mean of weights",
    "best",
    "a loss scale around",
    "by hand",
)


def test_without_anything_of_hpcdl_it_ends_with_2_unless_that_is_allowed(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    refused = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "refused", tmp_path / "plain.py"])
    assert refused.code == 2, refused.err
    (line,) = [line for line in refused.err.splitlines() if line.startswith("hpcdl: ")]
    assert "model.fit with SGD on 2 ranks" in line and "hpcdl.DistributedOptimizer(SGD(...))" in line
    assert "trained" not in refused.out
    words = ["run", "--ranks", "2", "--allow-undistributed", "--run-dir", tmp_path / "run", tmp_path / "plain.py"]
    allowed = succeed(session_hpcdl(words))
    assert allowed.out.count("trained") == 2
    assert len([text for text in record_of(tmp_path / "run")["warnings"] if "model of its own" in text]) == 1


def test_a_script_that_has_called_init_is_warned_at_its_first_step_and_ends_with_2(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "begun.py").write_text(WITH_INIT + PLAIN)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "begun.py"])
    assert ended.code == 2 and ended.out.count("trained") == 2
    first, last = (line for line in ended.err.splitlines() if line.startswith("hpcdl: "))
    assert first.startswith("hpcdl: warning: model.fit with SGD") and "--allow-undistributed" in last


BY_HAND = """
import sys
import hpcdl
if "no-init" not in sys.argv:
    hpcdl.init()
import numpy as np, tensorflow as tf
weight, x = tf.Variable(tf.zeros([2, 1])), np.ones((8, 2), "float32")
average = hpcdl.allreduce if "average" in sys.argv else tf.identity
if "center" in sys.argv:  # exchanges no gradients, and sets weights itself
    import keras
    center = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="sync-easgd", period=2)

@tf.function
def step(batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batch @ weight - 1) ** 2)
    weight.assign_sub(0.1 * average(tape.gradient(loss, weight)))

for first in range(0, 8, 2):
    if "center" in sys.argv:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight - 1) ** 2)
        center.apply([tape.gradient(loss, weight)], [weight])
    else:
        step(x[first : first + 2])
print("trained", flush=True)
"""


@pytest.mark.parametrize("words", [["average"], ["center"], ["alone"], ["no-init"]], ids=str)
def test_updates_by_hand_that_exchange_nothing_end_with_2(
    session_hpcdl: CommandLine, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "hand.py").write_text(BY_HAND)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "hand.py", *words])
    lines = [line for line in ended.err.splitlines() if "updates variables by hand on 2 ranks" in line]
    if words in (["average"], ["center"]):
        assert (ended.code, ended.out.count("trained"), lines) == (0, 2, []), ended.err
        assert "no steps were counted" in ended.err and "0 steps" not in ended.err
        return
    alone = words == ["alone"]
    assert (ended.code, ended.out.count("trained"), len(lines)) == (2, 2 * alone, 1 + alone), ended.err
    assert "use hpcdl.DistributedGradientTape" in lines[-1] and "--allow-undistributed" in lines[-1]


def test_a_script_whose_ranks_exchange_nothing_is_warned_at_its_end(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("print('worked', flush=True)\n")
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "alone.py"]
    ended = succeed(session_hpcdl(words))
    assert ended.err.count("warning: the 2 ranks exchanged nothing through hpcdl: each did the script's work") == 1
    assert len([text for text in record_of(tmp_path / "run")["warnings"] if "exchanged nothing" in text]) == 1
    meant = succeed(session_hpcdl([*words[:3], "--allow-undistributed", "--run-dir", tmp_path / "meant", words[-1]]))
    assert "exchanged nothing" not in meant.err and meant.out.count("worked") == 2
    (tmp_path / "together.py").write_text("import hpcdl\nhpcdl.init()\nhpcdl.barrier()\n")
    together = succeed(session_hpcdl([*words[:3], "--run-dir", tmp_path / "together", tmp_path / "together.py"]))
    assert "exchanged nothing" not in together.err


OWN_MPI = """
import sys
from mpi4py import MPI
import keras, numpy as np, tensorflow as tf
world = MPI.COMM_WORLD
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
x, optimizer = np.random.default_rng(world.rank).normal(size=(8, 2)), keras.optimizers.SGD(0.1)
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - 1) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    if sys.argv[1] == "averaged":
        gradients = [tf.constant(world.allreduce(one.numpy()) / world.size) for one in gradients]
    optimizer.apply(gradients, model.trainable_variables)
"""


@pytest.mark.parametrize("how", ["averaged", "alone"])
def test_a_script_that_averages_with_mpi4py_itself_is_let_alone(
    session_hpcdl: CommandLine, tmp_path: Path, how: str
) -> None:
    (tmp_path / "own.py").write_text(OWN_MPI)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "own.py", how])
    assert "exchanges nothing through hpcdl. The script imports mpi4py" in ended.err, ended.err
    if how == "averaged":
        assert ended.code == 0 and "a model of its own" not in ended.err, ended.err
    else:
        assert ended.code == 2 and "each rank trains a model of its own" in ended.err.splitlines()[-1], ended.err


def test_a_strategy_of_tensorflow_is_advised_away(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    scope = "import tensorflow as tf\ntf.distribute.MirroredStrategy().scope().__enter__()\n"
    (tmp_path / "mirrored.py").write_text(scope + PLAIN)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "mirrored.py"])
    assert ended.code == 2 and "leave `with strategy.scope()` of tf.distribute out, and write optimizer=" in ended.err


@pytest.fixture(scope="module")
def held(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The ranks' output for each case; the script exits with 0, because other parts of it are distributed."""
    folder = tmp_path_factory.mktemp("held")
    words = ["run", "--ranks", "2", "--run-dir", folder / "run", HERE / "held_script.py"]
    return succeed(session_hpcdl(words))


@pytest.mark.parametrize("case", ALIKE)
def test_a_distributed_optimizer_is_found_wherever_it_is(held: Finished, case: str) -> None:
    assert sorted(re.findall(rf"^CASE (\d) {case}: (.*)$", held.out, re.MULTILINE)) == [("0", "alike"), ("1", "alike")]


@pytest.mark.parametrize("case", WARNED)
def test_what_is_not_distributed_has_its_warning_once(held: Finished, case: str) -> None:
    lines = [line for line in held.err.splitlines() if line.startswith(f"hpcdl: warning: {WARNED[case]} on 2 ranks")]
    assert len(lines) == 1, held.err[-3000:]


def test_weights_that_are_to_be_a_rank_s_own_have_no_warning(held: Finished) -> None:
    assert "with Ftrl" not in held.err and "with Adamax on 2 ranks moves" in held.err


PICTURE = """
import sys
import hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
how = sys.argv[1]
keras.utils.set_random_seed(hpcdl.rank())
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
x = np.random.default_rng(hpcdl.rank()).normal(size=(8, 2))
model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
model.fit(x, x[:, :1], verbose=0)
image, plain = tf.Variable([[1.0, 2.0]], name="image"), keras.optimizers.Adam(0.1)
weights = model.trainable_variables if how == "the model" else [image]
if "chosen" in how:
    hpcdl.combine(image, "own")
for _ in range(0 if how == "rank 0" and hpcdl.rank() else 3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x if "own data" in how or how == "the model" else image) ** 2) + tf.reduce_sum(
            image * x[0] if "own data" in how else image**2
        )
    plain.apply_gradients(zip(tape.gradient(loss, weights), weights))
"""


@pytest.mark.parametrize(
    ("how", "warned"),
    [
        ("alike", ""),
        pytest.param("own data, chosen", "", marks=pytest.mark.long),
        pytest.param("rank 0", "", marks=pytest.mark.long),
        ("own data", "a loop of its own with Adam on 2 ranks moves image, whose gradients are not exchanged"),
        pytest.param("the model", "a loop of its own with Adam on 2 ranks, in which", marks=pytest.mark.long),
    ],
)
def test_a_picture_that_all_ranks_compute_alike_has_no_warning(
    session_hpcdl: CommandLine, tmp_path: Path, how: str, warned: str
) -> None:
    (tmp_path / "script.py").write_text(PICTURE)
    ended = succeed(session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how]))
    lines = [text for text in record_of(tmp_path / "run")["warnings"] if "a loop of its own" in text]
    assert [line[: len(warned)] for line in lines] == ([warned] if warned else []), ended.err
    assert ended.err.count("a loop of its own") == bool(warned)


SAME = """
import sys
import hpcdl
from hpcdl.supervision import runtime
hpcdl.init()
runtime.import_tensorflow()
import keras
import numpy
import tensorflow as tf

keras.utils.set_random_seed(1)
x = numpy.random.default_rng(0).normal(size=(24, 3)).astype("float32")
mine = slice(None) if "same" in sys.argv else slice(hpcdl.rank(), None, hpcdl.size())
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
if "noise" in sys.argv:

    class Noisy(keras.Model):
        def train_step(self, data):
            return super().train_step(data)  # a step of the script's own

    keras.utils.set_random_seed(hpcdl.rank())  # each rank drops other numbers
    inputs = keras.Input((3,))
    model = Noisy(inputs, model(keras.layers.Dropout(0.5)(inputs)))
if sys.argv[1] not in ("loop", "equation"):
    strategy = {"center": {"strategy": "sync-easgd"}, "period": {"strategy": "local-sgd", "period": 2}}
    model.compile(hpcdl.DistributedOptimizer("sgd", **strategy.get(sys.argv[1], {})), "mse")
    # With a number of steps the arrays are not compared, so that the batches show it.
    steps = {"steps_per_epoch": 2} if "noise" in sys.argv else {}
    model.fit(x[mine], x[mine].sum(1), batch_size=4, epochs=2, shuffle=False, verbose=0, **steps)
else:
    optimizer = keras.optimizers.SGD(0.1)
    for _ in range(3):
        with hpcdl.DistributedGradientTape() as tape:
            loss = tf.reduce_mean(model(x[mine]) ** 2)
            if "equation" in sys.argv:  # the gradient of the last bias comes from the boundary, which all ranks have
                points = tf.constant(x[mine])
                with tf.GradientTape() as inner:
                    inner.watch(points)
                    found = model(points)
                boundary = tf.reduce_mean((model(tf.zeros((1, 3))) - 1) ** 2)
                loss = tf.reduce_mean((inner.gradient(found, points) - points) ** 2) + boundary
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
"""


SAME_OR_OWN = [
    (kind, data) for kind in ("fit", "noise", "loop", "equation", "center", "period") for data in ("same", "own")
]
EVERY_TIME = {
    ("fit", "same"),
    ("noise", "own"),
    ("loop", "same"),
    ("equation", "own"),
    ("period", "own"),
}


@pytest.mark.parametrize(
    ("kind", "data"),
    [pytest.param(*case, marks=() if case in EVERY_TIME else pytest.mark.soak) for case in SAME_OR_OWN],
)
def test_ranks_that_train_on_the_same_samples_are_reported(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str, data: str
) -> None:
    (tmp_path / "script.py").write_text(SAME)
    ended = session_hpcdl(["run", "--ranks", "3", "--run-dir", tmp_path / "run", tmp_path / "script.py", kind, data])
    assert ended.code == 0, ended.err
    gradient, arrays = "all ranks computed the same gradient", "every rank was given the same 24 samples"
    text = {"noise": "all ranks were given the same batch", "fit": arrays}.get(kind, gradient)
    assert ended.err.count(f"warning: {text}") == (data == "same"), "said once"
    assert [text in one for one in record_of(tmp_path / "run")["warnings"]].count(True) == (data == "same")


SHUFFLED = """
import sys
import keras, numpy as np, tensorflow as tf
import hpcdl
hpcdl.init()
x = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
here = slice(hpcdl.rank(), None, hpcdl.size())
if sys.argv[1] == "arrays":
    data, rest = x, dict(y=x.sum(1), batch_size=8)
elif sys.argv[1] == "second":
    data, rest = x[here], dict(y=x[here].sum(1), batch_size=8)
elif sys.argv[1] == "parts":
    mine = x[np.random.permutation(96)][here]  # each rank draws an order of its own
    data, rest = mine, dict(y=mine.sum(1), batch_size=8)
elif sys.argv[1] == "endless":
    order = lambda: np.random.permutation(96).reshape(12, 8)
    data, rest = ((x[rows], x[rows].sum(1)) for _ in iter(int, 1) for rows in order()), dict(steps_per_epoch=12)
elif sys.argv[1].startswith("generated"):
    mine = x[here] if sys.argv[1] == "generated parts" else np.random.permutation(x)
    types = tf.TensorSpec((3,)), tf.TensorSpec(())
    rows = tf.data.Dataset.from_generator(lambda: zip(mine, mine.sum(1)), output_signature=types)
    data, rest = rows.shuffle(96).batch(8), {}
else:
    whole = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).shuffle(96)
    data, rest = hpcdl.dataset(whole, batch_size=8) if sys.argv[1] == "dealt" else whole.batch(8), {}
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = hpcdl.DistributedOptimizer("sgd")
def step(rows, wanted):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(rows, training=True)[:, 0] - wanted) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
if sys.argv[1].startswith("loop"):
    if sys.argv[1] == "loop":  # each rank shuffles all samples
        data, step = whole.batch(8), tf.function(step)
    else:  # parts, and a loop that calls the model on other data between its steps
        data = hpcdl.dataset(whole, batch_size=8)
    for _ in range(2):
        for rows, wanted in data:
            step(rows, wanted)
            model(x)
    sys.exit()
model.compile(optimizer, "mse")
model.fit(data, epochs=2, verbose=0, **rest)
if sys.argv[1] == "second":  # with other data than the first fit
    model.fit(x, x.sum(1), batch_size=8, verbose=0)
"""
TWICE, SOME = "every rank was given the same 96 samples", "some samples were given to several ranks"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("parts", SOME),
        ("whole", TWICE),
        ("endless", TWICE),
        pytest.param("second", TWICE, marks=pytest.mark.soak),
        pytest.param("generated", TWICE, marks=pytest.mark.soak),
        ("loop", TWICE),
        ("loop over parts", ""),
        pytest.param("generated parts", "", marks=pytest.mark.soak),
        pytest.param("arrays", TWICE, marks=pytest.mark.soak),
        pytest.param("dealt", "", marks=pytest.mark.soak),
    ],
)
def test_the_same_samples_in_another_order_on_each_rank(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str, text: str
) -> None:
    (tmp_path / "script.py").write_text(SHUFFLED)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", kind])
    assert ended.code == 0, ended.err
    warnings = [one for one in record_of(tmp_path / "run")["warnings"] if " samples w" in one or "same" in one]
    assert [one[: len(text)] for one in warnings] == ([text] if text else [])
    assert ended.err.count(f"warning: {text}") == bool(text)


SETTINGS = """
import hpcdl
hpcdl.init()
import keras, numpy
rank, x = hpcdl.rank(), numpy.random.default_rng(hpcdl.rank()).normal(size=(16, 3))
if rank:
    keras.layers.Dense(1)  # so that Keras numbers the next names in another way
first = keras.layers.Dense(2, ["relu", "tanh"][rank])
model = keras.Sequential([keras.Input((3,)), first, keras.layers.Dropout(0.1, seed=rank), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1 + rank)), lambda true, got: (true - got) ** 2)
for _ in range(2):
    model.fit(x, x[:, :1], batch_size=16, verbose=0)
"""


def test_settings_that_each_rank_has_drawn_are_reported_once(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SETTINGS)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"])
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("hpcdl: warning: ")]
    assert len(lines) == 2, ended.err
    rate, activation = lines
    assert "SGD has learning_rate 0.1 on rank 0, 1.1 on rank 1" in rate
    assert "layers/1/activation relu on rank 0, tanh on rank 1: all ranks train one model" in activation
    assert "\nwarning: only 2 steps: throughput includes the warm-up\n" in ended.err


SET_LATER = """
import hpcdl
hpcdl.init()
import keras, numpy as np
x = np.random.default_rng(hpcdl.rank()).normal(size=(16, 3))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
model.optimizer.learning_rate = (0.2, 0.3)[hpcdl.rank()]  # as the result of a finder on each rank
model.fit(x, x[:, :1], batch_size=8, verbose=0)
assert model.optimizer.learning_rate == np.float32(0.2)
"""


def test_a_rate_that_each_rank_sets_before_a_fit_is_named(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SET_LATER)
    ended = succeed(session_hpcdl(["run", "-n", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"]))
    assert ended.err.count("SGD has learning_rate 0.2 on rank 0, 0.3 on rank 1: all ranks train") == 1, ended.err


BY_WEIGHTS = """
import sys
import hpcdl
hpcdl.init()
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.default_rng(hpcdl.rank()).normal(size=(16, 3))
shared = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
for _ in range(2):
    model = keras.models.clone_model(shared)  # as a client of federated averaging
    model.set_weights(shared.get_weights())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    if sys.argv[1] == "averages":
        shared.set_weights(hpcdl.grouped_allreduce(model.get_weights()))
    print("loss", hpcdl.allreduce(model.evaluate(x, x[:, :1], verbose=0)), flush=True)
"""


@pytest.mark.parametrize("how", ["averages", "alone"])
def test_weights_averaged_after_steps_of_each_rank_are_distributed(
    session_hpcdl: CommandLine, tmp_path: Path, how: str
) -> None:
    (tmp_path / "rounds.py").write_text(BY_WEIGHTS)
    ended = session_hpcdl(["run", "-n", "2", "--run-dir", tmp_path / "run", tmp_path / "rounds.py", how])
    assert ended.err.count("The script calls hpcdl.allreduce: unless it averages gradients or weights") == 1, ended.err
    assert (ended.code, "a model of its own" in ended.err) == ((0, False) if how == "averages" else (2, True)), (
        ended.err
    )


ADVERSARIAL = """
import sys
import hpcdl
hpcdl.init()
import keras, tensorflow as tf
model, optimizer = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), keras.optimizers.SGD(0.1)
x = tf.random.stateless_normal((8, 3), (1, hpcdl.rank()))
with (tf.GradientTape() if sys.argv[1] == "plain" else hpcdl.DistributedGradientTape()) as tape:
    tape.watch(x)
    loss = tf.reduce_mean(model(x) ** 2)
x = x + 0.1 * tf.sign(tape.gradient(loss, x))
with hpcdl.DistributedGradientTape() as tape:
    loss = tf.reduce_mean(model(x) ** 2)
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""


@pytest.mark.parametrize("how", ["distributed", pytest.param("plain", marks=pytest.mark.long)])
def test_gradients_of_inputs_that_a_tape_averages_are_warned_of(
    session_hpcdl: CommandLine, tmp_path: Path, how: str
) -> None:
    (tmp_path / "script.py").write_text(ADVERSARIAL)
    ended = succeed(session_hpcdl(["run", "-n", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how]))
    assert ended.err.count("averages gradients of tensors, such as a batch's inputs") == (how == "distributed"), (
        ended.err
    )
