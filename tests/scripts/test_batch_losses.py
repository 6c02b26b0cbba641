"""Losses that are one number for a batch: what they are over the shares of several ranks is said at the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdl.scripts.fit.batch_losses import verdict
from hpcdl.scripts.fit.batch_mixes import meet
from hpcdl.scripts.fit.batch_sums import divides
from tests.conftest import CommandLine
from tests.training_runs import record_of

SUM, OTHER = "adds up the samples of a batch", "is no mean over the samples of a batch"


@pytest.mark.parametrize(
    ("values", "share", "text"),
    [
        ((2.0, 1.0, 3.0), 0.5, ""),
        ((2.2, 1.0, 3.0), 0.4, ""),
        ((4.0, 1.0, 3.0), 0.5, SUM),
        ((2.1, 1.0, 3.0), 0.5, OTHER),
        ((0.0, 0.0, 0.0), 0.5, ""),
        ((np.nan, 1.0, 3.0), 0.5, ""),
        (([1.0, 2.0], [1.0], [2.0]), 0.5, ""),
    ],
)
def test_a_loss_is_known_by_its_values_for_a_batch_and_its_halves(
    values: tuple[Any, ...], share: float, text: str
) -> None:
    said = verdict(*(np.asarray(value) for value in values), share=share)
    assert said.startswith(text) and bool(said) == bool(text)


LOSSES = """
import hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(hpcdl.rank()).normal(size=(24, 4)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
def total(true, got): return tf.reduce_sum((true - got) ** 2)
def mean(true, got): return tf.reduce_mean((true - got) ** 2)
def each(true, got): return tf.reduce_mean((true - got) ** 2, -1)
def whole_batch(true, got): return tf.reduce_mean(tf.reshape(true - got, (8, 1)) ** 2)
def overlap(true, got): return 1 - 2 * tf.reduce_sum(true * got) / tf.reduce_sum(true + got)
for eager in (False, True):
    for loss in (total, mean, each, whole_batch, overlap, "mse"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(hpcdl.DistributedOptimizer("sgd"), loss, run_eagerly=eager)
        model.fit(x, y, batch_size=8, verbose=0)
"""


def test_a_loss_is_looked_at_again_when_the_network_has_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keras
    import tensorflow as tf

    from hpcdl.comm.threads import alone
    from hpcdl.scripts.fit import batch_losses
    from hpcdl.scripts.process.group import ScriptGroup

    texts: list[str] = []
    monkeypatch.setattr(batch_losses, "warn_once", lambda _, key, text: texts.append(text))

    class Masked(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            mask = tf.cast(y_true > 0, y_pred.dtype)
            return tf.reduce_sum(mask * y_pred) / tf.reduce_sum(mask)

    looks = batch_losses.BatchLoss(ScriptGroup(alone()), Masked(name="masked"))
    seen = []
    plain = looks.look
    monkeypatch.setattr(looks, "look", lambda *given: seen.append(float(given[1][0])) or plain(*given))

    @tf.function
    def step(true: Any, got: Any) -> None:
        looks.trace(true, got)

    true = tf.constant([1.0, 0.0, 1.0, 1.0])
    for number in range(1, 10):
        got = tf.constant([1.0, 1.0, 1.0, 1.0]) if number < 7 else tf.constant([2.0, 1.0, 1.0, 1.0])
        step(true, got)
    assert seen == [1.0, 1.0, 2.0], "batches 1, 3 and 7, and none after a warning"
    assert len(texts) == 1 and OTHER in texts[0]


def test_sparse_values_are_left_alone() -> None:
    import keras
    import tensorflow as tf

    from hpcdl.comm.threads import alone
    from hpcdl.scripts.fit.batch_losses import BatchLoss
    from hpcdl.scripts.process.group import ScriptGroup

    looks = BatchLoss(ScriptGroup(alone()), keras.losses.MeanSquaredError())
    looks.trace(tf.sparse.from_dense([[1.0], [0.0]]), tf.constant([[1.0], [0.0]]))


@pytest.mark.long
def test_losses_that_depend_on_the_number_of_ranks_are_named_once(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOSSES)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"])
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if "the loss " in line]
    assert [line.split(":")[2].split(" ", 3)[3] for line in lines] == [f"total {SUM}", f"overlap {OTHER}"]
    assert len([one for one in record_of(tmp_path / "run")["warnings"] if one.startswith("the loss")]) == 2


CLIPS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(hpcdl.rank()).normal(size=(8, 4)).astype("float32")
def train(clip_loss, clip, settings):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1, **settings))
    @(tf.function if sys.argv[1] == "graph" else lambda step: step)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(clip_loss(model(x)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(clip(gradients), model.trainable_variables))
    hpcdl.broadcast_variables(model.variables)
    step()
same = lambda one: one
by_value = lambda values: tf.clip_by_value(values, -1.0, 1.0)
train(by_value, same, dict(global_clipnorm=0.1))
print("so far", flush=True)
train(same, lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0], {})
train(same, lambda gradients: [by_value(one) for one in gradients], {})
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["graph", "eager"])
def test_gradients_that_a_rank_clips_by_itself_are_named_once(
    session_hpcdl: CommandLine, tmp_path: Path, how: str
) -> None:
    (tmp_path / "script.py").write_text(CLIPS)
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how]
    ended = session_hpcdl(words)
    assert ended.code == 0 and ended.err.count("a step clips gradients before the ranks average them") == 1, ended.err
    (tmp_path / "script.py").write_text(CLIPS.partition("print")[0])
    ended = session_hpcdl([*words[:4], tmp_path / "right", *words[5:]])
    assert ended.code == 0 and "clips gradients" not in ended.err


SUMS = """
import sys, hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
kind, number, texts = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
x = np.random.default_rng(hpcdl.rank()).normal(size=(number, 4)).astype("float32")
weights = tf.Variable(tf.ones((8, 3)))
total = tf.reduce_sum
def value(text, v): return eval(text, globals(), {"v": v, "n": tf.cast(tf.shape(v)[0], tf.float32)})
class Adds(keras.layers.Layer):
    def __init__(self, text): super().__init__(); self.text = text
    def call(self, v): self.add_loss(value(self.text, v)); return v
class Own(keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape: tape.watch(data[0]); each = tf.reduce_sum(self(data[0]))
        tape.gradient(each, data[0])  # as in a penalty: no gradient by weights, so the sum is right
        with tf.GradientTape() as tape: loss = value(self.text, self(data[0], training=True) - data[1])
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}
class Computes(keras.Sequential):
    def compute_loss(self, x, y, y_pred, *_, **__): return value(self.text, y_pred - y)
def loop(model, Tape, run):
    optimizer = keras.optimizers.SGD(0.01)
    optimizer = optimizer if Tape is hpcdl.DistributedGradientTape else hpcdl.DistributedOptimizer(optimizer)
    @run
    def step(rows):
        with Tape() as tape: loss = value(model.text, model(rows, training=True) - rows[:, :1])
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))
    hpcdl.broadcast_variables(model.variables)
    for start in range(0, number, 8): step(tf.constant(x[start : start + 8]))
