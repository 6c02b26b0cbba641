"""Make TensorFlow report a GPU in the importing process; and a function for --preprocess that takes time."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

BATCH_S = 0.1
DEVICE = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
tf.config.list_physical_devices = lambda kind=None: [DEVICE] if kind in (None, DEVICE.device_type) else []
tf.config.experimental.get_device_details = lambda device: {"device_name": "GPU of a play"}


def slowly(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return the batch unchanged after BATCH_S, so that a run of some batches takes longer than a program's start."""

    def wait(images: Any) -> Any:
        time.sleep(BATCH_S)
        return images

    waited = tf.numpy_function(wait, [inputs], inputs.dtype)
    return tf.ensure_shape(waited, inputs.shape), targets
