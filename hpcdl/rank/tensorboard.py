"""A run's numbers as TensorBoard event files, beside the journal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

_SHOWN = {
    "step": ("loss", "images_per_second"),
    "epoch": ("loss", "accuracy", "val_loss", "val_accuracy"),
}


class TensorBoardWriter:
    """Takes a run's events and writes the numbers among them to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write what one event tells."""
        with self._writer.as_default(step=int(event.get("step", 0))):
            for name in _SHOWN.get(event["kind"], ()):
                if event.get(name) is not None:
                    tf.summary.scalar(f"{event['kind']}/{name}", event[name])
        self._writer.flush()