dense = lambda: keras.layers.Dense(1, activity_regularizer="l2", kernel_regularizer="l2")
for text in texts:
    first = [keras.Input((4,))]
    kinds = {"added": lambda layers: keras.Sequential([layers[0], Adds(text), layers[1]]), "computed": Computes}
    model = kinds.get(kind, Own)([*first, dense()])
    model.text = text
    if kind.startswith("loop"):
        for words in (kind, "eager", "tape", "") if len(texts) > 1 else (kind,):
            loop(model, hpcdl.DistributedGradientTape if "tape" in words else tf.GradientTape,
                 (lambda step: step) if "eager" in words else tf.function)
        continue
    model.compile(hpcdl.DistributedOptimizer("sgd"), "mse")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
"""
MEANS = (
    "tf.reduce_mean(v ** 2)", "total(v ** 2) / 8.0", "0.125 * total(v ** 2)", "total(v ** 2) / n",
    "tf.reduce_mean(total(v ** 2, -1))", "tf.nn.compute_average_loss(total(v ** 2, -1))",
    "total(tf.reduce_mean(tf.tile(v[:, :1], (1, 8)) ** 2, 0))", "tf.reduce_mean(v) + total(weights ** 2)",
    "keras.losses.MeanSquaredError()(v, 2 * v)",
)  # fmt: skip
"""The parts of a batch of 8 samples each have such a loss, and it is the mean of theirs."""


@pytest.mark.parametrize(
    ("divisors", "text"),
    [
        ([1.0], SUM),
        ([1.0, 100.0], SUM),
        ([1.0, 16.0], SUM),  # the batch of two ranks
        ([1.0, 8.0], ""),
        ([1.0, 8.0, 2.0], ""),
        ([1.0, 8.0, 100.0], ""),
        ([1.0, 24.0], ""),  # three values for each sample
        ([1.0, -8.0], ""),
    ],
)
def test_a_sum_is_a_mean_where_the_number_of_samples_divides_it(divisors: list[float], text: str) -> None:
    assert divides(divisors, 8, 2) != bool(text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "number", "texts"),
    [
        ("own", 24, MEANS),
        ("added", 24, MEANS),
        ("computed", 24, [*MEANS, "keras.losses.MeanSquaredError('mean_with_sample_weight')(v, 2 * v, v[:, 0] > 0)"]),
        ("computed", 24, ["total(v ** 2)"]),
        ("own", 25, ["total(v ** 2)"]),  # a last batch of another size: the number is unknown when the step is traced
        ("added", 24, ["tf.reduce_mean(v) - 0.01 * keras.ops.sum(v ** 2)"]),
        ("own", 24, ["tf.nn.compute_average_loss(total(v ** 2, -1), global_batch_size=16)"]),
        ("loop, eager, tape", 24, MEANS),
        ("loop", 24, ["0.5 * total(v ** 2)"]),
        ("loop, tape", 24, ["total(v ** 2)"]),
        ("loop, eager", 24, ["keras.losses.MeanSquaredError(reduction='sum')(v, 2 * v)"]),
        ("loop, eager, tape", 24, ["v[:, 0] ** 2"]),
        ("loop, eager", 25, ["tf.nn.compute_average_loss(total(v ** 2, -1), global_batch_size=16)"]),
    ],
)
def test_sums_over_a_batch_are_found_where_no_loss_function_has_them(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str, number: int, texts: Sequence[str]
) -> None:
    (tmp_path / "script.py").write_text(SUMS)
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", kind, str(number), *texts]
    ended = session_hpcdl(words)
    what = {
        "own": "a loss in train_step",
        "computed": "a loss in compute_loss",
        "added": "a loss given to add_loss",
    }.get(kind, "a loss in a loop")
    assert ended.code == 0, ended.err
    assert ended.err.count(f"warning: {what} adds up the samples") == (len(texts) == 1)
    assert ended.err.count(SUM) == (len(texts) == 1)


MEET = "results depend on the number of ranks"
APART = (
    "tf.reduce_mean(normal(v, training=True) ** 2)", "tf.reduce_mean((tf.norm(v, axis=-1) - 1) ** 2)",
    "tf.reduce_mean(tf.matmul(tf.matmul(v, w), w, transpose_b=True) ** 2)", "tf.reduce_mean(v) + tf.norm(w)",
    "tf.exp(-scale) * tf.reduce_mean(v ** 2) + scale", "tf.reduce_sum(v) / tf.cast(tf.shape(v)[0], tf.float32)",
    "keras.losses.KLDivergence()(tf.nn.softmax(v), tf.nn.softmax(2 * v))", "tf.reduce_mean(tf.reshape(v, (-1,)) ** 2)",
    "tf.reduce_mean(tf.stack([tf.reduce_mean(v), tf.reduce_mean(v ** 2)]))", "tf.nn.compute_average_loss(v[:, 0] ** 2)",
    "tf.reduce_mean(attention(v[:, None], v[:, None]) ** 2)", "tf.reduce_mean(v) - tf.reduce_mean(tf.exp(v))",
)  # fmt: skip
"""Losses that are means over samples: weights of their own and a normalisation over the batch change nothing in it."""
TOGETHER = (
    "tf.reduce_mean(tf.matmul(v, 2 * v, transpose_b=True) ** 2)", "tf.reduce_mean(tf.einsum('ae,pe->ap', v, v) ** 2)",
    "keras.ops.mean(keras.ops.matmul(v, keras.ops.transpose(v)) ** 2)", "tf.sqrt(tf.reduce_mean(v ** 2))",
    "(lambda u: tf.reduce_mean(tf.matmul(u, u, transpose_b=True) ** 2))(tf.concat([v, 2 * v], 0))",
    "tf.reduce_sum(v * mask) / tf.reduce_sum(mask)", "tf.math.log(tf.reduce_mean(tf.exp(v)))",
    "1 - 2 * tf.reduce_sum(v * mask) / (tf.reduce_sum(v ** 2) + tf.reduce_sum(mask))",
    "tf.reduce_sum((tf.matmul(v, v, transpose_a=True) / 8.0 - tf.eye(4)) ** 2)",
    "tf.reduce_sum(tf.math.log(tf.reduce_mean(tf.sigmoid(v), 0)))",
)  # fmt: skip
"""Losses for which each sample's share depends on the others of its batch."""


