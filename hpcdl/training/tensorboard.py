"""A run's numbers as TensorBoard event files, beside the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from hpcdl.training.journal import Journal

_SHOWN = {
    "step": ("loss", "images_per_second"),
    "epoch": ("loss", "accuracy", "val_loss", "val_accuracy"),
}


class TensorBoardJournal:
    """Writes what it is told to `folder`, and hands it on to another journal."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self._journal = journal
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, kind: str, **values: Any) -> None:
        """Append one event to both."""
        self._journal.write(kind, **values)
        with self._writer.as_default(step=int(values.get("step", 0))):
            for name in _SHOWN.get(kind, ()):
                if values.get(name) is not None:
                    tf.summary.scalar(f"{kind}/{name}", values[name])

    def step(self, step: int, **values: Any) -> None:
        """Append a step event to both, as often as the journal takes one."""
        if self._journal.due():
            self.write("step", step=step, **values)

    def due(self) -> bool:
        """Whether a step event would be kept now."""
        return self._journal.due()

    def close(self) -> None:
        """Close both."""
        self._writer.close()
        self._journal.close()
