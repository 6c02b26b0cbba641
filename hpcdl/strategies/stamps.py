"""The time of day inside a graph."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf


def timestamp() -> Any:
    """A scalar float64 tensor: Unix time in seconds when the graph gets there; order it by control dependencies.

    `tf.timestamp` would do, but TensorFlow refuses it when op determinism is on.
    """
    return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