@pytest.mark.parametrize("number", [8, None])
def test_a_graph_shows_where_the_samples_of_a_batch_meet(number: int | None) -> None:
    import keras
    import tensorflow as tf

    from hpcdl.scripts.fit import batch_mixes

    names = {
        "tf": tf, "keras": keras, "w": tf.Variable(tf.ones((4, 3))), "scale": tf.Variable(1.0),
        "normal": keras.layers.BatchNormalization(), "attention": keras.layers.MultiHeadAttention(1, 2),
    }  # fmt: skip

    def is_found(text: str) -> bool:
        found = []

        @tf.function(input_signature=[tf.TensorSpec((number, 4))])
        def step(v: Any) -> Any:
            loss = eval(text, names | {"v": v, "mask": tf.cast(v > 0, tf.float32)})
            look = batch_mixes._contrast, batch_mixes._not_linear
            found.extend(one(loss, number) is not None for one in look)
            return loss

        step.get_concrete_function()
        return any(found)

    assert [text for text in APART if is_found(text)] == []
    assert [text for text in TOGETHER if not is_found(text)] == []


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("tf.matmul(v, 2 * v, transpose_b=True)", [8]),
        ("keras.ops.matmul(v, keras.ops.transpose(v))", [8]),
        ("(lambda u: tf.matmul(u, u, transpose_b=True))(tf.concat([v, 2 * v], 0))", [16]),
        ("tf.matmul(v, square)", []),  # as many units as samples
        ("tf.matmul(v, tf.transpose(square))", []),
        ("tf.matmul(v, frozen)", []),  # a layer that is not trained
        ("tf.matmul(square, square, transpose_b=True)", []),
        ("tf.matmul(v, v, transpose_a=True)", []),
        ("v ** 2", []),
    ],
)
def test_an_eager_tape_passes_the_products_of_a_batch_with_itself(text: str, products: list[int]) -> None:
    import keras
    import tensorflow as tf

    from hpcdl.scripts.fit import loop_sums

    weights = {"square": tf.Variable(tf.ones((8, 8))), "kernel": tf.Variable(tf.ones((4, 8)))}
    with tf.GradientTape() as tape:
        hidden = tf.matmul(tf.random.normal((8, 4)), weights["kernel"])
        v = hidden if "square" in text else tf.concat([hidden, hidden[:, :2]], 1)
        loss = tf.reduce_mean(eval(text, weights | {"tf": tf, "keras": keras, "v": v, "frozen": tf.ones((10, 8))}) ** 2)
    loop_sums._products.clear()
    with loop_sums._sums_noted({tuple(one.shape) for one in weights.values()}):
        tape.gradient(loss, list(weights.values()))
    assert loop_sums._products == products


