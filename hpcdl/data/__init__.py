"""Turn any source into verified shards, and shards into the batches of every rank."""

from __future__ import annotations

from typing import Any


def open(data: str, **options: Any) -> Any:
    """Return a `tf.data.Dataset` of batches (images, labels); see `hpcdl.data.read.pipeline.as_tf_dataset`."""
    from hpcdl.data.read.pipeline import as_tf_dataset  # imported late: it loads TensorFlow

    return as_tf_dataset(data, **options)
