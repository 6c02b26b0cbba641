"""The files of `--tensorboard`, read with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_steps_and_epochs_become_scalars(tmp_path: Path) -> None:
    import tensorflow as tf

    from hpcdl.rank.worker import TensorBoardWriter

    writer = TensorBoardWriter(tmp_path)
    writer({"kind": "step", "step": 3, "loss": 0.5, "images_per_second": 100.0})
    writer({"kind": "epoch", "step": 4, "loss": 0.25, "accuracy": 0.75, "val_accuracy": None})
    writer({"kind": "message", "text": "hello"})
    found = {}
    for path in tmp_path.iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                found[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    assert found == {
        ("step/loss", 3): 0.5,
        ("step/images_per_second", 3): pytest.approx(100.0),
        ("epoch/loss", 4): 0.25,
        ("epoch/accuracy", 4): 0.75,
    }
