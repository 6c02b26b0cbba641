"""A tiny network that records its process's memory: NOTES is a folder, NOTE_AT the training steps, as `2000,20000`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

AT = [int(step) for step in os.environ["NOTE_AT"].split(",")]


def resident_bytes() -> int:
    """Return the resident memory of this process, after free memory has been returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Counter(keras.layers.Layer):
    """A layer that counts training steps and records the memory at some of them."""

    def build(self, input_shape: Any) -> None:
        """Do nothing: the layer has no weights."""
        self.seen = 0
        self.noted: dict[int, int] = {}

    def call(self, images: Any, training: bool | None = None) -> Any:
        """Return the inputs unchanged."""
        if not training:
            return images
        noted = tf.numpy_function(self._note, [tf.zeros([])], tf.float32)
        return images + tf.ensure_shape(noted, [])

    def _note(self, nothing: numpy.ndarray) -> numpy.ndarray:
        self.seen += 1
        if self.seen in AT:
            self.noted[self.seen] = resident_bytes()
            path = Path(os.environ["NOTES"]) / f"{os.getpid()}.json"
            path.write_text(json.dumps(self.noted))
        return nothing


def build(num_classes: int, input_shape: Any) -> Any:
    """Build the network."""
    inputs = keras.Input(input_shape)
    flat = keras.layers.Flatten()(Counter()(inputs))
    return keras.Model(inputs, keras.layers.Dense(num_classes)(flat))
