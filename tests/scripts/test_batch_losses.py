"""Losses that are one number for a batch: what they are over the shares of several ranks is said at the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdl.scripts.fit.batch_losses import verdict
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


def test_sparse_values_are_left_alone() -> None:
    import keras
    import tensorflow as tf

    from hpcdl.comm.threads import alone
    from hpcdl.scripts.fit.batch_losses import BatchLoss
    from hpcdl.scripts.process.group import ScriptGroup

    looks = BatchLoss(ScriptGroup(alone()), keras.losses.MeanSquaredError())
    looks.trace(tf.sparse.from_dense([[1.0], [0.0]]), tf.constant([[1.0], [0.0]]))


def test_losses_that_depend_on_the_number_of_ranks_are_named_once(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOSSES)
    ended = session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"])
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if "the loss " in line]
    assert [line.split(":")[2].split(" ", 3)[3] for line in lines] == [f"total {SUM}", f"overlap {OTHER}"]
    assert len([one for one in record_of(tmp_path / "run")["warnings"] if one.startswith("the loss")]) == 2


CLIPS = """
import hpcdl
hpcdl.init()
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(hpcdl.rank()).normal(size=(8, 4)).astype("float32")
def train(clip_loss, clip, settings):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.1, **settings))
    @tf.function
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


def test_gradients_that_a_rank_clips_by_itself_are_named_once(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CLIPS)
    words = ["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py"]
    ended = session_hpcdl(words)
    assert ended.code == 0 and ended.err.count("a step clips gradients before the ranks average them") == 1, ended.err
    (tmp_path / "script.py").write_text(CLIPS.partition("print")[0])
    ended = session_hpcdl([*words[:4], tmp_path / "right", words[-1]])
    assert ended.code == 0 and "clips gradients" not in ended.err
