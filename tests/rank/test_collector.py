"""Python's garbage collector is off while a rank starts, and works again after the first step."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from hpcdl.core.processes.collector import no_collection
from tests.conftest import CommandLine

NOTING = """
import gc, os, pathlib
import keras, tensorflow as tf


@keras.saving.register_keras_serializable()
class Noting(keras.layers.Layer):
    def call(self, inputs, training=False):
        def note(values):
            with open(os.environ["NOTES"], "a") as file:
                file.write(f"{gc.isenabled()} ")
            return values
        return tf.ensure_shape(tf.py_function(note, [inputs], tf.float32), inputs.shape) if training else inputs


def build(num_classes, input_shape):
    layers = keras.layers
    return keras.Sequential([keras.Input(input_shape), Noting(), layers.Flatten(), layers.Dense(num_classes)])
"""


def test_it_rests_inside_and_is_as_it_was_afterwards() -> None:
    was_on = gc.isenabled()
    try:
        for on in (True, False):
            (gc.enable if on else gc.disable)()
            with no_collection(), no_collection():
                assert not gc.isenabled()
            assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()


@pytest.mark.mpi
@pytest.mark.soak
def test_it_works_again_behind_the_first_step(run_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NOTING)
    line = ["train", "--model", f"{tmp_path / 'own.py'}:build", "--data", shards, "--strategy", "single"]
    more = ["--steps", "3", "--profile", "none", "--steps-per-call", "1", "--run-dir", tmp_path / "run"]
    finished = run_hpcdl([*line, *more], env={"NOTES": str(tmp_path / "notes")}, timeout_s=300)
    assert finished.code == 0, finished.err
    assert (tmp_path / "notes").read_text().split() == ["False", "True", "True"]