@pytest.mark.parametrize(
    ("shown", "expected"),
    [([8, 8], True), ([16, 16], True), ([5, 5], False), ([8, 16], False), ([], True), (43.0, True), (40.0, False)],
)
def test_samples_meet_in_a_square_product_or_where_a_mask_has_gaps(shown: Any, expected: bool) -> None:
    assert meet(8, np.asarray(shown)) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("own", "tf.reduce_mean(tf.matmul(v, v, transpose_b=True) ** 2)", "compares the samples of a batch"),
        ("own", "total(v ** 2) / (0.01 + total(tf.cast(v > 0, v.dtype)))", "divides by a sum"),
        ("loop", "tf.sqrt(tf.reduce_mean(v ** 2))", OTHER),
        ("computed", "tf.reduce_mean(tf.matmul(v, v, transpose_b=True) ** 2)", "a loss in compute_loss compares"),
        ("loop, eager", "tf.reduce_mean(tf.matmul(v, v, transpose_b=True) ** 2)", "a loss in a loop compares"),
    ],
)
def test_a_step_of_the_scripts_own_in_which_samples_meet_is_named_once(
    session_hpcdl: CommandLine, tmp_path: Path, kind: str, text: str, words: str
) -> None:
    (tmp_path / "script.py").write_text(SUMS)
    ended = session_hpcdl(["run", "-n", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", kind, "25", text])
    assert ended.code == 0, ended.err
    assert (ended.err.count(words), ended.err.count(MEET)) == (1, 1)
